//! The search: variants of layers, strategies inside them, stages across them, and the proof that the result is right.
//!
//! Modules in reading order; each uses only those above it.
#![warn(missing_docs)]

pub mod rewrite;
pub mod prove;
pub mod problem;
pub mod solve;
pub mod ilp;
pub mod space;
pub mod prices;
pub mod layer_problem;
pub mod menu;

#[cfg(test)]
mod solver_tests;
#[cfg(test)]
mod test_models;
#[cfg(test)]
mod discovery_tests;
