//! What crosses crates: one program, so that tests of different subjects run beside each other and are linked once.
//! `cargo test -p tests exhaustive::` runs those of one subject.

mod anytime;
mod bad_input;
mod baseline;
mod book;
mod branches;
mod checkpoints;
mod cli;
mod cli_prove;
mod collective_bytes;
mod compare;
mod constraints;
mod coverage;
mod determinism;
mod discovery;
mod equal_forms;
mod events;
mod exhaustive;
mod flat;
mod floors;
mod forbid;
mod forms;
mod fuzz;
mod golden_numbers;
mod golden_plans;
mod goodput;
mod had_once;
mod joint_forms;
mod lora;
mod memory;
mod mixed;
mod mtp;
mod native_models;
mod offload;
mod parameter_counts;
mod parts;
mod pinned;
mod priced_plans;
mod readme;
mod refusals;
mod replan;
mod saved_activations;
mod scores;
mod schedules;
mod shares;
mod shown_once;
mod solver_layers;
mod sweep;
mod target;
mod tensor_shares;
mod training;
mod unequal;
mod validation;
mod verify_shipped;

use mimalloc::MiMalloc;

/// As in the program: searches allocate many small lists.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;
