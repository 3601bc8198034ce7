//! Steps, layers and operators that were measured by the project's own script on one device, against their prices.
//!
//! `fixtures/measured` has the script and its tables. Nothing is fitted to them; what constants were read off them says
//! so where it stands, and steps that were measured after that are told apart.
//!
//! ```text
//! layer = (step of two layers) - (step of one), forward and backward each; both with launches that the device waits for; what it
//!         keeps, less its states
//! ```

use cost_model::Constants;
use ir::plan::prediction::Prediction;
use ir::units::GIB;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::case::Case;
use crate::components::{ComponentReport, measured_components};
use crate::express::Reason;
use crate::memory::allocated;
use crate::row::{Row, read_as};
use crate::score::Pair;

/// Name of the source.
const SOURCE: &str = "pytorch-h200";

/// Steps of the script.
const STEPS: &str = include_str!("../../fixtures/measured/steps.csv");

/// Bytes of the states of a parameter, as the script keeps them: bf16, and fp32 for gradient, value and both moments.
const STATE_BYTES: f64 = 18.0;

/// What steps and layers of the script have in common.
#[derive(Clone, Debug, PartialEq, Deserialize)]
struct Run {
    shape: String,
    kernels: String,
    attention: String,
    recompute: String,
    seq: u64,
    micro_batch: u64,
    arch: String,
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    ffn: u64,
}

/// A step of the script.
#[derive(Clone, Debug, PartialEq, Deserialize)]
struct Step {
    #[serde(flatten)]
    run: Run,
    micro_batches: u64,
    held_out: u8,
    layers: u64,
    vocab: u64,
    tied: u8,
    step_s: f64,
    peak_allocated_bytes: f64,
}

/// A layer of the script.
#[derive(Clone, Debug, PartialEq, Deserialize)]
struct Layer {
    #[serde(flatten)]
    run: Run,
    forward_us: f64,
    backward_us: f64,
    kept_bytes: f64,
}

/// A step, measured and predicted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepReport {
    /// Model, kernels, attention, recomputation, tokens of a sequence by sequences of a micro-batch by micro-batches.
    pub id: String,
    /// Whether it was measured after constants were read off the others.
    pub held_out: bool,
    /// Seconds.
    pub time: Pair,
    /// Peak of allocated memory, GiB.
    pub memory: Pair,
}

/// A layer, measured and predicted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerReport {
    /// Model, kernels, attention, recomputation, tokens of a sequence by sequences.
    pub id: String,
    /// Tokens of the micro-batch.
    pub tokens: u64,
    /// Seconds of forward on the device.
    pub forward: Pair,
    /// Seconds of backward on the device, with what is computed again.
    pub backward: Pair,
    /// Seconds of both, with launches that the device waits for.
    pub both: Pair,
    /// GiB kept between them.
    pub kept: Pair,
}

/// All that was measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Whole steps.
    pub steps: Vec<StepReport>,
    /// Single layers.
    pub layers: Vec<LayerReport>,
    /// Operators by kind.
    pub operators: Vec<ComponentReport>,
}

/// Prices all of it.
///
/// # Errors
/// Why a row of the shipped tables has no price.
pub fn measured(constants: &Constants) -> Result<Measured, Reason> {
    let steps: Vec<Step> = table(STEPS);
    let layers: Vec<Layer> = table(include_str!("../../fixtures/measured/layers.csv"));
    Ok(Measured {
        steps: steps.par_iter().map(|step| of_step(step, constants)).collect::<Result<_, _>>()?,
        layers: layers.par_iter().map(|layer| of_layer(layer, constants)).collect::<Result<_, _>>()?,
        operators: measured_components(constants),
    })
}

fn table<T: serde::de::DeserializeOwned>(text: &str) -> Vec<T> {
    read_as(text).expect("a test reads the embedded tables")
}

fn of_step(step: &Step, constants: &Constants) -> Result<StepReport, Reason> {
    let row = step.row();
    let prediction = priced(&row, constants)?;
    Ok(StepReport {
        id: row.id,
        held_out: step.held_out == 1,
        time: Pair { measured: step.step_s, predicted: prediction.step_time_s.0 },
        memory: Pair { measured: step.peak_allocated_bytes / GIB, predicted: allocated(&prediction) / GIB },
    })
}

fn of_layer(layer: &Layer, constants: &Constants) -> Result<LayerReport, Reason> {
    let one = priced(&layer.step(1).row(), constants)?;
    let two = priced(&layer.step(2).row(), constants)?;
    let more = |of: &dyn Fn(&Prediction) -> f64| of(&two) - of(&one);
    let [forward, backward] = [layer.forward_us, layer.backward_us].map(|us| us * 1e-6);
    let computing = more(&|p| (p.breakdown.compute_backward_s + p.breakdown.recompute_s).0);
    let kept = more(&allocated) - STATE_BYTES * layer.parameters();
    Ok(LayerReport {
        id: layer.run.id(),
        tokens: layer.run.seq * layer.run.micro_batch,
        forward: Pair { measured: forward, predicted: more(&|p| p.breakdown.compute_forward_s.0) },
        backward: Pair { measured: backward, predicted: computing },
        both: Pair {
            measured: forward + backward,
            predicted: more(&|p| (p.step_time_s - p.breakdown.optimizer_s).0),
        },
        kept: Pair { measured: layer.kept_for_backward() / GIB, predicted: kept / GIB },
    })
}

fn priced(row: &Row, constants: &Constants) -> Result<Prediction, Reason> {
    let case = Case::new(row, constants)?;
    case.price(constants).ok_or_else(|| Reason::Plan("the plan cannot be priced".into()))
}

impl Step {
    /// A run on one device by the script's software.
    fn row(&self) -> Row {
        let run = &self.run;
        Row {
            id: format!("{}x{}", run.id(), self.micro_batches),
            source: SOURCE.into(),
            tier: "unseen".into(),
            complete: 2,
            stack: if run.kernels == "compiled" { "fsdp-compiled" } else { "fsdp" }.into(),
            date: "2026-11".into(),
            arch: run.arch.clone(),
            layers: self.layers,
            hidden: run.hidden,
            heads: run.heads,
            kv_heads: Some(run.kv_heads),
            head_dim: Some(run.hidden / run.heads),
            ffn: Some(run.ffn),
            activation: if run.arch == "gpt" { "gelu" } else { "swiglu" }.into(),
            vocab: Some(self.vocab),
            tied: Some(self.tied),
            seq: run.seq,
            device: "h200-sxm".into(),
            devices: 1,
            node: 1,
            tp: Some(1),
            pp: Some(1),
            dp: Some(1),
            cp: Some(1),
            ep: Some(1),
            vpp: Some(1),
            micro_batch: Some(run.micro_batch),
            global_batch: Some(run.micro_batch * self.micro_batches),
            sequence_parallel: "0".into(),
            recompute: run.recompute.clone(),
            zero: "0".into(),
            precision: "bf16".into(),
            attention: run.attention.clone(),
            schedule: "none".into(),
            step_s: Some(self.step_s),
            peak_memory_gb: Some(self.peak_allocated_bytes / GIB),
            memory_kind: "GiB max allocated".into(),
            ..Row::default()
        }
    }
}

impl Run {
    /// Model, kernels, attention, recomputation, tokens of a sequence by sequences of a micro-batch.
    fn id(&self) -> String {
        let Self { shape, kernels, attention, recompute, seq, micro_batch, .. } = self;
        format!("{shape} {kernels} {attention} {recompute} {seq}x{micro_batch}")
    }
}

impl Layer {
    /// One step of so many such layers below a small vocabulary, whose times were not measured.
    fn step(&self, layers: u64) -> Step {
        const VOCABULARY: u64 = 1024;
        Step {
            run: self.run.clone(),
            micro_batches: 1,
            held_out: 0,
            layers,
            vocab: VOCABULARY,
            tied: 1,
            step_s: 1.0,
            peak_allocated_bytes: 0.0,
        }
    }

    /// Weights, biases and norms of the layer.
    fn parameters(&self) -> f64 {
        let [h, f] = [self.run.hidden, self.run.ffn].map(|n| n as f64);
        let kv = h / self.run.heads as f64 * self.run.kv_heads as f64;
        let products = 2.0 * h * h + 2.0 * h * kv;
        match self.run.arch.as_str() {
            "gpt" => products + 2.0 * h * f + (2.0 * h + 2.0 * kv) + (f + h) + 4.0 * h,
            _ => products + 3.0 * h * f + 2.0 * h,
        }
    }

    /// Bytes kept from one layer of a row of such: what the layer yields was held where it was measured, and stays
    /// where the next one keeps what it is given. Norms that are put together from several operators keep that in fp32
    /// instead.
    fn kept_for_backward(&self) -> f64 {
        let stream = 2.0 * (self.run.seq * self.run.micro_batch * self.run.hidden) as f64;
        let is_kept =
            self.run.recompute == "full" || self.run.kernels == "compiled" || self.run.arch == "gpt";
        self.kept_bytes - if is_kept { 0.0 } else { stream }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;
    use crate::score::Errors;
    use crate::stack::calibrated;

    static SHIPPED: LazyLock<Measured> = LazyLock::new(|| measured(&Constants::load()).unwrap());

    fn rows() -> Vec<Row> {
        table::<Step>(STEPS).iter().map(Step::row).collect()
    }

    #[test]
    fn every_row_of_the_tables_is_priced() {
        let found = &*SHIPPED;
        assert_eq!((found.steps.len(), found.layers.len()), (37, 35));
        assert_eq!(found.steps.iter().filter(|step| step.held_out).count(), 12);
        for step in rows() {
            assert_eq!(step.check(), Ok(()), "{}", step.id);
        }
        for kind in
            ["gemm forward", "gemm weight-gradient", "attention both, current", "grouped-gemm", "host-link"]
        {
            assert!(found.operators.iter().any(|one| one.kind.starts_with(kind)), "{kind}");
        }
    }

    /// Of three steps one waits for the host: it launches in half the time that is shipped, and other steps that wait
    /// for it are nearer.
    #[test]
    fn a_run_that_waits_for_the_host_says_how_fast_that_is() {
        let shipped = Constants::load();
        let case = |id: &str| {
            let row = rows().into_iter().find(|row| row.id == id).unwrap();
            Case::new(&row, &shipped).unwrap()
        };
        let runs = [
            case("gpt2-xl eager flash-2 none 1024x1x2"),
            case("llama-8b-16l eager flash-2 none 4096x2x2"),
            case("llama-1b compiled flash-2 none 4096x4x2"),
        ];
        let found = calibrated(&runs.iter().collect::<Vec<_>>(), &shipped).fit.constants;
        let launch = found.get("launch_s").unwrap() / shipped.get("launch_s").unwrap();
        assert!((0.4..0.55).contains(&launch), "{launch}");
        for id in ["gpt2-124m eager flash-2 none 1024x1x2", "gpt2-124m eager flash-2 none 1024x4x2"] {
            let other = case(id);
            let off = |constants: &Constants| (other.predicted(constants) / other.measured).ln();
            assert!(off(&found) < 0.6 * off(&shipped), "{id}");
        }
    }

    #[test]
    fn peaks_of_memory_are_within_three_per_cent() {
        let found = &*SHIPPED;
        for step in &found.steps {
            assert!(step.memory.error().abs() < 0.03, "{}: {:?}", step.id, step.memory);
        }
    }

    #[test]
    fn layers_keep_what_was_measured() {
        let found = &*SHIPPED;
        let kept: Vec<Pair> = found.layers.iter().map(|layer| layer.kept).collect();
        let errors = Errors::of(&kept);
        assert!(errors.mean < 0.02 && errors.max < 0.07, "{errors:?}");
    }

    #[test]
    fn steps_that_had_no_part_in_any_constant_are_predicted() {
        let found = &*SHIPPED;
        let held_out: Vec<Pair> =
            found.steps.iter().filter(|step| step.held_out).map(|step| step.time).collect();
        let errors = Errors::of(&held_out);
        assert!(errors.mean < 0.05 && errors.max < 0.12, "{errors:?}");
    }
}
