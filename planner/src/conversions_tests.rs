//! Conversions by routes and lengths against the sum of their steps.

use cost_model::Constants;
use ir::conversion::steps;
use ir::mesh::{AxisId, Mesh};
use ir::sharding::{Placement, Sharding};

use crate::prices::Prices;
use crate::test_models::{a100s, machine};

fn shardings(placements: &[Placement]) -> Vec<Sharding> {
    let with = |base: Sharding, axis: usize, placement: &Placement| base.with(AxisId(axis), *placement);
    let mut list = vec![Sharding::REPLICATED];
    for axis in 0..3 {
        list = list.iter().flat_map(|&base| placements.iter().map(move |p| with(base, axis, p))).collect();
    }
    list
}

#[test]
fn a_conversion_takes_what_its_steps_take() {
    let (cluster, constants) = (a100s(2), Constants::load());
    let mesh = Mesh::of_sizes(&[2, 2, 4]).unwrap();
    let prices = Prices::new(machine(&cluster, &constants), &mesh, &[]);
    let shards = [Placement::Shard(0), Placement::Shard(1), Placement::Replicate];
    let (to, from) = (shardings(&shards), shardings(&[shards.as_slice(), &[Placement::PartialSum]].concat()));
    let element_bytes = prices.machine().kernels.element_bytes;
    // Twice, and a shape that does not divide evenly: what was asked before is looked up.
    for (shape, filled) in [([16, 4096, 1024], 1.0), ([6, 48, 512], 0.5), ([16, 4096, 1024], 1.0)] {
        let found = prices.conversions((&shape, filled, None), &from, &to);
        assert_eq!(found.between.places.len(), from.len() * to.len());
        for (i, &before) in from.iter().enumerate() {
            for (j, &after) in to.iter().enumerate() {
                let sum = steps(before, after).map(|steps| -> f64 {
                    steps.iter().map(|step| prices.step(step, &shape, element_bytes * filled)).sum()
                });
                let one = found.which(i, j).map(|at| found.distinct()[at]);
                let total = one.map(|one| one.gather + one.scatter + one.reduce + one.exchange + one.other);
                let is_same = match (sum, total) {
                    (Some(sum), Some(total)) => (sum - total).abs() <= 1e-12 * sum,
                    (sum, total) => sum.is_none() && total.is_none(),
                };
                assert!(is_same, "{sum:?} {total:?} {before:?} {after:?}");
            }
        }
    }
}
