//! When the actions of a table ran.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Action;
use crate::units::Seconds;

/// One action with its time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Span {
    /// What ran.
    pub action: Action,
    /// When it started.
    pub start_s: Seconds,
    /// When its computation ended.
    pub end_s: Seconds,
}

/// When every action of a table ran.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Timeline {
    /// End of the last action of any rank.
    pub makespan_s: Seconds,
    /// Time from step to step where every rank goes on to the next by itself: the longest from a rank's first action to
    /// its last. Less than the makespan where ranks that start late also end late.
    pub period_s: Seconds,
    /// The actions of each rank, in order.
    pub ranks: Vec<RankTimeline>,
}

/// When every action of one rank ran, and where its time went: computing, sending and bubble add up to the makespan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RankTimeline {
    /// Its actions, in order.
    pub spans: Vec<Span>,
    /// Time in forwards and backwards.
    pub busy_s: Seconds,
    /// Time held up by its own transfers where these do not overlap.
    pub sending_s: Seconds,
    /// The rest: waiting for other ranks.
    pub bubble_s: Seconds,
}
