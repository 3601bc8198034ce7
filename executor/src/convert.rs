//! Conversions, run: the steps of `ir::conversion` as messages between ranks.
//!
//! Every step is along some axes; the ranks that differ only there form its group, in row-major order. What a member
//! sends to another is the intersection of what it holds before with what the other holds after.

use ndarray::{ArrayD, IxDyn};

use ir::conversion::{Step, StepKind};
use ir::mesh::{AxisId, Mesh, Meshes};
use ir::sharding::Sharding;

use crate::block::Block;
use crate::element::Reduce;
use crate::error::ExecutorError;
use crate::fabric::RankComm;
use crate::instruction::Tag;
use crate::kernels::Real;
use crate::observe::Activity;

/// Where a rank sits.
#[derive(Clone, Debug)]
pub(crate) struct Seat<'a> {
    pub(crate) mesh: &'a Mesh,
    /// Pipeline rank.
    pub(crate) stage: u32,
    /// Rank within its mesh.
    pub(crate) device: u64,
    /// Coordinates within its mesh.
    pub(crate) coordinates: Vec<u64>,
    meshes: Meshes<'a>,
}

impl<'a> Seat<'a> {
    /// The seat of a rank of the run.
    pub(crate) fn new(meshes: Meshes<'a>, rank: usize) -> Self {
        let (stage, device) = meshes.seat(rank as u64);
        let mesh = meshes.of(stage);
        Self { mesh, stage: stage as u32, device, coordinates: mesh.coordinates(device), meshes }
    }

    /// The first rank of a stage.
    pub(crate) fn first(&self, stage: u32) -> u64 {
        self.meshes.first(u64::from(stage))
    }

    /// What this rank holds of a tensor.
    pub(crate) fn block(&self, sharding: Sharding, shape: &[u64]) -> Block {
        Block::of(sharding, self.mesh, &self.coordinates, shape)
    }

    /// The rank of the run that has this device in another stage of the same mesh.
    pub(crate) fn peer(&self, stage: u32) -> usize {
        (self.first(stage) + self.device) as usize
    }
}

/// What is converted, for the collectives' tags and the blocks' shapes.
#[derive(Clone, Debug)]
pub(crate) struct Subject<'a> {
    pub(crate) tag: Tag,
    /// Lengths of the whole tensor's dims.
    pub(crate) shape: &'a [u64],
}

/// Runs steps on this rank's block of a tensor, together with the other ranks of the step's groups.
pub(crate) fn convert<E: Real>(
    comm: &mut RankComm<'_, E>,
    seat: &Seat<'_>,
    steps: &[Step],
    subject: &Subject<'_>,
    tensor: ArrayD<E>,
) -> Result<ArrayD<E>, ExecutorError> {
    steps.iter().try_fold(tensor, |tensor, step| {
        let exchange = Exchange::new(seat, step, subject);
        exchange.expect_shape(&tensor, &exchange.before, "before")?;
        let mut tensor = match step.kind.collective() {
            Some(kind) => {
                let (algorithm, tag) = (step.algorithm, &subject.tag);
                let activity = Activity::Communication { kind, algorithm, tag };
                comm.during(activity, |comm| exchange.run(comm, step, tensor))?
            }
            None => exchange.run(comm, step, tensor)?,
        };
        if step.kind.is_collective() {
            // What a rank summed itself is as coarse as what the others got of it.
            comm.edges().round_all(&mut tensor);
        }
        exchange.expect_shape(&tensor, &exchange.after, "after")?;
        Ok(tensor)
    })
}

/// One step as one rank sees it.
struct Exchange<'a> {
    subject: &'a Subject<'a>,
    /// Ranks of the run.
    group: Vec<usize>,
    /// Own blocks before and after.
    before: Block,
    after: Block,
    /// Every member's blocks before and after.
    members: Vec<(Block, Block)>,
    /// Whether this rank has coordinate zero on every axis of the step.
    is_first: bool,
}

impl<'a> Exchange<'a> {
    fn new(seat: &Seat<'_>, step: &Step, subject: &'a Subject<'a>) -> Self {
        let devices = seat.mesh.group(seat.device, &step.axes);
        let first = seat.first(seat.stage);
        let of = |device: u64, sharding| {
            Block::of(sharding, seat.mesh, &seat.mesh.coordinates(device), subject.shape)
        };
        let zero = |axis: &AxisId| seat.coordinates[axis.0] == 0;
        Self {
            subject,
            group: devices.iter().map(|device| (first + device) as usize).collect(),
            before: seat.block(step.before, subject.shape),
            after: seat.block(step.after, subject.shape),
            members: devices
                .iter()
                .map(|&device| (of(device, step.before), of(device, step.after)))
                .collect(),
            is_first: step.axes.iter().all(zero),
        }
    }

    fn run<E: Real>(
        &self,
        comm: &mut RankComm<'_, E>,
        step: &Step,
        tensor: ArrayD<E>,
    ) -> Result<ArrayD<E>, ExecutorError> {
        let tag = self.subject.tag.clone();
        let mut by = comm.by(step.algorithm);
        match step.kind {
            StepKind::AllReduce => {
                self.whole(by.all_reduce(&self.group, tag, elements(tensor), Reduce::Sum)?)
            }
            StepKind::AllReduceMax => {
                self.whole(by.all_reduce(&self.group, tag, elements(tensor), Reduce::Max)?)
            }
            StepKind::ReduceScatter { .. } => {
                let parts = self.parts(&tensor);
                self.whole(by.reduce_scatter_blocks(&self.group, tag, parts, Reduce::Sum)?)
            }
            StepKind::AllGather { .. } => {
                let lens: Vec<usize> = self.members.iter().map(|(before, _)| before.len()).collect();
                let blocks = by.all_gather_blocks(&self.group, tag, elements(tensor), &lens)?;
                Ok(self.joined(blocks))
            }
            StepKind::AllToAll { .. } => {
                let parts = self.parts(&tensor);
                let lens: Vec<usize> = self.incoming().iter().map(Block::len).collect();
                let blocks = by.all_to_all_blocks(&self.group, tag, parts, &lens)?;
                Ok(self.joined(blocks))
            }
            StepKind::Slice { .. } => Ok(self.before.cut(&tensor, &self.before.intersection(&self.after))),
            StepKind::Zero if self.is_first => Ok(tensor),
            StepKind::Zero => Ok(ArrayD::zeros(tensor.raw_dim())),
        }
    }

    /// What goes to each member.
    fn parts<E: Real>(&self, tensor: &ArrayD<E>) -> Vec<Vec<E>> {
        let part =
            |(_, after): &(Block, Block)| elements(self.before.cut(tensor, &self.before.intersection(after)));
        self.members.iter().map(part).collect()
    }

    /// What comes from each member.
    fn incoming(&self) -> Vec<Block> {
        self.members.iter().map(|(before, _)| self.after.intersection(before)).collect()
    }

    fn joined<E: Real>(&self, blocks: Vec<Vec<E>>) -> ArrayD<E> {
        let mut tensor = ArrayD::zeros(IxDyn(&self.after.shape()));
        for (part, values) in self.incoming().iter().zip(blocks) {
            self.after.paste(&mut tensor, part, values);
        }
        tensor
    }

    fn whole<E: Real>(&self, values: Vec<E>) -> Result<ArrayD<E>, ExecutorError> {
        let n = values.len();
        ArrayD::from_shape_vec(IxDyn(&self.after.shape()), values)
            .map_err(|_| self.wrong(&[n], &self.after, "after"))
    }

    fn expect_shape<E: Real>(
        &self,
        tensor: &ArrayD<E>,
        block: &Block,
        when: &str,
    ) -> Result<(), ExecutorError> {
        if tensor.shape() == block.shape() { Ok(()) } else { Err(self.wrong(tensor.shape(), block, when)) }
    }

    fn wrong(&self, found: &[usize], block: &Block, when: &str) -> ExecutorError {
        let expected = block.shape();
        ExecutorError::Unfit(format!(
            "{}: shape {found:?} {when} a step, expected {expected:?}",
            self.subject.tag
        ))
    }
}

/// Elements in index order.
pub(crate) fn elements<E: Real>(tensor: ArrayD<E>) -> Vec<E> {
    if tensor.is_standard_layout() {
        // The offset of an owned, standard array is zero unless it was sliced in place, which nothing here does.
        let (values, offset) = tensor.into_raw_vec_and_offset();
        if offset.is_none_or(|offset| offset == 0) { values } else { values[offset.unwrap_or(0)..].to_vec() }
    } else {
        tensor.iter().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::run_ranks;
    use ir::conversion::steps;
    use ir::sharding::Placement::{self, PartialMax, PartialSum, Replicate, Shard};
    use ndarray::Dimension;
    use proptest::prelude::*;

    /// A term of the tensor: what one coordinate of the partial axes adds to it. The terms are powers of two apart.
    fn local(seat: &Seat<'_>, sharding: Sharding, shape: &[u64]) -> ArrayD<f64> {
        let whole =
            ArrayD::from_shape_fn(IxDyn(&shape.iter().map(|&n| n as usize).collect::<Vec<_>>()), |i| {
                i.slice().iter().fold(1.0, |value, &row| 10.0 * value + row as f64)
            });
        let all = Block::of(Sharding::REPLICATED, seat.mesh, &seat.coordinates, shape);
        let mut own = all.cut(&whole, &seat.block(sharding, shape));
        for axis in seat.mesh.axis_ids() {
            let (size, at) = (seat.mesh.size(axis), seat.coordinates[axis.0]);
            match sharding.on(axis) {
                PartialSum => {
                    let last = at + 1 == size;
                    let half = 0.5_f64.powi(if last { at as i32 } else { at as i32 + 1 });
                    own.mapv_inplace(|x| x * half);
                }
                PartialMax => own.mapv_inplace(|x| if at == size / 2 { x } else { x - 1.0 }),
                Shard(_) | Replicate => {}
            }
        }
        own
    }

    fn check(mesh: &Mesh, from: Sharding, to: Sharding, shape: &[u64]) -> Result<(), ExecutorError> {
        let list = steps(from, to).unwrap();
        let out = run_ranks::<f64, _, _>(mesh.n_devices() as usize, &|_, _| 0, |comm| {
            let seat = Seat::new(Meshes::all(mesh), comm.rank());
            let subject = Subject { tag: Tag::new("t", 0), shape };
            let found = convert(comm, &seat, &list, &subject, local(&seat, from, shape))?;
            Ok(found)
        })?;
        // What is left unfinished is judged after finishing it here.
        for device in 0..mesh.n_devices() {
            let seat = Seat::new(Meshes::all(mesh), device as usize);
            let partial = to.partial_axes();
            let group = mesh.group(device, &partial);
            let total = group.iter().fold(None::<ArrayD<f64>>, |total, &member| {
                let term = &out[member as usize].0;
                Some(total.map_or_else(|| term.clone(), |total| total + term))
            });
            let finished = partial.iter().fold(to, |s, &axis| s.with(axis, Replicate));
            assert_eq!(
                total.unwrap(),
                local(&seat, finished, shape),
                "{from:?} to {to:?} on device {device}"
            );
        }
        Ok(())
    }

    fn placement() -> impl Strategy<Value = Placement> {
        prop_oneof![Just(Replicate), Just(PartialSum), Just(Shard(0)), Just(Shard(1)), Just(Shard(2))]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

        /// Dims of three lengths, none of which every mesh divides: blocks are uneven and some are empty.
        #[test]
        fn every_conversion_gives_what_its_target_says(
            sizes in prop::collection::vec(1_u64..4, 1..4),
            from in prop::collection::vec(placement(), 3),
            to in prop::collection::vec(placement(), 3),
            shape in prop::collection::vec(1_u64..8, 3),
        ) {
            let mesh = Mesh::of_sizes(&sizes).unwrap();
            let sharding = |list: &[Placement]| {
                let pairs = mesh.axis_ids().zip(list).filter(|(axis, _)| mesh.size(*axis) > 1);
                pairs.fold(Sharding::REPLICATED, |s, (axis, &placement)| s.with(axis, placement))
            };
            check(&mesh, sharding(&from), sharding(&to), &shape).unwrap();
        }
    }

    #[test]
    fn a_maximum_becomes_whole_by_one_reduction() {
        let mesh = Mesh::of_sizes(&[3]).unwrap();
        let from = Sharding::REPLICATED.with(AxisId(0), PartialMax);
        check(&mesh, from, Sharding::REPLICATED, &[2, 3]).unwrap();
    }
}
