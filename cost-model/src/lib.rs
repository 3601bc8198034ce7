//! Prices: what computation, communication and memory cost, and how a schedule's actions fall in time.
//!
//! It knows formulas and constants, each with its source; it does not know which plan is wanted.

#![warn(missing_docs)]

pub mod algorithms;
pub mod attention;
pub mod collective;
pub mod collective_loads;
pub mod constants;
pub mod dispatch;
pub mod energy;
pub mod expert_launches;
pub mod exposure;
pub mod gemm;
pub mod group;
pub mod links;
pub mod memory;
pub mod offload;
pub mod overlap;
pub mod parameters;
pub mod program_bytes;
#[cfg(test)]
mod program_fixture;
pub mod program_memory;
pub mod program_price;
mod program_work;
mod events;
mod power;
pub mod rates;
pub mod reliability;
pub mod ring;
pub mod section_price;
pub mod simulate;
pub mod slice_lengths;
pub mod step_price;
pub mod stream;
pub mod tensor_bytes;
pub mod traffic;
pub mod uncertainty;
pub mod work_time;

pub use algorithms::algorithms;
pub use attention::Attention;
pub use collective::{Algorithm, Choice, CollectiveKind, choose, price};
pub use constants::{CONSTANTS_JSON, Constants};
pub use gemm::GemmShape;
pub use group::{Group, GroupAxis};
pub use memory::MemoryBreakdown;
pub use parameters::{CalibrationError, PARAMETERS, Parameter};
pub use program_bytes::{
    BytesByCollective, CommunicationClass, Links, ProgramBytes, Sent, fetched_bytes, flat_step_bytes,
    handover_bytes, host_elements, kept_bytes, program_bytes, saved_bytes, split_bytes, step_bytes,
    stored_bytes, stream_bytes,
};
pub use program_memory::{
    MemoryContext, ProgramMemory, carried_bytes, kept_on_host, owed_bytes, program_memory,
};
pub use program_price::{RowPrice, Stream, price_events, price_program, price_split};
pub use rates::Rates;
pub use section_price::{
    Communication, CommunicationPrice, ComputePrice, ProgramPrice, SectionPrice, SplitPrice, UpdatePrice,
};
pub use simulate::{
    BackwardParts, Branches, PipelineTimes, RankTotals, SimulateError, Totals, Transfers, Turns, busiest,
    lower_bound, makespan, schedule_totals, simulate, totals,
};
pub use slice_lengths::{SliceCost, balanced_slices, equal_slices};
pub use step_price::{PriceContext, StepPrice, collective_kind, price_step};
pub use tensor_bytes::{ActivationKind, activation_kind};
pub use traffic::{bytes_sent, bytes_sent_per_tier};
pub use work_time::{n_kernels, work_time};
