//! A plan in the literature's words, as files and tables have it.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A plan in the literature's words. The degrees of the dense layers multiply to the devices of a stage:
/// `dp * cp * tp * same`; `ep` and `etp` cut the experts over the same devices once more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Roles {
    /// Data parallel: axes on the batch.
    pub dp: u64,
    /// Tensor parallel: axes on a loop of the weights (Shoeybi et al. 2019, arXiv 1909.08053).
    pub tp: u64,
    /// Megatron's sequence parallel: the stream is cut along the sequence on a tensor axis (Korthikanti et al. 2022,
    /// arXiv 2205.05198).
    pub sequence_parallel: bool,
    /// Context parallel: axes on the sequence of everything outside attention.
    pub cp: u64,
    /// How attention sees the whole sequence; absent without context parallelism.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<Context>,
    /// Expert parallel: axes on the experts.
    pub ep: u64,
    /// Expert tensor parallel: axes on the other loops of the experts' weights.
    pub etp: u64,
    /// Pipeline stages.
    pub pp: u64,
    /// Virtual stages of each pipeline rank.
    pub vpp: u64,
    /// Where the states of the parameters are cut.
    pub zero: Zero,
    /// Whether the host holds, in its memory or on its drives, and updates optimizer states.
    #[serde(default, skip_serializing_if = "Offload::is_none")]
    pub offload: Offload,
    /// Whether those states lie on the drives of the host.
    #[serde(default, skip_serializing_if = "OnNvme::is_none")]
    pub optimizer_on_nvme: OnNvme,
    /// Whether the host holds what layers keep for backward.
    #[serde(default, skip_serializing_if = "OnHost::is_none")]
    pub kept_on_host: OnHost,
    /// Whether the host holds parameters between uses.
    #[serde(default, skip_serializing_if = "OnHost::is_none")]
    pub parameters_on_host: OnHost,
    /// What is computed again in backward.
    pub recompute: RecomputeRole,
    /// Sequences of one micro-batch on one data-parallel replica.
    pub micro_batch: u64,
    /// Micro-batches of a step; of the average replica, where they run unequal shares.
    pub accumulation: u64,
    /// Least and most micro-batches of a replica, where they run unequal shares.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shares: Option<[u64; 2]>,
    /// Devices over which the vocabulary of the loss is cut.
    pub vocabulary_parallel: u64,
    /// Devices that compute the same in the dense layers.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub same: u64,
}

fn one() -> u64 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
fn is_one(degree: &u64) -> bool {
    *degree == 1
}

/// How attention sees keys that other devices hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Context {
    /// Keys and values are gathered (Dubey et al. 2024, arXiv 2407.21783, section 3.3.2).
    Gather,
    /// Sequence and heads are exchanged (Jacobs et al. 2023, arXiv 2309.14509).
    Ulysses,
    /// Blocks of keys and values travel round a ring (Liu et al. 2023, arXiv 2310.01889).
    Ring,
    /// Gathered keys and exchanged heads, on different axes.
    GatherAndUlysses,
    /// A ring and exchanged heads, on different axes (Fang and Zhao 2024, arXiv 2405.07719).
    RingAndUlysses,
    /// A ring, and keys gathered over another axis.
    RingAndGather,
    /// All three.
    RingGatherAndUlysses,
}

/// Where the states of the parameters are cut (Rajbhandari et al. 2020, arXiv 1910.02054).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Zero {
    /// 0 nothing, 1 the optimizer state, 2 the gradient too, 3 the parameter too.
    pub stage: u8,
    /// Devices over which they are cut, where these are fewer than hold the same weights (HSDP, MiCS).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hybrid: Option<u64>,
}

/// What the host's memory holds of the states (Ren et al. 2021, arXiv 2101.06840).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Offload {
    /// Nothing.
    #[default]
    None,
    /// Optimizer states of some parameters.
    Some,
    /// Optimizer states of all parameters.
    Optimizer,
}

/// What the drives of nodes hold of the states (Rajbhandari et al. 2021, arXiv 2104.07857, section 5.1.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OnNvme {
    /// Nothing.
    #[default]
    None,
    /// Some of the optimizer states that hosts update.
    Some,
    /// All of these.
    All,
}

impl OnNvme {
    /// True where drives hold nothing.
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }
}

/// Of which layers the host's memory holds what backward needs (Rhu et al. 2016, arXiv 1602.08124), or the parameters
/// between uses (Rajbhandari et al. 2021, arXiv 2104.07857).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OnHost {
    /// None.
    #[default]
    None,
    /// Some of those between embedding and head.
    Some,
    /// All of those.
    All,
}

impl OnHost {
    /// True where the host holds nothing.
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }
}

impl Offload {
    /// True where the host holds nothing.
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }
}

/// What is computed again in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RecomputeRole {
    /// Nothing.
    None,
    /// Some operators, or some layers.
    Selective,
    /// Every layer from its input.
    Full,
}

impl Roles {
    /// The same where replicas run such shares of the micro-batches; none where all run as many.
    #[must_use]
    pub fn with_shares(self, shares: &[u64]) -> Self {
        let ends = shares.iter().min().zip(shares.iter().max());
        Self { shares: ends.map(|(&least, &most)| [least, most]), ..self }
    }

    /// What the host's memory and drives hold, in words that follow the degrees; nothing where it holds nothing.
    pub fn on_host(&self) -> String {
        let optimizer = match (self.offload, self.optimizer_on_nvme) {
            (Offload::None, _) => "",
            (Offload::Some, OnNvme::None) => ", some optimizer states on the host",
            (Offload::Some, OnNvme::Some) => ", some optimizer states on the host and on nvme",
            (Offload::Some, OnNvme::All) => ", some optimizer states on nvme",
            (Offload::Optimizer, OnNvme::None) => ", optimizer on the host",
            (Offload::Optimizer, OnNvme::Some) => ", optimizer on the host and on nvme",
            (Offload::Optimizer, OnNvme::All) => ", optimizer on nvme",
        };
        let of_layers = |what: &str, held: OnHost| match held {
            OnHost::None => String::new(),
            OnHost::Some => format!(", {what} of some layers on the host"),
            OnHost::All => format!(", {what} on the host"),
        };
        let activations = of_layers("activations", self.kept_on_host);
        let parameters = of_layers("parameters", self.parameters_on_host);
        format!("{optimizer}{activations}{parameters}")
    }
}

impl fmt::Display for Roles {
    /// One line: degrees above one, then what is always said.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let degrees = [
            ("dp", self.dp),
            ("cp", self.cp),
            ("tp", self.tp),
            ("ep", self.ep),
            ("etp", self.etp),
            ("pp", self.pp),
            ("vpp", self.vpp),
            ("same", self.same),
        ];
        for (name, degree) in degrees.into_iter().filter(|(_, degree)| *degree > 1) {
            write!(f, "{name} {degree}")?;
            match (name, self.context) {
                ("tp", _) if self.sequence_parallel => write!(f, " sp")?,
                ("cp", Some(Context::Gather)) => write!(f, " gather")?,
                ("cp", Some(Context::Ulysses)) => write!(f, " ulysses")?,
                ("cp", Some(Context::Ring)) => write!(f, " ring")?,
                ("cp", Some(Context::GatherAndUlysses)) => write!(f, " gather and ulysses")?,
                ("cp", Some(Context::RingAndUlysses)) => write!(f, " ring and ulysses")?,
                ("cp", Some(Context::RingAndGather)) => write!(f, " ring and gather")?,
                ("cp", Some(Context::RingGatherAndUlysses)) => write!(f, " ring, gather and ulysses")?,
                _ => {}
            }
            write!(f, ", ")?;
        }
        write!(f, "ZeRO-{}", self.zero.stage)?;
        if let Some(devices) = self.zero.hybrid {
            write!(f, " over {devices}")?;
        }
        f.write_str(&self.on_host())?;
        let recompute = match self.recompute {
            RecomputeRole::None => "none",
            RecomputeRole::Selective => "selective",
            RecomputeRole::Full => "full",
        };
        write!(f, ", recompute {recompute}, micro-batch {} x ", self.micro_batch)?;
        match self.shares {
            None => write!(f, "{}", self.accumulation),
            Some([least, most]) => write!(f, "{least} to {most}"),
        }
    }
}
