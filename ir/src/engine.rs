//! The software that runs a plan, as far as it moves time and memory: which kernels are fused, what is overlapped,
//! what else is computed.
//!
//! It changes no result that a plan is held to, and `verify` runs none of it. The same plan differs by 10 to 25 %
//! between generations of frameworks, mostly for these reasons.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An engine. The default is a present-day one with fused kernels and overlapped gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Engine {
    /// Kernels of operators that are bound by memory.
    pub kernels: Kernels,
    /// Generation of the tiled attention kernel.
    pub flash: FlashKernel,
    /// Dropout on attention probabilities and on what enters the residual stream.
    pub dropout: Dropout,
    /// Products in chunks beside tensor parallel communication.
    pub tensor_overlap: TensorOverlap,
    /// Gradients reduced and parameters gathered beside computation.
    pub gradient_overlap: GradientOverlap,
    /// What a stage sends to the next one beside computation.
    pub stage_transfers: StageTransfers,
    /// Number format in which gradients are accumulated and reduced.
    pub gradients: GradientFormat,
    /// How much of a layer is run again where nothing of it is kept.
    pub recomputation: Recomputation,
    /// How the loss over the vocabulary is computed.
    pub loss: LossKernel,
    /// Where the products of weight gradients leave them.
    pub accumulation: Accumulation,
    /// How new parameters reach the ranks that do not hold their state.
    pub parameter_spread: ParameterSpread,
    /// What the optimizer copies beside its states.
    #[serde(skip_serializing_if = "Copies::is_none")]
    pub copies: Copies,
    /// How many gradients are reduced in one collective, where they are cut.
    #[serde(skip_serializing_if = "GradientReduction::is_by_layer")]
    pub gradient_reduction: GradientReduction,
    /// Whether a stage holds what it has sent.
    #[serde(skip_serializing_if = "StageOutputs::are_freed")]
    pub stage_outputs: StageOutputs,
    /// How the experts of a device are run.
    #[serde(skip_serializing_if = "Experts::is_together")]
    pub experts: Experts,
    /// How tokens reach experts on other devices.
    #[serde(skip_serializing_if = "Dispatch::is_all_to_all")]
    pub dispatch: Dispatch,
    /// Tokens sent to experts and back beside computation.
    #[serde(skip_serializing_if = "ExchangeOverlap::is_absent")]
    pub exchange_overlap: ExchangeOverlap,
    /// Who launches kernels.
    #[serde(skip_serializing_if = "Launches::are_by_host")]
    pub launches: Launches,
    /// When the libraries of products and attention cores are from.
    #[serde(skip_serializing_if = "Generation::is_current")]
    pub generation: Generation,
}

impl Engine {
    /// Megatron-LM and its forks until 2022: scores materialised, dropout, gradients reduced after the last backward.
    pub const MEGATRON_LM: Self = Self {
        kernels: Kernels::Fused,
        flash: FlashKernel::Second,
        dropout: Dropout::On,
        tensor_overlap: TensorOverlap::Absent,
        gradient_overlap: GradientOverlap::Absent,
        stage_transfers: StageTransfers::Waited,
        gradients: GradientFormat::Full,
        recomputation: Recomputation::Whole,
        loss: LossKernel::Unfused,
        accumulation: Accumulation::Separate,
        parameter_spread: ParameterSpread::Gathered,
        copies: Copies::None,
        gradient_reduction: GradientReduction::ByLayer,
        stage_outputs: StageOutputs::Held,
        experts: Experts::Each,
        dispatch: Dispatch::AllToAll,
        exchange_overlap: ExchangeOverlap::Absent,
        launches: Launches::Host,
        generation: Generation::Before2025,
    };

    /// Megatron-DeepSpeed: the same with DeepSpeed's optimizers and pipeline engine.
    pub const MEGATRON_DEEPSPEED: Self =
        Self { copies: Copies::Buckets, stage_outputs: StageOutputs::HeldInParts, ..Self::MEGATRON_LM };

    /// PyTorch FSDP around plain modules: nothing fused, parameters prefetched.
    pub const FSDP: Self = Self {
        kernels: Kernels::Eager,
        flash: FlashKernel::Second,
        dropout: Dropout::Off,
        tensor_overlap: TensorOverlap::Absent,
        gradient_overlap: GradientOverlap::Beside,
        stage_transfers: StageTransfers::Beside,
        gradients: GradientFormat::Full,
        recomputation: Recomputation::Needed,
        loss: LossKernel::Plain,
        accumulation: Accumulation::Separate,
        parameter_spread: ParameterSpread::Gathered,
        copies: Copies::None,
        gradient_reduction: GradientReduction::ByLayer,
        stage_outputs: StageOutputs::Freed,
        experts: Experts::Each,
        dispatch: Dispatch::AllToAll,
        exchange_overlap: ExchangeOverlap::Absent,
        launches: Launches::Host,
        generation: Generation::Current,
    };

    /// Names of all features, as [`Self::read`] takes them.
    pub fn features() -> Vec<String> {
        let schema = schemars::schema_for!(Self);
        let fields = schema.get("properties").and_then(serde_json::Value::as_object);
        fields.into_iter().flat_map(|all| all.keys()).map(|name| name.replace('_', "-")).collect()
    }

    /// Reads `megatron-lm`, `fsdp,flash=current`, `kernels=eager`: a preset or none, then features that differ from it.
    ///
    /// # Errors
    /// The piece that is no preset and no feature, and what it could be.
    pub fn read(text: &str) -> Result<Self, String> {
        let mut engine = Self::default();
        let mut told = BTreeSet::new();
        for (at, piece) in text.split(',').map(str::trim).enumerate() {
            engine = match (piece.split_once('='), piece) {
                (Some((name, _)), _) if !told.insert(name.trim().replace('_', "-")) => {
                    return Err(format!("`{}` is given twice", name.trim()));
                }
                (Some((name, value)), _) => engine.with(name.trim(), value.trim())?,
                (None, "default") if at == 0 => Self::default(),
                (None, "megatron-lm") if at == 0 => Self::MEGATRON_LM,
                (None, "megatron-deepspeed") if at == 0 => Self::MEGATRON_DEEPSPEED,
                (None, "fsdp") if at == 0 => Self::FSDP,
                (None, _) => {
                    return Err(format!(
                        "expected `default`, `megatron-lm`, `megatron-deepspeed`, `fsdp` first or `feature=value`, found `{piece}`"
                    ));
                }
            };
        }
        Ok(engine)
    }

    fn with(self, name: &str, value: &str) -> Result<Self, String> {
        let plain = |error: serde_json::Error| format!("{name}={value}: {error}");
        if !Self::features().contains(&name.replace('_', "-")) {
            return Err(format!("{name}={value}: there is no feature `{name}`"));
        }
        let mut fields = serde_json::to_value(self).map_err(plain)?;
        fields[name.replace('-', "_")] = value.into();
        serde_json::from_value(fields).map_err(plain)
    }

    /// How rows are put in order of their experts: twice, as where these run one after another, but for an engine that
    /// sends tokens once, which has nothing to sort before it knows their devices.
    pub fn sorting(&self) -> Experts {
        match self.dispatch {
            Dispatch::AllToAll => self.experts,
            Dispatch::PerNode => Experts::Together,
        }
    }

    /// True for the engine of a job that names none.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// What an optimizer copies beside its states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Copies {
    /// Nothing: gradients are reduced and parameters gathered where they lie.
    #[default]
    None,
    /// DeepSpeed: gradients and parameters pass through flat buckets, the update reads an fp32 copy of flattened 16-bit
    /// gradients, and bf16 gradients stay beside their fp32 sums.
    Buckets,
    /// DeepSpeed's bf16 optimizer in the branch that became its pull request 1801 of March 2022: every rank has the
    /// fp32 copy of all parameters, of which it updates its part (deepspeed/runtime/bf16_optimizer.py,
    /// `fp32_groups_flat`: "TODO: Need to only track fp32 params of this partition").
    WholeMaster,
}

/// How many gradients are reduced in one collective, where a device keeps a part of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GradientReduction {
    /// Those of a layer, or of a bucket: then the device has its parts.
    #[default]
    ByLayer,
    /// All, when backward is done: until then the device has them whole (Alpa's `all_reduce_threshold` of 2^60 bytes,
    /// alpa-projects/alpa alpa/shard_parallel/auto_sharding.py).
    AtOnce,
}

impl GradientReduction {
    /// True where gradients are reduced layer by layer.
    pub fn is_by_layer(&self) -> bool {
        *self == Self::ByLayer
    }
}

/// Whether a stage holds what it has sent until the backward of that micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum StageOutputs {
    /// It does not (Korthikanti et al. 2022, arXiv 2205.05198, appendix B; Megatron-Core's
    /// `deallocate_pipeline_outputs`).
    #[default]
    Freed,
    /// It does: Megatron-LM until then.
    Held,
    /// DeepSpeed's pipeline engine: of what tensor parallel ranks all hold each keeps its part. Where there is one,
    /// all, and what was received a second time: forward runs on a copy (deepspeed/runtime/pipe/engine.py,
    /// `_exec_forward_pass`).
    HeldInParts,
}

impl StageOutputs {
    /// True where nothing is held.
    pub fn are_freed(&self) -> bool {
        *self == Self::Freed
    }
}

impl Copies {
    /// True where nothing is copied.
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }
}

/// How the experts of a device are run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Experts {
    /// All in one kernel, to which tokens come sorted; no step of it waits for the host.
    #[default]
    Together,
    /// One after another, each with kernels of its own. Tokens are sorted by expert once more behind the exchange and
    /// back before it, and without a capacity the host reads how many every expert got before it launches what follows
    /// (Megatron-Core's all-to-all dispatcher with Transformer Engine's `GroupedLinear`).
    Each,
}

impl Experts {
    /// True where one kernel runs them all.
    pub fn is_together(&self) -> bool {
        *self == Self::Together
    }
}

/// How tokens reach experts on other devices, and come back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Dispatch {
    /// A copy for every expert that is chosen, each from the device that has the token to the one that has the expert
    /// (Megatron-Core's `alltoall` dispatcher, DeepSpeed-MoE). It is what programs say and the executor runs.
    #[default]
    AllToAll,
    /// A token crosses to a node once and to a device once, however many experts it has there: sent to the device of
    /// the same place in that node, forwarded inside the node while more arrives, and on its way back summed before it
    /// crosses (DeepSeek-V3, arXiv 2412.19437 section 3.2.2; DeepEP and HybridEP, Megatron-Core's `flex` dispatcher).
    PerNode,
}

impl Dispatch {
    /// True where every copy is sent by itself.
    pub fn is_all_to_all(&self) -> bool {
        *self == Self::AllToAll
    }
}

/// Whether tokens are sent to experts and back beside the computation of another micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ExchangeOverlap {
    /// They are not: experts wait for their tokens, and what follows for the experts.
    #[default]
    Absent,
    /// They are: a forward of one micro-batch runs layer by layer with a backward of another, and what one sends
    /// travels while the other computes (Megatron-Core's `overlap_moe_expert_parallel_comm`; DeepSeek-V3's DualPipe).
    Beside,
}

impl ExchangeOverlap {
    /// True where everything waits for tokens.
    pub fn is_absent(&self) -> bool {
        *self == Self::Absent
    }
}

/// Who launches kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Launches {
    /// The host, one after another.
    #[default]
    Host,
    /// The device, from a graph of the whole step (Megatron-Core's `cuda_graph_scope=full_iteration`): nothing waits
    /// for the host, and experts have as much room as their capacity, or a reserve, says.
    Graph,
}

impl Launches {
    /// True where the host launches them.
    pub fn are_by_host(&self) -> bool {
        *self == Self::Host
    }
}

/// When the libraries are from that matrix products and attention cores run in. Those of Hopper became faster by an
/// eighth (products in 16 bits) and by two fifths (attention) once they were made for it; on other families no
/// difference was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Generation {
    /// 2025 and after.
    #[default]
    Current,
    /// Before that.
    #[serde(rename = "before-2025")]
    Before2025,
}

impl Generation {
    /// True for present-day libraries.
    pub fn is_current(&self) -> bool {
        *self == Self::Current
    }
}

/// Kernels of operators that are bound by memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Kernels {
    /// One kernel per group of operators, written by hand or compiled.
    #[default]
    Fused,
    /// One kernel per operator, launched by the interpreter; those that PyTorch puts together from several (RMS norm,
    /// rotary embedding, gated activations) from extension libraries (Apex, flash-attention).
    Libraries,
    /// One kernel per operator, launched by the interpreter, or several, in fp32 where it computes so, where PyTorch
    /// puts it together from simpler ones.
    Eager,
}

/// Generation of the tiled attention kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FlashKernel {
    /// Made for the device: FlashAttention-3 or cuDNN on Hopper.
    #[default]
    Current,
    /// FlashAttention 1 or 2, made for Ampere.
    Second,
}

/// Dropout on attention probabilities and on what enters the residual stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Dropout {
    /// It is applied.
    On,
    /// It is not.
    #[default]
    Off,
}

/// Whether an engine cuts tensor parallel products into chunks that run beside their communication.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TensorOverlap {
    /// It does.
    Chunked,
    /// It does not, but reduces the gradient of a product's operand beside the product that yields that of its weight
    /// (Megatron-LM since 2022).
    Gradients,
    /// It does not: communication shows in full.
    #[default]
    Absent,
}

/// Whether gradients are reduced and parameters gathered beside computation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GradientOverlap {
    /// In buckets, behind the last backward and before the first forward.
    #[default]
    Beside,
    /// After the last backward, in full.
    Absent,
}

/// Whether a rank with several virtual stages sends beside computation; one with a single stage waits anyhow, since
/// what it does next needs what it receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum StageTransfers {
    /// It does, as Megatron-Core's interleaved schedule.
    #[default]
    Beside,
    /// It waits for every send. Of what tensor parallel ranks all hold each sends its part, and the parts are gathered
    /// where they arrive, as Megatron-LM did (arXiv 2104.04473 section 4.1).
    Waited,
}

/// Number format in which gradients are accumulated and reduced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GradientFormat {
    /// fp32, as Megatron's main gradients.
    #[default]
    Full,
    /// The job's own precision.
    Half,
}

/// Where the products of weight gradients leave them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Accumulation {
    /// Added to the accumulator inside the product, as Megatron-Core does; what stands for the gradient elsewhere in
    /// the framework is one 16-bit tensor per weight shape that lives for ever.
    #[default]
    Fused,
    /// In tensors of their own, added afterwards.
    Separate,
}

/// How new parameters reach the ranks that do not hold their state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ParameterSpread {
    /// Every rank holds an even share, and all shares are gathered.
    #[default]
    Gathered,
    /// Every tensor belongs to one rank, which broadcasts it (InternLM/InternEvo `HybridZeroOptimizer`, FairScale's
    /// OSS): a broadcast per tensor, each through all ranks.
    Broadcast,
}

/// How much of a layer is run again where nothing of it is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Recomputation {
    /// What backward needs: neither the last product of a layer nor its communication is.
    #[default]
    Needed,
    /// All of it, as PyTorch's reentrant checkpoints do, and Megatron's.
    Whole,
}

/// How the loss over the vocabulary is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LossKernel {
    /// Eager fp32 cross-entropy: 14 bytes per logit at its peak.
    Plain,
    /// Megatron's vocabulary-parallel cross-entropy: 8 bytes.
    #[default]
    Unfused,
    /// Fused and in place: 4 bytes.
    Fused,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preset_and_features_are_read_and_faults_named() {
        assert_eq!(Engine::read("megatron-lm"), Ok(Engine::MEGATRON_LM));
        let engine = Engine::read("fsdp, flash=current,tensor-overlap=chunked").unwrap();
        let expected =
            Engine { flash: FlashKernel::Current, tensor_overlap: TensorOverlap::Chunked, ..Engine::FSDP };
        assert_eq!(engine, expected);
        let fault = |text: &str| Engine::read(text).unwrap_err();
        assert!(
            fault("kernels=slow")
                .contains("unknown variant `slow`, expected one of `fused`, `libraries`, `eager`")
        );
        assert!(fault("speed=1").contains("there is no feature `speed`"));
        assert!(fault("flash=current,fsdp").contains("found `fsdp`"));
    }
}
