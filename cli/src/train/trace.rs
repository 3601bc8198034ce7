//! What every rank did, and when, as a trace: the JSON array format of Chrome's trace viewer, which Perfetto reads.
//!
//! A stage is a process, a rank a thread; times are microseconds since the plan began. The format: "Trace Event
//! Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use executor::observe::{Activity, Moved, Observer};
use ir::schedule::Section;
use ir::shrink::Shrunk;
use serde_json::{Value, json};

use crate::failure::Failure;

/// Something that a rank did.
struct Span {
    name: String,
    category: &'static str,
    start: Duration,
    /// Nothing while it lasts.
    end: Option<Duration>,
    /// What else there is to say.
    details: Value,
}

/// What one rank did, in the order in which it began, and what it has not ended.
#[derive(Default)]
struct Thread {
    spans: Vec<Span>,
    open: Vec<usize>,
}

/// A trace in the making.
pub(super) struct Trace {
    began: Instant,
    ranks: Vec<Mutex<Thread>>,
}

impl Trace {
    /// A trace of so many ranks that begins now.
    pub(super) fn new(n_ranks: usize) -> Self {
        #[expect(clippy::disallowed_methods, reason = "a trace says when; nothing depends on it")]
        let began = Instant::now();
        Self { began, ranks: (0..n_ranks).map(|_| Mutex::default()).collect() }
    }

    fn thread(&self, rank: usize) -> Option<MutexGuard<'_, Thread>> {
        // What a rank that panicked has told is still true.
        self.ranks.get(rank).map(|thread| thread.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The document.
    pub(super) fn json(&self, small: &Shrunk) -> Result<String, Failure> {
        let place = |rank: usize| small.plan.seat(rank as u64);
        let mut events = Vec::new();
        for rank in 0..self.ranks.len() {
            let (stage, device) = place(rank);
            if device == 0 {
                events.push(label("process_name", (stage, rank), &format!("stage {stage}")));
            }
            let mesh = small.plan.mesh_of(stage);
            let at = mesh.coordinates(device);
            let axes = mesh.axes.iter().zip(at).map(|(axis, at)| format!(", {} {at}", axis.name));
            let name = format!("rank {rank}{}", axes.collect::<String>());
            events.push(label("thread_name", (stage, rank), &name));
        }
        for rank in 0..self.ranks.len() {
            let Some(thread) = self.thread(rank) else { continue };
            let (stage, _) = place(rank);
            events.extend(thread.spans.iter().map(|span| {
                let end = span.end.unwrap_or(span.start);
                json!({
                    "name": span.name, "cat": span.category, "ph": "X", "pid": stage, "tid": rank,
                    "ts": micros(span.start), "dur": micros(end) - micros(span.start), "args": span.details
                })
            }));
        }
        let document = json!({ "traceEvents": events, "displayTimeUnit": "ms" });
        let text = serde_json::to_string(&document);
        text.map(|text| text + "\n").map_err(|error| Failure::bug(format!("no JSON form: {error}")))
    }
}

fn micros(time: Duration) -> f64 {
    // Whole nanoseconds: differences of times stay what they are.
    time.as_nanos() as f64 / 1e3
}

fn label(what: &str, (process, thread): (u64, usize), name: &str) -> Value {
    json!({ "name": what, "ph": "M", "pid": process, "tid": thread, "args": { "name": name } })
}

impl Observer for Trace {
    fn begins(&self, rank: usize, activity: Activity<'_>) {
        let Some(mut thread) = self.thread(rank) else { return };
        let (name, category, details) = described(activity);
        let at = thread.spans.len();
        thread.open.push(at);
        thread.spans.push(Span { name, category, start: self.began.elapsed(), end: None, details });
    }

    fn ends(&self, rank: usize, moved: Moved) {
        let Some(mut thread) = self.thread(rank) else { return };
        let now = self.began.elapsed();
        let Some(at) = thread.open.pop() else { return };
        let span = &mut thread.spans[at];
        span.end = Some(now);
        span.details["sent_bytes"] = moved.sent.into();
        span.details["received_bytes"] = moved.received.into();
    }
}

/// Name, category and details of something that a rank does.
fn described(activity: Activity<'_>) -> (String, &'static str, Value) {
    match activity {
        Activity::Action { step, action, chunk } => {
            let (letter, category) = match action.section {
                Section::Forward => ('F', "forward"),
                Section::Backward => ('B', "backward"),
                Section::BackwardInput => ('I', "backward"),
                Section::BackwardWeight => ('W', "backward"),
            };
            let stage = action.virtual_stage;
            let suffix = if stage == 0 { String::new() } else { format!(".{stage}") };
            let details = json!({
                "step": step, "micro_batch": action.micro_batch, "virtual_stage": stage, "chunk": chunk
            });
            (format!("{letter}{}{suffix}", action.micro_batch), category, details)
        }
        Activity::Update { step } => ("update".into(), "update", json!({ "step": step })),
        Activity::Communication { kind, algorithm, tag } => {
            let details = json!({ "for": &**tag.label(), "algorithm": algorithm.name(), "seq": tag.seq() });
            (kind.name().into(), "communication", details)
        }
    }
}
