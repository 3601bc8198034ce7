//! A layer on a mesh as a choice problem: a node per operator, an edge per activation.
//!
//! A node's choice is (strategy, kept or computed again, storage per parameter). The stream is a node too: its choice
//! is the sharding in which it enters and leaves. An edge sees of its producer (sharding, gradient wanted, kept or
//! again) and of its reader (sharding wanted, gradient left, whether backward needs the value), and prices the
//! conversions both ways and the bytes that are kept. The rules are those of `ir::lower`, priced.

use std::collections::BTreeMap;

use ir::graph::{Layer, Op, OpId, Sizes, TensorId};
use ir::lower::{LayerChoice, Recompute, backward_reads, gets, gradient_tensors, runs_backward};
use ir::mesh::MAX_AXES;
use ir::op::OpKind;
use ir::program::{AxisSet, Home, Storage};
use ir::sharding::Sharding;
use ir::signature::{Signature, signature};
use ir::strategy::{Placements, Strategy, placements};
use ir::work::Pass;

use crate::constraints::{Constraints, Kept};
use crate::meeting::{Carries, Clock, Meeting, Port, number};
use crate::prices::{Prices, local_parameter};
use crate::problem::{Cost, Edge, Node, Problem};
use crate::request::{ContextKind, Forbid};
use crate::space::{Space, is_activation};
use crate::stream;

/// What the caller already knows of the choice.
#[derive(Clone, Debug, Default)]
pub struct Given {
    /// Sharding of the stream, where it is decided.
    pub stream: Option<Sharding>,
    /// Use and storage of parameters that are tied to others.
    pub tied: BTreeMap<TensorId, (Sharding, Storage)>,
    /// Whether results may be computed again, must be, or may not.
    pub recompute: RecomputeRule,
    /// Where states may be cut.
    pub storage: StorageRule,
    /// Which memory may hold optimizer states.
    pub homes: HomeRule,
    /// How attention may see keys that other devices hold.
    pub context: Option<ContextKind>,
    /// What of storages, recomputation and attention may not be.
    pub forbid: Forbid,
    /// What is said of single tensors and operators.
    pub constraints: Constraints,
}

/// Which memory may hold the optimizer state of a parameter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HomeRule {
    /// The device's.
    #[default]
    Device,
    /// Either, as it pays.
    Free,
    /// The host's.
    Host,
}

impl HomeRule {
    /// What is left, the device first.
    pub(crate) fn homes(self) -> &'static [Home] {
        match self {
            Self::Device => &[Home::Device],
            Self::Free => &[Home::Device, Home::Host],
            Self::Host => &[Home::Host],
        }
    }
}

/// Which storages a parameter may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StorageRule {
    /// As it pays.
    #[default]
    Free,
    /// All states whole.
    Whole,
    /// Only the optimizer state cut.
    Optimizer,
    /// Optimizer state and gradient cut.
    Gradient,
    /// All cut.
    Parameter,
}

impl StorageRule {
    /// The rule that a ZeRO stage names.
    pub(crate) fn of_stage(stage: u8) -> Self {
        match stage {
            0 => Self::Whole,
            1 => Self::Optimizer,
            2 => Self::Gradient,
            _ => Self::Parameter,
        }
    }

    /// Whether the cuts of a storage obey, for a parameter that could be cut over `whole` axes.
    fn admits(self, storage: Storage, whole: AxisSet) -> bool {
        let cut = |yes: bool| if yes { whole } else { AxisSet::EMPTY };
        let wanted = |parameter, gradient, optimizer| {
            let cuts = Storage::on_device(cut(parameter), cut(gradient), cut(optimizer));
            storage == Storage { home: storage.home, ..cuts }
        };
        match self {
            Self::Free => true,
            Self::Whole => wanted(false, false, false),
            Self::Optimizer => wanted(false, false, true),
            Self::Gradient => wanted(false, true, true),
            Self::Parameter => wanted(true, true, true),
        }
    }

    /// The same of a parameter that is frozen: it has no gradient and no optimizer state to cut.
    fn admits_frozen(self, storage: Storage, whole: AxisSet) -> bool {
        match self {
            Self::Free => true,
            Self::Whole | Self::Optimizer | Self::Gradient => storage == Storage::default(),
            Self::Parameter => storage == Storage::frozen(whole),
        }
    }
}

/// Which operators may be computed again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RecomputeRule {
    /// As it pays.
    #[default]
    Free,
    /// Nothing is.
    Never,
    /// Only the attention core.
    AttentionOnly,
    /// Everything is.
    Always,
    /// As it pays, but for products.
    ButProducts,
    /// As it pays, but the attention core is.
    AtLeastAttention,
}

impl RecomputeRule {
    /// The rule on one layer: engines compute the layers between embedding and head again, never these themselves.
    fn on(self, layer: &Layer) -> Self {
        let is_end = layer.stream_in.is_none() || layer.tensors[layer.out.0].dims.is_empty();
        match self {
            Self::Always if is_end => Self::Free,
            Self::Free
            | Self::Never
            | Self::AttentionOnly
            | Self::ButProducts
            | Self::AtLeastAttention
            | Self::Always => self,
        }
    }
}

/// How an operator runs: all that its neighbours see of a choice.
#[derive(Clone, Debug)]
struct Form {
    strategy: Strategy,
    recompute: Recompute,
    places: Placements,
}

/// One choice of an operator: a form, and where its parameters live.
#[derive(Clone, Debug)]
struct Pick {
    form: usize,
    storage: Vec<(TensorId, Storage)>,
}

/// The problem and what its choices mean.
pub struct LayerProblem<'a> {
    /// The choice problem; its nodes are the operators, then the stream.
    pub problem: Problem,
    layer: &'a Layer,
    forms: Vec<Vec<Form>>,
    picks: Vec<Vec<Pick>>,
    streams: Vec<Sharding>,
}

struct Builder<'a, 'p> {
    layer: &'a Layer,
    sizes: &'p Sizes,
    prices: &'p Prices<'p>,
    clock: Clock,
    signatures: Vec<Signature>,
    forms: Vec<Vec<Form>>,
    picks: Vec<Vec<Pick>>,
    streams: Vec<Sharding>,
    gradients: std::collections::BTreeSet<TensorId>,
}

impl<'a> LayerProblem<'a> {
    /// Builds the problem. `None` where an operator has no legal strategy that honours what is given.
    pub fn new(
        layer: &'a Layer,
        sizes: &Sizes,
        prices: &Prices<'_>,
        clock: Clock,
        given: &Given,
    ) -> Option<Self> {
        let signatures: Vec<Signature> = layer.ops.iter().map(|op| signature(layer, op)).collect();
        let streams = match given.stream {
            Some(one) => vec![one],
            None => stream::shardings(layer, sizes, prices),
        };
        let mut builder = Builder {
            layer,
            sizes,
            prices,
            clock,
            signatures,
            forms: Vec::new(),
            picks: Vec::new(),
            streams,
            gradients: gradient_tensors(layer),
        };
        let mut nodes = Vec::new();
        let space = Space::new(layer, given.context).without(&given.forbid.cp_kind);
        for op in layer.op_ids() {
            nodes.push(builder.node(op, &space, given)?);
        }
        nodes.push(Node { choices: vec![Cost::default(); builder.streams.len()] });
        let edges = builder.edges();
        let Builder { forms, picks, streams, .. } = builder;
        Some(Self { problem: Problem { nodes, edges }, layer, forms, picks, streams })
    }

    /// The choice that a solution means.
    pub fn choice(&self, choices: &[usize]) -> LayerChoice {
        let picked: Vec<&Pick> = self.picks.iter().zip(choices).map(|(list, &c)| &list[c]).collect();
        let forms: Vec<&Form> = self.forms.iter().zip(&picked).map(|(list, pick)| &list[pick.form]).collect();
        let stream = self.streams[choices[self.picks.len()]];
        let has_loss = self.layer.tensors[self.layer.out.0].dims.is_empty();
        LayerChoice {
            stream: if self.layer.stream_in.is_some() { stream } else { Sharding::REPLICATED },
            out: if has_loss { Sharding::REPLICATED } else { stream },
            strategies: forms.iter().map(|form| form.strategy).collect(),
            recompute: self
                .layer
                .ops
                .iter()
                .zip(&forms)
                .map(|(op, form)| told(&op.kind, form.recompute))
                .collect(),
            storage: picked.iter().flat_map(|one| one.storage.iter().copied()).collect(),
        }
    }
}

impl LayerProblem<'_> {
    /// Sharding in which a choice uses a parameter; `None` for a tensor that no operator reads.
    pub fn used(&self, choice: &LayerChoice, tensor: TensorId) -> Option<Sharding> {
        let op = self.layer.reader(tensor)?;
        let one = &self.layer.ops[op.0];
        let at = one.operands.iter().position(|&t| t == tensor)?;
        Some(placements(&signature(self.layer, one), choice.strategies[op.0]).operands[at])
    }
}

impl Builder<'_, '_> {
    fn node(&mut self, op: OpId, space: &Space<'_>, given: &Given) -> Option<Node> {
        let one = &self.layer.ops[op.0];
        let sig = &self.signatures[op.0];
        let gets = gets(one, &self.gradients);
        let strategies = space.strategies(one, sig, (self.prices.mesh(), self.prices.views()), self.sizes);
        let mut choices = Vec::new();
        let (mut forms, mut picks) = (Vec::new(), Vec::new());
        for strategy in strategies {
            let places = placements(sig, strategy);
            if !given.constraints.allow(self.layer, one, &places, self.prices.mesh()) {
                continue;
            }
            let forward = self.prices.op(self.layer, one, sig, (strategy, self.sizes, Pass::Forward));
            let backward = self.prices.backward(self.layer, one, sig, (strategy, self.sizes, &gets));
            let storages = self.storages(op, &places, (forward, backward), given);
            for recompute in self.recompute_options(one, given) {
                let again =
                    if recompute == Recompute::Again && one.kind != OpKind::Fork { forward } else { 0.0 };
                let time = (forward + backward + again) * self.clock.micro_batches;
                for (storage, cost) in &storages {
                    choices.push(cost.plus(Cost { time, memory: 0.0 }));
                    picks.push(Pick { form: forms.len(), storage: storage.clone() });
                }
                forms.push(Form { strategy, recompute, places: places.clone() });
            }
        }
        self.forms.push(forms);
        self.picks.push(picks);
        (!choices.is_empty()).then_some(Node { choices })
    }

    /// Recompute options of an operator: what is said of it, or else what the rule leaves.
    fn recompute_options(&self, op: &Op, given: &Given) -> Vec<Recompute> {
        let rule = match given.constraints.kept(self.layer, op) {
            Some(Kept::Keep) => RecomputeRule::Never,
            Some(Kept::Again) => RecomputeRule::Always,
            None => given.recompute.on(self.layer),
        };
        recompute_options(&op.kind, rule)
    }

    /// Storages of all parameters of an operator, combined.
    fn storages(
        &self,
        op: OpId,
        places: &Placements,
        own: (f64, f64),
        given: &Given,
    ) -> Vec<(Vec<(TensorId, Storage)>, Cost)> {
        let mut list = vec![(Vec::new(), Cost::default())];
        for (i, &tensor) in self.layer.ops[op.0].operands.iter().enumerate() {
            if !self.layer.is_parameter(tensor) {
                continue;
            }
            let used = places.operands[i];
            let elements = local_parameter(self.layer, tensor, self.prices.mesh(), self.sizes, used);
            let mut storages = if self.layer.is_trained(tensor) {
                let gradient = places.operand_gradients[i];
                let in_one = |&home| self.prices.storages((elements, home), used, gradient, own);
                given.homes.homes().iter().flat_map(in_one).collect()
            } else {
                self.prices.frozen_storages(elements, used, own)
            };
            let whole = self.prices.shardable(ir::lower::whole_axes(self.prices.mesh(), used));
            let said = given.constraints.storage(self.layer, tensor).map(StorageRule::of_stage);
            let rule = said.unwrap_or(given.storage);
            let admits = |storage| {
                (match self.layer.is_trained(tensor) {
                    true => rule.admits(storage, whole),
                    false => rule.admits_frozen(storage, whole),
                }) && given.forbid.admits(storage, whole)
            };
            storages.retain(|(storage, _)| admits(*storage));
            if let Some((wanted_use, wanted)) = given.tied.get(&tensor) {
                storages.retain(|(storage, _)| used == *wanted_use && storage == wanted);
            }
            list = list
                .iter()
                .flat_map(|(before, sum): &(Vec<(TensorId, Storage)>, Cost)| {
                    storages.iter().map(move |(storage, price)| {
                        let mut all = before.clone();
                        all.push((tensor, *storage));
                        let time = price.per_micro_batch * self.clock.micro_batches + price.per_step;
                        let memory = price.state + price.gathered / self.clock.layers;
                        (all, sum.plus(Cost { time, memory }))
                    })
                })
                .collect();
        }
        list
    }

    fn edges(&self) -> Vec<Edge> {
        let stream = self.layer.ops.len();
        let mut edges = Vec::new();
        for op in self.layer.op_ids() {
            for (i, &tensor) in self.layer.ops[op.0].operands.iter().enumerate() {
                if is_activation(self.layer, tensor) {
                    let readers: Vec<Port> = self.reader_ports(op, i, tensor);
                    let edge = match self.layer.producer(tensor) {
                        Some(from) => {
                            self.edge((from.0, self.producer_ports(from, tensor)), (op.0, readers), tensor)
                        }
                        None => self.edge((stream, self.stream_ports()), (op.0, readers), tensor),
                    };
                    edges.push(edge);
                }
            }
        }
        if let Some(from) = self.layer.producer(self.layer.out) {
            let ports = self.producer_ports(from, self.layer.out);
            let has_loss = self.layer.tensors[self.layer.out.0].dims.is_empty();
            let target = if has_loss {
                let whole = Port { value: Sharding::REPLICATED, gradient: Sharding::REPLICATED, flag: false };
                vec![whole; self.streams.len()]
            } else {
                self.stream_ports()
            };
            edges.push(self.edge((from.0, ports), (stream, target), self.layer.out));
        }
        edges
    }

    fn stream_ports(&self) -> Vec<Port> {
        self.streams.iter().map(|&s| Port { value: s, gradient: s.dual(), flag: false }).collect()
    }

    fn producer_ports(&self, op: OpId, tensor: TensorId) -> Vec<Port> {
        let result = self.layer.ops[op.0].results.iter().position(|&t| t == tensor).unwrap_or(0);
        let port = |form: &Form| Port {
            value: form.places.results[result],
            gradient: self.gradient(tensor, form.places.result_gradients[result]),
            flag: form.recompute == Recompute::Again,
        };
        self.forms[op.0].iter().map(port).collect()
    }

    fn reader_ports(&self, op: OpId, operand: usize, tensor: TensorId) -> Vec<Port> {
        let one = &self.layer.ops[op.0];
        let saves =
            runs_backward(one, &self.gradients) && backward_reads(one, &self.gradients).contains(&operand);
        let port = |form: &Form| Port {
            value: form.places.operands[operand],
            gradient: self.gradient(tensor, form.places.operand_gradients[operand]),
            flag: saves || form.recompute == Recompute::Again,
        };
        self.forms[op.0].iter().map(port).collect()
    }

    /// Placement of a gradient, or whole where there is none.
    fn gradient(&self, tensor: TensorId, sharding: Sharding) -> Sharding {
        if self.gradients.contains(&tensor) { sharding } else { Sharding::REPLICATED }
    }

    fn edge(&self, from: (usize, Vec<Port>), to: (usize, Vec<Port>), tensor: TensorId) -> Edge {
        let (from_node, from_ports) = from;
        let (to_node, to_ports) = to;
        let (from_form, left) = number(&from_ports);
        let (to_form, right) = number(&to_ports);
        let meeting = Meeting {
            layer: self.layer,
            tensor,
            sizes: self.sizes,
            clock: self.clock,
            carries: if self.gradients.contains(&tensor) { Carries::Both } else { Carries::Values },
        };
        let spread = |node: usize, of_form: Vec<u32>| match self.picks.get(node) {
            Some(picks) => picks.iter().map(|pick| of_form[pick.form]).collect(),
            // The stream has one choice per sharding.
            None => of_form,
        };
        let (from_port, to_port) = (spread(from_node, from_form), spread(to_node, to_form));
        let table = meeting.table(self.prices, &left, &right);
        Edge { from: from_node, to: to_node, from_port, to_port, n_to_ports: right.len(), table }
    }
}

/// What a choice says of an operator: a fork computes nothing, whoever reads it in backward.
fn told(kind: &OpKind, recompute: Recompute) -> Recompute {
    if *kind == OpKind::Fork { Recompute::Keep } else { recompute }
}

/// Recompute options of a kind under a rule. For a fork the two mean: nobody, or somebody, reads it in backward.
fn recompute_options(kind: &OpKind, rule: RecomputeRule) -> Vec<Recompute> {
    let both = vec![Recompute::Keep, Recompute::Again];
    if *kind == OpKind::Fork {
        return both;
    }
    match rule {
        RecomputeRule::Free => both,
        RecomputeRule::Never => vec![Recompute::Keep],
        RecomputeRule::Always => vec![Recompute::Again],
        RecomputeRule::AttentionOnly if matches!(kind, OpKind::Attention { .. }) => vec![Recompute::Again],
        RecomputeRule::AttentionOnly => vec![Recompute::Keep],
        RecomputeRule::ButProducts if matches!(kind, OpKind::Linear) => vec![Recompute::Keep],
        RecomputeRule::AtLeastAttention if matches!(kind, OpKind::Attention { .. }) => vec![Recompute::Again],
        RecomputeRule::ButProducts | RecomputeRule::AtLeastAttention => both,
    }
}

const _: () = assert!(MAX_AXES <= 8, "axis sets are one byte");
