//! Programs: what every device of a stage does for one layer, in single-assignment form.
//!
//! A program has a forward and a backward section, called once per micro-batch, and one update per learned parameter,
//! called once per step. Every placement is decided here; pricing, running and drawing only read it. Recomputation is
//! part of backward: the same instructions as in forward, emitted where a value is first needed.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::collective::{Algorithm, CommunicationClass, Rule};
use crate::conversion::Step;
use crate::graph::{Layer, OpId, TensorId};
use crate::mesh::AxisId;
use crate::op::OpKind;
use crate::sharding::Sharding;
use crate::signature::Signature;
use crate::work::Pass;

/// Position of a value in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub usize);

/// Whether a value is a tensor of the layer or the gradient of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    /// The tensor.
    Primal,
    /// Its gradient.
    Gradient,
}

/// A tensor in one sharding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Value {
    /// The tensor of the layer.
    pub tensor: TensorId,
    /// Itself or its gradient.
    pub side: Side,
    /// Where its parts are.
    pub sharding: Sharding,
}

/// Axes over which a flattened local parameter is cut further, as a bit set in mesh order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AxisSet(pub u8);

impl AxisSet {
    /// No axis.
    pub const EMPTY: Self = Self(0);

    /// A set of the given axes.
    pub fn of(axes: &[AxisId]) -> Self {
        Self(axes.iter().fold(0, |bits, axis| bits | 1 << axis.0))
    }

    /// Axes in mesh order.
    pub fn axes(self) -> Vec<AxisId> {
        (0..8).filter(|i| self.0 >> i & 1 == 1).map(AxisId).collect()
    }

    /// Whether it holds every axis of `other`.
    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// True without axes.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// Where the three states of a parameter live between uses: each a cut of the flattened local block that the operator
/// uses, minor to the axes of that use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Storage {
    /// Cut of the parameter; gathered before each use.
    pub parameter: AxisSet,
    /// Cut of the gradient accumulator; reduced into it every micro-batch. Where it is empty the accumulator is what
    /// backward yields, and is converted once per step.
    pub gradient: AxisSet,
    /// Cut of the optimizer state, where the update runs. Holds the other two.
    pub optimizer: AxisSet,
    /// Which memory holds the optimizer state, and so who updates.
    pub home: StateHome,
}

/// Which memory holds an optimizer state, its fp32 copy of the parameter included.
///
/// Of a state on the host the finished gradient goes down, the host's processors update, and the new parameter comes up
/// in the job's format (Ren et al. 2021, "ZeRO-Offload", arXiv 2101.06840, section 4.1). One on the host's drives is
/// the same, but read before its update and written after it, parameter by parameter (Rajbhandari et al. 2021,
/// "ZeRO-Infinity", arXiv 2104.07857, section 5.2.2).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum StateHome {
    /// The device's own.
    #[default]
    Device,
    /// That of its node's host.
    Host,
    /// NVMe drives of its node, behind the host's memory.
    Nvme,
}

impl StateHome {
    /// True for the device's own memory, which documents need not name.
    pub fn is_device(&self) -> bool {
        *self == Self::Device
    }

    /// Whether the host's processors update.
    pub fn is_updated_by_host(self) -> bool {
        match self {
            Self::Device => false,
            Self::Host | Self::Nvme => true,
        }
    }

    /// The word that text forms have for it; none for the device's.
    pub fn word(self) -> &'static str {
        match self {
            Self::Device => "",
            Self::Host => "host",
            Self::Nvme => "nvme",
        }
    }

    /// The home that a text form names by this word.
    pub fn of_word(word: &str) -> Option<Self> {
        [Self::Host, Self::Nvme].into_iter().find(|home| home.word() == word)
    }
}

impl From<Home> for StateHome {
    fn from(home: Home) -> Self {
        match home {
            Home::Device => Self::Device,
            Home::Host => Self::Host,
        }
    }
}

/// Which memory holds a layer's parameters between uses, or what it keeps for backward.
///
/// What is kept goes down behind forward and comes up before backward (Rhu et al. 2016, "vDNN", arXiv 1602.08124,
/// section 3). Parameters come up for every use (Rajbhandari et al. 2021, "ZeRO-Infinity", arXiv 2104.07857, section
/// 5.1).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Home {
    /// The device's own.
    #[default]
    Device,
    /// That of its node's host.
    Host,
}

impl Home {
    /// True for the device's own memory, which documents need not name.
    pub fn is_device(&self) -> bool {
        *self == Self::Device
    }
}

impl Storage {
    /// Only the parameter is there, in this cut: that of a frozen one.
    pub fn frozen(parameter: AxisSet) -> Self {
        Self { parameter, ..Self::default() }
    }

    /// The three cuts, all states in the device's memory.
    pub const fn on_device(parameter: AxisSet, gradient: AxisSet, optimizer: AxisSet) -> Self {
        Self { parameter, gradient, optimizer, home: StateHome::Device }
    }

    /// The same cuts with the optimizer state in the host's memory.
    pub fn on_host(self) -> Self {
        Self { home: StateHome::Host, ..self }
    }

    /// The same cuts with the optimizer state on the host's drives.
    pub fn on_nvme(self) -> Self {
        Self { home: StateHome::Nvme, ..self }
    }

    /// The cut that holds all others: the optimizer's, or where there is none the parameter's.
    pub fn widest(self) -> AxisSet {
        AxisSet(self.parameter.0 | self.gradient.0 | self.optimizer.0)
    }
}

/// One thing that every device of the mesh does.
#[derive(Clone, Debug, PartialEq)]
pub enum Instruction {
    /// Takes the local block of a data tensor.
    Load {
        /// The block.
        output: ValueId,
    },
    /// Brings a parameter into the sharding of its use.
    Parameter {
        /// The block in use.
        output: ValueId,
        /// Gathers of the flattened block; empty where it is stored as used.
        gather: Vec<Step>,
    },
    /// Runs an operator forward.
    Forward {
        /// The operator.
        op: OpId,
        /// Its operands.
        operands: Vec<ValueId>,
        /// Its results.
        results: Vec<ValueId>,
    },
    /// Runs an operator backward.
    Backward {
        /// The operator.
        op: OpId,
        /// Operands that its line saves, and data.
        operands: Vec<Option<ValueId>>,
        /// Gradients of its results, where they have one.
        gradients: Vec<Option<ValueId>>,
        /// Gradients of its operands, where they get one.
        results: Vec<Option<ValueId>>,
    },
    /// Changes the sharding of a value.
    Convert {
        /// Before.
        input: ValueId,
        /// After.
        output: ValueId,
        /// How.
        steps: Vec<Step>,
    },
    /// Adds a parameter's gradient to its accumulator.
    Accumulate {
        /// The gradient as backward yields it.
        gradient: ValueId,
        /// Reduction of the flattened block into the accumulator's cut.
        reduce: Vec<Step>,
    },
    /// The value is not read again in this section.
    Free {
        /// The value.
        value: ValueId,
    },
}

/// What happens to a parameter at the end of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Update {
    /// The parameter.
    pub tensor: TensorId,
    /// Sharding in which the operator uses it.
    pub used: Sharding,
    /// Where its states live.
    pub storage: Storage,
    /// From the accumulator to the optimizer's cut, on the flattened block.
    pub reduce: Vec<Step>,
    /// From the optimizer's cut to the parameter's, on the flattened block.
    pub gather: Vec<Step>,
}

/// A parameter that is used and never updated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frozen {
    /// The parameter.
    pub tensor: TensorId,
    /// Sharding in which the operator uses it.
    pub used: Sharding,
    /// Its cut between uses, on the flattened block.
    pub cut: AxisSet,
}

/// How a parameter is held between uses, learned or frozen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldParameter {
    /// The parameter.
    pub tensor: TensorId,
    /// Sharding in which the operator uses it.
    pub used: Sharding,
    /// Where its states live; of a frozen one there is only the parameter.
    pub storage: Storage,
    /// Whether it has a gradient and optimizer states.
    pub trained: bool,
}

/// Everything a device does for one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Values, by id.
    pub values: Vec<Value>,
    /// Once per micro-batch; ends with `out` in place.
    pub forward: Vec<Instruction>,
    /// Once per micro-batch; begins with the gradients of `out`, ends with those of the streams.
    pub backward: Vec<Instruction>,
    /// Once per step and learned parameter.
    pub updates: Vec<Update>,
    /// Parameters that are only used.
    pub frozen: Vec<Frozen>,
    /// Those of both that another layer of the same rank holds, the owner of a tie: here they are read, and their
    /// gradients are added to the owner's, whose update is theirs.
    pub shared: BTreeSet<TensorId>,
    /// Values kept from forward to backward.
    pub saved: Vec<ValueId>,
    /// Which memory holds them between the two, and what kernels keep besides.
    pub kept: Home,
    /// Which memory holds the parameters between uses, as they are stored.
    pub parameters: Home,
    /// The incoming streams, in the order of the layer.
    pub stream: Vec<ValueId>,
    /// The outgoing streams or the loss, in the order of the layer.
    pub out: Vec<ValueId>,
    /// The gradients that arrive, one for each of `out`.
    pub out_gradient: Vec<ValueId>,
    /// The gradients that leave, one for each of `stream`.
    pub stream_gradient: Vec<ValueId>,
}

impl Instruction {
    /// Values that it reads.
    pub fn read(&self) -> Vec<ValueId> {
        match self {
            Self::Load { .. } | Self::Parameter { .. } | Self::Free { .. } => Vec::new(),
            Self::Forward { operands, .. } => operands.clone(),
            Self::Backward { operands, gradients, .. } => {
                operands.iter().chain(gradients).flatten().copied().collect()
            }
            Self::Convert { input, .. } => vec![*input],
            Self::Accumulate { gradient, .. } => vec![*gradient],
        }
    }

    /// Axes along which it moves anything; a ring apart, which is its operator's.
    pub fn axes(&self) -> Vec<AxisId> {
        let steps = match self {
            Self::Parameter { gather: steps, .. }
            | Self::Convert { steps, .. }
            | Self::Accumulate { reduce: steps, .. } => steps.as_slice(),
            Self::Load { .. } | Self::Forward { .. } | Self::Backward { .. } | Self::Free { .. } => &[],
        };
        steps.iter().flat_map(|step| step.axes.iter().copied()).collect()
    }

    /// Values that it makes.
    pub fn written(&self) -> Vec<ValueId> {
        match self {
            Self::Load { output } | Self::Parameter { output, .. } | Self::Convert { output, .. } => {
                vec![*output]
            }
            Self::Forward { results, .. } => results.clone(),
            Self::Backward { results, .. } => results.iter().flatten().copied().collect(),
            Self::Accumulate { .. } | Self::Free { .. } => Vec::new(),
        }
    }

    /// The operator that it runs, and which way.
    pub fn kernel(&self) -> Option<(OpId, Pass)> {
        match self {
            Self::Forward { op, .. } => Some((*op, Pass::Forward)),
            Self::Backward { op, .. } => Some((*op, Pass::Backward)),
            Self::Load { .. }
            | Self::Parameter { .. }
            | Self::Convert { .. }
            | Self::Accumulate { .. }
            | Self::Free { .. } => None,
        }
    }
}

impl Program {
    /// Every parameter that the layer holds: the learned ones, then the frozen.
    pub fn held(&self) -> impl Iterator<Item = HeldParameter> + '_ {
        self.used().filter(|one| !self.shared.contains(&one.tensor))
    }

    /// The updates of those.
    pub fn own_updates(&self) -> impl Iterator<Item = &Update> {
        self.updates.iter().filter(|update| !self.shared.contains(&update.tensor))
    }

    /// Every parameter that the layer uses, whoever holds it, in the same order.
    pub fn used(&self) -> impl Iterator<Item = HeldParameter> + '_ {
        let learned = self.updates.iter().map(|update| {
            let Update { tensor, used, storage, .. } = *update;
            HeldParameter { tensor, used, storage, trained: true }
        });
        let frozen = self.frozen.iter().map(|&Frozen { tensor, used, cut }| {
            let storage = Storage::frozen(cut);
            HeldParameter { tensor, used, storage, trained: false }
        });
        learned.chain(frozen)
    }

    /// Axes round which blocks of an operator's keys travel: they cut its second operand along a loop that is whole
    /// otherwise.
    pub fn ring_axes(&self, sig: &Signature, keys: ValueId) -> Vec<AxisId> {
        let dim = sig.ring.and_then(|ring| sig.operand_dim(1, ring.keys));
        dim.map_or(Vec::new(), |dim| self.value(keys).sharding.axes_of(dim).collect())
    }

    /// Whether backward takes what forward of an operator kept besides values: it runs and does not run forward again.
    pub fn keeps(&self, op: OpId) -> bool {
        let runs = |one: &Instruction| matches!(one, Instruction::Backward { op: other, .. } if *other == op);
        let again = |one: &Instruction| matches!(one, Instruction::Forward { op: other, .. } if *other == op);
        self.backward.iter().any(runs) && !self.backward.iter().any(again)
    }

    /// Operators that backward runs again, those that run in pieces once for each.
    pub fn runs_again(&self) -> impl Iterator<Item = OpId> + '_ {
        self.backward.iter().filter_map(|one| match one {
            Instruction::Forward { op, .. } => Some(*op),
            Instruction::Load { .. }
            | Instruction::Parameter { .. }
            | Instruction::Backward { .. }
            | Instruction::Convert { .. }
            | Instruction::Accumulate { .. }
            | Instruction::Free { .. } => None,
        })
    }

    /// Whether backward runs some product of a layer again.
    pub fn runs_products_again(&self, layer: &Layer) -> bool {
        self.runs_again().any(|op| layer.ops[op.0].kind == OpKind::Linear)
    }

    /// A value by id.
    pub fn value(&self, id: ValueId) -> Value {
        self.values[id.0]
    }

    /// The program with its collectives run as the rules say; the first that covers one decides.
    pub fn run_by(mut self, rules: &[Rule]) -> Self {
        self.decide(&mut |class, tensor, step| {
            let kind = step.kind.collective()?;
            let rule = rules.iter().find(|rule| rule.covers(class, tensor, (kind, &step.axes)))?;
            Some(rule.algorithm)
        });
        self
    }

    /// What every collective is for, of which tensor it is, and the step itself.
    pub fn collectives(&self) -> Vec<(CommunicationClass, TensorId, Step)> {
        let mut all = Vec::new();
        self.clone().decide(&mut |class, tensor, step| {
            all.extend(step.kind.is_collective().then(|| (class, tensor, step.clone())));
            None
        });
        all
    }

    /// Asks for the algorithm of every step; without an answer it stays.
    fn decide(&mut self, ask: &mut impl FnMut(CommunicationClass, TensorId, &Step) -> Option<Algorithm>) {
        let mut put = |class, tensor, steps: &mut [Step]| {
            for step in steps {
                step.algorithm = ask(class, tensor, step).unwrap_or(step.algorithm);
            }
        };
        let values = &self.values;
        for (pass, code) in [(Pass::Forward, &mut self.forward), (Pass::Backward, &mut self.backward)] {
            for instruction in code {
                let (class, value, steps) = match instruction {
                    Instruction::Convert { input, steps, .. } => {
                        (CommunicationClass::of_conversion(values[input.0].side, pass), *input, steps)
                    }
                    Instruction::Parameter { output, gather } => {
                        (CommunicationClass::ParameterGather, *output, gather)
                    }
                    Instruction::Accumulate { gradient, reduce } => {
                        (CommunicationClass::GradientAccumulate, *gradient, reduce)
                    }
                    Instruction::Load { .. }
                    | Instruction::Forward { .. }
                    | Instruction::Backward { .. }
                    | Instruction::Free { .. } => continue,
                };
                put(class, values[value.0].tensor, steps);
            }
        }
        for update in self.updates.iter_mut().filter(|update| !self.shared.contains(&update.tensor)) {
            put(CommunicationClass::GradientReduce, update.tensor, &mut update.reduce);
            put(CommunicationClass::Update, update.tensor, &mut update.gather);
        }
    }
}
