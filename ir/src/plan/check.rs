//! From the document back to a graph, choices and programs, with every invariant of a plan checked on the way.
//!
//! A plan may have been edited by hand, so nothing in it is trusted: every count is limited before anything is as long
//! as it says, and an error names the place. What holds after [`open`]:
//! - the cluster is one that a cluster file could describe;
//! - the mesh and the stages fit on the cluster, and the micro-batches make up the global batch;
//! - every entry is of a layer of the model, its strategies cut what divides, and it lowers to a program;
//! - the chunks hold the layers of the model in order, each stream arrives as the layer before left it, or at the start
//!   of
//!   a chunk in a sharding that converts into the one that is wanted;
//! - the schedule has a table;
//! - where sequences are cut into slices, every layer can be run by slices;
//! - where devices run unequal shares of the micro-batches, nothing of a micro-batch passes between them;
//! - parameters that are one are used and stored in one way.

use std::collections::{BTreeMap, BTreeSet};

use crate::conversion::steps;
use crate::graph::{Layer, Model, Segment, Sizes, TensorId};
use crate::lower::{LayerChoice, lower};
use crate::mesh::Mesh;
use crate::names::{Arrangement, PlacedLayer, Roles, roles, token_parts};
use crate::native::{self, LayerDocument, Length, ModelDocument};
use crate::op::OpKind;
use crate::op_limits;
use crate::plan::cluster_check::check_cluster;
use crate::plan::entry::{Entry, ParameterEntry, RESERVED, write_sharding};
use crate::plan::mesh_check::{check_mesh, check_stage_meshes, is_tidy};
use crate::plan::shares;
use crate::plan::sliced::{self, Sliced};
use crate::plan::ties_check::check_ties;
use crate::plan::{PLAN_SCHEMA_VERSION, Plan, PlanError};
use crate::positions::too_short;
use crate::program::{Program, StateHome};
use crate::sharding::Sharding;

/// Most layers of a model: far above any published, and few enough to list.
const MAX_LAYERS: u64 = 1 << 16;
/// Most operators or tensors of a layer kind; lowering recurses over chains of recomputed operators.
const MAX_OPS: usize = 512;
/// Most dims of a layer kind, so that a loop's number fits in a byte.
const MAX_DIMS: usize = 64;
/// Most dims of a tensor.
const MAX_NDIM: usize = 16;
/// Most elements of a tensor, and of the model: up to here a count is exact as a float.
const MAX_ELEMENTS: u64 = 1 << 53;
/// Longest sequence and largest batch.
const MAX_LENGTH: u64 = 1 << 32;

/// A plan with its names resolved.
#[derive(Clone, Debug, PartialEq)]
pub struct OpenPlan {
    /// The model as a graph.
    pub model: Model,
    /// The plan's entries, in its order.
    pub entries: Vec<OpenEntry>,
    /// Layer kinds that stand for another form, which is held here.
    pub originals: BTreeMap<usize, Layer>,
    /// What runs slice by slice, where sequences are cut.
    pub sliced: Option<Sliced>,
}

/// An entry with its names resolved.
#[derive(Clone, Debug, PartialEq)]
pub struct OpenEntry {
    /// Index of the layer kind.
    pub layer: usize,
    /// What was chosen.
    pub choice: LayerChoice,
    /// What every device runs.
    pub program: Program,
}

/// Checks every invariant of a plan.
///
/// # Errors
/// The first one that is broken, with its place.
pub fn check_plan(plan: &Plan) -> Result<(), PlanError> {
    open(plan).map(|_| ())
}

/// Checks a plan and resolves its names.
///
/// # Errors
/// The first invariant that is broken, with its place.
pub fn open(plan: &Plan) -> Result<OpenPlan, PlanError> {
    if plan.schema_version != PLAN_SCHEMA_VERSION {
        let what = format!("expected version {PLAN_SCHEMA_VERSION}, found {}", plan.schema_version);
        return Err(PlanError::new("schema_version", what));
    }
    check_cluster(&plan.cluster)?;
    check_mesh(plan)?;
    check_batch(plan)?;
    sliced::check_lengths(plan)?;
    shares::check_counts(plan)?;
    check_schedule(plan)?;
    check_stage_meshes(plan)?;
    check_limits(&plan.model)?;
    let model = native::read(&plan.model).map_err(|broken| within("model", broken.place, broken.what))?;
    let entries = open_entries(plan, &model)?;
    let originals = open_forms(plan, &model)?;
    let mut open = OpenPlan { model, entries, originals, sliced: None };
    check_chunks(plan, &open)?;
    shares::check_entries(plan, &open)?;
    open.sliced = sliced::open_slices(plan, &open.model, &open.entries, open.token_parts(plan))?;
    check_token_order(plan, &open)?;
    check_ties(plan, &open)?;
    check_prediction(plan)?;
    Ok(open)
}

impl OpenPlan {
    /// Lengths of the dims of an entry's layer in this plan's job.
    pub fn sizes(&self, plan: &Plan, entry: usize) -> Sizes {
        self.layer(entry).sizes(plan.micro_batch, plan.job.sequence)
    }

    /// What an entry runs: its layer and program, in their sliced form where sequences are cut.
    pub fn run(&self, entry: usize) -> (&Layer, &Program) {
        match &self.sliced {
            Some(sliced) => {
                let own = &sliced.entries[entry];
                (&sliced.model.layers[own.layer], &own.program)
            }
            None => (self.layer(entry), &self.entries[entry].program),
        }
    }

    /// Lengths of the dims of what an entry runs, for one slice.
    pub fn run_sizes(&self, plan: &Plan, entry: usize, slice: u32) -> Sizes {
        match &self.sliced {
            Some(sliced) => sliced.sizes(plan, entry, slice),
            None => self.sizes(plan, entry),
        }
    }

    /// Layer kind of an entry.
    pub fn layer(&self, entry: usize) -> &Layer {
        &self.model.layers[self.entries[entry].layer]
    }

    /// The plan in the literature's words.
    pub fn roles(&self, plan: &Plan) -> Roles {
        roles(&self.arrangement(plan)).with_shares(&plan.shares)
    }

    /// Devices over which a sequence is cut in the order of tokens.
    pub fn token_parts(&self, plan: &Plan) -> u64 {
        token_parts(&self.arrangement(plan))
    }

    /// The plan as names are read off it: where stages have other meshes, those with that of the first.
    pub fn arrangement<'a>(&'a self, plan: &'a Plan) -> Arrangement<'a> {
        self.arrangement_on(plan, &plan.mesh)
    }

    /// The same of the layers on stages of one mesh.
    fn arrangement_on<'a>(&'a self, plan: &'a Plan, mesh: &'a Mesh) -> Arrangement<'a> {
        let placed = self.entries.iter().zip(plan.entry_counts()).enumerate();
        let there = placed.filter(|(entry, _)| plan.mesh_of_entry(*entry) == mesh);
        Arrangement {
            mesh,
            layers: there
                .map(|(_, (entry, count))| PlacedLayer {
                    layer: &self.model.layers[entry.layer],
                    choice: &entry.choice,
                    count,
                })
                .collect(),
            n_stages: plan.n_stages,
            schedule: plan.schedule,
            micro_batch: plan.micro_batch,
            n_micro_batches: plan.n_micro_batches,
        }
    }
}

fn within(outer: &str, place: String, what: String) -> PlanError {
    PlanError::new(if place.is_empty() { outer.to_owned() } else { format!("{outer}.{place}") }, what)
}

/// An error at a place.
pub(super) fn fail<T>(place: impl Into<String>, what: impl Into<String>) -> Result<T, PlanError> {
    Err(PlanError::new(place, what))
}

fn check_batch(plan: &Plan) -> Result<(), PlanError> {
    let counts = [
        ("job.sequence", plan.job.sequence),
        ("job.global_batch", plan.job.global_batch),
        ("micro_batch", plan.micro_batch),
        ("n_micro_batches", plan.n_micro_batches),
    ];
    if let Some((place, count)) = counts.into_iter().find(|(_, count)| !(1..=MAX_LENGTH).contains(count)) {
        return fail(place, format!("expected 1 to {MAX_LENGTH}, found {count}"));
    }
    if plan.micro_batch.checked_mul(plan.n_micro_batches) != Some(plan.job.global_batch) {
        let what = format!(
            "{} micro-batches of {} sequences are not the global batch of {}",
            plan.n_micro_batches, plan.micro_batch, plan.job.global_batch
        );
        return fail("n_micro_batches", what);
    }
    Ok(())
}

fn check_token_order(plan: &Plan, open: &OpenPlan) -> Result<(), PlanError> {
    let parts = open.token_parts(plan);
    let others = plan.stage_meshes.iter().map(|mesh| token_parts(&open.arrangement_on(plan, mesh)));
    if let Some(other) = others.into_iter().find(|other| *other != parts) {
        let what =
            format!("tokens have one order, for {parts} parts of a sequence: a stage cuts it into {other}");
        return fail("stage_meshes", what);
    }
    let pieces = plan.job.token_order.pieces(parts);
    if parts == 1 || plan.job.sequence.is_multiple_of(pieces) {
        return Ok(());
    }
    let what = format!("{} tokens do not cut into {pieces} pieces", plan.job.sequence);
    fail("job.token_order", what)
}

fn check_schedule(plan: &Plan) -> Result<(), PlanError> {
    let n_stages = u32::try_from(plan.n_stages).unwrap_or(u32::MAX);
    let n_chunks = plan.schedule.placement().n_chunks(n_stages) as usize;
    if plan.chunks.len() != n_chunks {
        let what = format!("the schedule cuts the model into {n_chunks} chunks, found {}", plan.chunks.len());
        return fail("chunks", what);
    }
    plan.actions().map(|_| ())
}

/// Limits every count of an embedded model before anything is computed from it.
fn check_limits(model: &ModelDocument) -> Result<(), PlanError> {
    let n_layers = model.sequence.iter().fold(0_u64, |sum, run| sum.saturating_add(run.count));
    if n_layers > MAX_LAYERS {
        return fail("model.sequence", format!("a model has at most {MAX_LAYERS} layers, found {n_layers}"));
    }
    let mut total = 0.0;
    for (i, layer) in model.layers.iter().enumerate() {
        let place = format!("model.layers[{i}]");
        for (j, op) in layer.ops.iter().enumerate() {
            let kind = || format!("{place}.ops[{j}].kind");
            op_limits::check(&op.kind).map_err(|what| PlanError::new(kind(), what))?;
        }
        let elements = layer_elements(layer).map_err(|what| PlanError::new(place, what))?;
        let runs = model.sequence.iter().filter(|run| run.layer == layer.name);
        total += elements * runs.map(|run| run.count as f64).sum::<f64>();
    }
    if total > MAX_ELEMENTS as f64 {
        return fail("model", format!("a model has at most {MAX_ELEMENTS} parameters"));
    }
    Ok(())
}

/// Elements of all tensors as far as the model fixes them, or what exceeds a limit.
fn layer_elements(layer: &LayerDocument) -> Result<f64, String> {
    if layer.dims.len() > MAX_DIMS || layer.tensors.len() > 4 * MAX_OPS || layer.ops.len() > MAX_OPS {
        return Err(format!(
            "a layer has at most {MAX_DIMS} dims, {} tensors and {MAX_OPS} operators",
            4 * MAX_OPS
        ));
    }
    if let Some(dim) =
        layer.dims.iter().find(|dim| !is_tidy(&dim.name) || RESERVED.contains(&dim.name.as_str()))
    {
        return Err(format!("`{}` cannot be the name of a dim", dim.name));
    }
    let length = |name: &str| match layer.dims.iter().find(|dim| dim.name == name).map(|dim| &dim.length) {
        Some(Length::Fixed(n) | Length::Uneven(n)) => *n as f64,
        Some(Length::MicroBatch | Length::Sequence | Length::Slots(_) | Length::Capacity { .. }) | None => {
            1.0
        }
    };
    let mut total = 0.0;
    for tensor in &layer.tensors {
        let names: Vec<&str> = tensor.dims.split_whitespace().collect();
        let elements: f64 = names.iter().map(|name| length(name)).product();
        if names.len() > MAX_NDIM || elements > MAX_ELEMENTS as f64 {
            return Err(format!("tensor `{}` is too large", tensor.name));
        }
        if (1..names.len()).any(|i| names[..i].contains(&names[i])) {
            return Err(format!("tensor `{}` has a dim twice", tensor.name));
        }
        total += elements;
    }
    let parts = layer.ops.iter().filter_map(|op| {
        let (OpKind::Split { sizes } | OpKind::Concat { sizes }) = &op.kind else { return None };
        Some(sizes.iter().map(|&n| n as f64).sum::<f64>())
    });
    if parts.into_iter().any(|sum| sum > MAX_ELEMENTS as f64) {
        return Err("the parts of a split or a concatenation are too large".into());
    }
    Ok(total)
}

fn open_entries(plan: &Plan, model: &Model) -> Result<Vec<OpenEntry>, PlanError> {
    let mut entries = Vec::new();
    for (i, entry) in plan.entries.iter().enumerate() {
        let place = format!("entries[{i}]");
        let Some(at) = model.layers.iter().position(|layer| layer.name == entry.layer) else {
            return fail(format!("{place}.layer"), format!("no layer is named `{}`", entry.layer));
        };
        let layer = &model.layers[at];
        let sizes = layer.sizes(plan.micro_batch, plan.job.sequence);
        check_elements(layer, &sizes).map_err(|what| PlanError::new("job", what))?;
        if let Some(short) = too_short(layer, plan.job.sequence) {
            return fail("job.sequence", format!("{} tokens: {short}", plan.job.sequence));
        }
        check_homes(plan, (entry, &place))?;
        let mesh = plan.mesh_of_entry(i);
        let choice = entry.choice(layer, mesh).map_err(|e| within(&place, e.place, e.what))?;
        let program =
            lower(layer, mesh, &sizes, &choice).map_err(|error| PlanError::new(&place, error.to_string()))?;
        let rules = entry.rules(layer, mesh).map_err(|e| within(&place, e.place, e.what))?;
        entries.push(OpenEntry { layer: at, choice, program: program.run_by(&rules) });
    }
    Ok(entries)
}

/// States lie on drives only where every node has some.
fn check_homes(plan: &Plan, (entry, place): (&Entry, &str)) -> Result<(), PlanError> {
    let on_nvme = |parameter: &ParameterEntry| parameter.optimizer_home == StateHome::Nvme;
    let Some(at) = entry.parameters.iter().position(on_nvme) else { return Ok(()) };
    match plan.cluster.groups.iter().position(|group| group.nvme.is_none()) {
        None => Ok(()),
        Some(group) => {
            let what = format!(
                "`nvme`, but nodes of `cluster.groups[{group}]` have no drives: expected `nvme` there, or `host` or `device` here"
            );
            fail(format!("{place}.parameters[{at}].optimizer_home"), what)
        }
    }
}

/// The layers that were asked for, in the place of those that stand for them: each must fit there.
fn open_forms(plan: &Plan, model: &Model) -> Result<BTreeMap<usize, Layer>, PlanError> {
    let mut originals = BTreeMap::new();
    for (i, form) in plan.forms.iter().enumerate() {
        let place = format!("forms[{i}]");
        let Some(at) = model.layers.iter().position(|layer| layer.name == form.layer) else {
            return fail(format!("{place}.layer"), format!("no layer is named `{}`", form.layer));
        };
        layer_elements(&form.original).map_err(|what| PlanError::new(format!("{place}.original"), what))?;
        let mut document = plan.model.clone();
        document.layers[at] = LayerDocument { name: form.layer.clone(), ..form.original.clone() };
        let read = native::read(&document);
        let read = read.map_err(|broken| within(&format!("{place}.original"), broken.place, broken.what))?;
        originals.extend(read.layers.into_iter().nth(at).map(|layer| (at, layer)));
    }
    Ok(originals)
}

fn check_elements(layer: &Layer, sizes: &Sizes) -> Result<(), String> {
    for tensor in layer.tensor_ids() {
        let elements: f64 = layer.shape(tensor, sizes).into_iter().map(|n| n as f64).product();
        if elements > MAX_ELEMENTS as f64 {
            let name = &layer.tensors[tensor.0].name;
            return Err(format!(
                "tensor `{name}` of layer `{}` is too large for one micro-batch",
                layer.name
            ));
        }
    }
    Ok(())
}

fn check_chunks(plan: &Plan, open: &OpenPlan) -> Result<(), PlanError> {
    let mut left: Vec<Segment> = open.model.sequence.iter().rev().copied().collect();
    let mut stack: Vec<Left> = Vec::new();
    let mut unused: BTreeSet<usize> = (0..plan.entries.len()).collect();
    for (c, runs) in plan.chunks.iter().enumerate() {
        if runs.is_empty() {
            return fail(format!("chunks[{c}]"), "a chunk has at least one layer");
        }
        for (r, run) in runs.iter().enumerate() {
            let place = format!("chunks[{c}][{r}]");
            let Some(entry) = open.entries.get(run.entry) else {
                let what = format!("there are {} entries, found number {}", plan.entries.len(), run.entry);
                return fail(format!("{place}.entry"), what);
            };
            unused.remove(&run.entry);
            take_layers(&mut left, entry.layer, run.count, &open.model)
                .map_err(|what| PlanError::new(&place, what))?;
            let wanted = entry.choice.stream;
            let again = if run.count > 1 { entry.choice.out } else { wanted };
            let (layer, sizes) = (open.layer(run.entry), open.sizes(plan, run.entry));
            let shapes = |streams: &[TensorId]| -> Vec<Vec<u64>> {
                streams.iter().map(|&tensor| layer.shape(tensor, &sizes)).collect()
            };
            let (reads, leaves) = (shapes(&layer.stream_in), shapes(&layer.out));
            let taken = stack.split_off(stack.len().saturating_sub(reads.len()));
            let arrives = |left: &Left| match plan.mesh_of_chunk(left.chunk) {
                _ if left.chunk == c => left.sharding == wanted,
                mesh if mesh != plan.mesh_of_chunk(c) => hands_over(left.sharding) && hands_over(wanted),
                _ => left.sharding == wanted || converts(left.sharding, wanted),
            };
            if !taken.iter().all(arrives) || again != wanted {
                let what =
                    format!("entry {} expects the stream in another sharding than it arrives", run.entry);
                return fail(place, what);
            }
            if !taken.iter().map(|left| &left.shape).eq(&reads) || (run.count > 1 && reads != leaves) {
                return fail(
                    place,
                    format!("layer `{}` expects a stream of another shape than arrives", layer.name),
                );
            }
            let sharding = entry.choice.out;
            stack.extend(leaves.into_iter().map(|shape| Left { chunk: c, sharding, shape }));
        }
    }
    if let Some(run) = left.last() {
        return fail(
            "chunks",
            format!("layer `{}` is missing at the end", open.model.layers[run.layer].name),
        );
    }
    let whole = shares::loss(plan);
    if stack.last().map(|loss| loss.sharding) != Some(whole) {
        let wanted = write_sharding(whole, &plan.mesh, &[]);
        return fail(
            "chunks",
            format!("the loss must be whole on every device: the last entry's `out` must be `{wanted}`"),
        );
    }
    unused.first().map_or(Ok(()), |entry| fail(format!("entries[{entry}]"), "no chunk has this entry"))
}

/// A stream that a layer has left, and none has read.
struct Left {
    chunk: usize,
    sharding: Sharding,
    shape: Vec<u64>,
}

/// Whether a chunk that wants the stream in a sharding can take it over in another, and give its gradient back.
fn converts(given: Sharding, wanted: Sharding) -> bool {
    steps(given, wanted).is_some() && steps(wanted.dual(), given.dual()).is_some()
}

/// Whether blocks of a stream can be put together anew on other devices, which add nothing up.
fn hands_over(sharding: Sharding) -> bool {
    sharding.partial_axes().is_empty()
}

/// Takes `count` layers of a kind from the front of what is left of the model's sequence (kept in reverse).
fn take_layers(left: &mut Vec<Segment>, layer: usize, mut count: u64, model: &Model) -> Result<(), String> {
    let name = |layer: usize| model.layers[layer].name.as_str();
    if count == 0 {
        return Err("a run has at least one layer".into());
    }
    while count > 0 {
        let Some(next) = left.last_mut() else {
            return Err(format!("layer `{}` comes after the model's last layer", name(layer)));
        };
        if next.layer != layer {
            return Err(format!("expected layer `{}`, found `{}`", name(next.layer), name(layer)));
        }
        let taken = count.min(next.count);
        count -= taken;
        next.count -= taken;
        if next.count == 0 {
            left.pop();
        }
    }
    Ok(())
}

fn check_prediction(plan: &Plan) -> Result<(), PlanError> {
    let Some(predicted) = &plan.predicted else { return Ok(()) };
    if predicted.stages.len() as u64 != plan.n_stages {
        let what =
            format!("the plan has {} stages, found figures of {}", plan.n_stages, predicted.stages.len());
        return fail("predicted.stages", what);
    }
    Ok(())
}
