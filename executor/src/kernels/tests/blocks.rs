//! The one rule: every operator, cut along every loop that may be cut, gives the blocks and unfinished sums that
//! `ir::strategy` says, forward and backward.

use std::ops::Range;

use ndarray::{Axis, Slice};

use ir::mesh::{AxisId, MAX_AXES, Mesh};
use ir::op::{Linear, OpKind};
use ir::sharding::{Placement, Sharding};
use ir::signature::{FactorId, Split};
use ir::strategy::{AxisUse, Strategy, placements};

use super::cases::{Case, backward, cases, floats};
use super::{Noise, assert_close, rows};
use crate::kernels::{Tensor, Value, blocks, forward};

#[test]
fn blocks_of_one_loop_make_the_whole() {
    for case in cases() {
        for factor in splittable(&case) {
            // Three coordinates leave some blocks shorter, and some empty.
            for n in [2, 3] {
                check(&case, &Mesh::of_sizes(&[n]).unwrap(), &[factor]);
            }
        }
    }
}

/// Longer than the cache blocks into which the product is cut inside.
#[test]
fn blocks_of_a_large_product_make_the_whole() {
    let case = Case::new(OpKind::Linear, "x[b:2 s:33 h:600] w[h f:50] -> y[b s f]");
    for factor in splittable(&case) {
        check(&case, &Mesh::of_sizes(&[3]).unwrap(), &[factor]);
    }
}

#[test]
fn blocks_of_two_loops_make_the_whole() {
    let mesh = Mesh::of_sizes(&[2, 2]).unwrap();
    for case in cases() {
        for outer in splittable(&case) {
            for inner in splittable(&case) {
                check(&case, &mesh, &[outer, inner]);
            }
        }
    }
}

#[test]
fn unfinished_sums_pass_through_linear_operators() {
    for case in cases().into_iter().filter(|case| case.kind().line().linear == Linear::Yes) {
        let parts = terms(&case.operands.iter().map(|v| v.as_float().unwrap().clone()).collect::<Vec<_>>());
        let [one, two] =
            parts.map(|part| case.forward(&part.into_iter().map(Value::Float).collect::<Vec<_>>()));
        for ((one, two), whole) in one.iter().zip(&two).zip(case.forward(&case.operands)) {
            assert_close(&(one + two), &whole, 1e-14, &case.name);
        }
    }
}

#[test]
fn unfinished_gradients_pass_through_every_operator() {
    for case in cases() {
        let [one, two] = terms(&case.gradients).map(|part| case.backward(&part));
        for ((one, two), whole) in one.into_iter().zip(two).zip(case.backward(&case.gradients)) {
            if let (Some(one), Some(two), Some(whole)) = (one, two, whole) {
                assert_close(&(one + two), &whole, 1e-13, &case.name);
            }
        }
    }
}

/// Two lists of tensors whose sums are the given ones.
fn terms(tensors: &[Tensor<f64>]) -> [Vec<Tensor<f64>>; 2] {
    let mut noise = Noise::new(3);
    let one: Vec<_> = tensors.iter().map(|tensor| noise.tensor(tensor.shape())).collect();
    let two = tensors.iter().zip(&one).map(|(tensor, one)| tensor - one).collect();
    [one, two]
}

fn splittable(case: &Case) -> Vec<FactorId> {
    let all = case.signature.factors.iter().enumerate();
    all.filter(|(_, factor)| factor.split != Split::Whole).map(|(i, _)| FactorId(i as u8)).collect()
}

/// Runs every rank of a mesh, one loop on each axis, and puts the pieces together.
fn check(case: &Case, mesh: &Mesh, factors: &[FactorId]) {
    let mut uses = [AxisUse::Same; MAX_AXES];
    factors.iter().enumerate().for_each(|(axis, &factor)| uses[axis] = AxisUse::Factor(factor));
    let strategy = Strategy(uses);
    let names: Vec<&str> =
        factors.iter().map(|f| case.signature.factors[f.0 as usize].name.as_str()).collect();
    let what = format!("{} cut along {names:?} over {:?}", case.name, mesh.n_devices());

    let rule = placements(&case.signature, strategy);
    let expected = case.forward(&case.operands);
    let expected_gradients = case.backward(&case.gradients);
    let mut results: Vec<_> =
        expected.iter().zip(&rule.results).map(|(y, s)| Pieces::new(y.shape(), *s)).collect();
    let mut gradients: Vec<_> =
        case.operands.iter().zip(&rule.operand_gradients).map(|(x, s)| Pieces::new(x.shape(), *s)).collect();

    for rank in 0..mesh.n_devices() {
        let place = Place { mesh, coordinates: mesh.coordinates(rank) };
        let own = blocks(&case.signature, &case.sizes, strategy, mesh, &place.coordinates);
        let operands: Vec<_> =
            case.operands.iter().zip(&rule.operands).map(|(value, s)| place.block(value, s)).collect();
        let refs: Vec<_> = operands.iter().collect();
        let local = forward(&case.context(&own), &refs).unwrap_or_else(|error| panic!("{what}: {error}"));
        results.iter_mut().zip(floats(local)).for_each(|(pieces, local)| pieces.put(&place, &local));

        let arriving: Vec<_> = case.gradients.iter().cloned().map(Value::Float).collect();
        let arriving = arriving.iter().zip(&rule.result_gradients).map(|(g, s)| place.block(g, s)).collect();
        let local = backward(case, &own, &operands, &floats(arriving))
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        for ((pieces, local), expected) in gradients.iter_mut().zip(local).zip(&expected_gradients) {
            assert_eq!(local.is_some(), expected.is_some(), "{what}");
            local.iter().for_each(|local| pieces.put(&place, local));
        }
    }
    for (pieces, expected) in results.iter().zip(&expected) {
        // Where no sum is cut, not a bit may differ.
        let tolerance = if pieces.sharding.partial_axes().is_empty() { 0.0 } else { 1e-12 };
        assert_close(&pieces.whole, expected, tolerance, &format!("result of {what}"));
    }
    for (i, (pieces, expected)) in gradients.iter().zip(&expected_gradients).enumerate() {
        if let Some(expected) = expected {
            assert_close(&pieces.whole, expected, 1e-12, &format!("gradient {i} of {what}"));
        }
    }
}

struct Place<'a> {
    mesh: &'a Mesh,
    coordinates: Vec<u64>,
}

impl Place<'_> {
    fn ranges(&self, shape: &[usize], sharding: &Sharding) -> Vec<Range<u64>> {
        let range = |(dim, &n)| sharding.local_range(self.mesh, &self.coordinates, dim, n as u64);
        shape.iter().enumerate().map(range).collect()
    }

    fn block(&self, value: &Value<f64>, sharding: &Sharding) -> Value<f64> {
        let ranges = self.ranges(value.shape(), sharding).into_iter().enumerate();
        ranges.fold(value.clone(), |value, (dim, range)| rows(&value, dim, range))
    }
}

/// A tensor in the making from what ranks hold.
struct Pieces {
    sharding: Sharding,
    whole: Tensor<f64>,
}

impl Pieces {
    fn new(shape: &[usize], sharding: Sharding) -> Self {
        let max = (0..MAX_AXES).any(|axis| sharding.on(AxisId(axis)) == Placement::PartialMax);
        Self { sharding, whole: Tensor::from_elem(shape, if max { f64::NEG_INFINITY } else { 0.0 }) }
    }

    fn put(&mut self, place: &Place<'_>, local: &Tensor<f64>) {
        let ranges = place.ranges(self.whole.shape(), &self.sharding);
        let max = (0..MAX_AXES).any(|axis| self.sharding.on(AxisId(axis)) == Placement::PartialMax);
        let mut to = self.whole.view_mut();
        for (dim, range) in ranges.into_iter().enumerate() {
            to.slice_axis_inplace(Axis(dim), Slice::from(range.start as isize..range.end as isize));
        }
        assert_eq!(to.shape(), local.shape());
        to.zip_mut_with(local, |to, &local| *to = if max { to.max(local) } else { *to + local });
    }
}
