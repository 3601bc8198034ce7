//! The layers of a candidate in the hands of the solver: with a choice for every price of memory.

use std::cell::OnceCell;

use super::Worth;
use super::dual::in_memory;
use super::hosts::{Away, Hosts, Slowed};
use crate::bound::{Bound, Work};
use crate::candidate::{Candidate, Scope};
use crate::chooser::{Chooser, Question};
use crate::clock::Covers;
use crate::forms::Forms;
use crate::given::{Given, HomeRule};
use crate::layer_problem::{LayerProblem, Shift};
use crate::levels::is_frequent;
use crate::shelf::{Asked, Bench};

/// The first, in multiples of what a byte is worth by the fastest choices, as in menus.
const FIRST_PRICE: f64 = 0.15;

/// The layers of a candidate with a choice for every price of memory.
pub(super) struct Tables<'s> {
    pub(super) bench: Bench<'s>,
    pub(super) given: Given,
    pub(super) of: Forms<'s>,
    /// Per kind, its forms; nothing of rare ones, or only choices for where memory is free.
    pub(super) kinds: Vec<Asked<'s>>,
    /// The same of rare ones, once somebody asked; nothing of the others.
    pub(super) rare: OnceCell<Vec<Asked<'s>>>,
    /// Micro-batches that the tables take to be in flight.
    pub(super) in_flight: f64,
    /// Per kind and form, how it is priced where hosts hold some of it.
    slowed: OnceCell<Vec<Vec<Vec<Slowed<'s>>>>>,
    /// The same of rare ones.
    rare_slowed: OnceCell<Vec<Vec<Vec<Slowed<'s>>>>>,
    /// How hosts are counted, once somebody asked.
    hosts: OnceCell<Hosts>,
}

/// A form of a layer in the hands of the solver.
pub(super) struct Hand<'t> {
    pub(super) chooser: Chooser<'t>,
    /// What its choices cost more with the micro-batch that is asked about.
    pub(super) shift: Option<Shift>,
    /// Whether its layers may have all on their devices.
    pub(super) stays: bool,
    /// The same where they have something on their hosts.
    pub(super) away: Vec<Away<'t>>,
}

/// The layers of all stages in the hands of the solver.
pub(super) struct Ready<'t> {
    /// Per kind, its forms; nothing of rare ones.
    pub(super) kinds: Vec<Vec<Hand<'t>>>,
    /// The same of rare ones, once somebody asked; nothing of the others.
    pub(super) rare: OnceCell<Vec<Vec<Hand<'t>>>>,
    /// Per kind, the least seconds of a layer where memory is free.
    pub(super) free: Vec<f64>,
    pub(super) of: Forms<'t>,
    /// Least work where memory is free.
    pub(super) base: Work,
    /// Where to start.
    pub(super) worth: Worth,
    /// Where to start where nothing is known.
    pub(super) first_price: f64,
}

impl Scope<'_> {
    /// Prices what operators take by themselves as a candidate has it, whose micro-batch divides that of the tables;
    /// its least work where memory is free.
    pub(super) fn by_own_lengths<'s: 't, 't>(
        &'s self,
        (tables, bound): (&'t Tables<'s>, &Bound),
        ready: &mut Ready<'t>,
        candidate: &Candidate,
    ) -> Option<Work> {
        let clock = self.clock(candidate, tables.given.covers);
        for (kind, hands) in ready.kinds.iter_mut().enumerate() {
            for (hand, (form, _)) in hands.iter_mut().zip(&tables.kinds[kind]) {
                let layer = &self.forms[kind][*form].layer;
                let sizes = layer.sizes(candidate.micro_batch, self.request.job.sequence);
                hand.shift(clock, |problem, clock| {
                    problem.shift(&sizes, &tables.bench.prices, clock, &tables.given)
                });
            }
        }
        let p = candidate.n_stages as f64;
        let of_kind = |kind: usize| match self.is_rare(kind) {
            true => Some(ready.free[kind]),
            false => least_free(&ready.kinds[kind]),
        };
        let times = (0..self.counts.len()).map(of_kind).collect::<Option<Vec<f64>>>()?;
        let average =
            times.iter().zip(&self.counts).map(|(time, &count)| time * count as f64 / p).sum::<f64>();
        let slowest = self.pieces(self.ends_in_place(candidate), &times).least_slowest(candidate.n_stages);
        let free = in_memory(bound.work, average.max(bound.work.average));
        ready.base = Work { slowest: free.slowest.max(slowest), ..free };
        Some(ready.base)
    }

    pub(crate) fn most_frequent(&self) -> usize {
        (0..self.counts.len()).max_by_key(|&kind| self.counts[kind]).unwrap_or(0)
    }

    /// Whether so few layers are of a kind that what memory costs them is asked last.
    pub(crate) fn is_rare(&self, kind: usize) -> bool {
        !is_frequent(self.counts[kind], self.model().n_layers())
    }

    pub(super) fn priced_tables<'s>(
        &'s self,
        candidate: &'s Candidate,
        covers: Covers,
        of: Forms<'s>,
    ) -> Tables<'s> {
        self.tables_on(self.bench(candidate), covers, of)
    }

    /// The same as it is priced on one ground.
    pub(super) fn tables_on<'s>(&'s self, bench: Bench<'s>, covers: Covers, of: Forms<'s>) -> Tables<'s> {
        let given = Given { covers, of_bound: true, ..self.given() };
        let kinds = self.asked_of((&bench, &given), of, |kind| !self.is_rare(kind));
        let in_flight = self.clock(bench.candidate, given.covers).in_flight;
        let (slowed, rare_slowed, hosts) = (OnceCell::new(), OnceCell::new(), OnceCell::new());
        Tables { bench, given, of, kinds, rare: OnceCell::new(), in_flight, slowed, rare_slowed, hosts }
    }

    /// Per kind, its forms; nothing of kinds that are not wanted.
    fn asked_of<'s>(
        &'s self,
        (bench, given): (&Bench<'s>, &Given),
        of: Forms<'_>,
        is_wanted: impl Fn(usize) -> bool,
    ) -> Vec<Asked<'s>> {
        let asked = |kind| match is_wanted(kind) {
            true => self.asked(bench, kind, given, of),
            false => Vec::new(),
        };
        (0..self.forms.len()).map(asked).collect()
    }

    /// Forms of rare kinds in the hands of the solver.
    pub(super) fn rare<'s: 't, 't>(
        &'s self,
        (tables, of): (&'t Tables<'s>, Forms<'_>),
    ) -> Vec<Vec<Hand<'t>>> {
        let asked = || self.asked_of((&tables.bench, &tables.given), tables.of, |kind| self.is_rare(kind));
        let kinds = tables.rare.get_or_init(asked);
        let slowed = tables.rare_slowed.get_or_init(|| self.all_slowed(kinds, tables.hosts()));
        let kinds = kinds.iter().zip(slowed).enumerate();
        kinds.map(|(kind, forms)| self.in_hand((tables, kind), (forms.0, forms.1), of)).collect()
    }

    fn in_hand<'t>(
        &'t self,
        (tables, kind): (&Tables<'_>, usize),
        (forms, slowed): (&'t Asked<'t>, &'t [Vec<Slowed<'t>>]),
        of: Forms<'_>,
    ) -> Vec<Hand<'t>> {
        let n_asked = match of {
            Forms::Leading | Forms::Chosen(_) => 1,
            Forms::All => forms.len(),
        };
        let layer = &self.forms[kind][0].layer;
        let rules = [tables.given.kept, tables.given.parameters].map(|rule| rule.on(layer));
        let stays = !rules.contains(&HomeRule::Host);
        let hand = |((_, problem), slowed): (&'t (usize, LayerProblem<'t>), &'t Vec<Slowed<'t>>)| Hand {
            chooser: self.chooser(problem),
            shift: None,
            stays,
            away: self.away(slowed),
        };
        forms.iter().zip(slowed).take(n_asked).map(hand).collect()
    }

    pub(super) fn ready<'s: 't, 't>(
        &'s self,
        (tables, bound, of): (&'t Tables<'s>, &Bound, Forms<'t>),
        worth: Option<Worth>,
    ) -> Ready<'t> {
        let free = bound.layers.iter().map(|layer| match of {
            Forms::Leading | Forms::Chosen(_) => layer.plain.step,
            Forms::All => layer.least.step,
        });
        let first_price = FIRST_PRICE * bound.seconds_per_byte;
        let worth = worth.unwrap_or(Worth { price: first_price, a: 1.0, parts: [[0.0; 2]; 2] });
        let hosts = tables.hosts.get_or_init(|| self.hosts(tables, worth.price));
        let slowed = tables.slowed.get_or_init(|| self.all_slowed(&tables.kinds, hosts));
        let choosers = |(kind, forms): (usize, (&'t Asked<'t>, &'t Vec<Vec<Slowed<'t>>>))| {
            if self.is_rare(kind) { Vec::new() } else { self.in_hand((tables, kind), (forms.0, forms.1), of) }
        };
        Ready {
            kinds: tables.kinds.iter().zip(slowed).enumerate().map(choosers).collect(),
            rare: OnceCell::new(),
            free: free.collect(),
            of,
            base: bound.work,
            worth,
            first_price,
        }
    }
}

impl Tables<'_> {
    /// Bytes that there are for a device, those of its host for what they are worth.
    pub(super) fn capacity(&self) -> f64 {
        self.bench.setting.capacity + self.hosts().capacity()
    }

    /// How hosts are counted; not at all before somebody asked.
    pub(super) fn hosts(&self) -> &Hosts {
        const NONE: &Hosts = &Hosts::NONE;
        self.hosts.get().unwrap_or(NONE)
    }
}

/// Least seconds of a layer in any of its forms where memory is free.
fn least_free(forms: &[Hand<'_>]) -> Option<f64> {
    let of = |Hand { chooser, shift, .. }: &Hand<'_>| {
        let question = Question { shift: shift.as_ref(), ..Question::at(0.0) };
        Some(chooser.bound_apart(question)?.bound)
    };
    forms.iter().filter_map(of).min_by(f64::total_cmp)
}
