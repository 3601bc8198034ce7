//! Updates on the host: which memory a state lies in, and what moves between a rank's two arenas.
//!
//! ```text
//! device:  gradient finished  --down-->                                         --up-->  new value, as operators take it
//! host:                                 AdamW on the fp32 parameter and moments
//! ```
//! Ren et al. 2021, "ZeRO-Offload", arXiv 2101.06840, section 4.1. Bytes are counted where they are moved.

use ir::program::Home;

use crate::convert::elements;
use crate::element::Width;
use crate::error::ExecutorError;
use crate::kernels::Real;
use crate::lifetimes::{Held, State};
use crate::prepare::{ParameterKey, unfit};
use crate::rank::Rank;

/// Bytes that a rank moved between its device and its host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostMoves {
    /// Gradients, to the host.
    pub down: u64,
    /// New parameters, to the device.
    pub up: u64,
}

impl<E: Real> Rank<'_, E> {
    /// Which memory holds a state.
    pub(crate) fn home(&self, key: ParameterKey, state: State) -> Home {
        let of_update = self.parameters.get(&key).map_or(Home::Device, |parameter| parameter.home);
        match state {
            State::Stored | State::Accumulator => Home::Device,
            State::Master | State::First | State::Second => of_update,
        }
    }

    /// Moves a finished gradient to where its update runs.
    pub(crate) fn bring_down(&mut self, key: ParameterKey) -> Result<(), ExecutorError> {
        match self.home(key, State::Master) {
            Home::Device => Ok(()),
            Home::Host => {
                let gradient = self.gradient(key)?;
                self.memory.drop(Held::Gradient(key));
                self.record.moved.down += size_of_val(gradient.as_slice()) as u64;
                self.host.put_numbers(Held::Gradient(key), &gradient, Width::Full)
            }
        }
    }

    /// Brings a new value to the device, as operators take it.
    pub(crate) fn bring_up(&mut self, key: ParameterKey) -> Result<(), ExecutorError> {
        match self.home(key, State::Master) {
            Home::Device => Ok(()),
            Home::Host => {
                let new = self.read(key, State::Master)?;
                let width = self.run.rounded().bytes(size_of::<E>() as u64);
                self.record.moved.up += new.len() as u64 * width;
                self.write_updated(key, new)
            }
        }
    }

    /// A new value on the device, in the cut of its update.
    pub(crate) fn updated(&self, key: ParameterKey) -> Result<Vec<E>, ExecutorError> {
        match self.home(key, State::Master) {
            Home::Device => self.read(key, State::Master),
            Home::Host => {
                let values = self.memory.tensor(Held::Updated(key)).map(elements);
                values.ok_or_else(|| unfit(format!("layer {}: no new value came up", key.0)))
            }
        }
    }

    /// Takes a new value that is on the device.
    pub(crate) fn write_updated(&mut self, key: ParameterKey, mut new: Vec<E>) -> Result<(), ExecutorError> {
        match self.home(key, State::Master) {
            Home::Device => self.write(key, State::Master, &new),
            Home::Host => {
                self.edges().round_all(&mut new);
                self.memory.put_numbers(Held::Updated(key), &new, self.run.rounded())
            }
        }
    }
}
