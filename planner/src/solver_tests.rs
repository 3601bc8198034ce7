//! The three solvers of a choice problem against each other on random small graphs.

use proptest::prelude::*;

use crate::problem::{Cost, Edge, Node, Problem, brute};
use crate::{ilp, solve};

fn cost() -> impl Strategy<Value = Cost> {
    (0_u32..100, 0_u32..20)
        .prop_map(|(time, memory)| Cost { time: f64::from(time), memory: f64::from(memory) })
}

fn node() -> impl Strategy<Value = Node> {
    prop::collection::vec(cost(), 1..=4).prop_map(|choices| Node { choices })
}

prop_compose! {
    /// Any graph: several edges between two nodes, triangles and separate parts included.
    fn problem()(nodes in prop::collection::vec(node(), 1..=5))
        (pairs in prop::collection::vec((0..nodes.len(), 0..nodes.len()), 0..=7),
         ports in prop::collection::vec(0_u32..3, 64),
         prices in prop::collection::vec(prop::option::weighted(0.85, cost()), 64),
         nodes in Just(nodes)) -> Problem {
        let edges = pairs.iter().enumerate().filter(|(_, (from, to))| from != to).map(|(e, &(from, to))| {
            let port = |node: usize, shift: usize| -> Vec<u32> {
                (0..nodes[node].choices.len()).map(|c| ports[(e * 9 + c + shift) % 64]).collect()
            };
            let table = (0..9).map(|i| prices[(e * 9 + i) % 64]).collect();
            Edge { from, to, from_port: port(from, 0), to_port: port(to, 5), n_to_ports: 3, table }
        }).collect();
        Problem { nodes, edges }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn the_structured_solver_the_program_and_brute_force_agree(problem in problem(), capacity in 0_u32..120) {
        let capacity = f64::from(capacity);
        let expected = brute(&problem, capacity);
        let found = solve::solve(&problem, capacity);
        prop_assert_eq!(expected.as_ref().map(|s| s.cost.time), found.as_ref().map(|c| c.solution.cost.time));
        if let Some(found) = found {
            prop_assert!(found.solution.cost.memory <= capacity);
            prop_assert_eq!(problem.total(&found.solution.choices), Some(found.solution.cost));
            prop_assert_eq!(found.bound, found.solution.cost.time);
        }
        let program = ilp::solve(&problem, capacity);
        prop_assert_eq!(expected.map(|s| s.cost.time), program.map(|s| s.cost.time));
    }

    #[test]
    fn elimination_is_exact_at_any_price_of_memory(problem in problem(), price in 0_u32..5) {
        let price = f64::from(price);
        let mut choices = vec![0; problem.nodes.len()];
        let mut best = f64::INFINITY;
        loop {
            if let Some(cost) = problem.total(&choices) {
                best = best.min(cost.weighed(price));
            }
            let Some(at) = (0..choices.len()).rev().find(|&i| choices[i] + 1 < problem.nodes[i].choices.len()) else { break };
            choices[at] += 1;
            choices[at + 1..].fill(0);
        }
        match solve::eliminate(&problem, price) {
            None => prop_assert!(best.is_infinite()),
            Some((value, choices)) => {
                prop_assert_eq!(value, best);
                prop_assert_eq!(problem.total(&choices).map(|c| c.weighed(price)), Some(best));
            }
        }
    }
}
