//! Checkpoints in folders: written whole or not at all, and checked against the training that goes on from them.

use std::path::Path;

use executor::checkpoint::{self as form, CheckpointError, PartsOf, TrainingFacts};
use executor::run::Outcome;
use executor::states::States;
use frontends::InputError;
use ir::plan::Plan;
use ir::plan::check::OpenPlan;
use planner::rewrite::parts::{Stands, parts};

use crate::args::RunArgs;
use crate::failure::Failure;
use crate::input::read_bytes;
use crate::output::write_folder;

/// Longest file that is read: copies are small, and a broken index must not fill the memory.
const MAX_FILE_BYTES: u64 = 4 << 30;

/// What to do about a checkpoint that is broken.
const WRITE_AGAIN: &str = "`planner run PLAN --save DIR` writes a checkpoint; its files belong together";

/// What to do about a checkpoint of another copy.
const SAME_MODEL: &str =
    "copies of two plans may be shrunk to different sizes: train both with --whole, on a model of toy size";

/// What a training goes on from.
pub(super) struct Before {
    pub(super) facts: TrainingFacts,
    pub(super) states: States,
}

/// Where the parameters of the model that was asked for lie in those of a copy's; tied copies are left out.
pub(super) fn parts_of(whole: &OpenPlan, (plan, small): (&Plan, &OpenPlan)) -> Result<PartsOf, Failure> {
    let runs = plan.chunks.iter().flatten();
    let entries = runs.flat_map(|run| std::iter::repeat_n(run.entry, run.count as usize));
    let mut all = PartsOf::new();
    for (layer_idx, entry) in entries.enumerate() {
        let kind = small.entries[entry].layer;
        let layer = small.layer(entry);
        let stands = whole.originals.get(&kind);
        let stands = stands.map(|original| Stands { form: &whole.model.layers[kind], original });
        let found = parts(layer, stands).ok_or_else(|| {
            let what = "is no form of the layer that the plan says it stands for";
            Failure::argument(format!("layer `{}` {what}", layer.name))
        })?;
        for (tensor, parts) in found {
            let is_copy =
                small.model.ties.iter().any(|tie| tie.copy.layer == kind && tie.copy.tensor == tensor);
            if !is_copy {
                all.insert((layer_idx, layer.tensors[tensor.0].name.clone()), parts);
            }
        }
    }
    Ok(all)
}

/// Writes what the ranks of a plan hold into a new folder.
pub(super) fn save(
    folder: &Path,
    outcome: &Outcome,
    parts: &PartsOf,
    facts: TrainingFacts,
) -> Result<(), Failure> {
    let states = outcome.states.as_ref().ok_or_else(|| Failure::bug("the run gave no states"))?;
    let files = form::save(states, &outcome.shards, parts, facts);
    let files = files.map_err(|error| Failure::bug(format!("{}: {error}", error.file)))?;
    write_folder(folder, &files)
}

/// Reads what a training goes on from.
pub(super) fn load(folder: &Path, args: &RunArgs, parts: &PartsOf) -> Result<Before, Failure> {
    let input = |error: CheckpointError, hint: &str| {
        InputError::whole(&folder.join(&error.file).to_string_lossy(), error.what).with_hint(hint)
    };
    let mut unread = None;
    let mut read = |name: &str| {
        read_bytes(&folder.join(name), MAX_FILE_BYTES).map_err(|error| {
            unread.get_or_insert(error);
            CheckpointError { file: name.into(), what: String::new() }
        })
    };
    let loaded = form::load(&mut read);
    let checkpoint = loaded.map_err(|error| {
        unread.take().map_or_else(|| input(error, WRITE_AGAIN), |unread| unread.with_hint(WRITE_AGAIN))
    })?;
    let facts = checkpoint.index.training.clone();
    let differs = |what: String, hint: String| {
        let error = CheckpointError { file: form::INDEX.into(), what };
        Err(Failure::from(input(error, &hint)))
    };
    if facts.precision != args.precision.name() {
        let what = format!("it is of a training in {}, not in {}", facts.precision, args.precision.name());
        return differs(what, format!("go on with --precision {}", facts.precision));
    }
    if let Some(seed) = args.seed.filter(|seed| *seed != facts.seed) {
        let what = format!("it is of the text of seed {}, not {seed}", facts.seed);
        return differs(what, "leave out --seed".into());
    }
    let (states, _) = checkpoint.states(parts).map_err(|error| input(error, SAME_MODEL))?;
    Ok(Before { facts, states })
}
