//! What all ranks of a run share: programs, parameters, tokens, and where chunks and ties meet. Checked once, here.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use ir::conversion::Step;
use ir::graph::{Data, Layer, OpId, Role, Sizes, TensorId};
use ir::lower::LayerChoice;
use ir::mesh::AxisId;
use ir::program::{HeldParameter, Program, Side, Update};
use ir::schedule::{Action, Section, check_table};
use ir::signature::{Signature, signature};
use ir::split::{SplitBackward, split_backward};
use ir::strategy::Strategy;
use ir::token_order::TokenOrder;
use ir::work::Pass;
use ndarray::ArrayD;

use crate::audit::Leaves;
use crate::element::{Edges, Width};
use crate::error::ExecutorError;
use crate::initial::{self, Batch, Counting, Texts};
use crate::job::{Execution, Instance, LayerIdx};
use crate::kernels;
use crate::label::{Phase, Place};
use crate::rank::At;
use crate::routing::Routes;
use crate::run::ParameterName;
use crate::states::{self, States};
use crate::ways::{Border, Ways};

/// Rows of every loop of an operator.
pub(crate) type Rows = Vec<Range<u64>>;

/// A parameter of the run.
pub(crate) type ParameterKey = (LayerIdx, TensorId);

/// A run, ready to go.
pub(crate) struct Prepared<'a> {
    pub(crate) execution: &'a Execution<'a>,
    /// One per entry of `Execution::choices`.
    pub(crate) programs: &'a [Program],
    /// The same with backward in two parts; empty where the table never asks for them.
    splits: Vec<SplitBackward>,
    /// All layers in order.
    pub(crate) instances: Vec<Instance>,
    /// Per slice and kind of layer.
    pub(crate) sizes: Vec<Vec<Sizes>>,
    /// Per kind of layer and operator.
    pub(crate) signatures: Vec<Vec<Signature>>,
    /// Per slice, device of a mesh, entry of `Execution::choices` and operator, the rows of every loop that it walks.
    pub(crate) rows: Vec<Vec<Vec<Vec<Rows>>>>,
    /// Experts that routers are to choose.
    pub(crate) routes: &'a Routes,
    /// Where streams come from and go.
    pub(crate) ways: Ways,
    /// Parameters that are one.
    pub(crate) ties: Vec<TiedPair>,
    /// What every parameter begins with.
    pub(crate) initial: BTreeMap<ParameterKey, ArrayD<f64>>,
    positions: Vec<u64>,
    texts: Texts,
    counting: Counting,
    /// Per step, the tokens that the loss counts.
    n_counted: Vec<u64>,
}

/// A tie, with the layers that have the two parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TiedPair {
    pub(crate) owner: ParameterKey,
    pub(crate) copy: ParameterKey,
    /// The copy is nothing but the owner's tensor.
    pub(crate) is_shared: bool,
}

impl<'a> Prepared<'a> {
    pub(crate) fn new(
        execution: &'a Execution<'a>,
        programs: &'a [Program],
        routes: &'a Routes,
    ) -> Result<Self, ExecutorError> {
        check_counts(execution, programs)?;
        let instances = execution.instances();
        let positions = execution.tokens.order.positions(execution.sequence, execution.tokens.parts);
        let positions = positions.ok_or_else(|| {
            unfit(format!(
                "a sequence of {} tokens cannot be laid out {:?}",
                execution.sequence, execution.tokens
            ))
        })?;
        let layers = &execution.model.layers;
        let slices = 0..execution.slices.n();
        let sizes = |slice: u32| {
            layers.iter().map(|l| execution.slices.sizes(l, execution.micro_batch, slice)).collect()
        };
        let mut prepared = Self {
            execution,
            programs,
            splits: splits(execution, programs),
            instances,
            sizes: slices.clone().map(sizes).collect(),
            signatures: layers.iter().map(|l| l.ops.iter().map(|op| signature(l, op)).collect()).collect(),
            rows: Vec::new(),
            routes,
            ways: Ways::default(),
            ties: Vec::new(),
            initial: BTreeMap::new(),
            positions,
            counting: Counting::of(execution.model),
            n_counted: Vec::new(),
            texts: Texts::of(execution.model)
                .ok_or_else(|| unfit("the model has no vocabulary to draw tokens from".into()))?,
        };
        let n = u64::from(execution.n_micro_batches);
        prepared.n_counted = (0..u64::from(execution.steps))
            .map(|step| (0..n).map(|m| prepared.batch().n_counted(step * n + m)).sum())
            .collect();
        let n_devices = |stage: u32| execution.mesh_of(stage).n_devices();
        let devices = 0..(0..execution.n_stages).map(n_devices).max().unwrap_or(0);
        let rows = |slice| devices.clone().map(|device| prepared.find_rows(slice, device)).collect();
        prepared.rows = slices.map(rows).collect();
        prepared.ways = Ways::find(&prepared)?;
        prepared.ties = prepared.find_ties()?;
        prepared.initial = prepared.draw_parameters()?;
        Ok(prepared)
    }

    pub(crate) fn layer(&self, layer_idx: LayerIdx) -> &'a Layer {
        &self.execution.model.layers[self.instances[layer_idx].kind]
    }

    pub(crate) fn program(&self, layer_idx: LayerIdx) -> &'a Program {
        &self.programs[self.instances[layer_idx].choice]
    }

    /// The two parts of a layer's backward.
    pub(crate) fn split(&self, layer_idx: LayerIdx) -> Result<&SplitBackward, ExecutorError> {
        let split = self.splits.get(self.instances[layer_idx].choice);
        split.ok_or_else(|| unfit("the table splits backward, but nothing is split".into()))
    }

    pub(crate) fn place(&self, layer_idx: LayerIdx, phase: Phase, seq: u64) -> Place<'a> {
        Place { layer_idx, kind: &self.layer(layer_idx).name, phase, seq }
    }

    pub(crate) fn tensor_name(&self, layer_idx: LayerIdx, tensor: TensorId) -> &'a str {
        &self.layer(layer_idx).tensors[tensor.0].name
    }

    /// Lengths of a whole parameter's dims.
    pub(crate) fn shape(&self, layer_idx: LayerIdx, tensor: TensorId) -> Vec<u64> {
        self.shape_of(layer_idx, tensor, 0)
    }

    /// Lengths of a whole tensor's dims in a slice.
    pub(crate) fn shape_of(&self, layer_idx: LayerIdx, tensor: TensorId, slice: u32) -> Vec<u64> {
        self.layer(layer_idx).shape(tensor, &self.sizes[slice as usize][self.instances[layer_idx].kind])
    }

    /// The same where the run is.
    pub(crate) fn shape_in(&self, at: At<'_>, tensor: TensorId) -> Vec<u64> {
        self.shape_of(at.layer_idx, tensor, self.slice_of(at.place.seq))
    }

    /// Lengths of the dims of the stream that passes a border.
    pub(crate) fn border_shape<'b>(&self, border: &'b Border, seq: u64) -> &'b [u64] {
        border.shape(self.slice_of(seq))
    }

    /// The slice of a unit counted from the first step.
    pub(crate) fn slice_of(&self, seq: u64) -> u32 {
        (seq % u64::from(self.execution.slices.n())) as u32
    }

    /// Of whose sequences a device has a unit counted from the first step: the micro-batch of the whole mesh, counted
    /// so too, and the device on it.
    pub(crate) fn source(&self, seq: u64, device: u64) -> (u64, u64) {
        let execution = self.execution;
        let most = u64::from(execution.shape().n_micro_batches);
        let own = seq / u64::from(execution.slices.n());
        let (micro_batch, device) = execution.source(device, own % most);
        (own / most * u64::from(execution.n_micro_batches) + micro_batch, device)
    }

    /// A unit counted from the first step, in its step.
    pub(crate) fn unit_of(&self, seq: u64) -> u32 {
        (seq % u64::from(self.execution.shape().n_units())) as u32
    }

    /// The tokens of every sequence that a unit is about.
    pub(crate) fn tokens_of(&self, seq: u64) -> Range<u64> {
        self.execution.slices.range(self.slice_of(seq))
    }

    /// Layers of a chunk, first to last.
    pub(crate) fn layers_of(&self, chunk: u32) -> Vec<LayerIdx> {
        (0..self.instances.len()).filter(|&layer_idx| self.instances[layer_idx].chunk == chunk).collect()
    }

    /// Pipeline rank that owns a layer's parameters.
    pub(crate) fn stage_of(&self, layer_idx: LayerIdx) -> u32 {
        self.stages_of(layer_idx)[0]
    }

    /// Pipeline ranks with a copy of a layer, its owner first.
    pub(crate) fn stages_of(&self, layer_idx: LayerIdx) -> Vec<u32> {
        let execution = self.execution;
        execution.placement.ranks(execution.n_stages, self.instances[layer_idx].chunk).collect()
    }

    /// Layers of a pipeline rank.
    pub(crate) fn layers_on(&self, stage: u32) -> Vec<LayerIdx> {
        (0..self.instances.len()).filter(|&layer_idx| self.stages_of(layer_idx).contains(&stage)).collect()
    }

    /// The pipeline rank that runs a chunk of a micro-batch.
    pub(crate) fn stage_at(&self, chunk: u32, micro_batch: u32) -> u32 {
        self.execution.placement.seat(self.execution.n_stages, chunk, micro_batch).rank
    }

    /// The update of a parameter.
    pub(crate) fn update(&self, (layer_idx, tensor): ParameterKey) -> Result<&'a Update, ExecutorError> {
        let find = self.program(layer_idx).updates.iter().find(|update| update.tensor == tensor);
        find.ok_or_else(|| {
            let name = self.tensor_name(layer_idx, tensor);
            unfit(format!("layer {layer_idx}: its program has no update of parameter `{name}`"))
        })
    }

    /// How a parameter is held, here or by its owner.
    pub(crate) fn held(&self, (layer_idx, tensor): ParameterKey) -> Result<HeldParameter, ExecutorError> {
        let find = self.program(layer_idx).used().find(|used| used.tensor == tensor);
        find.ok_or_else(|| {
            let name = self.tensor_name(layer_idx, tensor);
            unfit(format!("layer {layer_idx}: its program does not hold parameter `{name}`"))
        })
    }

    /// The parameter whose tensors are a parameter's: its own, or those of the owner that holds it too.
    pub(crate) fn holder(&self, key: ParameterKey) -> ParameterKey {
        let tie = self.ties.iter().find(|tie| tie.is_shared && tie.copy == key);
        tie.map_or(key, |tie| tie.owner)
    }

    /// How numbers that leave an operator or a rank lie in memory.
    pub(crate) fn rounded(&self) -> Width {
        match self.execution.edges {
            Edges::Exact => Width::Full,
            Edges::Bf16 => Width::Bf16,
        }
    }

    /// How a value lies in memory: the loss of a token, what it is made of and their gradients are not rounded, and
    /// neither are gradients of parameters, which go to their accumulators.
    pub(crate) fn width(&self, layer_idx: LayerIdx, value: ir::program::Value) -> Width {
        let layer = self.layer(layer_idx);
        let kept = |op: OpId| Leaves::of_results(&layer.ops[op.0].kind) == Leaves::Single;
        match (layer.tensors[value.tensor.0].role, value.side) {
            (Role::Data(Data::Tokens | Data::Ahead(_) | Data::Labels | Data::Positions), _) => Width::Integer,
            (Role::Parameter(_) | Role::Frozen(_), Side::Gradient) => Width::Full,
            (Role::Activation, _) if layer.producer(value.tensor).is_some_and(kept) => Width::Full,
            (Role::Data(Data::AlibiSlopes | Data::RouterBias | Data::Features), _) => Width::Full,
            (Role::Parameter(_) | Role::Frozen(_) | Role::Activation, _) => self.rounded(),
        }
    }

    /// Axes along which an operator meets its keys block by block; none where it is on no ring.
    pub(crate) fn ring_axes(&self, layer_idx: LayerIdx, op: OpId) -> Vec<AxisId> {
        let (_, choice) = &self.execution.choices[self.instances[layer_idx].choice];
        choice.strategies[op.0].ring_axes()
    }

    /// Whether attention on a ring keeps what backward needs: in forward only where backward does not compute it again.
    pub(crate) fn keeps_attended(&self, layer_idx: LayerIdx, op: OpId, pass: Pass) -> bool {
        pass == Pass::Backward || self.program(layer_idx).keeps(op)
    }

    pub(crate) fn is_copy(&self, key: ParameterKey) -> bool {
        self.ties.iter().any(|tie| tie.copy == key)
    }

    /// Moments with which a parameter begins on a stage, if it owns the parameter and there are any.
    pub(crate) fn moments(&self, key: ParameterKey, stage: u32) -> Option<&'a states::Moments> {
        let from = self.execution.training.from?;
        let is_owned = self.stage_of(key.0) == stage && !self.is_copy(key);
        let name = (key.0, self.tensor_name(key.0, key.1).to_owned());
        from.moments.get(&name).filter(|_| is_owned)
    }

    pub(crate) fn batch(&self) -> Batch<'_> {
        let Execution { seed, micro_batch, training, .. } = *self.execution;
        let (positions, texts) = (self.positions.as_slice(), &self.texts);
        let first_sequence = training.from.map_or(0, |from| from.sequences);
        let text = training.text;
        Batch { seed, positions, texts, micro_batch, counting: self.counting, text, first_sequence }
    }

    /// Tokens of a step, over all micro-batches, that the loss counts: one for each rank to divide by, so that a
    /// micro-batch with fewer of them weighs less.
    pub(crate) fn n_counted(&self, step: u64) -> u64 {
        self.n_counted.get(step as usize).copied().unwrap_or_default()
    }

    /// Position in its sequence of every token, as they are laid out.
    pub(crate) fn positions(&self) -> &[u64] {
        &self.positions
    }

    fn find_rows(&self, slice: u32, device: u64) -> Vec<Vec<Rows>> {
        let of_choice = |(at, (kind, choice)): (usize, &(usize, LayerChoice))| {
            // Of a device that this mesh has not, nothing is asked.
            let mesh = self.execution.mesh_of_choice(at);
            let coordinates = mesh.coordinates(device);
            let pairs = self.signatures[*kind].iter().zip(&choice.strategies);
            let rows = |(signature, &strategy): (&Signature, &Strategy)| {
                kernels::blocks(signature, &self.sizes[slice as usize][*kind], strategy, mesh, &coordinates)
            };
            pairs.map(rows).collect()
        };
        self.execution.choices.iter().enumerate().map(of_choice).collect()
    }

    fn find_ties(&self) -> Result<Vec<TiedPair>, ExecutorError> {
        let mut ties = Vec::new();
        for tie in &self.execution.model.ties {
            let find = |kind| self.instances.iter().position(|instance| instance.kind == kind);
            let (Some(owner), Some(copy)) = (find(tie.owner.layer), find(tie.copy.layer)) else {
                return Err(unfit("a tie names a layer that does not occur".into()));
            };
            let is_shared = self.program(copy).shared.contains(&tie.copy.tensor);
            let pair =
                TiedPair { owner: (owner, tie.owner.tensor), copy: (copy, tie.copy.tensor), is_shared };
            let (a, b) = (self.held(pair.owner)?, self.held(pair.copy)?);
            let shape = |(layer_idx, tensor)| self.shape(layer_idx, tensor);
            if shape(pair.owner) != shape(pair.copy) || a.used != b.used || a.storage != b.storage {
                let name = |(layer_idx, tensor)| {
                    format!("`{}` of layer {layer_idx}", self.tensor_name(layer_idx, tensor))
                };
                let (owner, copy) = (name(pair.owner), name(pair.copy));
                return Err(unfit(format!(
                    "{copy} is tied to {owner} but differs in shape, sharding or storage"
                )));
            }
            if is_shared {
                self.check_shared(&pair)?;
            }
            ties.push(pair);
        }
        let is_copy = |key: ParameterKey| ties.iter().any(|tie: &TiedPair| tie.copy == key);
        for layer_idx in 0..self.instances.len() {
            if let Some(&tensor) = self.program(layer_idx).shared.iter().find(|&&t| !is_copy((layer_idx, t)))
            {
                let name = self.tensor_name(layer_idx, tensor);
                return Err(unfit(format!("`{name}` of layer {layer_idx} is shared, but it is no copy")));
            }
        }
        Ok(ties)
    }

    /// Owner and copy are on the same ranks, the owner holds its tensors, and their gradients can be added as they are.
    fn check_shared(&self, pair: &TiedPair) -> Result<(), ExecutorError> {
        let ranks = |key: ParameterKey| self.stages_of(key.0).into_iter().collect::<BTreeSet<u32>>();
        // By which algorithms, only the owner's says.
        let reduce = |(layer_idx, tensor): ParameterKey| {
            let updates = &self.program(layer_idx).updates;
            let update = updates.iter().find(|update| update.tensor == tensor)?;
            let change = |step: &Step| (step.kind, step.axes.clone(), [step.before, step.after]);
            Some(update.reduce.iter().map(change).collect::<Vec<_>>())
        };
        let facts = |key: ParameterKey| (ranks(key), self.program(key.0).parameters, reduce(key));
        let is_held = !self.program(pair.owner.0).shared.contains(&pair.owner.1);
        if is_held && facts(pair.owner) == facts(pair.copy) {
            return Ok(());
        }
        let (layer_idx, name) = (pair.copy.0, self.tensor_name(pair.copy.0, pair.copy.1));
        Err(unfit(format!("`{name}` of layer {layer_idx} cannot be its owner's tensor")))
    }

    fn draw_parameters(&self) -> Result<BTreeMap<ParameterKey, ArrayD<f64>>, ExecutorError> {
        let mut drawn = BTreeMap::new();
        for layer_idx in 0..self.instances.len() {
            let layer = self.layer(layer_idx);
            for tensor in layer.parameters() {
                let Some(init) = layer.tensors[tensor.0].role.init() else { continue };
                let name = (layer_idx, layer.tensors[tensor.0].name.clone());
                let given = match self.execution.training.from {
                    None => self.execution.given.get(&name),
                    // The copy of a tie begins with what its owner has.
                    Some(_) if self.is_copy((layer_idx, tensor)) => None,
                    Some(from) => {
                        Some(from.parameters.get(&name).ok_or_else(|| missing(&name, "parameter"))?)
                    }
                };
                let value = match given {
                    Some(given) if given.shape() == whole_shape(layer, tensor) => given.clone(),
                    Some(_) => return Err(unfit(format!("the given `{}` has another shape", name.1))),
                    None => initial::parameter(self.execution.seed, layer_idx, layer, tensor, init),
                };
                drawn.insert((layer_idx, tensor), value);
            }
        }
        if let Some(from) = self.execution.training.from {
            self.check_states(from)?;
        }
        for tie in &self.ties {
            if let Some(owner) = drawn.get(&tie.owner).cloned() {
                drawn.insert(tie.copy, owner);
            }
        }
        Ok(drawn)
    }
}

impl Prepared<'_> {
    /// States are of this model: nothing too much, and moments of the shape of their parameters.
    fn check_states(&self, from: &States) -> Result<(), ExecutorError> {
        let known = |(layer_idx, name): &ParameterName| {
            let layer = (*layer_idx < self.instances.len()).then(|| self.layer(*layer_idx))?;
            let tensor = layer.parameters().find(|tensor| layer.tensors[tensor.0].name == *name)?;
            Some(whole_shape(layer, tensor))
        };
        for name in from.parameters.keys().chain(from.moments.keys()) {
            let Some(shape) = known(name) else {
                return Err(unfit(format!(
                    "the states have `{}` of layer {}, the model has not",
                    name.1, name.0
                )));
            };
            let moments = from.moments.get(name).map(|moments| [&moments.first, &moments.second]);
            if moments.into_iter().flatten().any(|moment| moment.shape() != shape) {
                return Err(unfit(format!("the given moments of `{}` have another shape", name.1)));
            }
        }
        Ok(())
    }
}

fn missing((layer_idx, name): &ParameterName, what: &str) -> ExecutorError {
    unfit(format!("the states lack {what} `{name}` of layer {layer_idx}"))
}

/// Shape of a whole parameter.
fn whole_shape(layer: &Layer, tensor: TensorId) -> Vec<usize> {
    layer.shape(tensor, &layer.sizes(0, 0)).into_iter().map(|n| n as usize).collect()
}

pub(crate) fn unfit(what: String) -> ExecutorError {
    ExecutorError::Unfit(what)
}

fn splits(execution: &Execution<'_>, programs: &[Program]) -> Vec<SplitBackward> {
    let is_part = |action: &Action| match action.section {
        Section::Forward | Section::Backward => false,
        Section::BackwardInput | Section::BackwardWeight => true,
    };
    if !execution.table.iter().flatten().any(is_part) {
        return Vec::new();
    }
    let pairs = execution.choices.iter().zip(programs);
    pairs.map(|((kind, _), program)| split_backward(&execution.model.layers[*kind], program)).collect()
}

fn check_counts(execution: &Execution<'_>, programs: &[Program]) -> Result<(), ExecutorError> {
    ir::graph::check(execution.model).map_err(|error| unfit(error.to_string()))?;
    let n_chunks = execution.chunks.len();
    if let Some((kind, _)) = execution.choices.iter().find(|(kind, _)| *kind >= execution.model.layers.len())
    {
        return Err(unfit(format!("a choice is for layer kind {kind}, which does not exist")));
    }
    let fits = |(kind, choice): &(usize, LayerChoice)| {
        choice.strategies.len() == execution.model.layers[*kind].ops.len()
    };
    if let Some((kind, _)) = execution.choices.iter().find(|choice| !fits(choice)) {
        return Err(unfit(format!("a choice for layer kind {kind} has not one strategy per operator")));
    }
    let named = execution.chunks.iter().flat_map(|chunk| &chunk.layers);
    if named.clone().any(|&choice| choice >= execution.choices.len())
        || programs.len() != execution.choices.len()
    {
        return Err(unfit(
            "a chunk names a choice that does not exist, or there is not one program per choice".into(),
        ));
    }
    if execution.chunks.iter().any(|chunk| chunk.layers.is_empty()) {
        return Err(unfit("a chunk has no layers".into()));
    }
    if !named.map(|&choice| execution.choices[choice].0).eq(execution.model.kinds_in_order()) {
        return Err(unfit("the chunks do not hold the model's layers in order".into()));
    }
    let expected = execution.placement.n_chunks(execution.n_stages) as usize;
    if execution.table.len() != execution.n_stages as usize || n_chunks != expected {
        let (n, p, rows) = (n_chunks, execution.n_stages, execution.table.len());
        return Err(unfit(format!("{n} chunks and a table of {rows} rows do not fit {p} stages")));
    }
    if execution.micro_batch == 0 || execution.sequence == 0 {
        return Err(unfit("a micro-batch needs at least one sequence of one token".into()));
    }
    if execution.slices.sequence() != execution.sequence {
        return Err(unfit("the slices are not the whole sequence".into()));
    }
    let natural = execution.tokens.order == TokenOrder::Natural || execution.tokens.parts == 1;
    if execution.slices.is_cut() && !natural {
        return Err(unfit("slices need tokens in their natural order".into()));
    }
    check_table(&execution.table, execution.shape())?;
    check_shares(execution)
}

/// Unequal shares are together those of equal ones, and every device of a stage can run its own.
fn check_shares(execution: &Execution<'_>) -> Result<(), ExecutorError> {
    if execution.shares.is_empty() {
        return Ok(());
    }
    let size = execution.meshes.alike.axes.first().map_or(1, |axis| axis.size);
    let all: u64 = execution.shares.iter().map(|share| u64::from(share.n_micro_batches)).sum();
    let is_whole = execution.meshes.each.is_empty() && !execution.slices.is_cut();
    if execution.shares.len() as u64 != size
        || all != size * u64::from(execution.n_micro_batches)
        || !is_whole
    {
        return Err(unfit("the shares of the micro-batches do not fit the mesh".into()));
    }
    for share in &execution.shares {
        check_table(&share.table, execution.shape_of(share.n_micro_batches))?;
    }
    Ok(())
}
