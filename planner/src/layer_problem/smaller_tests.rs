//! Tables of a micro-batch that stand for those that divide it, held to tables of their own.

use cost_model::Constants;
use ir::mesh::Mesh;

use super::{LayerProblem, Pick, Shift};
use crate::chooser::{Chooser, Question, Troubles};
use crate::clock::{Clock, Covers};
use crate::given::Given;
use crate::prices::Prices;
use crate::request::Solver;
use crate::test_models::{Width, a100s, machine, one_product};

const WIDTH: Width = Width { hidden: 1024, kv_heads: 8, group: 1, head: 128, ffn: 4096 };

/// Sequences of a step.
const BATCH: u64 = 48;

/// Of a problem for micro-batches of 24 sequences on four devices, what `check` says with a shift to another
/// micro-batch, beside the problem of that one.
fn shifted<T>(micro_batch: u64, check: impl Fn((&LayerProblem<'_>, &Shift), &LayerProblem<'_>) -> T) -> T {
    let (cluster, constants) = (a100s(1), Constants::load());
    let mesh = Mesh::of_sizes(&[2, 2]).unwrap();
    let prices = Prices::new(machine(&cluster, &constants), &mesh, &[]);
    let layer = one_product(WIDTH);
    let given = Given::default();
    let sizes = |micro_batch: u64| layer.sizes(micro_batch, 1024);
    let clock = |micro_batch: u64| {
        Clock::beside(((BATCH / micro_batch) as f64, 1.0), 16.0, Covers::default(), &constants)
    };
    let problem = LayerProblem::new(&layer, &sizes(24), &prices, clock(24), &given).unwrap();
    let own = LayerProblem::new(&layer, &sizes(micro_batch), &prices, clock(micro_batch), &given).unwrap();
    let shift = problem.shift(&sizes(micro_batch), &prices, clock(micro_batch), &given);
    check((&problem, &shift), &own)
}

#[test]
fn the_same_micro_batch_costs_nothing_more() {
    shifted(24, |(problem, shift), _| {
        for ((more, excess), op) in shift.more.iter().zip(&shift.excess).zip(&problem.ops) {
            let own = |pick: &Pick| problem.clock.excess(op.spans(*pick));
            assert!(more.iter().all(|more| *more == 0.0));
            assert!(op.picks.iter().map(own).eq(excess.iter().copied()));
        }
    });
}

#[test]
fn operators_cost_what_they_cost_in_tables_of_their_own() {
    for micro_batch in [1, 2, 6, 12] {
        let n_closed = shifted(micro_batch, |(problem, shift), own| {
            let mut n_closed = 0;
            for (at, (op, alone)) in problem.ops.iter().zip(&own.ops).enumerate() {
                let node = |problem: &LayerProblem<'_>, choice: usize| {
                    problem.problem.nodes[at].choices[choice].time
                };
                for (choice, &pick) in op.picks.iter().enumerate() {
                    let form = op.form(pick);
                    let same = |other: &Pick| {
                        let known = alone.form(*other);
                        known.strategy == form.strategy
                            && known.recompute == form.recompute
                            && alone.stored(*other).storage == op.stored(pick).storage
                    };
                    let more = shift.more[at][choice];
                    match alone.picks.iter().position(same) {
                        Some(other) => {
                            let (time, whole) = (node(problem, choice) + more, node(own, other));
                            assert!((time / whole - 1.0).abs() < 1e-9, "{time} {whole}");
                        }
                        None => {
                            assert!(more == f64::INFINITY || more == 0.0, "{more}");
                            n_closed += usize::from(more == f64::INFINITY);
                        }
                    }
                }
            }
            n_closed
        });
        // Four devices do not share them equally.
        assert_eq!(n_closed > 0, !micro_batch.is_multiple_of(4), "{micro_batch}");
    }
}

#[test]
fn no_choices_cost_less_in_tables_of_their_own() {
    let mut n_higher = 0;
    for micro_batch in [1, 2, 6, 12, 24] {
        n_higher += shifted(micro_batch, |(problem, shift), own| {
            let troubles = Troubles::default();
            let [chooser, alone] =
                [problem, own].map(|problem| Chooser::new(Solver::Structured, problem, &troubles));
            let total = own.problem.total(&alone.cheapest(0.0).unwrap().choices).unwrap();
            let higher = |multiple: f64| {
                let price = multiple * total.time / total.memory;
                // What a micro-batch keeps has no price here: as large tables keep more.
                let question = Question { shift: Some(shift), ..Question::apart(price, 0.0) };
                let bound = chooser.bound_apart(question).unwrap().bound;
                let least = alone.cheapest_apart(Question::apart(price, 0.0)).unwrap().value;
                assert!(bound <= least * (1.0 + 1e-9), "{micro_batch} {multiple}: {bound} {least}");
                let plain = chooser.bound_apart(Question::apart(price, 0.0)).unwrap().bound;
                usize::from(bound > plain * 1.01)
            };
            [0.0, 0.1, 1.0, 10.0].map(higher).into_iter().sum::<usize>()
        });
    }
    assert!(n_higher > 0, "tables of their own say no more");
}
