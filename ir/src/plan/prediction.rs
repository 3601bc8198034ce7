//! What a plan says about itself: predicted figures, how the search went, and what else it looked at.
//!
//! Figures only; how each is computed is the cost model's business. Maps are by name so that a new category or tier
//! does not change the form.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::names::Roles;
use crate::units::{Bytes, Seconds};

/// What the cost model says of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Prediction {
    /// Time of one step.
    pub step_time_s: Seconds,
    /// Between what it may be expected, and why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_time_interval: Option<Interval>,
    /// Its parts, on the slowest stage.
    pub breakdown: Breakdown,
    /// Model FLOPs of a step over step time and devices, in 10^12 FLOP/s.
    pub model_tflops_per_device: f64,
    /// Model FLOPs over peak, attention counted as the full square.
    pub mfu: f64,
    /// Model FLOPs over peak, attention counted as its causal half.
    pub mfu_causal: f64,
    /// FLOPs that the hardware runs, recomputation included, over peak.
    pub hfu: f64,
    /// Tokens trained per second and device.
    pub tokens_per_s_per_device: f64,
    /// Most bytes that any device holds at once.
    pub peak_memory_bytes: Bytes,
    /// Pipeline stages in order.
    pub stages: Vec<StagePrediction>,
    /// Bytes that one device sends per step, by link tier: of the stage whose devices send most over that tier.
    pub bytes_per_tier: BTreeMap<String, Bytes>,
    /// Energy that devices draw in a step, in joules, where the cluster gives watts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy_per_step_joules: Option<f64>,
    /// Price of a step, where the cluster gives prices, in its currency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_per_step: Option<f64>,
    /// Price of 10^12 tokens, of what failures undo included where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_per_trillion_tokens: Option<f64>,
    /// What failures leave of the speed, where the cluster says how often devices fail.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upkeep: Option<Upkeep>,
    /// Coordinates of the outermost axis that run unequal shares of the micro-batches.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<SharePrediction>,
}

/// Coordinates of the outermost axis on the same devices with the same share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SharePrediction {
    /// The coordinates.
    pub coordinates: Vec<u64>,
    /// Their devices, in the order of the stages.
    pub devices: Vec<String>,
    /// Micro-batches of a step that each runs.
    pub n_micro_batches: u64,
    /// Time of these.
    pub pipeline_s: Seconds,
}

/// Checkpoints and failures of a long training.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Upkeep {
    /// Mean time between failures of the whole job.
    pub between_failures_s: Seconds,
    /// Bytes of a checkpoint: parameters and the optimizer's state, once.
    pub checkpoint_bytes: Bytes,
    /// What training waits for one, while devices copy their shares to their hosts.
    pub checkpoint_stall_s: Seconds,
    /// Training between two (Daly 2006), at least until one is in storage.
    pub checkpoint_interval_s: Seconds,
    /// Share of the time that is training which lasts.
    pub goodput: f64,
}

/// Between what a time may be expected: nine of ten are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Interval {
    /// Least time.
    pub least_s: Seconds,
    /// Longest.
    pub most_s: Seconds,
    /// What the prediction rests on, in words.
    pub basis: String,
}

/// Parts of the step time in seconds; together they are the step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Breakdown {
    /// Forward computation.
    pub compute_forward_s: Seconds,
    /// Backward computation.
    pub compute_backward_s: Seconds,
    /// Forward computation run again in backward.
    pub recompute_s: Seconds,
    /// Communication inside forward and backward that nothing hides, by kind.
    pub exposed_communication_s: BTreeMap<String, Seconds>,
    /// Waiting for other stages.
    pub bubble_s: Seconds,
    /// Reduction of gradients that nothing hides, once per step.
    pub gradient_sync_s: Seconds,
    /// Gathering of new parameters that nothing hides, once per step.
    pub parameter_gather_s: Seconds,
    /// Update of the parameters on the devices.
    pub optimizer_s: Seconds,
    /// Update of the parameters on the hosts, and what moves to them and back.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub offload_s: Seconds,
    /// Waiting for links to hosts: what layers keep there, and parameters that they have from there.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub host_links_s: Seconds,
    /// What the host adds: launches that the device waits for, the data loader.
    pub host_s: Seconds,
    /// What has no other name.
    pub other_s: Seconds,
}

impl Breakdown {
    /// Sum of all parts.
    pub fn total(&self) -> Seconds {
        let exposed: Seconds = self.exposed_communication_s.values().copied().sum();
        self.compute_forward_s
            + self.compute_backward_s
            + self.recompute_s
            + exposed
            + self.bubble_s
            + self.gradient_sync_s
            + self.parameter_gather_s
            + self.optimizer_s
            + self.offload_s
            + self.host_links_s
            + self.host_s
            + self.other_s
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
fn is_zero(time: &Seconds) -> bool {
    *time == Seconds::ZERO
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
fn is_none_of_them(bytes: &Bytes) -> bool {
    *bytes == Bytes::ZERO
}

/// Predicted figures of one pipeline stage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StagePrediction {
    /// Layers, embedding and head included.
    pub layers: u64,
    /// Forward of one micro-batch through all its chunks.
    pub forward_s: Seconds,
    /// Backward of one micro-batch through all its chunks, recomputation included.
    pub backward_s: Seconds,
    /// Bytes of one device by category, at the peak.
    pub memory: BTreeMap<String, Bytes>,
    /// Most bytes one device holds at once.
    pub peak_memory_bytes: Bytes,
    /// Bytes one device has.
    pub capacity_bytes: Bytes,
    /// Bytes of one device's states in the memory of its node's host.
    #[serde(default, skip_serializing_if = "is_none_of_them")]
    pub host_memory_bytes: Bytes,
    /// Bytes of one device's states on its node's NVMe drives.
    #[serde(default, skip_serializing_if = "is_none_of_them")]
    pub nvme_bytes: Bytes,
    /// Bytes one device sends per step, by link tier: conversions, parameters, gradients, the stream to its neighbours,
    /// shared parameters.
    #[serde(default)]
    pub bytes_per_tier: BTreeMap<String, Bytes>,
    /// The stage in the literature's words, where stages differ in them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roles: Option<Roles>,
}

/// How a plan was found. Work is counted, never timed, so that the document is the same every time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SearchReport {
    /// Plans in the space: a count that may exceed any integer.
    pub space_size: f64,
    /// Candidates looked at.
    pub n_candidates: u64,
    /// Candidates that a bound excluded.
    pub n_bounded: u64,
    /// Candidates that do not fit in memory.
    pub n_unfit: u64,
    /// Candidates simulated.
    pub n_simulated: u64,
    /// No plan of the space is faster than this, whatever its layers choose.
    pub lower_bound_s: Seconds,
    /// `step time / lower bound - 1`; zero is a proof of optimality within the space.
    pub gap: f64,
    /// Batches of work after which somebody stopped the search; absent where it ended by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped_after: Option<u64>,
    /// The proof, or what the gap leaves open, in words.
    pub proof: String,
    /// The engine whose plans were searched, by its name; absent where all were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// What was ruled out, in the words in which it was said: `zero=3`, `pp`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forbidden: Vec<String>,
}

/// A plan that lost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RunnerUp {
    /// What it is in the literature's words.
    pub roles: Roles,
    /// Its step time, simulated or bounded from below.
    pub step_time_s: Seconds,
    /// Why it lost.
    pub reason: String,
}
