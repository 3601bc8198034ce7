//! A copy of a plan that is small enough to run here: the plan shrunk, and what the executor asks for, read off it.

use executor::compare::Precision;
use executor::element::Edges;
use executor::job::{AdamW, Chunk, Execution, Share, TokenLayout, Training};
use ir::graph::Layer;
use ir::lower::LayerChoice;
use ir::plan::check::OpenPlan;
use ir::plan::{EntryRun, Plan, PlanError};
use ir::program::Program;
use ir::schedule::Action;
use ir::shrink::{ShrinkError, ShrinkLimits, Shrunk, shrink};
use ir::slices::Slices;

use crate::args::CopyArgs;
use crate::failure::Failure;

/// Most parameters over all ranks, and tokens of a micro-batch, of a plan that is run as it is.
const MAX_ELEMENTS: u64 = 1 << 26;

/// Most micro-batches of a plan that is run as it is.
const MAX_MICRO_BATCHES: u64 = 1 << 10;

/// Updates that are run: the second has moments from the first.
pub(crate) const STEPS: u32 = 2;

/// Of parameters and tokens. Any does; it is fixed so that a verification can be repeated.
pub(crate) const SEED: u64 = 7;

/// Settings of the update.
///
/// A gradient that is zero but for rounding moves its parameter by `lr / eps` of that rounding, and a tiny model makes
/// a thousandfold of it in the second step's gradients. In double precision there is room for that; in single
/// precision, where parameters are not compared, the step is so small that their own rounding is the larger.
fn adamw(precision: Precision) -> AdamW {
    let (lr, eps) = match precision {
        Precision::F64 => (1e-2, 1e-3),
        Precision::F32 | Precision::Bf16 => (1e-3, 1e-1),
    };
    AdamW { lr, eps, beta1: 0.9, beta2: 0.95, weight_decay: 0.1 }
}

/// The plan that is run: a shrunk copy, or with `--whole` the plan itself.
pub(crate) fn small(
    file: &str,
    (plan, opened): (&Plan, &OpenPlan),
    args: &CopyArgs,
) -> Result<Shrunk, Failure> {
    if args.whole { as_it_is(file, plan, opened, args.ranks) } else { shrunk(file, plan, args.ranks) }
}

/// The plan without shrinking, where it is small enough to run on one machine.
fn as_it_is(file: &str, plan: &Plan, opened: &OpenPlan, max_ranks: u64) -> Result<Shrunk, Failure> {
    let too_large = |what: String| {
        let what = format!("{file}: {what}: too large to be run as it is");
        Err(Failure::argument_with_hint(what, "leave out --whole to run a small copy"))
    };
    if plan.n_devices() > max_ranks {
        return too_large(format!("{} ranks exceed the limit of {}", plan.n_devices(), max_ranks));
    }
    let tokens = plan.job.sequence.saturating_mul(plan.micro_batch);
    let elements = opened.model.n_parameters().saturating_mul(plan.n_devices()).saturating_add(tokens);
    if elements > MAX_ELEMENTS || plan.most_micro_batches() > MAX_MICRO_BATCHES {
        let n_parameters = opened.model.n_parameters();
        return too_large(format!(
            "{n_parameters} parameters and {tokens} tokens on {} ranks",
            plan.n_devices()
        ));
    }
    Ok(Shrunk::whole(plan))
}

fn shrunk(file: &str, plan: &Plan, max_ranks: u64) -> Result<Shrunk, Failure> {
    shrink(plan, &ShrinkLimits { max_ranks }).map_err(|error| match error {
        ShrinkError::TooManyRanks { .. } => {
            Failure::argument_with_hint(format!("{file}: {error}"), "allow more with --ranks")
        }
        ShrinkError::Plan(_) => Failure::argument(format!("{file}: {error}")),
        ShrinkError::Broken(_) => Failure::bug(error.to_string()),
    })
}

/// A plan small enough to run.
pub(crate) struct SmallRun<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) opened: &'a OpenPlan,
    pub(crate) table: Vec<Vec<Action>>,
    /// What each coordinate of the outermost axis runs, where they run unequal shares.
    pub(crate) shares: Vec<Share>,
    /// What every layer of an entry runs, by entry.
    pub(crate) programs: Vec<Program>,
    stands_for: &'a [u64],
    n_stages: u32,
    n_micro_batches: u32,
}

impl<'a> SmallRun<'a> {
    /// A run of a checked plan.
    pub(crate) fn new(small: &'a Shrunk, opened: &'a OpenPlan) -> Result<Self, Failure> {
        let plan = &small.plan;
        let too_many = |_| Failure::bug("the shrunk plan has too many stages or micro-batches");
        let n_stages = u32::try_from(plan.n_stages).map_err(too_many)?;
        let n_micro_batches = u32::try_from(plan.n_micro_batches).map_err(too_many)?;
        let wrong = |error: PlanError| Failure::bug(format!("{}: {}", error.place, error.what));
        let table = plan.actions().map_err(wrong)?;
        let share = |&share: &u64| {
            let n_micro_batches = u32::try_from(share).map_err(too_many)?;
            Ok(Share { n_micro_batches, table: plan.actions_of(share).map_err(wrong)? })
        };
        let shares = plan.shares.iter().map(share).collect::<Result<_, Failure>>()?;
        let programs = (0..opened.entries.len()).map(|entry| opened.run(entry).1.clone()).collect();
        let stands_for = &small.stands_for;
        Ok(Self { plan, opened, table, shares, programs, stands_for, n_stages, n_micro_batches })
    }

    /// What joins two ranks of the run, a device or a link tier of the cluster: that which joins the ranks they stand
    /// for.
    pub(crate) fn tier_between(&self, a: usize, b: usize) -> usize {
        self.plan.cluster.level_between(self.stands_for[a], self.stands_for[b])
    }

    /// What is run.
    pub(crate) fn execution(&self, precision: Precision, seed: u64) -> Execution<'a> {
        let whole = self.in_whole(precision, seed);
        let Some(sliced) = &self.opened.sliced else { return whole };
        let choices = sliced.entries.iter().map(|entry| (entry.layer, entry.choice.clone())).collect();
        Execution { model: &sliced.model, choices, slices: sliced.slices.clone(), ..whole }
    }

    /// The same with every sequence in one piece, of which the reference is made. Its table may be of slices.
    pub(crate) fn in_whole(&self, precision: Precision, seed: u64) -> Execution<'a> {
        let layers = |run: &EntryRun| std::iter::repeat_n(run.entry, run.count as usize);
        let chunk = |runs: &Vec<EntryRun>| Chunk { layers: runs.iter().flat_map(layers).collect() };
        let choices: Vec<(usize, LayerChoice)> =
            self.opened.entries.iter().map(|entry| (entry.layer, entry.choice.clone())).collect();
        Execution {
            model: &self.opened.model,
            meshes: self.plan.meshes(),
            n_stages: self.n_stages,
            placement: self.plan.schedule.placement(),
            chunks: self.plan.chunks.iter().map(chunk).collect(),
            choices,
            micro_batch: self.plan.micro_batch,
            n_micro_batches: self.n_micro_batches,
            shares: self.shares.clone(),
            sequence: self.plan.job.sequence,
            tokens: TokenLayout {
                order: self.plan.job.token_order,
                parts: self.opened.token_parts(self.plan),
            },
            slices: Slices::whole(self.plan.job.sequence),
            table: self.table.clone(),
            seed,
            given: executor::run::Tensors::new(),
            steps: STEPS,
            optimizer: adamw(precision),
            edges: match precision {
                Precision::F64 | Precision::F32 => Edges::Exact,
                Precision::Bf16 => Edges::Bf16,
            },
            training: Training::CHECK,
        }
    }

    /// Layer and program of every layer of a chunk, in order.
    pub(crate) fn chunk(&self, chunk: usize) -> Vec<(&'a Layer, &'a Program, usize)> {
        let entry = |run: &EntryRun| std::iter::repeat_n(run.entry, run.count as usize);
        let entries = self.plan.chunks[chunk].iter().flat_map(entry);
        let run = |entry: usize| {
            let (layer, program) = self.opened.run(entry);
            (layer, program, entry)
        };
        entries.map(run).collect()
    }
}
