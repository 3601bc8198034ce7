//! The cheapest choices of a layer against all its combinations, where passes send for longer than they compute.

use cost_model::Constants;
use ir::mesh::Mesh;

use crate::chooser::{Cheapest, Chooser, Question, Troubles};
use crate::clock::{Clock, Covers};
use crate::given::{Given, RecomputeRule};
use crate::layer_problem::LayerProblem;
use crate::prices::Prices;
use crate::request::Solver;
use crate::test_models::{Width, a100s, machine, one_product};

const WIDTH: Width = Width { hidden: 4096, kv_heads: 1, group: 1, head: 1, ffn: 4096 };

/// Prices of memory, in multiples of time over memory of the fastest choices.
const PRICES: [f64; 5] = [0.0, 0.1, 0.5, 2.0, 100.0];

/// What a solution costs, every pass taking the longer of what it computes and what it sends.
fn cost(problem: &LayerProblem<'_>, choices: &[usize], price: f64) -> Option<f64> {
    let [forward, backward] = problem.excess(choices);
    Some(problem.problem.total(choices)?.weighed(price) + forward.max(0.0) + backward.max(0.0))
}

fn least(problem: &LayerProblem<'_>, price: f64) -> f64 {
    let nodes = &problem.problem.nodes;
    let mut choices = vec![0; nodes.len()];
    let mut least = f64::INFINITY;
    loop {
        least = cost(problem, &choices, price).map_or(least, |own| own.min(least));
        let Some(at) = (0..choices.len()).rev().find(|&at| choices[at] + 1 < nodes[at].choices.len()) else {
            return least;
        };
        choices[at] += 1;
        choices[at + 1..].fill(0);
    }
}

/// Asks about the layer on two devices with so many tokens, and hands on each price's least cost and what was found.
fn ask(tokens: u64, solver: Solver, check: impl Fn(f64, &LayerProblem<'_>, &Chooser<'_>)) {
    let (cluster, constants, troubles) = (a100s(1), Constants::load(), Troubles::default());
    let mesh = Mesh::of_sizes(&[2]).unwrap();
    let prices = Prices::new(machine(&cluster, &constants), &mesh, &[]);
    let layer = one_product(WIDTH);
    let clock = Clock::beside((8.0, 1.0), 16.0, Covers::default(), &constants);
    let given = Given { recompute: RecomputeRule::Never, ..Given::default() };
    let problem = LayerProblem::new(&layer, &layer.sizes(2, tokens), &prices, clock, &given).unwrap();
    assert!(problem.problem.n_combinations() < 3e6, "{}", problem.problem.n_combinations());
    let chooser = Chooser::new(solver, &problem, &troubles);
    let cost = problem.problem.total(&chooser.cheapest(0.0).unwrap().choices).unwrap();
    PRICES.iter().for_each(|multiple| check(multiple * cost.time / cost.memory, &problem, &chooser));
    assert_eq!(troubles.first(), None);
}

/// With few tokens parameters take longer to gather than to multiply with.
#[test]
fn no_combination_is_cheaper_than_the_bound_and_what_is_found_is_near_the_best() {
    let leans = std::cell::Cell::new(0);
    for tokens in [64, 512, 4096] {
        ask(tokens, Solver::Structured, |price, problem, chooser| {
            let best = least(problem, price);
            let Cheapest { value, choices, bound, at_bound, .. } = chooser.cheapest(price).unwrap();
            assert!((cost(problem, &choices, price).unwrap() / value - 1.0).abs() < 1e-9);
            assert!(bound <= best * (1.0 + 1e-9) && value >= best * (1.0 - 1e-9), "{bound} {best} {value}");
            assert!(value <= best * 1.03 && bound >= best * 0.9, "{tokens} {price}: {bound} {best} {value}");
            let swift = chooser.bound_apart(Question::at(price)).unwrap().bound;
            assert!(swift <= best * (1.0 + 1e-9) && swift >= best * 0.9, "{tokens} {price}: {swift} {best}");
            let plain = problem.problem.total(&at_bound).unwrap().weighed(price);
            leans.set(leans.get() + usize::from(bound > plain * (1.0 + 1e-9)));
            let (_, own) = chooser.cheapest_by_own((price, price, f64::INFINITY)).unwrap();
            assert!(cost(problem, &own, price).unwrap() >= best * (1.0 - 1e-9));
        });
    }
    assert!(leans.get() > 0, "no pass sent for longer than it computed");
}

#[test]
fn the_integer_program_finds_the_same() {
    ask(64, Solver::Structured, |price, problem, chooser| {
        let troubles = Troubles::default();
        let program = Chooser::new(Solver::Microlp, problem, &troubles);
        let (one, other) = (chooser.cheapest(price).unwrap(), program.cheapest(price).unwrap());
        assert!((one.bound / other.bound - 1.0).abs() < 1e-6, "{} {}", one.bound, other.bound);
        let own = [chooser, &program]
            .map(|chooser| chooser.cheapest_by_own((price, price, f64::INFINITY)).unwrap().0);
        assert!((own[0] / own[1] - 1.0).abs() < 1e-6, "{own:?}");
    });
}
