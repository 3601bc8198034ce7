//! Legal choices for every layer kind, drawn one decision at a time.

use std::collections::{BTreeMap, BTreeSet};

use ir::collective::Algorithm;
use ir::conversion::steps;
use ir::graph::{Layer, Model, Op, OpId, Sizes, TensorId};
use ir::lower::{LayerChoice, Recompute, lower, whole_axes};
use ir::mesh::{AxisId, Mesh};
use ir::op::OpKind;
use ir::plan::shares::{AXIS, is_sent_once, keeps_apart};
use ir::program::{AxisSet, Home, StateHome, Storage};
use ir::sharding::{Placement, Sharding};
use ir::signature::signature;
use ir::strategy::{Placements, Strategy, placements, strategies};
use ir::token_order::TokenOrder;

use super::Shares;

/// Who decides between legal options; every answer is an index of the options given, or is taken modulo their number.
pub(crate) trait Chooser {
    /// Where an axis cuts the stream.
    fn stream(&mut self, axis: AxisId, options: &[Placement]) -> usize;
    /// What an operator does with all axes.
    fn strategy(&mut self, layer: &Layer, op: OpId, options: &[(Strategy, Placements)]) -> usize;
    /// Whether backward computes the results of an operator again.
    fn again(&mut self, op: &Op) -> bool;
    /// Over which of the axes on which a parameter is whole its three states are cut.
    fn storage(&mut self, whole: AxisSet) -> Storage;
    /// Which memory holds what a layer keeps, and which its parameters between uses.
    fn homes(&mut self) -> [Home; 2];
    /// How many layers a chunk takes, of 1 to `most`, where `even` would be fair.
    fn layers(&mut self, even: usize, most: usize) -> usize;
    /// Whether a slice is longer than the shortest.
    fn slice(&mut self, slice: u32) -> usize;
    /// How many units of micro-batches a coordinate gives away, of at most so many.
    fn given_away(&mut self, most: usize) -> usize;
    /// The order of the tokens of a cut sequence.
    fn token_order(&mut self, options: &[TokenOrder]) -> usize;
    /// Whether the owner of a tie holds the copy, where it can.
    fn shared(&mut self) -> bool;
    /// The algorithm of a collective.
    fn algorithm(&mut self, options: &[Algorithm]) -> usize;
}

/// Decisions, taken in turn; past the end all are zero.
pub(crate) struct Decisions<'a> {
    list: &'a [u16],
    at: usize,
}

impl<'a> Decisions<'a> {
    pub(crate) fn new(list: &'a [u16]) -> Self {
        Self { list, at: 0 }
    }

    /// One of `n` options.
    fn pick(&mut self, n: usize) -> usize {
        let decision = self.list.get(self.at).copied().unwrap_or(0);
        self.at += 1;
        usize::from(decision) % n.max(1)
    }

    /// Some of the axes of a set.
    fn subset(&mut self, of: AxisSet) -> AxisSet {
        let axes: Vec<AxisId> = of.axes().into_iter().filter(|_| self.pick(2) == 1).collect();
        AxisSet::of(&axes)
    }
}

impl Chooser for Decisions<'_> {
    fn stream(&mut self, _: AxisId, options: &[Placement]) -> usize {
        self.pick(options.len())
    }

    fn strategy(&mut self, _: &Layer, _: OpId, options: &[(Strategy, Placements)]) -> usize {
        self.pick(options.len())
    }

    fn again(&mut self, _: &Op) -> bool {
        self.pick(2) == 1
    }

    fn storage(&mut self, whole: AxisSet) -> Storage {
        let optimizer = self.subset(whole);
        let home = [StateHome::Device, StateHome::Host, StateHome::Nvme][self.pick(3)];
        Storage { parameter: self.subset(optimizer), gradient: self.subset(optimizer), optimizer, home }
    }

    fn homes(&mut self) -> [Home; 2] {
        use Home::{Device, Host};
        [[Device, Device], [Host, Device], [Device, Host], [Host, Host]][self.pick(4)]
    }

    fn layers(&mut self, even: usize, most: usize) -> usize {
        1 + (even - 1 + self.pick(most)) % most
    }

    fn slice(&mut self, _: u32) -> usize {
        self.pick(2)
    }

    fn given_away(&mut self, most: usize) -> usize {
        self.pick(most + 1)
    }

    fn token_order(&mut self, options: &[TokenOrder]) -> usize {
        self.pick(options.len())
    }

    fn shared(&mut self) -> bool {
        self.pick(2) == 1
    }

    fn algorithm(&mut self, options: &[Algorithm]) -> usize {
        self.pick(options.len())
    }
}

/// A choice for a layer kind.
pub(crate) struct Drawn {
    pub(crate) choice: LayerChoice,
}

/// Use and storage of tied parameters that were drawn already.
type Tied = BTreeMap<(usize, TensorId), (Sharding, Storage)>;

/// Draws a choice for every layer kind of a model.
pub(crate) fn draw_model(
    model: &Model,
    mesh: &Mesh,
    (micro_batch, sequence, shares): (u64, u64, Shares),
    chooser: &mut dyn Chooser,
) -> Option<Vec<Drawn>> {
    let stream = draw_stream(model, mesh, (micro_batch, sequence, shares), chooser)?;
    let mut tied = Tied::new();
    let mut drawn = Vec::new();
    for (kind, layer) in model.layers.iter().enumerate() {
        let sizes = layer.sizes(micro_batch, sequence);
        let given: BTreeMap<TensorId, (Sharding, Storage)> = tied
            .iter()
            .filter(|((of, _), _)| *of == kind)
            .map(|((_, tensor), &one)| (*tensor, one))
            .collect();
        let draw = Draw { layer, mesh, sizes: &sizes, stream, shares, tied: &given };
        let choice = draw.choice(chooser)?;
        for tie in model.ties.iter().filter(|tie| tie.owner.layer == kind) {
            let used = draw.used(&choice, tie.owner.tensor)?;
            tied.insert((tie.copy.layer, tie.copy.tensor), (used, choice.storage[&tie.owner.tensor]));
        }
        drawn.push(Drawn { choice });
    }
    Some(drawn)
}

/// A sharding of the stream that every layer can read and write.
fn draw_stream(
    model: &Model,
    mesh: &Mesh,
    (micro_batch, sequence, shares): (u64, u64, Shares),
    chooser: &mut dyn Chooser,
) -> Option<Sharding> {
    let layer = model.layers.iter().find(|layer| !layer.stream_in.is_empty())?;
    let shape = layer.shape(*layer.stream_in.last()?, &layer.sizes(micro_batch, sequence));
    let mut sharding = Sharding::REPLICATED;
    for axis in mesh.axis_ids().filter(|&axis| mesh.size(axis) > 1) {
        let fits = |dim: &usize| {
            let parts: u64 = sharding.axes_of(*dim).map(|axis| mesh.size(axis)).product();
            shape[*dim].is_multiple_of(parts * mesh.size(axis))
        };
        let mut options = vec![Placement::Replicate];
        options.extend((0..shape.len()).filter(fits).map(|dim| Placement::Shard(dim as u8)));
        if shares == Shares::Unequal && axis == AXIS {
            options.retain(|option| *option == Placement::Shard(0));
        }
        sharding = sharding.with(axis, *options.get(chooser.stream(axis, &options))?);
    }
    Some(sharding)
}

struct Draw<'a> {
    layer: &'a Layer,
    mesh: &'a Mesh,
    sizes: &'a Sizes,
    stream: Sharding,
    shares: Shares,
    tied: &'a BTreeMap<TensorId, (Sharding, Storage)>,
}

impl Draw<'_> {
    fn choice(&self, chooser: &mut dyn Chooser) -> Option<LayerChoice> {
        let is_loss = self.layer.has_loss();
        let out = match (is_loss, self.shares) {
            (false, _) => self.stream,
            (true, Shares::Equal) => Sharding::REPLICATED,
            (true, Shares::Unequal) => Sharding::REPLICATED.with(AXIS, Placement::PartialSum),
        };
        let mut chosen: Vec<(Strategy, Placements)> = Vec::new();
        for op in self.layer.op_ids() {
            let options = self.options(op, &chosen, out);
            let at = chooser.strategy(self.layer, op, &options);
            chosen.push(options.get(at)?.clone());
        }
        let again = |op: &Op, chooser: &mut dyn Chooser| {
            let again = chooser.again(op) && op.kind != OpKind::Fork;
            if again { Recompute::Again } else { Recompute::Keep }
        };
        let recompute = self.layer.ops.iter().map(|op| again(op, chooser)).collect();
        let strategies = chosen.iter().map(|(strategy, _)| *strategy).collect();
        let storage = self.storages(&chosen, chooser);
        let [kept, parameters] = chooser.homes();
        let mut choice = LayerChoice {
            stream: if self.layer.stream_in.is_empty() { Sharding::REPLICATED } else { self.stream },
            out,
            strategies,
            recompute,
            kept,
            parameters,
            storage,
            shared: BTreeSet::new(),
        };
        if lower(self.layer, self.mesh, self.sizes, &choice).is_err() {
            // Not every cut of the three states goes together; whole storage always does.
            choice
                .storage
                .iter_mut()
                .filter(|(t, _)| !self.tied.contains_key(t))
                .for_each(|(_, s)| *s = Storage::default());
        }
        lower(self.layer, self.mesh, self.sizes, &choice).ok().map(|_| choice)
    }

    /// Strategies of an operator whose operands and gradients can be brought, the simplest first.
    fn options(
        &self,
        op: OpId,
        chosen: &[(Strategy, Placements)],
        out: Sharding,
    ) -> Vec<(Strategy, Placements)> {
        let one = &self.layer.ops[op.0];
        let sig = signature(self.layer, one);
        let mut list = strategies(self.layer, one, &sig, self.mesh, self.sizes);
        list.sort_by_key(|strategy| *strategy != Strategy::SAME);
        if self.shares == Shares::Unequal {
            list.retain(|&strategy| keeps_apart(self.layer, one, strategy));
        }
        let placed = list.into_iter().map(|strategy| (strategy, placements(&sig, strategy)));
        placed.filter(|(_, places)| self.fits(one, places, chosen, out)).collect()
    }

    fn fits(&self, op: &Op, places: &Placements, chosen: &[(Strategy, Placements)], out: Sharding) -> bool {
        let operands = op.operands.iter().enumerate().all(|(i, &tensor)| {
            if let Some((used, _)) = self.tied.get(&tensor) {
                return places.operands[i] == *used;
            }
            if self.layer.is_data(tensor) || self.layer.is_parameter(tensor) {
                return true;
            }
            let (value, gradient) = self.left(tensor, chosen);
            let there = steps(value, places.operands[i]).is_some();
            let back = !op.kind.differentiates(i) || steps(places.operand_gradients[i], gradient).is_some();
            there && back
        });
        let leaves = op.results.iter().position(|tensor| self.layer.out.contains(tensor)).is_none_or(|i| {
            steps(places.results[i], out).is_some() && steps(out.dual(), places.result_gradients[i]).is_some()
        });
        operands && leaves
    }

    /// How a tensor is left where it is computed, and how its gradient is wanted there.
    fn left(&self, tensor: TensorId, chosen: &[(Strategy, Placements)]) -> (Sharding, Sharding) {
        let Some(op) = self.layer.producer(tensor) else { return (self.stream, self.stream.dual()) };
        let places = &chosen[op.0].1;
        let at = self.layer.ops[op.0].results.iter().position(|&t| t == tensor).unwrap_or(0);
        (places.results[at], places.result_gradients[at])
    }

    fn storages(
        &self,
        chosen: &[(Strategy, Placements)],
        chooser: &mut dyn Chooser,
    ) -> BTreeMap<TensorId, Storage> {
        let mut all = BTreeMap::new();
        for (op, (_, places)) in self.layer.ops.iter().zip(chosen) {
            for (i, &tensor) in op.operands.iter().enumerate().filter(|(_, t)| self.layer.is_parameter(**t)) {
                let whole = whole_axes(self.mesh, places.operands[i]);
                let mut drawn = chooser.storage(whole);
                if self.shares == Shares::Unequal && !is_sent_once(drawn) {
                    (drawn.parameter, drawn.gradient) = Default::default();
                }
                if !self.layer.is_trained(tensor) {
                    drawn = Storage::frozen(drawn.parameter);
                }
                all.insert(tensor, self.tied.get(&tensor).map_or(drawn, |(_, storage)| *storage));
            }
        }
        all
    }

    /// How a choice uses a parameter.
    fn used(&self, choice: &LayerChoice, tensor: TensorId) -> Option<Sharding> {
        let op = &self.layer.ops[self.layer.reader(tensor)?.0];
        let at = self.layer.ops.iter().position(|one| one.name == op.name)?;
        let i = op.operands.iter().position(|&t| t == tensor)?;
        Some(placements(&signature(self.layer, op), choice.strategies[at]).operands[i])
    }
}
