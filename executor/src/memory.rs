//! The arena of a rank, run: one block of bytes in which everything lies that the rank holds between two instructions.
//!
//! An instruction reads its operands out of the arena and writes its results into it, each at the offset that was
//! planned before the run, in the bytes that it takes: eight or four, or two where numbers are rounded to bf16. A
//! number that two bytes do not hold is an error, as is a byte that is not free; what is given back is overwritten, so
//! that nobody reads it by mistake. Without a plan a buffer goes where one of its size was given back, or behind all
//! others.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::ops::RangeInclusive;

use ndarray::{ArrayD, IxDyn};

use ir::graph::OpId;
use ir::program::ValueId;

use crate::arena::Arena;
use crate::element::{Element, Width};
use crate::error::ExecutorError;
use crate::job::LayerIdx;
use crate::kernels::{Tensor, Value};
use crate::lifetimes::{Held, MemoryPlan};
use crate::prepare::unfit;

/// What is written where nothing is held: no number in any width, and no token.
const NOTHING: u8 = 0xff;

/// Bytes of a rank's arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankMemory {
    /// Size of the arena as planned.
    pub planned_peak: u64,
    /// Most bytes that live at once as planned: no arena is smaller.
    pub lower_bound: u64,
    /// Highest byte that the run used.
    pub high_water: u64,
    /// Most bytes that the run held at once.
    pub most_live: u64,
}

/// Where a buffer lies and how it is read.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Lying {
    offset: u64,
    bytes: u64,
    shape: Vec<usize>,
    width: Width,
}

impl Lying {
    fn n_elements(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64
    }
}

/// A rank's memory, where numbers are computed with as `E`.
#[derive(Debug)]
pub(crate) struct Memory<'a, E> {
    plan: Option<&'a MemoryPlan>,
    bytes: Vec<u8>,
    arena: Arena,
    now: BTreeMap<Held, Lying>,
    /// How often each buffer has appeared in this step.
    seen: BTreeMap<Held, usize>,
    /// Without a plan, places that were given back, by their size.
    free: BTreeMap<u64, Vec<u64>>,
    numbers: PhantomData<E>,
}

impl<'a, E: Element> Memory<'a, E> {
    /// An empty arena, as large as planned.
    pub(crate) fn new(plan: Option<&'a MemoryPlan>) -> Self {
        let bytes = plan.map_or(0, |plan| plan.placed.peak) as usize;
        Self {
            plan,
            bytes: vec![NOTHING; bytes],
            arena: Arena::default(),
            now: BTreeMap::new(),
            seen: BTreeMap::new(),
            free: BTreeMap::new(),
            numbers: PhantomData,
        }
    }

    /// Writes a value; one that is there already is replaced where it lies.
    pub(crate) fn put(&mut self, held: Held, value: &Value<E>, width: Width) -> Result<(), ExecutorError> {
        match value {
            Value::Float(tensor) => self.put_tensor(held, tensor, width),
            Value::Index(index) => {
                let place = self.place(held, (index.shape(), Width::Integer))?;
                let places = place.as_chunks_mut::<{ size_of::<i64>() }>().0.iter_mut();
                places.zip(index).for_each(|(place, value)| *place = value.to_le_bytes());
                Ok(())
            }
        }
    }

    /// Writes numbers of a shape.
    pub(crate) fn put_tensor(
        &mut self,
        held: Held,
        tensor: &Tensor<E>,
        width: Width,
    ) -> Result<(), ExecutorError> {
        // Memory has index order; a transposed view is brought into it.
        let ordered = tensor.as_standard_layout();
        let values = ordered.as_slice().unwrap_or_default();
        self.put_shaped(held, tensor.shape(), values, width)
    }

    /// Writes numbers in a row.
    pub(crate) fn put_numbers(
        &mut self,
        held: Held,
        values: &[E],
        width: Width,
    ) -> Result<(), ExecutorError> {
        self.put_shaped(held, &[values.len()], values, width)
    }

    fn put_shaped(
        &mut self,
        held: Held,
        shape: &[usize],
        values: &[E],
        width: Width,
    ) -> Result<(), ExecutorError> {
        let place = self.place(held, (shape, width))?;
        match width {
            Width::Integer => return Err(unfit(format!("{held:?} has numbers where integers were planned"))),
            Width::Full => E::write_all(values, place),
            Width::Bf16 => {
                for (place, value) in place.as_chunks_mut().0.iter_mut().zip(values) {
                    let bits = value.bf16_bits();
                    let bits =
                        bits.ok_or_else(|| unfit(format!("{held:?}: {value} is no number of bf16")))?;
                    *place = bits.to_le_bytes();
                }
            }
        }
        Ok(())
    }

    /// The bytes of a buffer, to be written.
    fn place(&mut self, held: Held, (shape, width): (&[usize], Width)) -> Result<&mut [u8], ExecutorError> {
        let bytes = shape.iter().product::<usize>() as u64 * width.bytes(size_of::<E>() as u64);
        let offset = match self.now.get_mut(&held) {
            Some(lying) if lying.bytes == bytes && lying.width == width => {
                shape.clone_into(&mut lying.shape);
                lying.offset
            }
            Some(lying) => {
                let there = lying.bytes;
                return Err(unfit(format!("{held:?} has {bytes} B where it lies in {there} B")));
            }
            None => self.claim(held, (shape, width), bytes)?,
        };
        let (from, to) = (offset as usize, (offset + bytes) as usize);
        self.bytes.get_mut(from..to).ok_or_else(|| unfit(format!("{held:?} does not lie in the arena")))
    }

    fn claim(
        &mut self,
        held: Held,
        (shape, width): (&[usize], Width),
        bytes: u64,
    ) -> Result<u64, ExecutorError> {
        let offset = match self.plan {
            Some(plan) => self.planned(plan, held, bytes)?,
            None => self.free.get_mut(&bytes).and_then(Vec::pop).unwrap_or(self.arena.high_water),
        };
        let taken = |byte| unfit(format!("{held:?} at {offset}: byte {byte} of the arena is not free"));
        self.arena.claim(offset, bytes).map_err(taken)?;
        if self.plan.is_none() && self.bytes.len() < (offset + bytes) as usize {
            self.bytes.resize((offset + bytes) as usize, NOTHING);
        }
        self.now.insert(held, Lying { offset, bytes, shape: shape.to_vec(), width });
        Ok(offset)
    }

    fn planned(&mut self, plan: &MemoryPlan, held: Held, bytes: u64) -> Result<u64, ExecutorError> {
        let nth = self.seen.entry(held).or_insert(0);
        let at = plan.of.get(&held).and_then(|list| list.get(*nth));
        *nth += 1;
        let at = *at.ok_or_else(|| unfit(format!("{held:?} is held but was not planned")))?;
        let planned = plan.buffers[at].bytes;
        if planned != bytes {
            return Err(unfit(format!("{held:?} has {bytes} B, planned were {planned} B")));
        }
        Ok(plan.placed.offsets[at])
    }

    /// A value as it lies here; nothing where it is not held.
    pub(crate) fn get(&self, held: Held) -> Option<Value<E>> {
        let lying = self.now.get(&held)?;
        let memory = self.bytes.get(lying.offset as usize..(lying.offset + lying.bytes) as usize)?;
        let shape = IxDyn(&lying.shape);
        match lying.width {
            Width::Integer => {
                let values = memory.as_chunks().0.iter().map(|&place| i64::from_le_bytes(place)).collect();
                ArrayD::from_shape_vec(shape, values).ok().map(Value::Index)
            }
            Width::Full => ArrayD::from_shape_vec(shape, E::read_all(memory)).ok().map(Value::Float),
            Width::Bf16 => {
                let number = |&place: &[u8; 2]| E::from_bf16_bits(u16::from_le_bytes(place));
                let values = memory.as_chunks().0.iter().map(number).collect();
                ArrayD::from_shape_vec(shape, values).ok().map(Value::Float)
            }
        }
    }

    /// Numbers as they lie here.
    pub(crate) fn tensor(&self, held: Held) -> Option<Tensor<E>> {
        self.get(held).and_then(Value::into_float)
    }

    /// Elements of what lies here.
    pub(crate) fn n_elements(&self, held: Held) -> Option<usize> {
        self.now.get(&held).map(|lying| lying.n_elements() as usize)
    }

    /// Reads numbers and gives their place back.
    pub(crate) fn take(&mut self, held: Held) -> Option<Tensor<E>> {
        let tensor = self.tensor(held);
        self.drop(held).then_some(tensor).flatten()
    }

    /// Moves everything of some ranges to another memory, as it lies here; says what it was: elements and their width.
    ///
    /// # Errors
    /// Where the other memory has no place for it.
    pub(crate) fn move_to(
        &mut self,
        other: &mut Self,
        ranges: &[RangeInclusive<Held>],
    ) -> Result<Vec<(u64, Width)>, ExecutorError> {
        let copied = self.copy_to(other, ranges)?;
        self.of_ranges(ranges).into_iter().for_each(|held| {
            self.drop(held);
        });
        Ok(copied)
    }

    /// The same, and it stays here too.
    ///
    /// # Errors
    /// Where the other memory has no place for it.
    pub(crate) fn copy_to(
        &self,
        other: &mut Self,
        ranges: &[RangeInclusive<Held>],
    ) -> Result<Vec<(u64, Width)>, ExecutorError> {
        let one = |held: Held| {
            let (Some(value), Some(lying)) = (self.get(held), self.now.get(&held)) else {
                return Err(unfit(format!("{held:?} cannot be read where it lies")));
            };
            other.put(held, &value, lying.width)?;
            Ok((lying.n_elements(), lying.width))
        };
        self.of_ranges(ranges).into_iter().map(one).collect()
    }

    fn of_ranges(&self, ranges: &[RangeInclusive<Held>]) -> Vec<Held> {
        let of = |range: &RangeInclusive<Held>| self.now.range(range.clone()).map(|(held, _)| *held);
        ranges.iter().flat_map(of).collect()
    }

    /// Gives a buffer's place back; says whether it was held.
    pub(crate) fn drop(&mut self, held: Held) -> bool {
        let Some(Lying { offset, bytes, .. }) = self.now.remove(&held) else { return false };
        self.arena.release(offset, bytes);
        if self.plan.is_none() {
            self.free.entry(bytes).or_default().push(offset);
        }
        if let Some(place) = self.bytes.get_mut(offset as usize..(offset + bytes) as usize) {
            place.fill(NOTHING);
        }
        true
    }

    /// Values that are held of a layer and unit, each with its elements and their width.
    pub(crate) fn values(
        &self,
        (layer_idx, unit): (LayerIdx, u32),
    ) -> impl Iterator<Item = (ValueId, u64, Width)> {
        let first = Held::Value(layer_idx, unit, ValueId(0));
        let last = Held::Value(layer_idx, unit, ValueId(usize::MAX));
        self.now.range(first..=last).filter_map(|(held, lying)| {
            let Held::Value(_, _, id) = held else { return None };
            Some((*id, lying.n_elements(), lying.width))
        })
    }

    /// Elements that rings of a layer keep of a unit.
    pub(crate) fn attended(&self, (layer_idx, unit): (LayerIdx, u32)) -> u64 {
        let (none, all) = (OpId(0), OpId(usize::MAX));
        let results = Held::Attended(layer_idx, unit, none)..=Held::Attended(layer_idx, unit, all);
        let sums = Held::LogSums(layer_idx, unit, none)..=Held::LogSums(layer_idx, unit, all);
        self.now.range(results).chain(self.now.range(sums)).map(|(_, lying)| lying.n_elements()).sum()
    }

    /// The next step begins: only states are left.
    pub(crate) fn end_step(&mut self) {
        let is_state = |held: &Held| matches!(held, Held::State(..));
        let over: Vec<Held> = self.now.keys().copied().filter(|held| !is_state(held)).collect();
        over.into_iter().for_each(|held| {
            self.drop(held);
        });
        // A state that is here only for its update appears anew in every step.
        let now = &self.now;
        self.seen.retain(|held, _| is_state(held) && now.contains_key(held));
    }

    pub(crate) fn report(&self) -> RankMemory {
        let placed = self.plan.map(|plan| plan.placed.as_ref());
        RankMemory {
            planned_peak: placed.map_or(0, |placed| placed.peak),
            lower_bound: placed.map_or(0, |placed| placed.lower_bound),
            high_water: self.arena.high_water,
            most_live: self.arena.most_live,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Held = Held::Value(0, 0, ValueId(0));
    const SECOND: Held = Held::Value(0, 0, ValueId(1));

    #[test]
    fn what_is_written_is_read_in_its_width() {
        let mut memory = Memory::<f32>::new(None);
        let tensor = ArrayD::from_shape_fn(IxDyn(&[2, 3]), |i| (i[0] * 3 + i[1]) as f32);
        memory.put_tensor(FIRST, &tensor.t().into_owned(), Width::Full).unwrap();
        memory.put_tensor(SECOND, &tensor, Width::Bf16).unwrap();
        assert_eq!(memory.tensor(FIRST), Some(tensor.t().into_owned()));
        assert_eq!(memory.tensor(SECOND), Some(tensor));
        assert_eq!(memory.report().high_water, 6 * 4 + 6 * 2);
        let tokens = ArrayD::from_elem(IxDyn(&[2]), -100);
        memory.put(Held::Value(1, 0, ValueId(0)), &Value::Index(tokens.clone()), Width::Integer).unwrap();
        assert_eq!(memory.get(Held::Value(1, 0, ValueId(0))), Some(Value::Index(tokens)));
    }

    #[test]
    fn a_number_that_was_not_rounded_does_not_fit_into_two_bytes() {
        let mut memory = Memory::new(None);
        let wrong = memory.put_numbers(FIRST, &[1.0, 1.001_f32], Width::Bf16);
        assert!(wrong.unwrap_err().to_string().contains("is no number of bf16"));
    }

    #[test]
    fn what_is_given_back_is_overwritten_and_used_again() {
        let mut memory = Memory::<f64>::new(None);
        memory.put_numbers(FIRST, &[1.0, 2.0], Width::Full).unwrap();
        assert!(memory.drop(FIRST) && !memory.drop(FIRST));
        assert!(memory.bytes.iter().all(|&byte| byte == NOTHING) && memory.tensor(FIRST).is_none());
        memory.put_numbers(SECOND, &[3.0, 4.0], Width::Full).unwrap();
        assert_eq!(memory.report(), RankMemory { high_water: 16, most_live: 16, ..RankMemory::default() });
    }
}
