//! Conversions on one mesh: which collectives lie between two shardings, and what each takes for tensors of one shape.
//!
//! A search asks for thousands of pairs of shardings on every mesh, for tensors of a dozen shapes. So shardings,
//! collectives on axes and lengths of what is sent are numbered as they come: what was asked before is an index.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;

use cost_model::CollectiveKind;
use cost_model::dispatch::Routing;
use ir::conversion::{Change, StepKind};
use ir::mesh::Mesh;
use ir::program::AxisSet;
use ir::sharding::Sharding;

use crate::ways::ways;

/// Seconds of a conversion, shown in full, by what they could hide behind.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Conversion {
    pub(crate) gather: f64,
    pub(crate) scatter: f64,
    pub(crate) reduce: f64,
    /// Tokens to experts or back.
    pub(crate) exchange: f64,
    pub(crate) other: f64,
}

impl Conversion {
    fn add(&mut self, kind: StepKind, routing: Option<Routing>, time: f64) {
        match kind {
            StepKind::AllToAll { .. } if routing.is_some() => self.exchange += time,
            StepKind::AllGather { .. } => self.gather += time,
            StepKind::ReduceScatter { .. } => self.scatter += time,
            StepKind::AllReduce => self.reduce += time,
            StepKind::AllReduceMax | StepKind::AllToAll { .. } => self.other += time,
            StepKind::Slice { .. } | StepKind::Zero => {}
        }
    }
}

/// A step that sends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hop {
    pub(crate) change: Change,
    pub(crate) collective: CollectiveKind,
    /// Number of its collective on its axes.
    link: u32,
    /// Number of the sharding in which it holds most: of a gather, what comes together.
    whole: u32,
}

impl Hop {
    /// What its price depends on: routes that are alike in it take as long for tensors of any shape.
    fn key(&self) -> HopKey {
        let Change { kind, before, after, .. } = self.change;
        let is_exchange = self.collective == CollectiveKind::AllToAll;
        HopKey {
            link: self.link,
            whole: self.whole,
            is_max: kind == StepKind::AllReduceMax,
            // Tokens that are routed are sent by what they are cut along on both sides.
            ends: is_exchange.then(|| [before.code(), after.code()]),
        }
    }
}

/// What the price of a step depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct HopKey {
    link: u32,
    whole: u32,
    is_max: bool,
    ends: Option<[u32; 2]>,
}

/// The steps that send between shardings of tensors of any shape.
#[derive(Default)]
pub(crate) struct Routes {
    shardings: Vec<Sharding>,
    /// By their codes.
    numbers: BTreeMap<u32, u32>,
    links: Vec<(CollectiveKind, AxisSet)>,
    hops: Vec<Hop>,
    /// Where among them a route is: distinct ones, as far as prices see.
    routes: Vec<Range<u32>>,
    /// By what their prices depend on.
    known: BTreeMap<Vec<HopKey>, u32>,
    /// Per pair of numbers: not asked yet, or which route; none where there is no way.
    places: Vec<Vec<Option<Option<u32>>>>,
    /// From the shardings of a list to those of another: micro-batches of other sizes mostly ask for the same.
    between: BTreeMap<[Vec<u32>; 2], Arc<Between>>,
}

/// Routes from every sharding of one list to every one of another.
#[derive(Debug, Default)]
struct Between {
    /// Row by row: one more than which of the distinct routes; nothing where there is no way.
    places: Vec<Option<NonZeroU32>>,
    /// Numbers of the distinct routes, as they come.
    routes: Vec<u32>,
}

impl Routes {
    /// Numbers of shardings.
    pub(crate) fn numbers(&mut self, shardings: &[Sharding]) -> Vec<u32> {
        shardings.iter().map(|&sharding| self.number(sharding)).collect()
    }

    /// Routes from every sharding of one list to every one of another, by their numbers.
    fn between(&mut self, lists: [Vec<u32>; 2]) -> Arc<Between> {
        if let Some(known) = self.between.get(&lists) {
            return Arc::clone(known);
        }
        let [rows, columns] = &lists;
        let mut found = Between::default();
        // Per route, as far as it was met: one more than which of the distinct ones.
        let mut met: Vec<Option<NonZeroU32>> = Vec::new();
        for &row in rows {
            for &column in columns {
                let place = self.route(row as usize, column as usize).map(|route| {
                    if let Some(Some(known)) = met.get(route as usize) {
                        return *known;
                    }
                    let place = NonZeroU32::MIN.saturating_add(found.routes.len() as u32);
                    found.routes.push(route);
                    note(&mut met, route as usize, place);
                    place
                });
                found.places.push(place);
            }
        }
        let found = Arc::new(found);
        self.between.insert(lists, Arc::clone(&found));
        found
    }

    fn number(&mut self, sharding: Sharding) -> u32 {
        let all = &mut self.shardings;
        *self.numbers.entry(sharding.code()).or_insert_with(|| {
            all.push(sharding);
            all.len() as u32 - 1
        })
    }

    /// Number of the route from a sharding, by its number, to another; `None` where there is no way.
    fn route(&mut self, from: usize, to: usize) -> Option<u32> {
        let known = self.places.get(from).and_then(|row| row.get(to).copied().flatten());
        known.unwrap_or_else(|| {
            let route = self.find(from, to);
            set(&mut self.places, (from, to), route);
            route
        })
    }

    /// What is sent along a route.
    fn hops(&self, route: u32) -> &[Hop] {
        let Range { start, end } = self.routes[route as usize];
        &self.hops[start as usize..end as usize]
    }

    fn find(&mut self, from: usize, to: usize) -> Option<u32> {
        let mut changes = Vec::new();
        ways(self.shardings[from], self.shardings[to], |change| changes.push(change))?;
        let mut hops = Vec::new();
        for change in changes {
            let Some(collective) = change.kind.collective() else { continue };
            let whole = self.number(whole(collective, change.before, change.after));
            let link = (collective, change.axes);
            let known = self.links.iter().position(|known| *known == link);
            let link = known.unwrap_or_else(|| {
                self.links.push(link);
                self.links.len() - 1
            });
            hops.push(Hop { change, collective, link: link as u32, whole });
        }
        let Self { hops: all, routes, known, .. } = self;
        Some(*known.entry(hops.iter().map(Hop::key).collect()).or_insert_with(|| {
            let first = all.len() as u32;
            all.append(&mut hops);
            routes.push(first..all.len() as u32);
            routes.len() as u32 - 1
        }))
    }
}

/// Notes an answer in a table that grows with what is asked.
fn set<T: Clone>(table: &mut Vec<Vec<Option<T>>>, (row, column): (usize, usize), answer: T) {
    if table.len() <= row {
        table.resize_with(row + 1, Vec::new);
    }
    note(&mut table[row], column, answer);
}

/// Notes an answer in a list that grows with what is asked.
fn note<T: Clone>(list: &mut Vec<Option<T>>, at: usize, answer: T) {
    list.resize(list.len().max(at + 1), None);
    list[at] = Some(answer);
}

/// The sharding in which a step holds most: of a gather, what comes together.
pub(crate) fn whole(collective: CollectiveKind, before: Sharding, after: Sharding) -> Sharding {
    if collective == CollectiveKind::AllGather { after } else { before }
}

/// Who prices a step that was not asked for before.
pub(crate) trait Sends {
    fn mesh(&self) -> &Mesh;
    /// Bytes of an element of an activation.
    fn element_bytes(&self) -> f64;
    /// Seconds of its collective for so many bytes.
    fn collective(&self, hop: &Hop, bytes: f64) -> f64;
    /// The same of tokens that are routed, where the engine sends these in a way of their own.
    fn exchange(&self, hop: &Hop, routing: Routing, bytes: f64) -> Option<f64>;
}

/// Tensors of one shape, as far as they were sent.
pub(crate) struct Sent {
    shape: Vec<u64>,
    /// The fraction of it that holds something.
    filled: f64,
    routing: Option<Routing>,
    /// Per sharding by its number: not asked yet, or one more than which length.
    lengths: Vec<Option<NonZeroU32>>,
    /// Distinct bytes on a device.
    bytes: Vec<f64>,
    /// Per link, and by the length of what is sent: seconds, or not asked yet.
    times: Vec<Vec<Option<f64>>>,
    /// Exchanges of routed tokens, by their axes and the codes of both shardings.
    exchanges: BTreeMap<(AxisSet, [u32; 2]), Option<f64>>,
    /// Per route: not asked yet, or one more than which of the distinct conversions leads along it.
    along: Vec<Option<NonZeroU32>>,
    distinct: Vec<Conversion>,
}

/// Conversions from every sharding of one list to every one of another.
#[derive(Debug)]
pub struct Conversions {
    between: Arc<Between>,
    n_columns: usize,
    /// Per distinct route, which of the distinct ones.
    along: Vec<u32>,
    distinct: Vec<Conversion>,
}

impl Conversions {
    /// Those of tensors as they are sent from the shardings of one list to those of another, by their numbers.
    pub(crate) fn new(
        lists: [Vec<u32>; 2],
        (routes, sent): (&mut Routes, &mut Sent),
        by: &impl Sends,
    ) -> Self {
        let n_columns = lists[1].len();
        let between = routes.between(lists);
        let numbers: Vec<usize> = between.routes.iter().map(|&route| sent.along(route, routes, by)).collect();
        let mut distinct: Vec<Conversion> = Vec::new();
        let mut places: Vec<Option<u32>> = vec![None; sent.distinct.len()];
        let mut place = |number: usize| {
            *places[number].get_or_insert_with(|| {
                distinct.push(sent.distinct[number]);
                distinct.len() as u32 - 1
            })
        };
        let along = numbers.into_iter().map(&mut place).collect();
        Self { between, n_columns, along, distinct }
    }

    /// Which of the distinct ones leads from a sharding of the first list to one of the second; `None` where there is
    /// no way.
    pub(crate) fn which(&self, row: usize, column: usize) -> Option<usize> {
        let place = self.between.places[row * self.n_columns + column]?;
        Some(self.along[place.get() as usize - 1] as usize)
    }

    /// The distinct ones.
    pub fn distinct(&self) -> &[Conversion] {
        &self.distinct
    }
}

impl Sent {
    /// Tensors of a shape, as they are routed, among those of all.
    pub(crate) fn of<'s>(
        all: &'s mut Vec<Self>,
        (shape, filled, routing): (&[u64], f64, Option<Routing>),
    ) -> &'s mut Self {
        let same = |known: &Self| {
            known.shape == shape && known.filled.total_cmp(&filled).is_eq() && known.routing == routing
        };
        let at = all.iter().position(same).unwrap_or_else(|| {
            all.push(Self {
                shape: shape.to_vec(),
                filled,
                routing,
                lengths: Vec::new(),
                bytes: Vec::new(),
                times: Vec::new(),
                exchanges: BTreeMap::new(),
                along: Vec::new(),
                distinct: Vec::new(),
            });
            all.len() - 1
        });
        &mut all[at]
    }

    /// Which of the distinct conversions leads along a route.
    fn along(&mut self, route: u32, routes: &Routes, by: &impl Sends) -> usize {
        if let Some(Some(known)) = self.along.get(route as usize) {
            return known.get() as usize - 1;
        }
        let mut sum = Conversion::default();
        for hop in routes.hops(route) {
            let is_exchange = hop.collective == CollectiveKind::AllToAll;
            let exchange =
                self.routing.filter(|_| is_exchange).and_then(|routing| self.exchange(hop, routing, by));
            let time = exchange.unwrap_or_else(|| self.plain(hop, by));
            sum.add(hop.change.kind, self.routing, time);
        }
        let known = self.distinct.iter().position(|known| *known == sum);
        let at = known.unwrap_or_else(|| {
            self.distinct.push(sum);
            self.distinct.len() - 1
        });
        note(&mut self.along, route as usize, NonZeroU32::MIN.saturating_add(at as u32));
        at
    }

    fn plain(&mut self, hop: &Hop, by: &impl Sends) -> f64 {
        let (link, length) = (hop.link as usize, self.length(hop, by));
        if let Some(Some(time)) = self.times.get(link).and_then(|times| times.get(length)) {
            return *time;
        }
        let time = by.collective(hop, self.bytes[length]);
        set(&mut self.times, (link, length), time);
        time
    }

    fn exchange(&mut self, hop: &Hop, routing: Routing, by: &impl Sends) -> Option<f64> {
        let length = self.length(hop, by);
        let bytes = self.bytes[length];
        let Change { axes, before, after, .. } = hop.change;
        let known = self.exchanges.entry((axes, [before.code(), after.code()]));
        *known.or_insert_with(|| by.exchange(hop, routing, bytes))
    }

    /// Which of the lengths a step sends.
    fn length(&mut self, hop: &Hop, by: &impl Sends) -> usize {
        let number = hop.whole as usize;
        if let Some(Some(place)) = self.lengths.get(number) {
            return place.get() as usize - 1;
        }
        let Change { before, after, .. } = hop.change;
        let whole = whole(hop.collective, before, after);
        let elements = whole.local_elements(by.mesh(), &self.shape) as f64;
        let bytes = elements * (by.element_bytes() * self.filled);
        let known = self.bytes.iter().position(|known| known.total_cmp(&bytes).is_eq());
        let at = known.unwrap_or_else(|| {
            self.bytes.push(bytes);
            self.bytes.len() - 1
        });
        note(&mut self.lengths, number, NonZeroU32::MIN.saturating_add(at as u32));
        at
    }
}

#[cfg(test)]
#[path = "conversions_tests.rs"]
mod tests;
