//! Runs a program on N ranks, one plain thread each, with real tensors and real collectives.

pub mod element;

pub mod instruction;

pub mod counters;

pub mod error;

pub mod observe;

pub mod fabric;

pub mod collective;

pub mod kernels;

mod label;

pub mod states;

pub mod job;

mod block;
mod handover;
mod border;

mod convert;

mod initial;

mod routing;

mod prepare;
mod ways;

pub mod arena;

mod lifetimes;
mod memory;

mod rank;

pub mod audit;

mod operate;

mod ring;
mod ring_audit;

mod extend;

mod offload;

mod update;

mod assemble;

pub mod run;

pub mod checkpoint;

pub mod taken;

pub mod compare;

pub mod agreement;

pub use label::Class;

pub use memory::RankMemory;

pub use offload::HostMoves;

pub use routing::Routes;
