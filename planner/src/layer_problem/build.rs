//! How the choice problem of a layer is built: what every operator may do, what that costs, and what its neighbours see
//! of it.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use cost_model::expert_launches::behind_counts;
use cost_model::exposure::{OpSeconds, is_view};
use cost_model::memory::{kept_logits, logits_bytes, predictions};
use cost_model::program_memory::{adds_inside, stand_in};
use cost_model::tensor_bytes::is_logits;
use ir::graph::{Layer, Op, OpId, Sizes, TensorId};
use ir::lower::{Recompute, backward_reads, gets, gradient_tensors, runs_backward};
use ir::op::OpKind;
use ir::program::Storage;
use ir::sharding::Sharding;
use ir::signature::{Signature, signature};
use ir::strategy::{Placements, Strategy, placements};
use ir::units::Bytes;
use ir::work::Pass;

use crate::clock::{Clock, Spans};
use crate::constraints::Kept;
use crate::given::{Given, RecomputeRule, StorageRule};
use crate::meeting::{Carries, End, Meeting, Pace, Passages, Port, number};
use crate::prices::{OpTime, Parcel, Prices, StoragePrice, local_parameter};
use crate::problem::{Cost, Edge, Node, Problem};
use crate::space::{Space, is_activation};
use crate::stream;

use super::{Choices, Form, LayerProblem, OnHost, Pick, Stored};

/// Layers whose parameters a device gathers at once (`cost_model::memory::gathered_units`).
const GATHERED: f64 = 2.0;

/// A problem in the making.
pub(super) struct Builder<'a, 'p> {
    layer: &'a Layer,
    sizes: &'p Sizes,
    prices: &'p Prices<'p>,
    clock: Clock,
    signatures: Vec<Signature>,
    /// Per operator, which of its operands get gradients.
    gets: Vec<Vec<bool>>,
    /// Per operator, operands that its backward reads.
    reads: Vec<Vec<usize>>,
    ops: Vec<Choices>,
    streams: Vec<Sharding>,
    gradients: BTreeSet<TensorId>,
    /// Elements of all parameters of the layer.
    n_parameters: u64,
    /// Operators that are launched only when the host knows the tokens of its experts.
    behind_counts: Range<usize>,
    /// Operators whose results backward could read, were all computed again: the others never are, whatever is said of
    /// them.
    needed: BTreeSet<OpId>,
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
        let mut builder = Builder::new(layer, (sizes, prices), clock);
        builder.streams = match given.stream {
            Some(one) => vec![one],
            None => stream::shardings(layer, sizes, prices),
        };
        let mut nodes = Vec::new();
        let space = Space::new(layer, given.context).without(&given.forbid.cp_kind);
        for op in layer.op_ids() {
            nodes.push(builder.node(op, &space, given)?);
        }
        nodes.push(Node { choices: vec![Cost::default(); builder.streams.len()] });
        let (edges, passages) = builder.edges().into_iter().unzip();
        let Builder { ops, streams, .. } = builder;
        let shared = given.shared.clone();
        Some(Self { problem: Problem { nodes, edges }, layer, clock, ops, passages, streams, shared })
    }
}

/// Which products of a pace are looked for beyond operators that only pass on, and in which pass they do.
type Beyond = (fn(&Pace) -> OpSeconds, Pass);

/// All of a strategy that the storages of its parameters depend on.
type Uses = Vec<[Sharding; 2]>;

impl<'a, 'p> Builder<'a, 'p> {
    pub(super) fn new(layer: &'a Layer, (sizes, prices): (&'p Sizes, &'p Prices<'p>), clock: Clock) -> Self {
        let gradients = gradient_tensors(layer);
        Self {
            layer,
            sizes,
            prices,
            clock,
            signatures: layer.ops.iter().map(|op| signature(layer, op)).collect(),
            gets: layer.ops.iter().map(|op| gets(op, &gradients)).collect(),
            reads: layer.ops.iter().map(|op| backward_reads(op, &gradients)).collect(),
            ops: Vec::new(),
            streams: Vec::new(),
            n_parameters: layer.parameters().map(|t| layer.shape(t, sizes).iter().product::<u64>()).sum(),
            needed: needed_again(layer, &gradients),
            behind_counts: behind_counts(layer, prices.machine().constants.engine.experts),
            gradients,
        }
    }

    /// Every strategy of an operator, whatever constraints say of it.
    pub(super) fn strategies(&self, op: OpId, space: &Space<'_>) -> Vec<Strategy> {
        let at = (self.prices.mesh(), self.prices.views());
        space.strategies(&self.layer.ops[op.0], &self.signatures[op.0], at, self.sizes)
    }

    /// What an operator takes in a strategy: forward, backward, and what it waits for its launches.
    pub(super) fn timed(&self, op: OpId, strategy: Strategy) -> (OpTime, OpTime, f64) {
        let (one, sig) = (&self.layer.ops[op.0], &self.signatures[op.0]);
        let waits = match self.behind_counts.contains(&op.0) {
            true => self.prices.waits(self.layer, one, sig, (strategy, self.sizes)),
            false => 0.0,
        };
        (
            self.prices.op(self.layer, one, sig, (strategy, self.sizes, Pass::Forward)),
            self.prices.backward(self.layer, one, sig, (strategy, self.sizes, &self.gets[op.0])),
            waits,
        )
    }

    /// The passes of a form.
    pub(super) fn passes(
        &self,
        op: OpId,
        recompute: Recompute,
        (forward, backward, waits): (OpTime, OpTime, f64),
    ) -> Spans {
        let runs_again = recompute == Recompute::Again
            && self.layer.ops[op.0].kind != OpKind::Fork
            && self.needed.contains(&op);
        let again = if runs_again { forward.total } else { 0.0 };
        Spans { forward: forward.total, backward: backward.total + again, waits, ..Spans::default() }
    }

    fn node(&mut self, op: OpId, space: &Space<'_>, given: &Given) -> Option<Node> {
        let one = &self.layer.ops[op.0];
        let sig = &self.signatures[op.0];
        let strategies = self.strategies(op, space);
        let options = self.recompute_options(one, given);
        let runs_always = options == [Recompute::Again] && self.needed.contains(&op);
        let mut choices = Vec::new();
        let mut own = Choices::default();
        // What was stored already, of strategies that use the parameters alike.
        let mut stored: Vec<(Uses, Range<usize>)> = Vec::new();
        for strategy in strategies {
            let places = placements(sig, strategy);
            if !given.constraints.allow(self.layer, one, &places, self.prices.mesh()) {
                continue;
            }
            let timed @ (forward, backward, _) = self.timed(op, strategy);
            let again = match runs_always {
                true => backward.products.plus(forward.products),
                false => backward.products,
            };
            let (forward, backward) = (forward.products, backward.products);
            let pace = place(&mut own.paces, Pace { forward, backward, again });
            let uses = self.uses(one, &places);
            let known = stored.iter().find(|(before, _)| *before == uses).map(|(_, range)| range.clone());
            let range = known.unwrap_or_else(|| {
                let first = own.stored.len();
                own.stored.append(&mut self.storages(op, &places, given));
                stored.push((uses, first..own.stored.len()));
                first..own.stored.len()
            });
            let places = Arc::new(places);
            for &recompute in &options {
                let passes = self.passes(op, recompute, timed);
                let beside = if given.cuts { 0.0 } else { self.logits(op, (recompute, &places)) };
                let of_form = Cost { time: self.clock.seconds(passes), memory: beside };
                for at in range.clone() {
                    choices.push(own.stored[at].cost.plus(of_form));
                    own.picks.push(Pick { form: own.forms.len() as u32, stored: at as u32 });
                }
                let places = Arc::clone(&places);
                own.forms.push(Form { strategy, recompute, places, pace, passes, beside });
            }
        }
        self.ops.push(own);
        (!choices.is_empty()).then_some(Node { choices })
    }

    /// Bytes of scores at the peak of the loss, beyond what is kept of them, of the operator that computes them
    /// (`cost_model::program_memory`).
    fn logits(&self, op: OpId, (recompute, places): (Recompute, &Placements)) -> f64 {
        let one = &self.layer.ops[op.0];
        let Some(&scores) = one.results.first().filter(|&&result| is_logits(self.layer, result)) else {
            return 0.0;
        };
        if one.kind == OpKind::Fork {
            return 0.0;
        }
        let shape = self.layer.shape(scores, self.sizes);
        let elements = places.results[0].local_elements(self.prices.mesh(), &shape) as f64;
        let constants = self.prices.machine().constants;
        let peak = logits_bytes(elements, constants.engine.loss, constants);
        let kept = match recompute {
            Recompute::Keep => kept_logits(elements, constants.engine.loss, constants),
            Recompute::Again => Bytes::ZERO,
        };
        ((peak - kept) / predictions(&shape) * constants.fragmentation_factor).0
    }

    /// How an operator's parameters and their gradients lie.
    fn uses(&self, op: &Op, places: &Placements) -> Vec<[Sharding; 2]> {
        let of = |(at, &tensor): (usize, &TensorId)| {
            let both = [places.operands[at], places.operand_gradients[at]];
            self.layer.is_parameter(tensor).then_some(both)
        };
        op.operands.iter().enumerate().filter_map(of).collect()
    }

    /// Recompute options of an operator: what is said of it, or else what the rule leaves.
    fn recompute_options(&self, op: &Op, given: &Given) -> Vec<Recompute> {
        let rule = match given.constraints.kept(self.layer, op) {
            Some(Kept::Keep) => RecomputeRule::Never,
            Some(Kept::Again) => RecomputeRule::Always,
            None => given.recompute.on(self.layer),
        };
        rule.options(&op.kind)
    }

    /// Storages of all parameters of an operator, combined.
    fn storages(&self, op: OpId, places: &Placements, given: &Given) -> Vec<Stored> {
        let sharing = if given.of_bound { self.clock.layers.ceil() } else { self.clock.layers };
        let slack = self.prices.machine().constants.fragmentation_factor;
        let mut list = vec![Stored::default()];
        for (i, &tensor) in self.layer.ops[op.0].operands.iter().enumerate() {
            if !self.layer.is_parameter(tensor) {
                continue;
            }
            let until = if self.reads[op.0].contains(&i) { Pass::Backward } else { Pass::Forward };
            let used = places.operands[i];
            let elements = local_parameter(self.layer, tensor, self.prices.mesh(), self.sizes, used);
            // Programs send the parameters of a layer in as few pieces as they can; a bound must not count one each.
            let [together, alone] =
                [self.n_parameters.max(elements), elements].map(|sent| Parcel { elements, sent });
            let mut storages = if self.layer.is_trained(tensor) {
                let gradient = places.operand_gradients[i];
                let priced = |parcel, home| self.prices.storages((parcel, home), (used, until), gradient);
                let in_one = |&home| with_alone(priced(together, home), &priced(alone, home));
                let tied = given.tied.get(&tensor).and_then(|tied| tied.storage.as_ref());
                let tied = tied.map(|storage| std::slice::from_ref(&storage.home));
                tied.unwrap_or(given.homes.homes()).iter().flat_map(in_one).collect()
            } else {
                let priced = |parcel| self.prices.frozen_storages(parcel, (used, until));
                with_alone(priced(together), &priced(alone))
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
            storages.retain(|(storage, ..)| admits(*storage));
            if let Some(tied) = given.tied.get(&tensor) {
                let uses = [used, places.operand_gradients[i]];
                storages.retain(|(storage, ..)| tied.admits(uses, *storage));
            }
            let once = self.once(tensor, used);
            storages.iter_mut().for_each(|(storage, price, _)| price.once = once(storage, price));
            if given.shared.contains(&tensor) {
                for (_, price, alone) in &mut storages {
                    *price =
                        StoragePrice { spans: price.spans.of_micro_batches(), ..StoragePrice::default() };
                    *alone = alone.of_micro_batches();
                }
            }
            list = list
                .iter()
                .flat_map(|before| {
                    storages.iter().map(move |(storage, price, alone)| {
                        let mut all = Vec::with_capacity(before.storage.len() + 1);
                        all.extend_from_slice(&before.storage);
                        all.push((tensor, *storage));
                        let time = self.clock.seconds(price.spans);
                        let once = price.once / sharing;
                        let memory = price.state + once;
                        let cost = before.cost.plus(Cost { time, memory });
                        let (spans, alone) =
                            (before.spans.plus(price.spans, 1.0), before.alone.plus(*alone, 1.0));
                        // Parameters that are cut are gathered for use anyway.
                        let is_gathered = !storage.parameter.is_empty();
                        let used = if is_gathered { 0.0 } else { slack * sharing.min(GATHERED) / sharing };
                        let (states, parameters) = (price.host, price.parameter);
                        let own = OnHost { states, parameters, freed: parameters * (1.0 - used) };
                        let (once, on_host) = (before.once + once, before.on_host.plus(own));
                        Stored { storage: all, cost, spans, alone, once, on_host }
                    })
                })
                .collect();
        }
        list
    }

    /// Bytes that a stage has once for all layers whose parameter is stored in a way: gathered for use, with what the
    /// allocator holds beside it, or what stands for its gradient.
    fn once(&self, tensor: TensorId, used: Sharding) -> impl Fn(&Storage, &StoragePrice) -> f64 {
        let (layer, machine) = (self.layer, self.prices.machine());
        let stands_in = stand_in((layer, self.prices.mesh(), self.sizes), tensor, used, machine.precision);
        move |storage, price| {
            let is_inside = adds_inside(layer, (tensor, storage), machine.constants.engine);
            let stands_in = if is_inside && layer.is_trained(tensor) { stands_in.0 } else { 0.0 };
            price.once * machine.constants.fragmentation_factor + stands_in
        }
    }

    fn edges(&self) -> Vec<(Edge, Passages)> {
        let stream = self.layer.ops.len();
        let mut edges = Vec::new();
        for op in self.layer.op_ids() {
            for (i, &tensor) in self.layer.ops[op.0].operands.iter().enumerate() {
                if is_activation(self.layer, tensor) {
                    let readers = self.reader_end(op, i, tensor);
                    let edge = match self.layer.producer(tensor) {
                        Some(from) => {
                            self.edge((from.0, self.producer_end(from, tensor)), (op.0, readers), tensor)
                        }
                        None => self.edge((stream, self.stream_end()), (op.0, readers), tensor),
                    };
                    edges.push(edge);
                }
            }
        }
        for &out in &self.layer.out {
            let Some(from) = self.layer.producer(out) else { continue };
            let end = self.producer_end(from, out);
            let has_loss = self.layer.has_loss();
            let target = if has_loss {
                let whole = Sharding::REPLICATED;
                let port = Port { value: whole, gradient: whole, flag: false, pace: 0 };
                End { ports: vec![port; self.streams.len()], paces: vec![Pace::default()] }
            } else {
                self.stream_end()
            };
            edges.push(self.edge((from.0, end), (stream, target), out));
        }
        edges
    }

    fn stream_end(&self) -> End {
        let port = |&s: &Sharding| Port { value: s, gradient: s.dual(), flag: false, pace: 0 };
        End { ports: self.streams.iter().map(port).collect(), paces: vec![Pace::default()] }
    }

    fn producer_end(&self, op: OpId, tensor: TensorId) -> End {
        let result = self.layer.ops[op.0].results.iter().position(|&t| t == tensor).unwrap_or(0);
        let port = |form: &Form| Port {
            value: form.places.results[result],
            gradient: self.gradient(tensor, form.places.result_gradients[result]),
            flag: form.recompute == Recompute::Again,
            pace: form.pace,
        };
        self.end(op, self.ops[op.0].forms.iter().map(port).collect(), Self::before)
    }

    fn reader_end(&self, op: OpId, operand: usize, tensor: TensorId) -> End {
        let one = &self.layer.ops[op.0];
        let saves =
            runs_backward(one, &self.gradients) && backward_reads(one, &self.gradients).contains(&operand);
        let port = |form: &Form| Port {
            value: form.places.operands[operand],
            gradient: self.gradient(tensor, form.places.operand_gradients[operand]),
            flag: saves || form.recompute == Recompute::Again && self.needed.contains(&op),
            pace: form.pace,
        };
        self.end(op, self.ops[op.0].forms.iter().map(port).collect(), Self::after)
    }

    /// One end of an edge; an operator without products has those beyond it, as long as they can be.
    fn end(&self, op: OpId, mut ports: Vec<Port>, beyond: fn(&Self, OpId, Beyond) -> OpSeconds) -> End {
        let has_products = |pace: &Pace| (pace.forward.both() + pace.backward.both()).0 > 0.0;
        if self.ops[op.0].paces.iter().any(has_products) {
            return End { ports, paces: self.ops[op.0].paces.clone() };
        }
        ports.iter_mut().for_each(|port| port.pace = 0);
        let all = |of| beyond(self, op, of);
        let (forward, backward) =
            (all((|pace| pace.forward, Pass::Forward)), all((|pace| pace.backward, Pass::Backward)));
        // In backward, what only passes a value on does so as in forward.
        let again = all((|pace| pace.again, Pass::Forward));
        End { ports, paces: vec![Pace { forward, backward, again }] }
    }

    /// Products of an operator or, through views, of those that yield what it reads: the longest of their forms.
    fn before(&self, op: OpId, of: Beyond) -> OpSeconds {
        let producers = self.layer.ops[op.0].operands.iter().filter_map(|&t| self.layer.producer(t));
        self.through(op, of, producers.collect(), Self::before)
    }

    /// The same of those that read what it yields.
    fn after(&self, op: OpId, of: Beyond) -> OpSeconds {
        let readers = self.layer.ops[op.0].results.iter().filter_map(|&t| self.layer.reader(t));
        self.through(op, of, readers.collect(), Self::after)
    }

    fn through(
        &self,
        op: OpId,
        (of, pass): Beyond,
        beyond: Vec<OpId>,
        go_on: fn(&Self, OpId, Beyond) -> OpSeconds,
    ) -> OpSeconds {
        let longer = |a: OpSeconds, b: OpSeconds| OpSeconds {
            products: a.products.max(b.products),
            weight_products: a.weight_products.max(b.weight_products),
        };
        let own = self.ops[op.0].paces.iter().map(of).fold(OpSeconds::default(), longer);
        if own.both().0 > 0.0 || !is_view(&self.layer.ops[op.0].kind, pass) {
            return own;
        }
        beyond.into_iter().fold(own, |sum, op| sum.plus(go_on(self, op, (of, pass))))
    }

    /// Placement of a gradient, or whole where there is none.
    fn gradient(&self, tensor: TensorId, sharding: Sharding) -> Sharding {
        if self.gradients.contains(&tensor) { sharding } else { Sharding::REPLICATED }
    }

    fn edge(
        &self,
        (from_node, from): (usize, End),
        (to_node, to): (usize, End),
        tensor: TensorId,
    ) -> (Edge, Passages) {
        let (from_form, ports) = number(&from.ports, Port::code);
        let from = End { ports, ..from };
        let (to_form, ports) = number(&to.ports, Port::code);
        let to = End { ports, ..to };
        let meeting = Meeting {
            layer: self.layer,
            tensor,
            sizes: self.sizes,
            carries: if self.gradients.contains(&tensor) { Carries::Both } else { Carries::Values },
        };
        let spread = |node: usize, of_form: Vec<u32>| match self.ops.get(node) {
            Some(op) => op.picks.iter().map(|pick| of_form[pick.form as usize]).collect(),
            // The stream has one choice per sharding.
            None => of_form,
        };
        let (from_port, to_port) = (spread(from_node, from_form), spread(to_node, to_form));
        let passages = meeting.table(self.prices, &from, &to);
        let table = passages.iter().map(|passage| passage.map(|one| one.cost(&self.clock))).collect();
        let edge =
            Edge { from: from_node, to: to_node, from_port, to_port, n_to_ports: to.ports.len(), table };
        (edge, passages)
    }
}

/// Storages at the prices at which all parameters of a layer are sent together, each with what it takes by itself.
fn with_alone(
    together: Vec<(Storage, StoragePrice)>,
    alone: &[(Storage, StoragePrice)],
) -> Vec<(Storage, StoragePrice, Spans)> {
    let pair = |((storage, price), (_, alone)): ((Storage, StoragePrice), &(Storage, StoragePrice))| {
        (storage, price, alone.spans)
    };
    together.into_iter().zip(alone).map(pair).collect()
}

/// Operators of whose results backward needs one, where everything is computed again that backward needs.
fn needed_again(layer: &Layer, gradients: &BTreeSet<TensorId>) -> BTreeSet<OpId> {
    let mut read: BTreeSet<TensorId> = BTreeSet::new();
    let mut needed = BTreeSet::new();
    let ops: Vec<OpId> = layer.op_ids().collect();
    for &id in ops.iter().rev() {
        let op = &layer.ops[id.0];
        let is_needed = op.results.iter().any(|result| read.contains(result));
        if is_needed {
            needed.insert(id);
        }
        let saved = if runs_backward(op, gradients) { backward_reads(op, gradients) } else { Vec::new() };
        let reads = |(at, _): &(usize, &TensorId)| is_needed || saved.contains(at);
        read.extend(op.operands.iter().enumerate().filter(reads).map(|(_, tensor)| *tensor));
    }
    needed
}

/// The place of a pace among distinct ones.
fn place(paces: &mut Vec<Pace>, pace: Pace) -> usize {
    paces.iter().position(|known| *known == pace).unwrap_or_else(|| {
        paces.push(pace);
        paces.len() - 1
    })
}
