//! Which bytes of parameters and optimizer states move between which ranks when training goes on under another plan.
//!
//! Both plans are of one model; parameters are compared as that has them, so that fused ones meet separate ones. What a
//! rank holds is a list of regions (`ir::region`), never of elements:
//!
//! ```text
//! takes(d, s) = sum over parameters of |held by d under the new plan, and taken from s|
//! from whom   = from itself, if it has the element; else the nearest rank that has it by link tier;
//!               of n such ranks in order, the (d mod n)-th, so that not all ask the same
//! ```
//! Ranks are those of the larger cluster: where one plan is on a part of it, or has its groups in another order, a
//! device is known by its node and its place there.
//!
//! Under one plan two ranks hold the same region of a parameter, or regions apart: so whoever holds one element of a
//! region holds all of it.

use std::collections::{BTreeMap, BTreeSet};

use cost_model::memory::StateBytes;
use ir::cluster::{Cluster, Tier};
use ir::engine::GradientFormat;
use ir::graph::{ParameterRef, Tie};
use ir::numbers::Numbers;
use ir::plan::Plan;
use ir::plan::check::OpenPlan;
use ir::program::HeldParameter;
use ir::region::{Part, Region, cut_run};
use rayon::prelude::*;

use crate::rewrite::parts::{Stands, parts};

/// Bytes of an element of a parameter, by the state that is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateSizes {
    /// Of the parameter as layers read it.
    pub parameter: u64,
    /// Of all that the update keeps: master copy and moments.
    pub optimizer: u64,
}

impl StateSizes {
    /// Those of a plan's job: 2 + 12 bytes in bf16, 4 + 8 in fp32.
    pub fn of(plan: &Plan) -> Self {
        let bytes = StateBytes::adamw(plan.job.precision, GradientFormat::Full);
        Self { parameter: bytes.parameter.0 as u64, optimizer: bytes.optimizer().0 as u64 }
    }
}

/// A state of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// The parameter as layers read it, where it is stored between uses.
    Parameter,
    /// Master copy and moments, where the update runs.
    Optimizer,
}

/// Who gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Givers {
    /// Every rank that holds a state gives it: training goes over from one plan to the other.
    Ranks,
    /// These ranks of the first plan do so; the others are lost.
    Survivors(Numbers),
    /// The first rank that updates an element gives all of its states: it is the one that wrote them to a checkpoint.
    Writers,
}

/// A parameter of the model that was asked for: the position of its layer, and its name there.
pub type Name = (u64, String);

/// Something that a rank takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Who gives.
    pub from: u64,
    /// Who takes; itself, where nothing moves.
    pub to: u64,
    /// What.
    pub region: Region,
}

/// Bytes that stay on their rank, and bytes that move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// Taken by a rank from itself.
    pub stays: u64,
    /// Taken from others.
    pub moves: u64,
}

/// The map from one plan to another.
#[derive(Clone, Debug, PartialEq)]
pub struct ReshardMap {
    /// Bytes that a rank takes from a rank, from, to; itself included.
    pub pairs: BTreeMap<(u64, u64), u64>,
    /// Bytes of every parameter's states.
    pub tensors: BTreeMap<(Name, State), Amount>,
    /// Bytes that somebody needs and nobody has: they are in a checkpoint at best.
    pub missing: u64,
}

impl ReshardMap {
    /// All of it.
    pub fn total(&self) -> Amount {
        let mut total = Amount::default();
        for (&(from, to), &bytes) in &self.pairs {
            if from == to { total.stays += bytes } else { total.moves += bytes }
        }
        total
    }
}

/// Why two plans have no map.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReshardError {
    /// A parameter is only in one of the models.
    #[error("parameter `{name}` of layer {layer} is only in the {which} plan's model")]
    Missing {
        /// Position of its layer.
        layer: u64,
        /// Its name.
        name: String,
        /// In which.
        which: &'static str,
    },
    /// A parameter is another layer's in one of the models alone.
    #[error(
        "parameter `{name}` of layer {layer} is one with that of another layer in the {which} plan's model only"
    )]
    Tied {
        /// Position of its layer.
        layer: u64,
        /// Its name.
        name: String,
        /// In which.
        which: &'static str,
    },
    /// A parameter has another shape.
    #[error(
        "parameter `{name}` of layer {layer} has shape {first:?} in the first plan and {second:?} in the second"
    )]
    Shape {
        /// Position of its layer.
        layer: u64,
        /// Its name.
        name: String,
        /// In the first plan.
        first: Vec<u64>,
        /// In the second.
        second: Vec<u64>,
    },
    /// A fused layer cannot be derived from the one that it stands for.
    #[error("layer `{0}` is no form of the layer that the plan says it stands for")]
    Form(String),
}

/// Ranks of a stage that hold the same of a parameter.
#[derive(Clone, Debug)]
struct Holders {
    regions: Vec<Region>,
    /// Devices of the mesh, in order.
    devices: Vec<u64>,
}

/// One plan, ready to be asked who holds what.
struct Side<'a> {
    plan: &'a Plan,
    open: &'a OpenPlan,
    /// Per entry and part of a parameter, who holds it.
    held: Vec<BTreeMap<(String, State), Vec<Holders>>>,
    /// Shapes of the parts, per entry.
    shapes: Vec<BTreeMap<String, Vec<u64>>>,
    /// Entry and chunk of every layer.
    layers: Vec<(usize, usize)>,
    /// Ranks of the larger cluster that its ranks are; the same ones, where nothing else is said.
    devices: Option<Vec<u64>>,
}

/// A parameter: the position of its layer, and its name.
type Place = (usize, String);

impl<'a> Side<'a> {
    /// Parameters that are one: owner and copy.
    fn ties(&self) -> BTreeSet<[Place; 2]> {
        let place = |one| self.place(one);
        self.open.model.ties.iter().filter_map(|tie| Some([place(tie.owner)?, place(tie.copy)?])).collect()
    }

    /// Where a parameter is; its layer occurs once where it is tied.
    fn place(&self, one: ParameterRef) -> Option<Place> {
        let is_of_kind = |(entry, _): &(usize, usize)| self.open.entries[*entry].layer == one.layer;
        let layer = self.layers.iter().position(is_of_kind)?;
        Some((layer, self.name(one).to_owned()))
    }

    fn new((plan, open): (&'a Plan, &'a OpenPlan)) -> Result<Self, ReshardError> {
        let mut side =
            Self { plan, open, held: Vec::new(), shapes: Vec::new(), layers: Vec::new(), devices: None };
        for (chunk, runs) in plan.chunks.iter().enumerate() {
            for run in runs {
                side.layers.extend(std::iter::repeat_n((run.entry, chunk), run.count as usize));
            }
        }
        for entry in 0..open.entries.len() {
            let layer = open.layer(entry);
            let original = open.originals.get(&open.entries[entry].layer);
            let stands = original.map(|original| Stands { form: layer, original });
            let parts = parts(layer, stands).ok_or_else(|| ReshardError::Form(layer.name.clone()))?;
            let mut held = BTreeMap::new();
            let mut shapes = BTreeMap::new();
            let program = &open.entries[entry].program;
            for one in program.used() {
                for part in parts.get(&one.tensor).into_iter().flatten() {
                    shapes.insert(part.name.clone(), part.shape.clone());
                    if program.shared.contains(&one.tensor) {
                        continue;
                    }
                    let states: &[State] = match one.trained {
                        true => &[State::Parameter, State::Optimizer],
                        false => &[State::Parameter],
                    };
                    for &state in states {
                        held.insert((part.name.clone(), state), side.holders(entry, &one, (part, state)));
                    }
                }
            }
            side.held.push(held);
            side.shapes.push(shapes);
        }
        Ok(side)
    }

    /// Who of a stage holds what of a part.
    fn holders(&self, entry: usize, held: &HeldParameter, (part, state): (&Part, State)) -> Vec<Holders> {
        let mesh = self.plan.mesh_of_entry(entry);
        let layer = self.open.layer(entry);
        let shape = layer.shape(held.tensor, &layer.sizes(0, 0));
        let cut = match state {
            State::Parameter => held.storage.parameter,
            State::Optimizer => held.storage.optimizer,
        };
        let mut groups: BTreeMap<Vec<Region>, Vec<u64>> = BTreeMap::new();
        for device in 0..mesh.n_devices() {
            let at = mesh.coordinates(device);
            let block = Region::of(held.used, mesh, &at, &shape);
            let run = cut_run(mesh, &at, block.volume(), cut);
            let regions: Vec<Region> =
                block.run(run).iter().filter_map(|region| part.region(region)).collect();
            if !regions.is_empty() {
                groups.entry(regions).or_default().push(device);
            }
        }
        groups.into_iter().map(|(regions, devices)| Holders { regions, devices }).collect()
    }

    /// Ranks on which the first device of every stage that holds a state of a layer's parameter is. The copy of a tie
    /// is read and never updated; of two stages with one chunk only the first updates.
    fn stages(&self, layer: usize, name: &str, state: State) -> Vec<u64> {
        let (_, chunk) = self.layers[layer];
        let stages = self.plan.stages_of_chunk(chunk);
        match state {
            State::Parameter => stages,
            State::Optimizer if self.tie_of(layer, name).is_some() => Vec::new(),
            State::Optimizer => stages.into_iter().take(1).collect(),
        }
    }

    /// The layer whose states a layer's parameter has: its owner's, where it is the copy of a tie.
    fn owner(&self, layer: usize, name: &str) -> (usize, String) {
        let owner = self.tie_of(layer, name).and_then(|tie| self.place(tie.owner));
        owner.unwrap_or_else(|| (layer, name.to_owned()))
    }

    /// The tie of which a layer's parameter is the copy.
    fn tie_of(&self, layer: usize, name: &str) -> Option<&'a Tie> {
        let kind = self.open.entries[self.layers[layer].0].layer;
        let is_copy = |tie: &&Tie| tie.copy.layer == kind && self.name(tie.copy) == name;
        self.open.model.ties.iter().find(is_copy)
    }

    fn name(&self, one: ParameterRef) -> &'a str {
        &self.open.model.layers[one.layer].tensors[one.tensor.0].name
    }

    /// The layer whose tensors a layer's parameter has: its owner's, where it is a copy that the owner holds.
    fn holder(&self, layer: usize, name: &str) -> (usize, String) {
        match self.held[self.layers[layer].0].contains_key(&(name.to_owned(), State::Parameter)) {
            true => (layer, name.to_owned()),
            false => self.owner(layer, name),
        }
    }

    /// The rank of the larger cluster that a rank is.
    fn device(&self, rank: u64) -> u64 {
        let devices = self.devices.as_ref();
        devices.and_then(|devices| devices.get(rank as usize).copied()).unwrap_or(rank)
    }

    /// Everybody who holds a state of a layer's parameter, by what they hold.
    fn ranks(&self, layer: usize, name: &str, state: State) -> Vec<(&[Region], Vec<u64>)> {
        let (entry, _) = self.layers[layer];
        let stages = self.stages(layer, name, state);
        let holders = self.held[entry].get(&(name.to_owned(), state)).into_iter().flatten();
        let of_stages = |holders: &Holders| {
            let ranks = |&stage: &u64| {
                let rank = move |&device: &u64| self.device(self.plan.cluster_rank(stage, device));
                holders.devices.iter().map(rank)
            };
            stages.iter().flat_map(ranks).collect::<Vec<u64>>()
        };
        holders
            .map(|holders| (holders.regions.as_slice(), of_stages(holders)))
            .filter(|(_, ranks)| !ranks.is_empty())
            .collect()
    }
}

/// Two plans of one model.
pub struct Reshard<'a> {
    from: Side<'a>,
    to: Side<'a>,
    givers: Givers,
    /// Of the larger cluster, where not all ranks of the first plan give.
    survivors: Option<BTreeSet<u64>>,
    /// The cluster whose links join the ranks of both plans, if there is one.
    links: Option<&'a Cluster>,
}

impl<'a> Reshard<'a> {
    /// From one plan to another.
    ///
    /// # Errors
    /// Where the two are not of one model.
    pub fn new(
        from: (&'a Plan, &'a OpenPlan),
        to: (&'a Plan, &'a OpenPlan),
        givers: Givers,
    ) -> Result<Self, ReshardError> {
        let (first, second) = (&from.0.cluster, &to.0.cluster);
        let (mut from, mut to) = (Side::new(from)?, Side::new(to)?);
        let links = if is_numbered(first) || is_numbered(second) {
            let larger = larger(first, second);
            (from.devices, to.devices) = (Some(devices(first, larger)), Some(devices(second, larger)));
            Some(larger)
        } else {
            links(first, second)
        };
        let survivors = match &givers {
            Givers::Survivors(ranks) => Some(ranks.iter().map(|rank| from.device(rank)).collect()),
            Givers::Ranks | Givers::Writers => None,
        };
        let both = Self { from, to, givers, survivors, links };
        both.check()?;
        Ok(both)
    }

    fn check(&self) -> Result<(), ReshardError> {
        let n = self.from.layers.len().max(self.to.layers.len());
        for layer in 0..n {
            let empty = BTreeMap::new();
            let shapes = |side: &'_ Side<'a>| {
                side.layers.get(layer).map_or_else(|| empty.clone(), |(entry, _)| side.shapes[*entry].clone())
            };
            let (first, second) = (shapes(&self.from), shapes(&self.to));
            for (name, shape) in &first {
                let (layer, name) = (layer as u64, name.clone());
                match second.get(&name) {
                    None => return Err(ReshardError::Missing { layer, name, which: "first" }),
                    Some(other) if other != shape => {
                        let (first, second) = (shape.clone(), other.clone());
                        return Err(ReshardError::Shape { layer, name, first, second });
                    }
                    Some(_) => {}
                }
            }
            if let Some(name) = second.keys().find(|name| !first.contains_key(*name)) {
                let (layer, name) = (layer as u64, name.clone());
                return Err(ReshardError::Missing { layer, name, which: "second" });
            }
        }
        let (first, second) = (self.from.ties(), self.to.ties());
        let only = |some: &BTreeSet<[Place; 2]>, others: &BTreeSet<[Place; 2]>, which: &'static str| {
            let [_, (layer, name)] = some.difference(others).next()?.clone();
            Some(ReshardError::Tied { layer: layer as u64, name, which })
        };
        let other = only(&first, &second, "first").or_else(|| only(&second, &first, "second"));
        other.map_or(Ok(()), Err)
    }

    /// Position of the link tier between two ranks, where both plans are of one cluster or of a part of it.
    pub fn tier(&self, a: u64, b: u64) -> Option<usize> {
        self.links.map(|cluster| cluster.tier_between(a, b))
    }

    /// Parameters in order.
    pub fn names(&self) -> Vec<Name> {
        let of = |(layer, (entry, _)): (usize, &(usize, usize))| {
            self.from.shapes[*entry].keys().map(move |name| (layer as u64, name.clone())).collect::<Vec<_>>()
        };
        self.from.layers.iter().enumerate().flat_map(of).collect()
    }

    /// From whom a rank takes what all of `holders` have.
    fn giver(&self, to: u64, holders: &[u64]) -> u64 {
        if holders.contains(&to) {
            return to;
        }
        let mut nearest: Option<usize> = None;
        let mut near: Vec<u64> = Vec::new();
        for &holder in holders {
            let tier = self.tier(holder, to);
            // Where links say nothing, all are as near.
            let is_nearer = tier.is_some_and(|tier| nearest.is_none_or(|nearest| tier < nearest));
            if is_nearer {
                nearest = tier;
                near.clear();
            }
            if tier == nearest {
                near.push(holder);
            }
        }
        near.get(to as usize % near.len().max(1)).copied().unwrap_or(to)
    }

    /// Who may give a state of a parameter.
    fn sources(&self, layer: usize, name: &str, state: State) -> Vec<(&[Region], Vec<u64>)> {
        match &self.givers {
            Givers::Ranks => self.from.ranks(layer, name, state),
            Givers::Survivors(_) => {
                let mut left = self.from.ranks(layer, name, state);
                let gives = |rank: &u64| self.survivors.as_ref().is_none_or(|all| all.contains(rank));
                left.iter_mut().for_each(|(_, ranks)| ranks.retain(gives));
                left.retain(|(_, ranks)| !ranks.is_empty());
                left
            }
            Givers::Writers => {
                let mut written = self.from.ranks(layer, name, State::Optimizer);
                if written.is_empty() {
                    // What is never updated is written as it is stored.
                    written = self.from.ranks(layer, name, State::Parameter);
                }
                written.iter_mut().for_each(|(_, ranks)| ranks.truncate(1));
                written
            }
        }
    }

    /// What every rank takes of a state of a parameter, told as it is found.
    fn each(&self, layer: usize, name: &str, state: State, mut tell: impl FnMut(u64, u64, &Region, &Region)) {
        let (source, held) = match &self.givers {
            Givers::Ranks | Givers::Survivors(_) => self.from.holder(layer, name),
            // A copy is not written: who reads one takes its owner's.
            Givers::Writers => self.from.owner(layer, name),
        };
        let sources = self.sources(source, &held, state);
        for (wanted, takers) in self.to.ranks(layer, name, state) {
            for (given, holders) in &sources {
                let mut givers: Option<Vec<u64>> = None;
                for want in wanted {
                    for give in given.iter().filter(|give| give.common(want) > 0) {
                        let of_all = || takers.iter().map(|&to| self.giver(to, holders)).collect();
                        let givers = givers.get_or_insert_with(of_all);
                        takers.iter().zip(givers).for_each(|(&to, &mut from)| tell(from, to, give, want));
                    }
                }
            }
        }
    }

    /// Everything that is taken of a state of a parameter, region by region.
    pub fn taken(&self, (layer, name): &Name, state: State) -> Vec<Taken> {
        let mut all = Vec::new();
        self.each(*layer as usize, name, state, |from, to, give, want| {
            all.extend(give.intersection(want).map(|region| Taken { from, to, region }));
        });
        all
    }

    /// The whole map. Layers whose stages and entries are alike are worked out once.
    pub fn map(&self, sizes: StateSizes) -> ReshardMap {
        let alike = |layer: usize| -> Alike {
            let ((from, chunk), (to, other)) = (self.from.layers[layer], self.to.layers[layer]);
            (from, to, self.from.plan.stages_of_chunk(chunk), self.to.plan.stages_of_chunk(other))
        };
        let layers = 0..self.from.layers.len();
        let firsts: BTreeMap<Alike, usize> =
            layers.clone().rev().map(|layer| (alike(layer), layer)).collect();
        let known: BTreeMap<Alike, Vec<OfState>> =
            firsts.into_par_iter().map(|(key, layer)| (key, self.of_layer(layer, sizes))).collect();
        let mut map = ReshardMap { pairs: BTreeMap::new(), tensors: BTreeMap::new(), missing: 0 };
        for layer in layers {
            let list = &known[&alike(layer)];
            for one in list.iter() {
                map.missing += one.missing;
                let amount = map.tensors.entry(((layer as u64, one.name.clone()), one.state)).or_default();
                for (&(from, to), &bytes) in &one.pairs {
                    *map.pairs.entry((from, to)).or_insert(0) += bytes;
                    if from == to { amount.stays += bytes } else { amount.moves += bytes }
                }
            }
        }
        map
    }

    fn of_layer(&self, layer: usize, sizes: StateSizes) -> Vec<OfState> {
        let names = self.from.shapes[self.from.layers[layer].0].keys();
        let one = |(name, state): (&String, State)| {
            let bytes = match state {
                State::Parameter => sizes.parameter,
                State::Optimizer => sizes.optimizer,
            };
            let mut pairs = BTreeMap::new();
            self.each(layer, name, state, |from, to, give, want| {
                *pairs.entry((from, to)).or_insert(0) += give.common(want) * bytes;
            });
            let wants = |(regions, takers): (&[Region], Vec<u64>)| {
                regions.iter().map(Region::volume).sum::<u64>() * takers.len() as u64
            };
            let wanted: u64 = self.to.ranks(layer, name, state).into_iter().map(wants).sum();
            let missing = (wanted * bytes).saturating_sub(pairs.values().sum());
            OfState { name: name.clone(), state, pairs, missing }
        };
        let states = [State::Parameter, State::Optimizer];
        names.flat_map(|name| states.map(|state| (name, state))).map(one).collect()
    }
}

/// What layers have in common that are resharded alike: entries and stages under both plans.
type Alike = (usize, usize, Vec<u64>, Vec<u64>);

/// What is taken of a state of a layer's parameter, by pair of ranks.
struct OfState {
    name: String,
    state: State,
    pairs: BTreeMap<(u64, u64), u64>,
    missing: u64,
}

/// Whether nodes of a cluster are told apart by numbers.
pub fn is_numbered(cluster: &Cluster) -> bool {
    cluster.groups.iter().any(|group| group.nodes.is_some())
}

/// The cluster with more devices; of equal ones the second.
pub fn larger<'a>(first: &'a Cluster, second: &'a Cluster) -> &'a Cluster {
    if first.n_devices() > second.n_devices() { first } else { second }
}

/// The ranks of a larger cluster that the ranks of one are, by their nodes and places; behind them what it lacks.
fn devices(of: &Cluster, larger: &Cluster) -> Vec<u64> {
    let ranks: BTreeMap<(u64, u64), u64> = larger.seats().into_iter().zip(0..).collect();
    let mut next = larger.n_devices();
    let rank = |seat: (u64, u64)| {
        ranks.get(&seat).copied().unwrap_or_else(|| {
            next += 1;
            next - 1
        })
    };
    of.seats().into_iter().map(rank).collect()
}

/// Of two clusters the larger, if the smaller is a part of it: the same tiers, shorter where it ends.
fn links<'a>(first: &'a Cluster, second: &'a Cluster) -> Option<&'a Cluster> {
    let (large, small) =
        if first.n_devices() >= second.n_devices() { (first, second) } else { (second, first) };
    let n = small.n_devices();
    let same =
        |(large, small): (&Tier, &Tier)| large.name == small.name && small.devices == large.devices.min(n);
    let alike = large.tiers.len() == small.tiers.len() && large.tiers.iter().zip(&small.tiers).all(same);
    alike.then_some(large)
}
