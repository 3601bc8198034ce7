//! Who answers the choice problem of a layer at a price of memory: the structured solver, or the integer program.
//!
//! Both are exact, so plans differ by ties at most. The program is slower by orders of magnitude; it is there so that
//! whoever doubts the structured solver can plan without it.

use std::cell::{OnceCell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};

use ir::mesh::Mesh;

use crate::ilp;
use crate::layer_problem::{LayerProblem, OnHost, Shift};
use crate::memos::lock;
use crate::problem::Problem;
use crate::request::Solver;
use crate::solve::Prepared;

/// Variables of an integer program that are accepted: up to here microlp takes seconds for a layer, beyond it may take
/// hours.
pub const MAX_VARIABLES: usize = 20_000;

/// What kept a solver from an answer; empty where all went well. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Troubles(Arc<Mutex<BTreeSet<String>>>);

impl Troubles {
    fn note(&self, what: String) {
        lock(&self.0).insert(what);
    }

    /// The first in the order of their text, so that threads do not change it.
    pub fn first(&self) -> Option<String> {
        lock(&self.0).first().cloned()
    }
}

/// The choices of a layer at a price of memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Cheapest {
    /// Seconds with what their bytes cost, every pass taking the longer of what it computes and what it sends.
    pub value: f64,
    /// The best choices that were found.
    pub choices: Vec<usize>,
    /// No choices cost less than this.
    pub bound: f64,
    /// The choices that cost least by the sum that says so.
    pub at_bound: Vec<usize>,
    /// That sum: the problem's with so large parts of the excess of forward and of backward.
    pub parts: [f64; 2],
}

/// What a layer is asked.
#[derive(Clone, Copy, Debug)]
pub struct Question<'q> {
    /// Seconds for a byte.
    pub price: f64,
    /// Seconds for a byte that is kept for backward.
    pub kept: f64,
    /// Seconds for bytes that hosts have or could have.
    pub(crate) on_host: OnHost,
    /// This part of what operators need beside what is kept while they run: a smaller micro-batch needs less.
    pub(crate) part: f64,
    /// What choices cost more than the problem says.
    pub(crate) shift: Option<&'q Shift>,
    /// Seconds from which on an answer is of no interest.
    pub(crate) limit: f64,
}

impl Question<'_> {
    /// With one price for all bytes.
    pub fn at(price: f64) -> Self {
        Self::apart(price, price)
    }

    /// With a price of its own for what is kept for backward.
    pub fn apart(price: f64, kept: f64) -> Self {
        Self { price, kept, on_host: OnHost::default(), part: 1.0, shift: None, limit: f64::INFINITY }
    }
}

/// Means of the two sums that are tried beyond the sums themselves, at most.
const MEANS: usize = 2;

/// Answers that are kept.
const MOST_ANSWERS: usize = 8;

/// One layer's choice problem in the hands of a solver.
///
/// A pass that computes for `w` and sends for `c` beside it takes `max(w + slow c, c + slow w)`
/// (`cost_model::overlap::side_by_side`). Either is a sum over choices, the problem's or that with the *excess* of the
/// second over the first; the longer is not. Where the cheapest by the first send for longer, those by the second are
/// asked for, and where these do not, those by a mean of the two, where their lines cross: no mean is above the longer.
pub struct Chooser<'a> {
    problem: &'a LayerProblem<'a>,
    by: By<'a>,
    /// What choices add by what hides behind their own operator, the same at every price.
    own_excess: OnceCell<Vec<Vec<f64>>>,
    /// The last answers: what they cost at other prices is a limit there.
    answers: RefCell<VecDeque<Vec<usize>>>,
}

/// A solver.
enum By<'a> {
    /// The structured one.
    Structured(Prepared<'a>),
    /// The integer program.
    Program(&'a Troubles),
}

impl<'a> Chooser<'a> {
    /// Hands a problem over.
    pub fn new(solver: Solver, problem: &'a LayerProblem<'a>, troubles: &'a Troubles) -> Self {
        let by = match solver {
            Solver::Structured => By::Structured(Prepared::new(&problem.problem)),
            Solver::Microlp => By::Program(troubles),
        };
        Self { problem, by, own_excess: OnceCell::new(), answers: RefCell::default() }
    }

    /// The problem, and what its choices mean.
    pub fn problem(&self) -> &'a LayerProblem<'a> {
        self.problem
    }

    /// Least `time + price * memory`. `None` where every combination is forbidden, or where the program gave up, which
    /// is noted.
    pub fn cheapest(&self, price: f64) -> Option<Cheapest> {
        self.cheapest_apart(Question::at(price))
    }

    /// The same with a price of its own for what is kept for backward; `None` too where it costs more than the limit.
    pub fn cheapest_apart(&self, of: Question<'_>) -> Option<Cheapest> {
        self.cheapest_by(of, |parts| self.least_with((of.price, of.kept, of.limit), self.more(of, parts)))
    }

    /// Nearly the same in a part of the time: a bound by bounds of the sums, and choices that nearly reach it; `None`
    /// too where no choices cost less than the limit.
    pub(crate) fn bound_apart(&self, of: Question<'_>) -> Option<Cheapest> {
        self.cheapest_by(of, |parts| self.bound_at(of, parts))
    }

    /// What no choices cost less than, by one sum: the problem's with so large parts of the excess of forward and of
    /// backward; and choices that nearly reach it.
    pub(crate) fn bound_at(&self, of: Question<'_>, parts: [f64; 2]) -> Option<(f64, Vec<usize>)> {
        let more = self.more(of, parts);
        match &self.by {
            By::Structured(prepared) => prepared.bound_below((of.price, of.kept), of.limit, more),
            By::Program(_) => self.least_with((of.price, of.kept, of.limit), more),
        }
    }

    /// What a choice of a node costs more than the problem says, with so large parts of the excess.
    fn more<'s>(&'s self, of: Question<'s>, parts: [f64; 2]) -> impl Fn(usize, usize) -> f64 + 's {
        // A smaller micro-batch needs less beside what is kept.
        let less = if of.part < 1.0 { (of.part - 1.0) * of.price } else { 0.0 };
        move |node, choice| {
            let excess = match of.shift {
                Some(shift) => shift.more(node, choice, parts),
                None if parts == [0.0; 2] => 0.0,
                None => self.problem.part_of_excess((node, choice), parts),
            };
            let beside = if less == 0.0 { 0.0 } else { self.problem.beside_of(node, choice) * less };
            let on_host = if of.on_host == OnHost::default() {
                0.0
            } else {
                self.problem.on_host_of(node, choice).at(of.on_host)
            };
            excess + beside + on_host
        }
    }

    /// The same by whoever answers for one sum.
    fn cheapest_by(
        &self,
        of: Question<'_>,
        least: impl Fn([f64; 2]) -> Option<(f64, Vec<usize>)>,
    ) -> Option<Cheapest> {
        let ask = |parts: [f64; 2]| {
            let (cost, choices) = least(parts)?;
            let excess =
                of.shift.map_or_else(|| self.problem.excess(&choices), |shift| shift.excess(&choices));
            let longer = |at: usize| excess[at].max(0.0) - excess[at] * parts[at];
            Some((cost, cost + longer(0) + longer(1), excess, choices))
        };
        let (cost, value, excess, choices) = ask([0.0; 2])?;
        let mut best =
            Cheapest { value, choices: choices.clone(), bound: cost, at_bound: choices, parts: [0.0; 2] };
        let leans = excess.map(|one| if one > 0.0 { 1.0 } else { 0.0 });
        // Along the line from the first sum to the second, the least cost and how it rises.
        let slope = |excess: [f64; 2]| excess[0] * leans[0] + excess[1] * leans[1];
        let (mut low, mut high) = ((0.0, cost, slope(excess)), None);
        if low.2 <= 0.0 {
            return Some(best);
        }
        for _ in 0..=MEANS {
            let part = match high {
                None => 1.0,
                Some((at, cost, slope)) => {
                    let (from, least, rises): (f64, f64, f64) = low;
                    let part = (cost - least + rises * from - slope * at) / (rises - slope);
                    // Both lines are level with what was found already.
                    if part <= from || part >= at {
                        break;
                    }
                    part
                }
            };
            let parts = leans.map(|lean| lean * part);
            let (cost, value, excess, choices) = ask(parts)?;
            if cost > best.bound {
                best = Cheapest { bound: cost, at_bound: choices.clone(), parts, ..best };
            }
            if value < best.value {
                best = Cheapest { value, choices, ..best };
            }
            match (slope(excess) > 0.0, high.is_none()) {
                (true, true) => break,
                (true, false) => low = (part, cost, slope(excess)),
                (false, _) => high = Some((part, cost, slope(excess))),
            }
        }
        Some(best)
    }

    /// The same where parameters are sent one by one behind nothing but their own operator, and what that costs. Where
    /// all of a layer covers them, parameters cost the same for the same memory and are all cut or none; here those
    /// that hide least are the last to be cut, which leaves choices between the two. Asked for a price, one of what is
    /// kept and a limit.
    pub(crate) fn cheapest_by_own(&self, of: (f64, f64, f64)) -> Option<(f64, Vec<usize>)> {
        let more = self.own_excess.get_or_init(|| self.problem.own_excess());
        self.least_with(of, |node, choice| more[node][choice])
    }

    /// The least that some choices cost which were answers before: no answer costs more.
    fn least_known(&self, (price, kept): (f64, f64), more: impl Fn(usize, usize) -> f64) -> f64 {
        let cost = |choices: &Vec<usize>| {
            let (nodes, edges) = self.problem.problem.parts(choices)?;
            let more: f64 = choices.iter().enumerate().map(|(node, &choice)| more(node, choice)).sum();
            Some(nodes.time + price * nodes.memory + edges.time + kept * edges.memory + more)
        };
        self.answers.borrow().iter().filter_map(cost).fold(f64::INFINITY, f64::min)
    }

    fn keep(&self, choices: &[usize]) {
        let mut answers = self.answers.borrow_mut();
        if answers.iter().all(|known| known != choices) {
            if answers.len() == MOST_ANSWERS {
                answers.pop_front();
            }
            answers.push_back(choices.to_vec());
        }
    }

    /// Least cost where choices of nodes take so much more time, if it is no more than a limit; the integer program
    /// asks for no limit.
    fn least_with(
        &self,
        (price, kept, limit): (f64, f64, f64),
        more: impl Fn(usize, usize) -> f64,
    ) -> Option<(f64, Vec<usize>)> {
        match &self.by {
            By::Structured(prepared) => {
                let limit = self.least_known((price, kept), &more).min(limit);
                let found = prepared.eliminate_below((price, kept), limit, more);
                found.iter().for_each(|(_, choices)| self.keep(choices));
                found
            }
            By::Program(troubles) => {
                program(&self.problem.problem.with_more_at_nodes(more), (price, kept), troubles)
            }
        }
    }
}

/// The integer program's answer.
fn program(problem: &Problem, (price, kept): (f64, f64), troubles: &Troubles) -> Option<(f64, Vec<usize>)> {
    let paid = (price.total_cmp(&kept).is_ne()).then(|| problem.with_edges_at(kept));
    match ilp::cheapest(paid.as_ref().unwrap_or(problem), price) {
        Ok(answer) => answer,
        Err(error) => {
            troubles.note(format!(
                "the integer program of a layer gave up ({error}); leave it to the structured solver"
            ));
            None
        }
    }
}

/// What to say of a problem that is too large for a solver, if it is.
pub(crate) fn too_large(
    solver: Solver,
    problem: &LayerProblem<'_>,
    (layer, mesh): (&str, &Mesh),
) -> Option<String> {
    let n = match solver {
        Solver::Structured => return None,
        Solver::Microlp => ilp::n_variables(&problem.problem),
    };
    let axes: Vec<String> = mesh.axis_ids().map(|axis| mesh.size(axis).to_string()).collect();
    (n > MAX_VARIABLES).then(|| {
        format!(
            "as an integer program the choices of layer `{layer}` on a mesh of {} devices have {n} variables, more than \
             the {MAX_VARIABLES} that microlp is asked to solve: take the structured solver, fewer devices, or pin \
             degrees",
            axes.join(" x ")
        )
    })
}
