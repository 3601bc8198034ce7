//! The three solvers of a choice problem against each other on random small graphs.

use proptest::prelude::*;

use crate::problem::{Cost, Edge, Node, Problem, Solution, brute};
use crate::solve::Prepared;
use crate::{ilp, solve};

/// The integer program's answer; that it gives up is a failure of the test, not an answer.
fn program(problem: &Problem, capacity: f64) -> Result<Option<Solution>, TestCaseError> {
    ilp::solve(problem, capacity).map_err(|error| TestCaseError::fail(error.to_string()))
}

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
        let program = program(&problem, capacity)?;
        prop_assert_eq!(expected.map(|s| s.cost.time), program.map(|s| s.cost.time));
    }

    #[test]
    fn parts_give_what_the_whole_gives(problem in problem(), capacity in 0_u32..120) {
        let capacity = f64::from(capacity);
        let expected = brute(&problem, capacity);
        // So few labels that nothing but splitting leads to the end.
        let found = Prepared::new(&problem).fastest_of_parts(capacity, (2, usize::MAX));
        prop_assert_eq!(expected.map(|s| s.cost.time), found.as_ref().map(|c| c.solution.cost.time));
        if let Some(found) = found {
            prop_assert_eq!(found.bound, found.solution.cost.time);
        }
    }

    #[test]
    fn a_search_that_is_cut_short_has_a_plan_and_a_bound(
        problem in problem(), capacity in 0_u32..120, labels in 0_usize..30
    ) {
        let capacity = f64::from(capacity);
        let expected = brute(&problem, capacity);
        let found = Prepared::new(&problem).fastest_of_parts(capacity, (2, labels));
        prop_assert_eq!(expected.is_some(), found.is_some());
        if let (Some(expected), Some(found)) = (expected, found) {
            prop_assert!(found.solution.cost.memory <= capacity);
            prop_assert!(found.bound <= expected.cost.time + 1e-9);
            prop_assert!(expected.cost.time <= found.solution.cost.time);
        }
    }

    #[test]
    fn what_is_eliminated_in_parts_is_as_cheap(problem in problem(), price in 0_u32..5, work in 0_u32..20) {
        let price = f64::from(price);
        let prepared = Prepared::new(&problem);
        let [whole, parts] = [f64::INFINITY, f64::from(work)].map(|work| prepared.eliminate_in_parts(price, work));
        prop_assert_eq!(whole.as_ref().map(|one| one.0), parts.as_ref().map(|one| one.0));
        if let Some((value, choices)) = parts {
            prop_assert_eq!(problem.total(&choices).map(|cost| cost.time + price * cost.memory), Some(value));
        }
    }

    #[test]
    fn a_price_of_edges_by_itself_is_the_time_of_edges(problem in problem(), price in 0_u32..5, kept in 0_u32..5) {
        let (price, kept) = (f64::from(price), f64::from(kept));
        let apart = solve::Prepared::new(&problem).eliminate_apart(price, kept);
        let paid = solve::eliminate(&problem.with_edges_at(kept), price);
        prop_assert_eq!(apart.map(|(value, _)| value), paid.map(|(value, _)| value));
    }

    #[test]
    fn a_bound_by_one_sweep_is_no_higher_than_the_least(
        problem in problem(), price in 0_u32..5, kept in 0_u32..5, more in prop::collection::vec(0_u32..9, 20)
    ) {
        let (price, kept) = (f64::from(price), f64::from(kept));
        let own = |node: usize| (0..4).map(|choice| f64::from(more[4 * node + choice])).collect();
        let more: Vec<Vec<f64>> = (0..problem.nodes.len()).map(own).collect();
        let prepared = Prepared::new(&problem);
        let own = |node: usize, choice: usize| more[node][choice];
        let least = prepared.eliminate_below((price, kept), f64::INFINITY, own);
        let bound = prepared.bound_below((price, kept), f64::INFINITY, own);
        prop_assert_eq!(least.is_some(), bound.is_some());
        if let (Some((least, _)), Some((bound, choices))) = (least, bound) {
            prop_assert!(bound <= least + 1e-9, "{bound} of {least}");
            prop_assert!(problem.total(&choices).is_some());
        }
        let plain = prepared.bound_below((price, kept), f64::INFINITY, |_, _| 0.0).map(|(bound, _)| bound);
        let least = prepared.eliminate_apart(price, kept).map(|(least, _)| least + 1e-9);
        prop_assert!(plain <= least, "{plain:?} of {least:?}");
    }

    #[test]
    fn a_limit_hides_nothing_but_what_is_above_it(
        problem in problem(), (price, kept) in (0_u32..5, 0_u32..5), limit in 0_u32..60
    ) {
        let (prices, limit) = ((f64::from(price), f64::from(kept)), f64::from(limit));
        let prepared = Prepared::new(&problem);
        let none = |_: usize, _: usize| 0.0;
        let least = prepared.eliminate_below(prices, f64::INFINITY, none).map(|(least, _)| least);
        let below = prepared.eliminate_below(prices, limit, none).map(|(found, _)| found);
        let bound = prepared.bound_below(prices, limit, none).map(|(bound, _)| bound);
        match least {
            Some(least) if least <= limit => {
                prop_assert_eq!(below, Some(least));
                prop_assert!(bound.is_some_and(|bound| bound <= least + 1e-9), "{:?} of {}", bound, least);
            }
            least => prop_assert!(below.is_none() || below == least, "{:?} of {:?}", below, least),
        }
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

/// A node whose value 24 others read, each through one of 256 ports: 2^192 combinations of ports.
#[test]
fn a_node_with_very_many_edges_keeps_its_choices_apart() {
    let second = Cost { time: 1.0, memory: 0.0 };
    let free = Cost::default();
    let mut nodes = vec![Node { choices: vec![free, free] }];
    let mut edges = Vec::new();
    for to in 1..=24 {
        nodes.push(Node { choices: vec![free] });
        // The two choices differ only on the first edge, where the first of them costs a second.
        let from_port = if to == 1 { vec![0, 255] } else { vec![255, 255] };
        let table = (0..256).map(|port| Some(if port == 0 { second } else { free })).collect();
        edges.push(Edge { from: 0, to, from_port, to_port: vec![0], n_to_ports: 1, table });
    }
    let problem = Problem { nodes, edges };
    let (time, choices) = solve::eliminate(&problem, 0.0).unwrap();
    assert_eq!((time, choices[0]), (0.0, 1));
}

/// Giving up is no proof that nothing fits, and that nothing fits is no failure.
#[test]
fn the_program_says_of_a_problem_without_a_plan_that_there_is_none() {
    let gigabyte = Cost { time: 1.0, memory: 1e9 };
    let problem = Problem { nodes: vec![Node { choices: vec![gigabyte] }; 2], edges: Vec::new() };
    assert_eq!(ilp::solve(&problem, 1.9e9), Ok(None));
    assert_eq!(ilp::solve(&problem, 2e9).unwrap().unwrap().cost, Cost { time: 2.0, memory: 2e9 });
}
