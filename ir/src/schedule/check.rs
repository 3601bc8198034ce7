//! What actions wait for, and whether a table can run: it knows tables, not schedules.
//!
//! ```text
//! forward   of chunk c   waits for   forward of chunk c - 1                       (sent from rank to rank)
//! backward  of chunk c   waits for   the gradient of chunk c + 1                  (sent)
//!           of the last              its own forward
//! weights   of chunk c   wait for    the gradient of chunk c itself
//! ```
//! Where sequences are cut into slices, each is a unit of its own in all of this. Besides, a rank runs the forwards of
//! a micro-batch's slices in order, for attention needs the keys of those before, and its backwards from the last to
//! the first, for the gradients of a slice's keys come from those behind: both on one rank, so the row's order decides.
//!
//! The gradient of a chunk comes from its full backward or from its backward to the input, whichever the table has; a
//! table may have both kinds. Every other dependency, such as backward on its own forward, follows from these.

use std::collections::{BTreeMap, BTreeSet};

use super::{Action, ChunkGraph, MAX_ACTIONS, Placement, ScheduleError, Seat, Section};

/// The counts that fix a table's actions, whatever their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableShape {
    /// Pipeline ranks.
    pub n_stages: u32,
    /// Which rank holds which chunk.
    pub placement: Placement,
    /// Micro-batches per step.
    pub n_micro_batches: u32,
    /// Slices of every sequence; 1 where they are not cut.
    pub n_slices: u32,
}

/// What actions wait for, and leave behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Product {
    /// The stream after a chunk.
    Stream,
    /// The gradient before a chunk.
    Gradient,
    /// A chunk's weight gradients.
    Weights,
}

/// A product of a chunk, micro-batch and slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Event {
    product: Product,
    chunk: u32,
    micro_batch: u32,
    slice: u32,
}

impl TableShape {
    /// Virtual stages per rank.
    pub fn n_virtual_stages(self) -> u32 {
        self.placement.n_virtual_stages()
    }

    /// Chunks the model is cut into.
    pub fn n_chunks(self) -> u32 {
        self.placement.n_chunks(self.n_stages)
    }

    /// The chunk that an action runs.
    pub fn chunk(self, action: Action) -> u32 {
        let Action { rank, virtual_stage, .. } = action;
        self.placement.chunk(self.n_stages, Seat { rank, virtual_stage })
    }

    /// Slices of all micro-batches.
    pub fn n_units(self) -> u32 {
        self.n_micro_batches.saturating_mul(self.n_slices)
    }

    /// Which of them an action is about, slices within micro-batches.
    pub fn unit(self, action: Action) -> u32 {
        action.micro_batch * self.n_slices + action.slice
    }

    /// Places for [`Self::yields`] and [`Self::needs`]: three for every chunk and unit.
    pub fn n_events(self) -> usize {
        3 * self.n_chunks() as usize * self.n_units() as usize
    }

    /// The place, dense from 0, of what may be waited for once an action has ended.
    pub fn yields(self, action: Action) -> usize {
        self.index(self.event(action))
    }

    /// The place of what must be there before an action may start; nothing for the first chunk's forward.
    pub fn needs(self, action: Action) -> Option<usize> {
        self.awaited(action).map(|event| self.index(event))
    }

    /// Whether what an action waits for comes from another chunk, and so perhaps from another rank.
    pub fn receives(self, action: Action) -> bool {
        self.awaited(action).is_some_and(|event| event.chunk != self.chunk(action))
    }

    /// Whether counts are such that a table has a size, and one that is not too large.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn check(self) -> Result<(), ScheduleError> {
        if self.n_stages == 0
            || self.n_virtual_stages() == 0
            || self.n_micro_batches == 0
            || self.n_slices == 0
        {
            return Err(ScheduleError::Empty);
        }
        let n_actions = 2_u64
            .saturating_mul(u64::from(self.n_stages))
            .saturating_mul(u64::from(self.n_virtual_stages()))
            .saturating_mul(u64::from(self.n_micro_batches))
            .saturating_mul(u64::from(self.n_slices));
        if n_actions > MAX_ACTIONS {
            return Err(ScheduleError::TooLarge { n_actions });
        }
        match self.placement {
            Placement::Bidirectional if !self.n_stages.is_multiple_of(2) => {
                Err(ScheduleError::OddBidirectional { n_stages: self.n_stages })
            }
            Placement::Bidirectional | Placement::Looped { .. } | Placement::Waves { .. } => Ok(()),
        }
    }

    /// The action of a section, wherever its chunk is for its micro-batch.
    fn action(self, section: Section, Event { chunk, micro_batch, slice, .. }: Event) -> Action {
        let Seat { rank, virtual_stage } = self.placement.seat(self.n_stages, chunk, micro_batch);
        Action { rank, section, virtual_stage, micro_batch, slice }
    }

    fn holds(self, action: Action) -> bool {
        let Action { rank, virtual_stage, micro_batch, slice, .. } = action;
        rank < self.n_stages
            && virtual_stage < self.n_virtual_stages()
            && micro_batch < self.n_micro_batches
            && slice < self.n_slices
            && self.placement.seat(self.n_stages, self.chunk(action), micro_batch)
                == Seat { rank, virtual_stage }
    }

    fn index(self, event: Event) -> usize {
        let product = match event.product {
            Product::Stream => 0,
            Product::Gradient => 1,
            Product::Weights => 2,
        };
        let chunk = (product * self.n_chunks() + event.chunk) as usize;
        chunk * self.n_units() as usize + (event.micro_batch * self.n_slices + event.slice) as usize
    }

    fn event(self, action: Action) -> Event {
        let product = match action.section {
            Section::Forward => Product::Stream,
            Section::Backward | Section::BackwardInput => Product::Gradient,
            Section::BackwardWeight => Product::Weights,
        };
        Event { product, chunk: self.chunk(action), micro_batch: action.micro_batch, slice: action.slice }
    }

    fn awaited(self, action: Action) -> Option<Event> {
        let Event { chunk, micro_batch, slice, .. } = self.event(action);
        let of = |product, chunk| Some(Event { product, chunk, micro_batch, slice });
        match action.section {
            Section::Forward if chunk == 0 => None,
            Section::Forward => of(Product::Stream, chunk - 1),
            Section::Backward | Section::BackwardInput if chunk + 1 == self.n_chunks() => {
                of(Product::Stream, chunk)
            }
            Section::Backward | Section::BackwardInput => of(Product::Gradient, chunk + 1),
            Section::BackwardWeight => of(Product::Gradient, chunk),
        }
    }

    /// The same in a graph of chunks.
    fn awaited_in(self, graph: &ChunkGraph, action: Action) -> impl Iterator<Item = Event> {
        let Event { chunk, micro_batch, slice, .. } = self.event(action);
        let (product, chunks) = match action.section {
            Section::Forward => (Product::Stream, graph.before(chunk)),
            Section::Backward | Section::BackwardInput => (Product::Gradient, graph.behind(chunk)),
            Section::BackwardWeight => (Product::Gradient, [].as_slice()),
        };
        let others = chunks.iter().map(move |&chunk| Event { product, chunk, micro_batch, slice });
        let own = match action.section {
            Section::Forward => None,
            Section::Backward | Section::BackwardInput => chunks.is_empty().then_some(Product::Stream),
            Section::BackwardWeight => Some(Product::Gradient),
        };
        own.into_iter().map(move |product| Event { product, chunk, micro_batch, slice }).chain(others)
    }

    /// The rank that waits for what an action leaves behind, if it is sent.
    fn awaits_elsewhere(self, action: Action) -> Option<u32> {
        let Event { product, chunk, micro_batch, .. } = self.event(action);
        let next = match product {
            Product::Stream => Some(chunk + 1).filter(|&next| next < self.n_chunks()),
            Product::Gradient => chunk.checked_sub(1),
            Product::Weights => None,
        }?;
        Some(self.placement.seat(self.n_stages, next, micro_batch).rank)
    }
}

/// Judges a table: every action of the shape exactly once, on its own rank, and no rank ever waits in vain.
///
/// # Errors
/// The first thing that is wrong.
pub fn check_table(table: &[Vec<Action>], shape: TableShape) -> Result<(), ScheduleError> {
    in_dependency_order(table, shape, |_, _, _| ())
}

/// The table's actions in an order in which each follows all that it needs, ranks keeping their own order.
///
/// The order depends on nothing but the table, so a simulation that walks it is deterministic. It takes time in
/// proportion to the number of actions.
///
/// # Errors
/// Where [`check_table`] fails.
pub fn dependency_order(table: &[Vec<Action>], shape: TableShape) -> Result<Vec<Action>, ScheduleError> {
    let mut order = Vec::with_capacity(table.iter().map(Vec::len).sum());
    in_dependency_order(table, shape, |action, _, _| order.push(action))?;
    Ok(order)
}

/// Visits the actions of a table in that order, without a list of them: each with the place of what it needs, if
/// anything, and of what it yields.
///
/// # Errors
/// Where [`check_table`] fails; a table that cannot run to its end is visited as far as it can.
pub fn in_dependency_order(
    table: &[Vec<Action>],
    shape: TableShape,
    mut visit: impl FnMut(Action, Option<usize>, usize),
) -> Result<(), ScheduleError> {
    every_action_once(table, shape)?;
    slices_in_order(table, shape)?;
    let mut done = vec![false; shape.n_events()];
    let mut next = vec![0_usize; table.len()];
    let mut runnable: Vec<u32> = (0..shape.n_stages).rev().collect();
    while let Some(rank) = runnable.pop() {
        while let Some(&action) = table[rank as usize].get(next[rank as usize]) {
            let needs = shape.needs(action);
            if needs.is_some_and(|needed| !done[needed]) {
                break;
            }
            let left = shape.yields(action);
            done[left] = true;
            next[rank as usize] += 1;
            visit(action, needs, left);
            // Wake the rank that stands exactly at what this action allows; any other will get there by itself.
            let waiting = shape.awaits_elsewhere(action).filter(|&other| other != rank);
            if let Some(other) = waiting
                && let Some(&stands) = table[other as usize].get(next[other as usize])
                && shape.needs(stands) == Some(left)
            {
                runnable.push(other);
            }
        }
    }
    deadlock(table, &next, shape).map_or(Ok(()), Err)
}

/// The same where chunks take streams over from others than the one before: with the places of all that an action
/// needs, of forwards in the order of [`ChunkGraph::before`], of backwards in that of [`ChunkGraph::behind`].
///
/// # Errors
/// Where [`check_table`] fails: a table is for any graph if it is one for a chain.
pub fn in_graph_order(
    table: &[Vec<Action>],
    shape: TableShape,
    graph: &ChunkGraph,
    mut visit: impl FnMut(Action, &[usize], usize),
) -> Result<(), ScheduleError> {
    // Whatever hands streams on does so to later chunks, so the order of a chain is one for any graph.
    let mut needs: Vec<usize> = Vec::new();
    in_dependency_order(table, shape, |action, _, yields| {
        needs.clear();
        needs.extend(shape.awaited_in(graph, action).map(|event| shape.index(event)));
        visit(action, &needs, yields);
    })
}

/// The first rank of a circle of ranks that wait for each other, found by asking whom the first stuck rank waits for.
fn deadlock(table: &[Vec<Action>], next: &[usize], shape: TableShape) -> Option<ScheduleError> {
    let waits = |rank: u32| -> Option<(Action, Action)> {
        let action = *table[rank as usize].get(next[rank as usize])?;
        Some((action, producer(table, shape, shape.awaited(action)?)?))
    };
    let mut rank = (0..shape.n_stages).find(|&rank| waits(rank).is_some())?;
    let mut asked = BTreeSet::new();
    while asked.insert(rank) {
        rank = waits(rank)?.1.rank;
    }
    let (action, needs) = waits(rank)?;
    Some(ScheduleError::Deadlock { rank, action, needs })
}

/// The action of a table that leaves something behind.
fn producer(table: &[Vec<Action>], shape: TableShape, event: Event) -> Option<Action> {
    let Seat { rank, .. } = shape.placement.seat(shape.n_stages, event.chunk, event.micro_batch);
    table[rank as usize].iter().copied().find(|&action| shape.event(action) == event)
}

fn every_action_once(table: &[Vec<Action>], shape: TableShape) -> Result<(), ScheduleError> {
    shape.check()?;
    let mut seen = vec![false; shape.n_events()];
    for (rank, row) in table.iter().enumerate() {
        let rank = rank as u32;
        for &action in row {
            if action.rank != rank || !shape.holds(action) {
                return Err(ScheduleError::OutOfPlace { rank, action });
            }
            if left_behind(action.section).iter().any(|&product| {
                let event = Event { product, ..shape.event(action) };
                std::mem::replace(&mut seen[shape.index(event)], true)
            }) {
                return Err(ScheduleError::Twice { rank, action });
            }
        }
    }
    for product in [Product::Stream, Product::Gradient, Product::Weights] {
        for chunk in 0..shape.n_chunks() {
            for unit in 0..shape.n_units() {
                let (micro_batch, slice) = (unit / shape.n_slices, unit % shape.n_slices);
                let event = Event { product, chunk, micro_batch, slice };
                if !seen[shape.index(event)] {
                    return Err(missing(shape, event, &seen));
                }
            }
        }
    }
    Ok(())
}

/// Forwards rise and backwards fall through the slices of a micro-batch; weights may come in any order.
fn slices_in_order(table: &[Vec<Action>], shape: TableShape) -> Result<(), ScheduleError> {
    if shape.n_slices == 1 {
        return Ok(());
    }
    for (rank, row) in table.iter().enumerate() {
        let mut passed: BTreeMap<(bool, u32, u32), u32> = BTreeMap::new();
        for &action in row {
            let back = action.section.yields_gradient();
            if !back && action.section != Section::Forward {
                continue;
            }
            let count = passed.entry((back, action.virtual_stage, action.micro_batch)).or_insert(0);
            // Every action is there once, so that no slice can be due beyond the last.
            let due = if back { (shape.n_slices - 1).saturating_sub(*count) } else { *count };
            if action.slice != due {
                return Err(ScheduleError::SliceOrder { rank: rank as u32, action, due });
            }
            *count += 1;
        }
    }
    Ok(())
}

/// Everything that a section completes.
fn left_behind(section: Section) -> &'static [Product] {
    match section {
        Section::Forward => &[Product::Stream],
        Section::Backward => &[Product::Gradient, Product::Weights],
        Section::BackwardInput => &[Product::Gradient],
        Section::BackwardWeight => &[Product::Weights],
    }
}

fn missing(shape: TableShape, event: Event, seen: &[bool]) -> ScheduleError {
    let has_weights = seen[shape.index(Event { product: Product::Weights, ..event })];
    let section = match event.product {
        Product::Stream => Section::Forward,
        Product::Gradient if has_weights => Section::BackwardInput,
        Product::Gradient => Section::Backward,
        Product::Weights => Section::BackwardWeight,
    };
    let action = shape.action(section, event);
    ScheduleError::Missing { rank: action.rank, action }
}

/// What a rank holds for chunks of micro-batches, or of their slices, that are under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InFlight {
    /// Forwards whose backward has not begun: all that forward keeps.
    pub saved: u32,
    /// Backwards whose weights are still to come: what those need.
    pub carried: u32,
}

impl InFlight {
    /// Both.
    pub fn total(self) -> u32 {
        self.saved + self.carried
    }

    /// What is held once a section has run.
    pub fn pass(&mut self, section: Section) {
        match section {
            Section::Forward => self.saved += 1,
            Section::Backward => self.saved = self.saved.saturating_sub(1),
            Section::BackwardInput => {
                self.saved = self.saved.saturating_sub(1);
                self.carried += 1;
            }
            Section::BackwardWeight => self.carried = self.carried.saturating_sub(1),
        }
    }
}

/// What a rank holds after each action of its row.
pub fn in_flight(row: &[Action]) -> Vec<InFlight> {
    let mut now = InFlight::default();
    let step = |action: &Action| {
        now.pass(action.section);
        now
    };
    row.iter().map(step).collect()
}

/// For each rank, the most chunk forwards whose backward is not yet complete, in chunks of micro-batches or of slices.
///
/// Divide by the number of virtual stages, and of slices, to get micro-batches of a whole stage's activations.
pub fn peak_in_flight(table: &[Vec<Action>]) -> Vec<u32> {
    table.iter().map(|row| in_flight(row).into_iter().map(InFlight::total).max().unwrap_or(0)).collect()
}

/// Messages that are received in another order than they were sent between the same two ranks.
///
/// Where messages are matched by name this is harmless; an engine that matches them by order needs it to be zero, or a
/// channel for each direction and virtual stage. Of a table that passes [`check_table`].
pub fn overtaken(table: &[Vec<Action>], shape: TableShape) -> u64 {
    let mut sent: BTreeMap<(u32, u32), BTreeMap<usize, usize>> = BTreeMap::new();
    for (rank, row) in table.iter().enumerate() {
        for &action in row {
            if let Some(to) = shape.awaits_elsewhere(action).filter(|&to| to != rank as u32) {
                let queue = sent.entry((rank as u32, to)).or_default();
                let place = queue.len();
                queue.insert(shape.yields(action), place);
            }
        }
    }
    let mut latest: BTreeMap<(u32, u32), usize> = BTreeMap::new();
    let mut count = 0;
    for (rank, row) in table.iter().enumerate() {
        for &action in row {
            let Some(event) = shape.awaited(action) else { continue };
            let from = shape.placement.seat(shape.n_stages, event.chunk, event.micro_batch).rank;
            let pair = (from, rank as u32);
            let place = sent.get(&pair).and_then(|queue| queue.get(&shape.index(event)));
            let Some(&place) = place else { continue };
            let before = latest.entry(pair).or_insert(place);
            count += u64::from(place < *before);
            *before = place.max(*before);
        }
    }
    count
}
