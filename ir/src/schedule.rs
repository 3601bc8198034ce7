//! Pipeline schedules as tables of actions: what each pipeline rank runs, in which order.
//!
//! A schedule knows order, not time: pricing and simulating a table is the cost model's business. A schedule is two
//! things: a [`Placement`], which says what rank holds which chunk of the model, and one small function that writes its
//! table (`tables`, `listed`, `v_shaped`). `check` judges any table without knowing who wrote it, a user's too.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

mod placement;
mod error;
mod check;
mod graph;
mod tables;
mod listed;
mod v_shaped;
mod text;
mod timeline;
#[cfg(test)]
mod tests;

pub use check::{
    InFlight, TableShape, check_table, dependency_order, in_dependency_order, in_flight, in_graph_order,
    overtaken, peak_in_flight,
};
pub use error::ScheduleError;
pub use graph::ChunkGraph;
pub use placement::{Placement, Seat};
pub use text::{TableTextError, parse_row, row_text};
pub use timeline::{RankTimeline, Span, Timeline};

/// The most actions a table may have: 128 MiB of them. The largest published run has well below a million.
pub const MAX_ACTIONS: u64 = 1 << 23;

/// A rule that orders the micro-batches of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Schedule {
    /// All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965).
    #[serde(rename = "gpipe")]
    GPipe,
    /// One forward, one backward after a warm-up (Narayanan et al. 2019, PipeDream-Flush: arXiv 2006.09503).
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// 1F1B that warms up twice as far, so that transfers hide (Fan et al. 2021, DAPPLE: arXiv 2007.01045, policy B).
    #[serde(rename = "eager-1f1b")]
    Eager,
    /// 1F1B with a bound on the micro-batches that the first rank takes in before its first backward (DAPPLE, section
    /// 5).
    Dapple {
        /// The bound, at least 1: as many as stages is 1F1B, twice as many eager 1F1B.
        warm_up: u32,
    },
    /// 1F1B over several virtual stages per rank (Narayanan et al. 2021, arXiv 2104.04473).
    Interleaved {
        /// Virtual stages of each rank, at least 2.
        virtual_stages: u32,
    },
    /// All micro-batches through each virtual stage before the next (Lamy-Poirier 2023, arXiv 2211.05953).
    BreadthFirst {
        /// Virtual stages of each rank.
        virtual_stages: u32,
    },
    /// Backward in two parts, the second filling bubbles, in the memory of 1F1B (Qi et al. 2024, arXiv 2401.10241).
    ZbH1,
    /// The same in twice the memory, with no bubble where all parts take equal time (arXiv 2401.10241).
    ZbH2,
    /// Zero bubble over two chunks per rank in a V, in the memory of 1F1B (arXiv 2401.10241 section 6, 2405.15362).
    ZbV,
    /// The V with half the memory of 1F1B (Qi et al. 2024, arXiv 2405.15362).
    VHalf,
    /// The V with a third of the memory of 1F1B (arXiv 2405.15362).
    VMin,
    /// Waves over the ranks, back and forth (Liu et al. 2023, arXiv 2308.15762).
    Hanayo {
        /// Waves; each is two virtual stages.
        waves: u32,
    },
    /// Half of DualPipe: a V in which forward of one chunk meets backward of the other
    /// (`deepseek-ai/DualPipe`, DualPipeV).
    #[serde(rename = "dualpipe-v")]
    DualPipeV,
    /// Two pipelines in opposite directions over two copies of the model (Li and Hoefler 2021, arXiv 2107.06925).
    Chimera,
    /// 1F1B over slices of sequences, the backward of a micro-batch from its last slice to its first (Sun et al. 2024,
    /// arXiv 2406.03488).
    #[serde(rename = "seq1f1b")]
    Seq1F1B {
        /// Slices of every sequence, at least 2.
        slices: u32,
    },
    /// All forwards, then all backwards, over slices of sequences (Li et al. 2021, arXiv 2102.07988).
    #[serde(rename = "terapipe")]
    TeraPipe {
        /// Slices of every sequence, at least 2.
        slices: u32,
    },
    /// The plan brings its own table.
    Custom(Placement),
}

impl Schedule {
    /// What rank holds which chunk.
    pub fn placement(self) -> Placement {
        match self {
            Self::GPipe
            | Self::OneFOneB
            | Self::Eager
            | Self::Dapple { .. }
            | Self::ZbH1
            | Self::ZbH2
            | Self::Seq1F1B { .. }
            | Self::TeraPipe { .. } => Placement::Looped { virtual_stages: 1 },
            Self::Interleaved { virtual_stages } | Self::BreadthFirst { virtual_stages } => {
                Placement::Looped { virtual_stages }
            }
            Self::ZbV | Self::VHalf | Self::VMin | Self::DualPipeV => Placement::Waves { virtual_stages: 2 },
            Self::Hanayo { waves } => Placement::Waves { virtual_stages: waves.saturating_mul(2) },
            Self::Chimera => Placement::Bidirectional,
            Self::Custom(placement) => placement,
        }
    }

    /// Virtual stages that each rank holds.
    pub fn n_virtual_stages(self) -> u32 {
        self.placement().n_virtual_stages()
    }

    /// Slices that every sequence is cut into, one without. Of a table that the plan brings, only the plan tells.
    pub fn n_slices(self) -> u32 {
        match self {
            Self::Seq1F1B { slices } | Self::TeraPipe { slices } => slices,
            Self::GPipe
            | Self::OneFOneB
            | Self::Eager
            | Self::Dapple { .. }
            | Self::Interleaved { .. }
            | Self::BreadthFirst { .. }
            | Self::ZbH1
            | Self::ZbH2
            | Self::ZbV
            | Self::VHalf
            | Self::VMin
            | Self::Hanayo { .. }
            | Self::DualPipeV
            | Self::Chimera
            | Self::Custom(_) => 1,
        }
    }

    /// Micro-batches from which on more of them change nothing about what any rank has under way at most, on so many
    /// stages; `None` where nobody looked.
    pub fn steady_from(self, n_stages: u32) -> Option<u32> {
        matches!(self, Self::ZbH1 | Self::ZbH2 | Self::DualPipeV).then(|| n_stages.saturating_mul(2))
    }

    /// Whether its table runs backward in two parts. Of a table that the plan brings, only the table tells.
    pub fn splits_backward(self) -> bool {
        match self {
            Self::ZbH1 | Self::ZbH2 | Self::ZbV | Self::VHalf | Self::VMin | Self::DualPipeV => true,
            Self::GPipe
            | Self::OneFOneB
            | Self::Eager
            | Self::Dapple { .. }
            | Self::Interleaved { .. }
            | Self::BreadthFirst { .. }
            | Self::Hanayo { .. }
            | Self::Chimera
            | Self::Seq1F1B { .. }
            | Self::TeraPipe { .. }
            | Self::Custom(_) => false,
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::GPipe => write!(f, "gpipe"),
            Self::OneFOneB => write!(f, "1f1b"),
            Self::Eager => write!(f, "eager-1f1b"),
            Self::Dapple { warm_up } => write!(f, "dapple({warm_up})"),
            Self::Interleaved { virtual_stages } => write!(f, "interleaved({virtual_stages})"),
            Self::BreadthFirst { virtual_stages } => write!(f, "breadth-first({virtual_stages})"),
            Self::ZbH1 => write!(f, "zb-h1"),
            Self::ZbH2 => write!(f, "zb-h2"),
            Self::ZbV => write!(f, "zb-v"),
            Self::VHalf => write!(f, "v-half"),
            Self::VMin => write!(f, "v-min"),
            Self::Hanayo { waves } => write!(f, "hanayo({waves})"),
            Self::DualPipeV => write!(f, "dualpipe-v"),
            Self::Chimera => write!(f, "chimera"),
            Self::Seq1F1B { slices } => write!(f, "seq1f1b({slices})"),
            Self::TeraPipe { slices } => write!(f, "terapipe({slices})"),
            Self::Custom(_) => write!(f, "custom"),
        }
    }
}

/// The part of a stage's program that an action runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Section {
    /// Forward of one micro-batch.
    Forward,
    /// Full backward of one micro-batch: input and weight gradients.
    Backward,
    /// Backward as far as the chunk before waits for it: gradients of inputs.
    BackwardInput,
    /// The rest of backward: gradients of weights.
    BackwardWeight,
}

impl Section {
    /// Whether it ends with the gradient that the chunk before waits for.
    pub fn yields_gradient(self) -> bool {
        match self {
            Self::Backward | Self::BackwardInput => true,
            Self::Forward | Self::BackwardWeight => false,
        }
    }
}

/// One entry of a schedule's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct Action {
    /// Pipeline rank that runs it.
    pub rank: u32,
    /// Forward or backward, or which part of backward.
    pub section: Section,
    /// Which of the rank's virtual stages.
    pub virtual_stage: u32,
    /// Which micro-batch of the step.
    pub micro_batch: u32,
    /// Which slice of its sequences, the first where they are not cut.
    #[serde(default, skip_serializing_if = "is_first")]
    pub slice: u32,
}

/// Slice 0 goes without saying.
fn is_first(slice: &u32) -> bool {
    *slice == 0
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let section = match self.section {
            Section::Forward => "forward",
            Section::Backward => "backward",
            Section::BackwardInput => "backward to the input",
            Section::BackwardWeight => "backward to the weights",
        };
        let slice = if self.slice > 0 { format!("slice {} of ", self.slice) } else { String::new() };
        write!(
            f,
            "{section} of {slice}micro-batch {} on virtual stage {}",
            self.micro_batch, self.virtual_stage
        )
    }
}

/// What every rank runs, in order.
///
/// `n_stages` pipeline ranks, `n_micro_batches` per step. Each rank has `2 * m * v` actions, as often as there are
/// slices, and one more for each backward that is split: 1F1B with 2 stages and 2 micro-batches gives rank 0
/// `F0 F1 B0 B1` and rank 1 `F0 B0 F1 B1`.
///
/// # Errors
/// Counts that the schedule has no table for. [`Schedule::Custom`] never has one here: the plan brings it.
pub fn table(
    schedule: Schedule,
    n_stages: u32,
    n_micro_batches: u32,
) -> Result<Vec<Vec<Action>>, ScheduleError> {
    let (placement, n_slices) = (schedule.placement(), schedule.n_slices());
    let shape = TableShape { n_stages, placement, n_micro_batches, n_slices };
    shape.check()?;
    let rows =
        |row: fn(u32, TableShape) -> Vec<Action>| Ok((0..n_stages).map(|rank| row(rank, shape)).collect());
    match schedule {
        Schedule::GPipe | Schedule::BreadthFirst { .. } => rows(tables::breadth_first),
        Schedule::OneFOneB => rows(tables::one_f_one_b),
        Schedule::Eager => rows(tables::eager),
        Schedule::Dapple { warm_up: 0 } => Err(ScheduleError::Empty),
        Schedule::Dapple { warm_up } => {
            Ok((0..n_stages).map(|rank| tables::dapple(rank, warm_up, shape)).collect())
        }
        Schedule::Interleaved { virtual_stages } if virtual_stages < 2 => Err(ScheduleError::NotInterleaved),
        Schedule::Interleaved { .. } if !n_micro_batches.is_multiple_of(n_stages) => {
            Err(ScheduleError::NotAMultiple { n_micro_batches, n_stages })
        }
        Schedule::Interleaved { .. } => rows(tables::interleaved),
        Schedule::ZbH1 => rows(tables::zb_h1),
        Schedule::ZbH2 => rows(tables::zb_h2),
        Schedule::ZbV => v_shaped::zb_v(shape),
        Schedule::VHalf => v_shaped::v_half(shape),
        Schedule::VMin => v_shaped::v_min(shape),
        Schedule::Hanayo { .. } => listed::hanayo(shape),
        Schedule::DualPipeV if u64::from(n_micro_batches) < 2 * u64::from(n_stages) => {
            Err(ScheduleError::TooFewMicroBatches { needed: 2 * u64::from(n_stages), n_micro_batches })
        }
        Schedule::DualPipeV => rows(tables::dualpipe_v),
        Schedule::Chimera => listed::chimera(shape),
        Schedule::Seq1F1B { slices } | Schedule::TeraPipe { slices } if slices < 2 => {
            Err(ScheduleError::NotSliced)
        }
        Schedule::Seq1F1B { .. } => rows(tables::seq_1f1b),
        Schedule::TeraPipe { .. } => rows(tables::terapipe),
        Schedule::Custom(_) => Err(ScheduleError::NoRule),
    }
}
