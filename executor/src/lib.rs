//! Runs a program on N ranks, one plain thread each, with real tensors and real collectives.

pub mod element;

pub mod instruction;

pub mod counters;

pub mod error;

pub mod fabric;

pub mod collective;

pub mod kernels;
