//! What storages of a parameter ask for.

use cost_model::Constants;
use ir::mesh::{AxisId, Mesh};
use ir::program::{AxisSet, StateHome, Storage};
use ir::sharding::{Placement, Sharding};
use ir::work::Pass;

use crate::prices::{Parcel, Prices};
use crate::test_models::{a100s, machine};

/// Two nodes of eight, gradients that are unfinished on both axes: what is scattered within the node every micro-batch
/// is summed across nodes once per step, and an eighth of it.
#[test]
fn a_gradient_that_is_cut_in_the_node_crosses_the_network_once_per_step() {
    let (cluster, constants) = (a100s(2), Constants::load());
    let mesh = Mesh::of_sizes(&[2, 8]).unwrap();
    let prices = Prices::new(machine(&cluster, &constants), &mesh, &[]);
    let unfinished = (0..2).fold(Sharding::REPLICATED, |s, axis| s.with(AxisId(axis), Placement::PartialSum));
    let parcel = Parcel { elements: 1 << 28, sent: 1 << 28 };
    let used = (Sharding::REPLICATED, Pass::Backward);
    let all = prices.storages((parcel, StateHome::Device), used, unfinished);
    let node = AxisSet::of(&[AxisId(1)]);
    let with = |gradient: AxisSet| {
        let is_it = |storage: &Storage| {
            storage.parameter.is_empty() && storage.gradient == gradient && storage.optimizer == node
        };
        all.iter().find(|(storage, _)| is_it(storage)).unwrap().1.spans
    };
    let (whole, cut) = (with(AxisSet::EMPTY), with(node));
    // Scattered in the node in both, and then summed over the two nodes.
    assert_eq!(whole.every, 0.0);
    assert!(cut.every > 0.0 && cut.reduce > cut.every, "{cut:?}");
    assert!(((cut.every + cut.reduce) / whole.reduce - 1.0).abs() < 1e-9, "{cut:?} {whole:?}");
}

/// What backward does not read is gathered once: the table of an embedding.
#[test]
fn a_parameter_that_backward_does_not_read_is_gathered_for_forward_alone() {
    let (cluster, constants) = (a100s(1), Constants::load());
    let mesh = Mesh::of_sizes(&[8]).unwrap();
    let prices = Prices::new(machine(&cluster, &constants), &mesh, &[]);
    let unfinished = Sharding::REPLICATED.with(AxisId(0), Placement::PartialSum);
    let parcel = Parcel { elements: 1 << 28, sent: 1 << 28 };
    let cut = |until: Pass| {
        let all = prices.storages((parcel, StateHome::Device), (Sharding::REPLICATED, until), unfinished);
        all.into_iter().find(|(storage, _)| !storage.parameter.is_empty()).unwrap().1.spans
    };
    let (once, again) = (cut(Pass::Forward), cut(Pass::Backward));
    assert!(once.gather > 0.0 && once.gather == again.gather);
    assert!((again.every - once.every - once.gather).abs() < 1e-12, "{once:?} {again:?}");
}
