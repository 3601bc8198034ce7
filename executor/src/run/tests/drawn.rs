//! Plans drawn at random: whatever the rule allows must run and be right.
//!
//! Every operator draws from all its strategies, every operator whether it is computed again, every parameter where its
//! three states are cut, and the stream its sharding; the schedule is drawn as well.

use ir::graph::Layer;
use ir::mesh::MAX_AXES;
use ir::program::StateHome;
use ir::strategy::{Strategy as OpStrategy, strategies};
use proptest::prelude::*;

use super::*;
use model::{ATTENTIONS, MICRO_BATCH, SEQUENCE, attending, crossing, embedding_with_positions};

/// Plans per body: enough to see each strategy of each operator beside most others of its neighbours.
const CASES: u32 = 28;

/// A source of decisions that proptest can shrink; it never runs out.
struct Dice<'a> {
    faces: &'a [u16],
    next: usize,
}

impl Dice<'_> {
    fn below(&mut self, n: usize) -> usize {
        self.next += 1;
        usize::from(self.faces[self.next % self.faces.len()]) % n
    }

    fn subset(&mut self, of: AxisSet) -> AxisSet {
        AxisSet::of(&of.axes().into_iter().filter(|_| self.below(2) == 1).collect::<Vec<_>>())
    }

    fn sharding(&mut self, mesh: &Mesh) -> Sharding {
        let all = [
            Placement::Replicate,
            Placement::Shard(0),
            Placement::Shard(1),
            Placement::Shard(2),
            Placement::PartialSum,
        ];
        let long = mesh.axis_ids().filter(|&axis| mesh.size(axis) > 1);
        long.fold(Sharding::REPLICATED, |s, axis| s.with(axis, all[self.below(all.len())]))
    }

    fn choice(&mut self, layer: &Layer, mesh: &Mesh, stream: Sharding) -> LayerChoice {
        let sizes = layer.sizes(MICRO_BATCH, SEQUENCE);
        let mut choice = plain(layer);
        choice.stream = if layer.stream_in.is_empty() { Sharding::REPLICATED } else { stream };
        choice.out = if layer.has_loss() { Sharding::REPLICATED } else { stream };
        for (i, op) in layer.ops.iter().enumerate() {
            let sig = signature(layer, op);
            let all: Vec<OpStrategy> = strategies(layer, op, &sig, mesh, &sizes)
                .into_iter()
                .filter(|strategy| !reads_a_maximum(layer, op) || !strategy.0.contains(&AxisUse::Through))
                .collect();
            choice.strategies[i] = all[self.below(all.len())];
            choice.recompute[i] = [Recompute::Keep, Recompute::Again][self.below(2)];
            for (tensor, used) in op.operands.iter().zip(placements(&sig, choice.strategies[i]).operands) {
                if let Some(storage) = choice.storage.get_mut(tensor) {
                    let optimizer = self.subset(whole_axes(mesh, used));
                    let (gradient, parameter) = (self.subset(optimizer), self.subset(optimizer));
                    let home = [StateHome::Device, StateHome::Host, StateHome::Nvme][self.below(3)];
                    *storage = Storage { parameter, gradient, optimizer, home };
                }
            }
        }
        choice
    }
}

/// An unfinished maximum has no conversion to an unfinished sum, which is all that passes through an operator.
fn reads_a_maximum(layer: &Layer, op: &ir::graph::Op) -> bool {
    let producer = layer.producer(op.operands[0]);
    producer.is_some_and(|producer| layer.ops[producer.0].kind == ir::op::OpKind::RowMax)
}

#[derive(Clone, Debug)]
struct Drawn {
    sizes: Vec<u64>,
    pipeline: (Schedule, u32, u32),
    faces: Vec<u16>,
}

fn drawn() -> impl Strategy<Value = Drawn> {
    let sizes = prop_oneof![
        prop::collection::vec(2_u64..5, 1..2),
        Just(vec![2, 2]),
        Just(vec![2, 3]),
        Just(vec![3, 2]),
        Just(vec![4, 2]),
        Just(vec![2, 2, 2]),
    ];
    let interleaved = Schedule::Interleaved { virtual_stages: 2 };
    let pipeline = prop_oneof![
        3 => Just((Schedule::GPipe, 1, 2)),
        1 => Just((Schedule::OneFOneB, 2, 3)),
        1 => Just((interleaved, 2, 2)),
    ];
    let faces = prop::collection::vec(any::<u16>(), 311);
    (sizes, pipeline, faces).prop_map(|(sizes, pipeline, faces)| Drawn { sizes, pipeline, faces })
}

fn run_drawn(model: &Model, drawn: &Drawn) {
    assert!(drawn.sizes.len() <= MAX_AXES);
    let mesh = Mesh::of_sizes(&drawn.sizes).unwrap();
    let mut dice = Dice { faces: &drawn.faces, next: 0 };
    let stream = dice.sharding(&mesh);
    let choices = model.layers.iter().map(|layer| dice.choice(layer, &mesh, stream)).collect();
    check(&execution(model, &mesh, choices, drawn.pipeline));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(CASES) })]

    #[test]
    fn every_drawn_plan_of_a_feed_forward_is_right(drawn in drawn()) {
        run_drawn(&model(mlp(), 2), &drawn);
    }

    #[test]
    fn every_drawn_plan_of_a_decoder_is_right(drawn in drawn()) {
        let mut model = model(decoder(), 2);
        model.layers[0] = embedding_with_positions();
        run_drawn(&model, &drawn);
    }

    #[test]
    fn every_drawn_plan_of_attention_is_right(drawn in drawn(), kind in prop::sample::select(&ATTENTIONS[..])) {
        run_drawn(&model(attending(kind), 2), &drawn);
    }

    #[test]
    fn every_drawn_plan_of_keys_of_another_length_is_right(drawn in drawn()) {
        run_drawn(&model(crossing(), 2), &drawn);
    }

    #[test]
    fn every_drawn_plan_of_a_tower_and_a_decoder_is_right(drawn in drawn()) {
        run_drawn(&model::tower_and_decoder(), &drawn);
    }

    #[test]
    fn every_drawn_plan_of_experts_is_right(
        drawn in drawn(),
        bias in prop_oneof![Just(AttentionBias::None), Just(AttentionBias::Slopes), Just(AttentionBias::Sinks)],
    ) {
        run_drawn(&model(experts(bias), 2), &drawn);
    }

    #[test]
    fn every_drawn_plan_of_experts_with_a_capacity_is_right(drawn in drawn()) {
        run_drawn(&model(model::limited_experts(), 2), &drawn);
    }
}
