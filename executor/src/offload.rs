//! What lies on the host and its drives: which memory holds a state, what a layer keeps there, and what moves between a
//! rank's arenas.
//!
//! ```text
//! device:  gradient finished  --down-->                                         --up-->  new value, as operators take it
//! host:                                 AdamW on the fp32 parameter and moments
//! drives, if these hold them:   --read-->                                       --written-->
//!
//! device:  forward of a layer --kept, down-->                  --kept, up-->  its backward
//! host:                                       all in between
//!
//! device:  --up, gathered-->  a use, forward or backward           new value, in its storage's cut  --down-->
//! host:    parameters as they are stored                                                                     the same
//! ```
//! Ren et al. 2021, "ZeRO-Offload", arXiv 2101.06840, section 4.1; Rhu et al. 2016, "vDNN", arXiv 1602.08124, section
//! 3; Rajbhandari et al. 2021, "ZeRO-Infinity", arXiv 2104.07857, sections 5.1 and 5.2.2. Bytes are counted where they
//! are moved.

use ir::program::{Home, StateHome};

use crate::convert::elements;
use crate::element::Width;
use crate::error::ExecutorError;
use crate::kernels::Real;
use crate::lifetimes::{Held, State, held_of, updated_states};
use crate::memory::Memory;
use crate::prepare::{ParameterKey, unfit};
use crate::rank::{Rank, Unit};

/// Bytes that a rank moved between its device and its host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostMoves {
    /// Gradients, to the host.
    pub down: u64,
    /// New parameters, to the device.
    pub up: u64,
    /// What layers keep for backward, to the host; every number in the width of the executed type.
    pub kept_down: u64,
    /// The same, back to the device.
    pub kept_up: u64,
    /// Parameters that the host holds between uses, to the host when they are new.
    pub stored_down: u64,
    /// The same, to the device for a use.
    pub stored_up: u64,
    /// Optimizer states on the host's drives, to its memory for their update.
    pub read: u64,
    /// The same, back to the drives.
    pub written: u64,
}

/// Bytes of what was moved as it lies, however numbers are rounded elsewhere: states never are.
fn lying_bytes<E>(moved: &[(u64, Width)]) -> u64 {
    moved.iter().map(|&(n, width)| n * width.bytes(size_of::<E>() as u64)).sum()
}

impl<'a, E: Real> Rank<'a, E> {
    /// Which memory holds a state between updates.
    pub(crate) fn home(&self, key: ParameterKey, state: State) -> StateHome {
        let of_update = self.parameters.get(&key).map_or(StateHome::Device, |parameter| parameter.home);
        match state {
            State::Stored => self.run.program(key.0).parameters.into(),
            State::Accumulator => StateHome::Device,
            State::Master | State::First | State::Second => of_update,
        }
    }

    /// The memory in which a state is now.
    pub(crate) fn memory_of(&self, key: ParameterKey, state: State) -> &Memory<'a, E> {
        match self.place_of(key, state) {
            StateHome::Device => &self.memory,
            StateHome::Host => &self.host,
            StateHome::Nvme => &self.nvme,
        }
    }

    /// The same to be written.
    pub(crate) fn memory_of_mut(&mut self, key: ParameterKey, state: State) -> &mut Memory<'a, E> {
        match self.place_of(key, state) {
            StateHome::Device => &mut self.memory,
            StateHome::Host => &mut self.host,
            StateHome::Nvme => &mut self.nvme,
        }
    }

    /// Where a state is now: what lies on drives is in the host's memory while it is updated.
    fn place_of(&self, key: ParameterKey, state: State) -> StateHome {
        let is_read = self.host.n_elements(Held::State(key, state)).is_some();
        match self.home(key, state) {
            StateHome::Nvme if is_read => StateHome::Host,
            home @ (StateHome::Device | StateHome::Host | StateHome::Nvme) => home,
        }
    }

    /// Reads the states of an update off the drives into the host's memory, where they lie there. They keep their place
    /// on the drives, to be written over.
    pub(crate) fn read_in(&mut self, key: ParameterKey) -> Result<(), ExecutorError> {
        match self.home(key, State::Master) {
            StateHome::Device | StateHome::Host => Ok(()),
            StateHome::Nvme => {
                let moved = self.nvme.copy_to(&mut self.host, &[updated_states(key)])?;
                self.record.moved.read += lying_bytes::<E>(&moved);
                Ok(())
            }
        }
    }

    /// Writes them back.
    pub(crate) fn write_out(&mut self, key: ParameterKey) -> Result<(), ExecutorError> {
        match self.home(key, State::Master) {
            StateHome::Device | StateHome::Host => Ok(()),
            StateHome::Nvme => {
                let moved = self.host.move_to(&mut self.nvme, &[updated_states(key)])?;
                self.record.moved.written += lying_bytes::<E>(&moved);
                Ok(())
            }
        }
    }

    /// Moves what a layer keeps of a unit to the host, where that holds it.
    pub(crate) fn stow(&mut self, unit: Unit) -> Result<(), ExecutorError> {
        match self.run.program(unit.0).kept {
            Home::Device => Ok(()),
            Home::Host => {
                let moved = self.memory.move_to(&mut self.host, &held_of(unit))?;
                self.record.moved.kept_down += self.all_planned_bytes(&moved);
                Ok(())
            }
        }
    }

    /// Moves it back to the device.
    pub(crate) fn fetch(&mut self, unit: Unit) -> Result<(), ExecutorError> {
        match self.run.program(unit.0).kept {
            Home::Device => Ok(()),
            Home::Host => {
                let moved = self.host.move_to(&mut self.memory, &held_of(unit))?;
                self.record.moved.kept_up += self.all_planned_bytes(&moved);
                Ok(())
            }
        }
    }

    /// Counts so many elements of a parameter that the host holds, on their way for a use.
    pub(crate) fn count_fetched(&mut self, key: ParameterKey, n: usize) {
        self.record.moved.stored_up += self.stored_on_host(key, n);
    }

    /// The same of a new value, on its way back.
    pub(crate) fn count_stored(&mut self, key: ParameterKey, n: usize) {
        self.record.moved.stored_down += self.stored_on_host(key, n);
    }

    /// Bytes of so many elements of a parameter as it is stored; none where the device holds it.
    fn stored_on_host(&self, key: ParameterKey, n: usize) -> u64 {
        match self.home(key, State::Stored) {
            StateHome::Device => 0,
            StateHome::Host | StateHome::Nvme => self.rounded_bytes(n),
        }
    }

    /// Bytes of so many elements as operators take them.
    fn rounded_bytes(&self, n: usize) -> u64 {
        n as u64 * self.run.rounded().bytes(size_of::<E>() as u64)
    }

    fn all_planned_bytes(&self, moved: &[(u64, Width)]) -> u64 {
        moved.iter().map(|&(n, width)| self.planned_bytes(n, width)).sum()
    }

    /// Moves a finished gradient to where its update runs.
    pub(crate) fn bring_down(&mut self, key: ParameterKey) -> Result<(), ExecutorError> {
        match self.home(key, State::Master) {
            StateHome::Device => Ok(()),
            StateHome::Host | StateHome::Nvme => {
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
            StateHome::Device => Ok(()),
            StateHome::Host | StateHome::Nvme => {
                let new = self.read(key, State::Master)?;
                self.record.moved.up += self.rounded_bytes(new.len());
                self.write_updated(key, new)
            }
        }
    }

    /// A new value on the device, in the cut of its update.
    pub(crate) fn updated(&self, key: ParameterKey) -> Result<Vec<E>, ExecutorError> {
        match self.home(key, State::Master) {
            StateHome::Device => self.read(key, State::Master),
            StateHome::Host | StateHome::Nvme => {
                let values = self.memory.tensor(Held::Updated(key)).map(elements);
                values.ok_or_else(|| unfit(format!("layer {}: no new value came up", key.0)))
            }
        }
    }

    /// Takes a new value that is on the device.
    pub(crate) fn write_updated(&mut self, key: ParameterKey, mut new: Vec<E>) -> Result<(), ExecutorError> {
        match self.home(key, State::Master) {
            StateHome::Device => self.write(key, State::Master, &new),
            StateHome::Host | StateHome::Nvme => {
                self.edges().round_all(&mut new);
                self.memory.put_numbers(Held::Updated(key), &new, self.run.rounded())
            }
        }
    }
}
