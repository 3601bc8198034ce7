//! The shardings in which the stream may pass from layer to layer.

use ir::graph::{Layer, Sizes};
use ir::sharding::{Placement, Sharding};

use crate::prices::Prices;
use crate::space::{AxisRule, AxisView, Between, Reach};

/// Whole, by sequences, by tokens, per axis.
pub(crate) fn shardings(layer: &Layer, sizes: &Sizes, prices: &Prices<'_>) -> Vec<Sharding> {
    let passed = if layer.stream_in.is_empty() { &layer.out } else { &layer.stream_in };
    let own = passed.iter().map(|&tensor| layer.shape(tensor, sizes));
    let shapes: Vec<Vec<u64>> = own.chain(prices.passed().iter().cloned()).collect();
    let mesh = prices.mesh();
    let mut list = vec![Sharding::REPLICATED];
    for axis in mesh.axis_ids().filter(|&axis| mesh.size(axis) > 1) {
        let (sequences, tokens, whole) = (Placement::Shard(0), Placement::Shard(1), Placement::Replicate);
        let options = match prices.views()[axis.0] {
            AxisView { rule: AxisRule::Free, reach: Reach::Node, .. } => vec![sequences, tokens, whole],
            AxisView { rule: AxisRule::Free, reach: Reach::Network, .. }
            | AxisView { rule: AxisRule::Around, .. } => {
                vec![sequences, tokens]
            }
            AxisView {
                rule: AxisRule::Sequences | AxisRule::Replicas | AxisRule::Shares | AxisRule::Experts,
                ..
            } => vec![sequences],
            AxisView { rule: AxisRule::Tokens | AxisRule::TokensAndExperts, .. } => vec![tokens],
            AxisView { rule: AxisRule::Inside(b) | AxisRule::InsideAndExperts(b), .. } => match b {
                Between::Tokens => vec![tokens],
                Between::Same => vec![whole],
                Between::Free => vec![tokens, whole],
            },
        };
        let barred = prices.views()[axis.0].barred;
        let options: Vec<Placement> =
            options.into_iter().filter(|&one| !(barred.sequences && one == sequences)).collect();
        let options = if options.is_empty() { vec![whole] } else { options };
        list = list.iter().flat_map(|base| options.iter().map(|&p| base.with(axis, p))).collect();
    }
    let divides = |s: &Sharding| {
        (0..2).all(|dim| {
            let parts: u64 = s.axes_of(dim).map(|axis| mesh.size(axis)).product();
            shapes.iter().all(|shape| shape.get(dim).is_none_or(|n| n.is_multiple_of(parts)))
        })
    };
    list.retain(divides);
    if list.is_empty() { vec![Sharding::REPLICATED] } else { list }
}
