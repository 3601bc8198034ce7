//! Checkpoints: the states of a training as files that training under any plan of the model can go on from.
//!
//! Every rank writes a safetensors file with the states of what it updates; of ranks that hold the same only the first.
//! A tensor of a file is a region of a parameter of the model that was asked for, never of a fused one, and its name
//! says which: `3.attention.q.weight.first_moment[0:8,4:8]`. So no rank needs another to write, a file is read without
//! knowing the plan that wrote it, and any region of a parameter can be taken from the files that overlap it; the
//! layout of PyTorch's distributed checkpoints is the same. `checkpoint.json` lists files and parameters, and how far
//! training was.
//!
//! Bytes in, bytes out: who reads and writes files is the caller's affair.

use std::collections::{BTreeMap, BTreeSet};

use ir::region::{Part, Region};
use ndarray::{ArrayD, IxDyn, Slice};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors, serialize};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::run::ParameterName;
use crate::states::{Moments, Shard, States};

/// Version of the form that this build reads and writes.
pub const VERSION: u32 = 1;

/// Name of the index among the files of a checkpoint.
pub const INDEX: &str = "checkpoint.json";

/// What a checkpoint says of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Index {
    /// Version of this form: 1.
    pub planner_checkpoint: u32,
    /// The training that wrote it.
    pub training: TrainingFacts,
    /// Updates so far.
    pub steps: u64,
    /// Sequences so far.
    pub sequences: u64,
    /// Parameters by name: the position of the layer, a point, the name in the layer.
    pub parameters: BTreeMap<String, ParameterFacts>,
    /// Files.
    pub files: Vec<FileFacts>,
}

/// What a training was, and has to be if it goes on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingFacts {
    /// Name of the model.
    pub model: String,
    /// Number format: f64, f32 or bf16.
    pub precision: String,
    /// Of the text.
    pub seed: u64,
    /// Of the update.
    pub learning_rate: f64,
    /// Sequences of a step.
    pub sequences_per_step: u64,
    /// Tokens of a sequence.
    pub sequence: u64,
}

/// A parameter of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParameterFacts {
    /// Lengths of its dims.
    pub shape: Vec<u64>,
    /// Whether it has moments.
    pub moments: bool,
}

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileFacts {
    /// Its name.
    pub name: String,
    /// The rank that wrote it.
    pub rank: u64,
    /// Its length.
    pub bytes: u64,
    /// Its digest, as `sha256sum` prints it: a byte that was changed would go unnoticed where any number is a number.
    pub sha256: String,
}

/// What is wrong with a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct CheckpointError {
    /// The file at fault.
    pub file: String,
    /// What was found there, and what was expected.
    pub what: String,
}

/// The SHA-256 of some bytes, in hexadecimal digits.
pub fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn fault(file: &str, what: impl Into<String>) -> CheckpointError {
    CheckpointError { file: file.to_owned(), what: what.into() }
}

/// Number format of the files: parameters and moments are never rounded to less than single precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Numbers {
    F32,
    F64,
}

impl Numbers {
    fn of(precision: &str) -> Option<Self> {
        match precision {
            "f64" => Some(Self::F64),
            "f32" | "bf16" => Some(Self::F32),
            _ => None,
        }
    }

    fn dtype(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::F64 => Dtype::F64,
        }
    }

    fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    fn write(self, values: &[f64]) -> Vec<u8> {
        match self {
            // Values of a run in single precision are held as they were: nothing is rounded.
            Self::F32 => values.iter().flat_map(|&value| (value as f32).to_le_bytes()).collect(),
            Self::F64 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        }
    }

    fn read(self, bytes: &[u8]) -> Vec<f64> {
        match self {
            Self::F32 => bytes.as_chunks().0.iter().map(|&one| f64::from(f32::from_le_bytes(one))).collect(),
            Self::F64 => bytes.as_chunks().0.iter().map(|&one| f64::from_le_bytes(one)).collect(),
        }
    }
}

/// States as they stand in the names of tensors: the value, then its moments.
const STATES: [&str; 3] = ["parameter", "first_moment", "second_moment"];

/// Where the parameters of a model lie in those of a plan's, by the latter; tied copies are left out.
pub type PartsOf = BTreeMap<ParameterName, Vec<Part>>;

/// The files of a checkpoint by name, the index last: who sees it sees all.
///
/// # Errors
/// States that the parts do not cover.
pub fn save(
    states: &States,
    shards: &[Vec<Shard>],
    parts: &PartsOf,
    training: TrainingFacts,
) -> Result<Vec<(String, Vec<u8>)>, CheckpointError> {
    let numbers = Numbers::of(&training.precision);
    let numbers =
        numbers.ok_or_else(|| fault(INDEX, format!("unknown precision `{}`", training.precision)))?;
    let mut index = Index {
        planner_checkpoint: VERSION,
        training,
        steps: states.steps,
        sequences: states.sequences,
        parameters: BTreeMap::new(),
        files: Vec::new(),
    };
    let mut files = Vec::new();
    let mut written = BTreeSet::new();
    for (rank, shards) in shards.iter().enumerate() {
        let mut tensors = BTreeMap::new();
        for shard in shards.iter().filter(|shard| !shard.values.is_empty()) {
            let key = (&shard.name, block_of(shard), shard.elements.start, shard.elements.end);
            if !written.insert(key) {
                continue;
            }
            let parts = parts.get(&shard.name);
            let parts =
                parts.ok_or_else(|| fault(INDEX, format!("nothing is known of `{}`", shard.name.1)))?;
            for part in parts {
                let facts = ParameterFacts { shape: part.shape.clone(), moments: shard.moments.is_some() };
                index.parameters.insert(id(shard.name.0, &part.name), facts);
                add_pieces(&mut tensors, shard, part);
            }
        }
        let views = tensors.iter().map(|(name, (shape, values)): (&String, &(Vec<usize>, Vec<f64>))| {
            (name.clone(), shape.clone(), numbers.write(values))
        });
        let views: Vec<(String, Vec<usize>, Vec<u8>)> = views.collect();
        let name = format!("rank-{rank:05}.safetensors");
        let wrong = |error: safetensors::SafeTensorError| fault(&name, error.to_string());
        let views = views.iter().map(|(tensor, shape, bytes)| {
            Ok((tensor, TensorView::new(numbers.dtype(), shape.clone(), bytes).map_err(wrong)?))
        });
        let bytes = serialize(views.collect::<Result<Vec<_>, _>>()?, None).map_err(wrong)?;
        let (n_bytes, sha256) = (bytes.len() as u64, digest(&bytes));
        index.files.push(FileFacts { name: name.clone(), rank: rank as u64, bytes: n_bytes, sha256 });
        files.push((name, bytes));
    }
    let text = serde_json::to_string_pretty(&index).map_err(|error| fault(INDEX, error.to_string()))?;
    files.push((INDEX.to_owned(), (text + "\n").into_bytes()));
    Ok(files)
}

fn id(layer_idx: usize, name: &str) -> String {
    format!("{layer_idx}.{name}")
}

fn block_of(shard: &Shard) -> Region {
    Region(shard.block.iter().map(|rows| (rows.start, rows.end)).collect())
}

/// Adds what a shard holds of a part: a tensor per region and state.
fn add_pieces(tensors: &mut BTreeMap<String, (Vec<usize>, Vec<f64>)>, shard: &Shard, part: &Part) {
    let block = block_of(shard);
    for region in block.run(shard.elements.clone()) {
        let Some(own) = part.region(&region) else { continue };
        let mut inside = region;
        if let Some(within) = &part.within {
            let rows = &mut inside.0[within.dim];
            *rows = (rows.0.max(within.rows.0), rows.1.min(within.rows.1));
        }
        let places = places(&block, &inside);
        let at = |place: &usize| place - shard.elements.start as usize;
        let shape: Vec<usize> = own.0.iter().map(|(start, end)| (end - start) as usize).collect();
        let [first, second] = shard.moments.as_ref().map_or([None, None], |[a, b]| [Some(a), Some(b)]);
        for (state, values) in STATES.iter().zip([Some(&shard.values), first, second]) {
            let Some(values) = values else { continue };
            let name = format!("{}.{state}{}", id(shard.name.0, &part.name), slices(&own));
            tensors.insert(name, (shape.clone(), places.iter().map(|place| values[at(place)]).collect()));
        }
    }
}

/// Places of a region's elements in the index order of a block that holds it.
fn places(block: &Region, region: &Region) -> Vec<usize> {
    let extend = |starts: Vec<usize>, (all, rows): (&(u64, u64), &(u64, u64))| {
        let length = (all.1 - all.0) as usize;
        let rows = (rows.0 - all.0) as usize..(rows.1 - all.0) as usize;
        starts.iter().flat_map(|start| rows.clone().map(move |row| start * length + row)).collect()
    };
    block.0.iter().zip(&region.0).fold(vec![0], extend)
}

/// `[0:8,4:8]`.
fn slices(region: &Region) -> String {
    let rows: Vec<String> = region.0.iter().map(|(start, end)| format!("{start}:{end}")).collect();
    format!("[{}]", rows.join(","))
}

/// A parameter of a checkpoint, whole.
#[derive(Clone, Debug)]
struct Whole {
    shape: Vec<u64>,
    /// Value and moments.
    states: Vec<Vec<f64>>,
    /// Who wrote each element, by state.
    writers: Vec<Vec<Option<u32>>>,
}

/// A checkpoint that has been read.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// What it says of itself.
    pub index: Index,
    wholes: BTreeMap<(usize, String), Whole>,
}

/// By parameter of a plan's model, the rank that wrote each element.
pub type Writers = BTreeMap<ParameterName, ArrayD<u32>>;

/// Steps and sequences that no training has done.
const MOST_DONE: u64 = 1 << 48;

/// Place of the second moment, a mean of squares, among the states.
const SECOND_MOMENT: usize = 2;

/// Reads a checkpoint; `read` gives the bytes of a file.
///
/// # Errors
/// A file that is broken or missing, and parameters that are not there whole and once.
pub fn load(
    read: &mut dyn FnMut(&str) -> Result<Vec<u8>, CheckpointError>,
) -> Result<Checkpoint, CheckpointError> {
    let index = read_index(&read(INDEX)?)?;
    let numbers = Numbers::of(&index.training.precision)
        .ok_or_else(|| fault(INDEX, format!("unknown precision `{}`", index.training.precision)))?;
    let mut wholes = wholes(&index, numbers)?;
    for file in &index.files {
        let bytes = read(&file.name)?;
        if bytes.len() as u64 != file.bytes {
            let what = format!(
                "{} bytes, expected {}: it is not the file that was written",
                bytes.len(),
                file.bytes
            );
            return Err(fault(&file.name, what));
        }
        if digest(&bytes) != file.sha256 {
            return Err(fault(
                &file.name,
                "its bytes are not those that were written: take another copy of it",
            ));
        }
        read_file((file, numbers), &bytes, &mut wholes)?;
    }
    for ((layer, name), whole) in &wholes {
        for (state, writers) in STATES.iter().zip(&whole.writers) {
            if let Some(at) = writers.iter().position(Option::is_none) {
                let what = format!("no file has element {at} of {state} of `{}`", id(*layer, name));
                return Err(fault(INDEX, what));
            }
        }
    }
    Ok(Checkpoint { index, wholes })
}

fn read_index(bytes: &[u8]) -> Result<Index, CheckpointError> {
    let index: Index = serde_json::from_slice(bytes).map_err(|error| fault(INDEX, error.to_string()))?;
    if index.planner_checkpoint != VERSION {
        let what = format!("version {} of the form, expected {VERSION}", index.planner_checkpoint);
        return Err(fault(INDEX, what));
    }
    for (what, count) in [("steps", index.steps), ("sequences", index.sequences)] {
        if count > MOST_DONE {
            return Err(fault(INDEX, format!("{what}: {count}, expected no more than {MOST_DONE}")));
        }
    }
    let rate = index.training.learning_rate;
    if !(rate > 0.0 && rate.is_finite()) {
        return Err(fault(INDEX, format!("training.learning_rate: {rate}, expected a number above 0")));
    }
    let plain = |name: &str| !name.is_empty() && !name.contains(['/', '\\']) && name != "..";
    if let Some(file) = index.files.iter().find(|file| !plain(&file.name)) {
        return Err(fault(INDEX, format!("`{}` is no name of a file beside it", file.name)));
    }
    if let Some(file) = index.files.iter().find(|file| u32::try_from(file.rank).is_err()) {
        return Err(fault(INDEX, format!("`{}` is of rank {}, which is too large", file.name, file.rank)));
    }
    Ok(index)
}

/// Room for the parameters of an index, which must be no more than its files can hold.
fn wholes(index: &Index, numbers: Numbers) -> Result<BTreeMap<(usize, String), Whole>, CheckpointError> {
    let room = index.files.iter().fold(0_u64, |sum, file| sum.saturating_add(file.bytes)) / numbers.bytes();
    let mut taken = 0_u64;
    let mut wholes = BTreeMap::new();
    for (text, facts) in &index.parameters {
        let wrong = || fault(INDEX, format!("`{text}` is no layer and name, such as `3.norm.weight`"));
        let (layer, name) = text.split_once('.').ok_or_else(wrong)?;
        let layer: usize = layer.parse().map_err(|_| wrong())?;
        let n = facts.shape.iter().fold(1_u64, |n, &length| n.saturating_mul(length));
        let n_states = if facts.moments { STATES.len() } else { 1 };
        taken = taken.saturating_add(n.saturating_mul(n_states as u64));
        if taken > room {
            return Err(fault(
                INDEX,
                format!("shape {:?} of `{text}` is more than the files hold", facts.shape),
            ));
        }
        let n = n as usize;
        let (states, writers) = (vec![vec![0.0; n]; n_states], vec![vec![None; n]; n_states]);
        wholes.insert((layer, name.to_owned()), Whole { shape: facts.shape.clone(), states, writers });
    }
    Ok(wholes)
}

fn read_file(
    (file, numbers): (&FileFacts, Numbers),
    bytes: &[u8],
    wholes: &mut BTreeMap<(usize, String), Whole>,
) -> Result<(), CheckpointError> {
    let tensors = SafeTensors::deserialize(bytes).map_err(|error| fault(&file.name, error.to_string()))?;
    let mut tensors = tensors.tensors();
    // The crate lists them in no order; the first error is to be the same every time.
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    for (name, tensor) in tensors {
        let wrong = |what: &str| fault(&file.name, format!("tensor `{name}`: {what}"));
        let place =
            Place::of(&name).ok_or_else(|| wrong("its name does not say which part of what it is"))?;
        let whole =
            wholes.get_mut(&place.parameter).ok_or_else(|| wrong("the index has no such parameter"))?;
        if tensor.dtype() != numbers.dtype() {
            return Err(wrong(&format!("it is in {:?}, expected {:?}", tensor.dtype(), numbers.dtype())));
        }
        let all = Region::whole(&whole.shape);
        let inside = |(rows, all): (&(u64, u64), &(u64, u64))| rows.0 <= rows.1 && rows.1 <= all.1;
        if place.region.0.len() != all.0.len() || !place.region.0.iter().zip(&all.0).all(inside) {
            return Err(wrong(&format!("it is outside of a parameter of shape {:?}", whole.shape)));
        }
        let shape: Vec<u64> = place.region.0.iter().map(|(start, end)| end - start).collect();
        let found: Vec<u64> = tensor.shape().iter().map(|&n| n as u64).collect();
        if found != shape {
            return Err(wrong(&format!("its shape is {found:?}, its name says {shape:?}")));
        }
        let (Some(values), Some(writers)) =
            (whole.states.get_mut(place.state), whole.writers.get_mut(place.state))
        else {
            return Err(wrong("the index says that it has no moments"));
        };
        for (at, value) in places(&all, &place.region).into_iter().zip(numbers.read(tensor.data())) {
            if !value.is_finite() || (place.state == SECOND_MOMENT && value < 0.0) {
                return Err(wrong(&format!(
                    "element {at} of the parameter is {value}, which no training goes on from"
                )));
            }
            if let Some(other) = writers[at].replace(file.rank as u32) {
                return Err(wrong(&format!(
                    "element {at} of the parameter is also in the file of rank {other}"
                )));
            }
            values[at] = value;
        }
    }
    Ok(())
}

/// What the name of a tensor says.
struct Place {
    parameter: (usize, String),
    state: usize,
    region: Region,
}

impl Place {
    fn of(name: &str) -> Option<Self> {
        let (head, rows) = name.strip_suffix(']')?.rsplit_once('[')?;
        let (parameter, state) = head.rsplit_once('.')?;
        let (layer, parameter) = parameter.split_once('.')?;
        let row = |text: &str| {
            let (start, end) = text.split_once(':')?;
            Some((start.parse().ok()?, end.parse().ok()?))
        };
        let rows = rows.split(',').filter(|text| !text.is_empty()).map(row).collect::<Option<_>>()?;
        Some(Self {
            parameter: (layer.parse().ok()?, parameter.to_owned()),
            state: STATES.iter().position(|known| *known == state)?,
            region: Region(rows),
        })
    }
}

impl Checkpoint {
    /// The states as a plan's model has them, and who wrote each element.
    ///
    /// # Errors
    /// A model that has other parameters, or of other shapes.
    pub fn states(&self, parts: &PartsOf) -> Result<(States, Writers), CheckpointError> {
        let mut states =
            States { steps: self.index.steps, sequences: self.index.sequences, ..States::default() };
        let mut writers = Writers::new();
        let mut seen = 0;
        for (name, parts) in parts {
            let mut whole: Vec<Piece<'_>> = Vec::new();
            for part in parts {
                whole.push(self.piece(name.0, part)?);
                seen += 1;
            }
            let joined = |of: &dyn Fn(&Whole) -> Option<Vec<f64>>| joined(&whole, of);
            let state = |i: usize| joined(&|whole| whole.states.get(i).cloned());
            let broken = || fault(INDEX, format!("the parts of `{}` do not make it up", name.1));
            states.parameters.insert(name.clone(), state(0).ok_or_else(broken)?);
            if let (Some(first), Some(second)) = (state(1), state(2)) {
                states.moments.insert(name.clone(), Moments { first, second });
            }
            let of = |whole: &Whole| {
                let first = whole.writers.first()?;
                Some(first.iter().map(|writer| f64::from(writer.unwrap_or_default())).collect())
            };
            let found = joined(&of).ok_or_else(broken)?;
            writers.insert(name.clone(), found.mapv(|writer| writer as u32));
        }
        if seen != self.wholes.len() {
            let known: Vec<(usize, &str)> = parts
                .iter()
                .flat_map(|(name, parts)| parts.iter().map(|part| (name.0, part.name.as_str())))
                .collect();
            let extra = self.wholes.keys().find(|(layer, name)| !known.contains(&(*layer, name.as_str())));
            let extra = extra.map_or(String::new(), |(layer, name)| id(*layer, name));
            return Err(fault(
                INDEX,
                format!("it has parameter `{extra}`, which the model to train has not"),
            ));
        }
        Ok((states, writers))
    }

    fn piece<'a>(&'a self, layer: usize, part: &'a Part) -> Result<Piece<'a>, CheckpointError> {
        let text = id(layer, &part.name);
        let whole = self.wholes.get(&(layer, part.name.clone()));
        let whole = whole
            .ok_or_else(|| fault(INDEX, format!("it lacks parameter `{text}` of the model to train")))?;
        if whole.shape != part.shape {
            let (found, expected) = (&whole.shape, &part.shape);
            return Err(fault(
                INDEX,
                format!("`{text}` has shape {found:?}, the model to train has {expected:?}"),
            ));
        }
        Ok(Piece { part, whole })
    }
}

/// A parameter of the checkpoint, and where it lies in the plan's.
struct Piece<'a> {
    part: &'a Part,
    whole: &'a Whole,
}

/// A state of the plan's parameter from its parts side by side; nothing where one lacks it.
fn joined(pieces: &[Piece<'_>], of: &dyn Fn(&Whole) -> Option<Vec<f64>>) -> Option<ArrayD<f64>> {
    let array = |piece: &Piece<'_>| {
        let mut shape: Vec<usize> = piece.part.shape.iter().map(|&n| n as usize).collect();
        if let Some(within) = piece.part.within.as_ref().filter(|within| !within.keeps_dim) {
            shape.insert(within.dim, 1);
        }
        ArrayD::from_shape_vec(IxDyn(&shape), of(piece.whole)?).ok()
    };
    let first = pieces.first()?;
    let Some(within) = &first.part.within else { return array(first) };
    let arrays: Vec<(&Piece<'_>, ArrayD<f64>)> =
        pieces.iter().map(|piece| Some((piece, array(piece)?))).collect::<Option<_>>()?;
    let mut shape = arrays.first()?.1.shape().to_vec();
    shape[within.dim] = arrays.iter().map(|(_, array)| array.shape()[within.dim]).sum();
    let mut all = ArrayD::zeros(IxDyn(&shape));
    for (piece, array) in &arrays {
        let rows = piece.part.within.as_ref()?.rows;
        let rows = Slice::from(rows.0 as usize..rows.1 as usize);
        let mut target = all.slice_axis_mut(ndarray::Axis(within.dim), rows);
        if target.shape() != array.shape() {
            return None;
        }
        target.assign(array);
    }
    Some(all)
}
