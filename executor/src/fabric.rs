//! Rank threads and the mail between them: who runs, who waits for whom, and when nothing can move any more.
//!
//! Sending never blocks; receiving names its source. So the ranks form a Kahn network: how far each of them gets
//! does not depend on timing, and an error is the same in every run. That is why a failure is announced only when
//! no rank can run any further, not at the moment it happens:
//! ```text
//! running = ranks that are neither finished, failed, nor waiting for mail that is not there
//! running = 0  =>  the failure of the smallest failed rank, else a deadlock if a rank waits, else the end
//! ```
//! No clock takes part. Collectives between two ranks are read in the order sent, so a mismatch shows at once;
//! send-receives are found by their tag, because schedules of two stages may order them differently.
//!
//! Kahn 1974, "The semantics of a simple language for parallel programming".

use std::any::Any;
use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use ir::collective::{Algorithm, CollectiveKind};

use crate::counters::{Counters, Traffic};
use crate::element::{Edges, Element};
use crate::error::{ExecutorError, Waiting};
use crate::instruction::{Instruction, Operation, Tag};
use crate::observe::{Activity, Moved, Nobody, Observer};

/// Says which link tier joins two ranks.
pub type TierOf<'a> = dyn Fn(usize, usize) -> usize + Sync + 'a;

/// Runs `body` once per rank, each on a thread of its own, and returns what the ranks return, in rank order,
/// with the bytes each of them sent.
///
/// If a rank fails in any way, so does the run; ranks that wait are told, never left hanging.
pub fn run_ranks<E, T, F>(
    n_ranks: usize,
    tier_of: &TierOf<'_>,
    body: F,
) -> Result<Vec<(T, Counters)>, ExecutorError>
where
    E: Element,
    T: Send,
    F: Fn(&mut RankComm<'_, E>) -> Result<T, ExecutorError> + Sync,
{
    run_observed_ranks(n_ranks, (tier_of, &Nobody), body)
}

/// Like [`run_ranks`], telling an observer of every communication.
pub fn run_observed_ranks<E, T, F>(
    n_ranks: usize,
    (tier_of, observer): (&TierOf<'_>, &dyn Observer),
    body: F,
) -> Result<Vec<(T, Counters)>, ExecutorError>
where
    E: Element,
    T: Send,
    F: Fn(&mut RankComm<'_, E>) -> Result<T, ExecutorError> + Sync,
{
    let fabric = Fabric::new(n_ranks, tier_of);
    let results: Vec<Option<(T, Counters)>> = thread::scope(|scope| {
        let mut threads = Vec::with_capacity(n_ranks);
        for rank in 0..n_ranks {
            let (fabric, body) = (&fabric, &body);
            let thread = thread::Builder::new().name(format!("rank {rank}"));
            match thread.spawn_scoped(scope, move || run_rank((fabric, observer), rank, body)) {
                Ok(handle) => threads.push(handle),
                Err(error) => {
                    fabric.fail_unstarted(rank, &error.to_string());
                    break;
                }
            }
        }
        threads.into_iter().map(|handle| handle.join().unwrap_or(None)).collect()
    });
    fabric.outcome()?;
    Ok(results.into_iter().flatten().collect())
}

fn run_rank<E, T, F>(
    (fabric, observer): (&Fabric<'_, E>, &dyn Observer),
    rank: usize,
    body: &F,
) -> Option<(T, Counters)>
where
    E: Element,
    F: Fn(&mut RankComm<'_, E>) -> Result<T, ExecutorError>,
{
    let (counters, moved) = (Counters::default(), Cell::default());
    let mut comm = RankComm { fabric, observer, rank, counters, moved, edges: Edges::Exact };
    let returned = catch_unwind(AssertUnwindSafe(|| body(&mut comm)));
    let mut state = fabric.lock();
    let last = || state.last[rank].as_deref().cloned().map(Box::new);
    match returned {
        Ok(Ok(value)) => {
            fabric.leave(&mut state, rank, None);
            Some((value, comm.counters))
        }
        Ok(Err(error)) => {
            let error = ExecutorError::Rank { rank, last: last(), source: Box::new(error) };
            fabric.leave(&mut state, rank, Some(error));
            None
        }
        Err(panic) => {
            let message = panic_message(panic.as_ref());
            let error = ExecutorError::Panicked { rank, last: last(), message };
            fabric.leave(&mut state, rank, Some(error));
            None
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text.clone()
    } else {
        "a panic without a message".to_owned()
    }
}

/// One rank's handle to the others. The collectives are in [`crate::collective`].
pub struct RankComm<'a, E: Element> {
    fabric: &'a Fabric<'a, E>,
    observer: &'a dyn Observer,
    rank: usize,
    counters: Counters,
    /// Bytes of all messages so far.
    moved: Cell<Moved>,
    edges: Edges,
}

impl<E: Element> RankComm<'_, E> {
    /// Rounds what this rank sends from now on.
    pub(crate) fn round_to(&mut self, edges: Edges) {
        self.edges = edges;
    }

    /// How what is sent is rounded.
    pub(crate) fn edges(&self) -> Edges {
        self.edges
    }

    /// Does something that the observer is told of.
    pub(crate) fn during<T>(&mut self, activity: Activity<'_>, body: impl FnOnce(&mut Self) -> T) -> T {
        let before = self.moved.get();
        self.observer.begins(self.rank, activity);
        let result = body(self);
        let Moved { sent, received } = self.moved.get();
        let moved = Moved { sent: sent - before.sent, received: received - before.received };
        self.observer.ends(self.rank, moved);
        result
    }

    /// One end of a message that the observer is told of.
    pub(crate) fn during_message<T>(&mut self, tag: &Tag, body: impl FnOnce(&mut Self) -> T) -> T {
        let (kind, algorithm) = (CollectiveKind::SendRecv, Algorithm::Direct);
        self.during(Activity::Communication { kind, algorithm, tag }, body)
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks of the run.
    pub fn n_ranks(&self) -> usize {
        self.fabric.bells.len()
    }

    /// Bytes sent so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Notes which instruction this rank is in. Refused once this rank or the run has failed.
    pub(crate) fn enter(&self, instruction: &Arc<Instruction>) -> Result<(), ExecutorError> {
        let mut state = self.fabric.lock();
        state.check_running(self.rank)?;
        state.last[self.rank] = Some(Arc::clone(instruction));
        Ok(())
    }

    /// Position of the link tier between two ranks.
    pub(crate) fn tier_of(&self, a: usize, b: usize) -> usize {
        (self.fabric.tier_of)(a, b)
    }

    /// Puts a message into the mailbox of `to` and counts its bytes on the tier between the two.
    pub(crate) fn post(
        &mut self,
        to: usize,
        instruction: &Arc<Instruction>,
        data: Vec<E>,
    ) -> Result<(), ExecutorError> {
        self.post_over(self.tier_of(self.rank, to), (to, instruction), data)
    }

    /// The same on a given tier: what goes to the tier's switch goes to the rank that plays it, be it this one.
    pub(crate) fn post_over(
        &mut self,
        tier: usize,
        (to, instruction): (usize, &Arc<Instruction>),
        data: Vec<E>,
    ) -> Result<(), ExecutorError> {
        let traffic = Traffic {
            kind: instruction.operation.kind(),
            algorithm: instruction.algorithm,
            label: Arc::clone(instruction.tag.label()),
            tier,
        };
        let bytes = data.len() as u64 * self.edges.element_bytes::<E>();
        self.counters.add(traffic, bytes);
        let moved = self.moved.get();
        self.moved.set(Moved { sent: moved.sent + bytes, ..moved });
        let mut data = data;
        self.edges.round_all(&mut data);
        self.deliver(to, instruction, data)
    }

    /// Puts a message into the mailbox of `to` that no rank sends: what comes out of a switch.
    pub(crate) fn deliver(
        &self,
        to: usize,
        instruction: &Arc<Instruction>,
        data: Vec<E>,
    ) -> Result<(), ExecutorError> {
        self.fabric.post(self.rank, to, Message { instruction: Arc::clone(instruction), data })
    }

    /// Waits for the message of `from` that belongs to `instruction`, which for a collective must be the next one.
    pub(crate) fn take(&self, from: usize, instruction: &Arc<Instruction>) -> Result<Vec<E>, ExecutorError> {
        let message = self.fabric.take(self.rank, from, instruction)?;
        let theirs = &message.instruction;
        if theirs == instruction {
            let bytes = message.data.len() as u64 * self.edges.element_bytes::<E>();
            let moved = self.moved.get();
            self.moved.set(Moved { received: moved.received + bytes, ..moved });
            return Ok(message.data);
        }
        Err(self.fail(match instruction.operation {
            // Found by its tag between the same two ranks: only the length can differ.
            Operation::SendReceive => ExecutorError::WrongLength {
                rank: self.rank,
                instruction: Box::new(instruction.as_ref().clone()),
                what: format!("the message from rank {from}"),
                found: message.data.len(),
                expected: instruction.lens.iter().sum(),
            },
            Operation::AllGather
            | Operation::ReduceScatter(_)
            | Operation::AllReduce(_)
            | Operation::AllToAll
            | Operation::Broadcast { .. } => ExecutorError::Mismatch {
                rank: self.rank,
                own: Box::new(instruction.as_ref().clone()),
                peer: from,
                theirs: Box::new(theirs.as_ref().clone()),
            },
        }))
    }

    /// Records that this rank has failed and gives the error back, to be returned.
    pub(crate) fn fail(&self, error: ExecutorError) -> ExecutorError {
        self.fabric.leave(&mut self.fabric.lock(), self.rank, Some(error.clone()));
        error
    }
}

/// What the rank threads share.
struct Fabric<'a, E> {
    state: Mutex<State<E>>,
    /// One per rank, rung when its mail has come or the run has failed.
    bells: Vec<Condvar>,
    tier_of: &'a TierOf<'a>,
}

struct State<E> {
    mail: Vec<BTreeMap<Slot, VecDeque<Message<E>>>>,
    status: Vec<Status>,
    /// Ranks with [`Status::Running`].
    n_running: usize,
    /// The last instruction each rank has entered.
    last: Vec<Option<Arc<Instruction>>>,
    failures: BTreeMap<usize, ExecutorError>,
    /// Why the run has failed, once no rank can run.
    verdict: Option<ExecutorError>,
}

struct Message<E> {
    instruction: Arc<Instruction>,
    data: Vec<E>,
}

/// A compartment of a mailbox: the sender, and the tag if it is not a collective.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Slot {
    from: usize,
    tag: Option<Tag>,
}

impl Slot {
    fn new(from: usize, instruction: &Instruction) -> Self {
        let tag = match instruction.operation {
            Operation::SendReceive => Some(instruction.tag.clone()),
            Operation::AllGather
            | Operation::ReduceScatter(_)
            | Operation::AllReduce(_)
            | Operation::AllToAll
            | Operation::Broadcast { .. } => None,
        };
        Self { from, tag }
    }
}

enum Status {
    Running,
    Waiting { slot: Slot, instruction: Arc<Instruction> },
    Finished,
    Failed,
}

impl<'a, E> Fabric<'a, E> {
    fn new(n_ranks: usize, tier_of: &'a TierOf<'a>) -> Self {
        let state = State {
            mail: (0..n_ranks).map(|_| BTreeMap::new()).collect(),
            status: (0..n_ranks).map(|_| Status::Running).collect(),
            n_running: n_ranks,
            last: vec![None; n_ranks],
            failures: BTreeMap::new(),
            verdict: None,
        };
        Self { state: Mutex::new(state), bells: (0..n_ranks).map(|_| Condvar::new()).collect(), tier_of }
    }

    /// The state stays consistent when a thread dies: no code of the ranks runs under the lock.
    fn lock(&self) -> MutexGuard<'_, State<E>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn post(&self, from: usize, to: usize, message: Message<E>) -> Result<(), ExecutorError> {
        let mut state = self.lock();
        state.check_running(from)?;
        let slot = Slot::new(from, &message.instruction);
        if matches!(&state.status[to], Status::Waiting { slot: wanted, .. } if *wanted == slot) {
            state.status[to] = Status::Running;
            state.n_running += 1;
            self.bells[to].notify_one();
        }
        state.mail[to].entry(slot).or_default().push_back(message);
        Ok(())
    }

    fn take(
        &self,
        rank: usize,
        from: usize,
        instruction: &Arc<Instruction>,
    ) -> Result<Message<E>, ExecutorError> {
        let slot = Slot::new(from, instruction);
        let mut state = self.lock();
        loop {
            state.check_running(rank)?;
            if let Some(message) = state.next_mail(rank, &slot) {
                return Ok(message);
            }
            if matches!(state.status[rank], Status::Running) {
                state.status[rank] =
                    Status::Waiting { slot: slot.clone(), instruction: Arc::clone(instruction) };
                state.n_running -= 1;
                self.settle(&mut state);
            } else {
                state = self.bells[rank].wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// A rank runs no more: it has finished, or failed with an error. Only its first failure counts.
    fn leave(&self, state: &mut State<E>, rank: usize, failure: Option<ExecutorError>) {
        if matches!(state.status[rank], Status::Running) {
            state.n_running -= 1;
        }
        match failure {
            Some(error) => {
                state.status[rank] = Status::Failed;
                state.failures.entry(rank).or_insert(error);
            }
            None if state.failures.contains_key(&rank) => {}
            None => state.status[rank] = Status::Finished,
        }
        self.settle(state);
    }

    /// The ranks from `first` on have no thread.
    fn fail_unstarted(&self, first: usize, reason: &str) {
        let n_ranks = self.bells.len();
        let mut state = self.lock();
        for rank in first..n_ranks {
            let error = ExecutorError::NoThread { rank: first, n_ranks, reason: reason.to_owned() };
            self.leave(&mut state, rank, Some(error));
        }
    }

    /// Once no rank can run, decides whether the run has failed, and tells those who wait.
    fn settle(&self, state: &mut State<E>) {
        if state.n_running > 0 || state.verdict.is_some() {
            return;
        }
        state.verdict = match state.failures.values().next() {
            Some(error) => Some(error.clone()),
            None => state.deadlock(),
        };
        if state.verdict.is_some() {
            self.bells.iter().for_each(Condvar::notify_one);
        }
    }

    /// How the run went, after all threads have ended.
    fn outcome(&self) -> Result<(), ExecutorError> {
        let state = self.lock();
        if let Some(error) = &state.verdict {
            return Err(error.clone());
        }
        for (rank, mail) in state.mail.iter().enumerate() {
            if let Some((slot, message)) = mail.iter().find_map(|(slot, queue)| Some((slot, queue.front()?)))
            {
                let instruction = Box::new(message.instruction.as_ref().clone());
                return Err(ExecutorError::Unread { rank, from: slot.from, instruction });
            }
        }
        Ok(())
    }
}

impl<E> State<E> {
    fn check_running(&self, rank: usize) -> Result<(), ExecutorError> {
        match self.verdict.as_ref().or_else(|| self.failures.get(&rank)) {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    fn next_mail(&mut self, rank: usize, slot: &Slot) -> Option<Message<E>> {
        let queue = self.mail[rank].get_mut(slot)?;
        let message = queue.pop_front();
        if queue.is_empty() {
            self.mail[rank].remove(slot);
        }
        message
    }

    /// The deadlock, if a rank waits although none runs.
    fn deadlock(&self) -> Option<ExecutorError> {
        let mut waiting: BTreeMap<usize, Waiting> = BTreeMap::new();
        let mut finished = Vec::new();
        for (rank, status) in self.status.iter().enumerate() {
            match status {
                Status::Waiting { slot, instruction } => {
                    let instruction = instruction.as_ref().clone();
                    let unread = self.unread(rank, slot.from);
                    waiting.insert(rank, Waiting { rank, from: slot.from, instruction, unread });
                }
                Status::Finished => finished.push(rank),
                Status::Running | Status::Failed => {}
            }
        }
        let first = *waiting.keys().next()?;
        let mut waiting_in_order = Vec::with_capacity(waiting.len());
        for rank in root_cause(first, &waiting) {
            waiting_in_order.extend(waiting.remove(&rank));
        }
        waiting_in_order.extend(waiting.into_values());
        Some(ExecutorError::Deadlock { waiting: waiting_in_order, finished })
    }

    /// What `from` has sent to `rank` and `rank` has not received.
    fn unread(&self, rank: usize, from: usize) -> Vec<Instruction> {
        let queues = self.mail[rank].iter().filter(|(slot, _)| slot.from == from);
        queues.flat_map(|(_, queue)| queue).map(|message| message.instruction.as_ref().clone()).collect()
    }
}

/// Follows who waits for whom from `first` until a circle closes (the circle is the cause), or ends at a rank that
/// has finished (the cause is who waits for it).
fn root_cause(first: usize, waiting: &BTreeMap<usize, Waiting>) -> Vec<usize> {
    let mut path = vec![first];
    let mut rank = first;
    while let Some(next) = waiting.get(&rank).map(|entry| entry.from) {
        if let Some(start) = path.iter().position(|&seen| seen == next) {
            return path.split_off(start);
        }
        if !waiting.contains_key(&next) {
            return vec![rank];
        }
        path.push(next);
        rank = next;
    }
    path
}

#[cfg(test)]
mod tests;
