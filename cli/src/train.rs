//! `planner run`: a small copy of a plan, trained for some steps beside one device, with the losses of both.

use executor::Routes;
use executor::agreement::{Agreement, agreement};
use executor::checkpoint::TrainingFacts;
use executor::compare::Precision;
use executor::error::ExecutorError;
use executor::job::{AdamW, Execution, Recorded, Reference, Text, Training};
use executor::kernels::Real;
use executor::observe::Observer;
use executor::run::{Outcome, run_observed, start};
use executor::states::States;
use ir::plan::check::open;
use ir::shrink::Shrunk;

use crate::args::{NumbersArg, RunArgs};
use crate::copy::{SEED, SmallRun, small};
use crate::failure::Failure;
use crate::figures;
use crate::input;
use crate::output::{check_folder, check_writable, is_free, json, write_whole};
use crate::terminal::Terminal;

mod checkpoint;
mod progress;
mod report;
mod trace;

use checkpoint::Before;
use progress::Progress;
use report::Trained;
use trace::Trace;

/// Trains a copy of a plan and one device, or says where they part.
pub(crate) fn run(args: &RunArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    let (plan, whole) = input::plan(&args.plan)?;
    let small = small(&args.plan, (&plan, &whole), &args.copy)?;
    writeln!(
        terminal.err,
        "training {} of the {}plan, and one device",
        figures::counted(small.plan.n_devices(), "rank"),
        if args.copy.whole { "" } else { "shrunk " }
    )?;
    let opened =
        open(&small.plan).map_err(|error| Failure::bug(format!("{}: {}", error.place, error.what)))?;
    let copy = SmallRun::new(&small, &opened)?;
    if let Some(folder) = args.save.as_ref().filter(|folder| !is_free(folder)) {
        let what = format!("{}: there is something already", folder.display());
        return Err(Failure::argument_with_hint(what, "name a folder that does not exist"));
    }
    args.save.as_deref().map_or(Ok(()), check_folder)?;
    args.trace.as_deref().map_or(Ok(()), check_writable)?;
    let parts = checkpoint::parts_of(&whole, (&small.plan, &opened))?;
    let precision = precision(args.precision);
    let before = args.load.as_ref().map(|folder| checkpoint::load(folder, args, &parts)).transpose()?;
    let facts = facts(args, precision, &small, before.as_ref());
    let job =
        Job { copy: &copy, precision, facts: &facts, from: before.as_ref().map(|before| &before.states) };
    let progress = Progress::new(terminal.progress, args.steps);
    let pair = match precision {
        Precision::F64 => pair::<f64>(&job, args, &progress),
        Precision::F32 | Precision::Bf16 => pair::<f32>(&job, args, &progress),
    };
    progress.finish();
    let (trained, trace) = pair?;
    if let Some(folder) = &args.save {
        checkpoint::save(folder, &trained.plan, &parts, facts.clone())?;
    }
    let trained = Trained::of(&small, &facts, &trained);
    if let Some(file) = &args.trace {
        write_whole(file, &trace.json(&small)?)?;
    }
    let text = if args.json.json { json(&trained)? } else { trained.text() };
    write!(terminal.out, "{text}")?;
    match trained.failure() {
        Some(what) => Err(Failure::NotVerified(format!("{}: {what}", args.plan))),
        None => Ok(()),
    }
}

fn precision(argument: NumbersArg) -> Precision {
    match argument {
        NumbersArg::F64 => Precision::F64,
        NumbersArg::F32 => Precision::F32,
        NumbersArg::Bf16 => Precision::Bf16,
    }
}

/// Settings of the update but for the rate.
///
/// An element whose gradient is zero but for rounding moves by `lr / eps` of that rounding, so that a usual `eps` of
/// 1e-8 would make numbers of it. This one is below the gradients of a tiny model and far above their rounding.
const ADAMW: AdamW = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-3, weight_decay: 0.1 };

/// What training is to be: what is asked for, else what a checkpoint says, else what is usual.
fn facts(args: &RunArgs, precision: Precision, small: &Shrunk, before: Option<&Before>) -> TrainingFacts {
    let usual = match precision {
        Precision::F64 | Precision::F32 => ADAMW.lr,
        Precision::Bf16 => 3e-3,
    };
    let before = before.map(|before| &before.facts);
    TrainingFacts {
        model: small.plan.model.name.clone(),
        precision: args.precision.name().into(),
        seed: args.seed.or(before.map(|before| before.seed)).unwrap_or(SEED),
        learning_rate: args.lr.or(before.map(|before| before.learning_rate)).unwrap_or(usual),
        sequences_per_step: small.plan.job.global_batch,
        sequence: small.plan.job.sequence,
    }
}

/// What is trained.
struct Job<'a> {
    copy: &'a SmallRun<'a>,
    precision: Precision,
    facts: &'a TrainingFacts,
    from: Option<&'a States>,
}

/// What three trainings gave.
struct Pair {
    agreement: Agreement,
    plan: Outcome,
}

/// Trains one device, once more from a start moved by one rounding, and the plan.
fn pair<E: Real>(job: &Job<'_>, args: &RunArgs, progress: &Progress) -> Result<(Pair, Trace), Failure> {
    let &Job { copy, precision, facts, from } = job;
    let training = Training { text: Text::Chain, from, record: Recorded::States };
    let base = copy.execution(precision, facts.seed);
    let optimizer = AdamW { lr: facts.learning_rate, ..ADAMW };
    let execution = Execution { steps: args.steps, optimizer, training, ..base };
    // One device runs every sequence in one piece, as `verify` has it.
    let in_whole =
        Execution { steps: args.steps, optimizer, training, ..copy.in_whole(precision, facts.seed) };
    let reference = Reference::of(&in_whole);
    let alone = reference.execution(&in_whole);
    let of_one = |error: ExecutorError| Failure::NotVerified(format!("one device: {error}"));
    let single = |execution: &Execution<'_>, routes: &Routes, what| {
        let programs = executor::run::programs(execution)?;
        run_observed::<E>(execution, (&programs, routes), (&|_, _| 0, &progress.of(what)))
    };
    let expected = single(&alone, &Routes::default(), "one device").map_err(of_one)?;
    let moved = start(&alone).map_err(of_one)?.shaken(precision.unit());
    let shaken = Training { from: Some(&moved), ..alone.training };
    let shaken = Execution { training: shaken, ..alone };
    let shaken = single(&shaken, &expected.routes, "rounding").map_err(of_one)?;
    let trace = Trace::new(execution.n_ranks() as usize);
    let found = {
        let tier = |a: usize, b: usize| copy.tier_between(a, b);
        let (traced, told) = (progress.with(&trace), progress.of("the plan"));
        let observer: &dyn Observer = if args.trace.is_some() { &traced } else { &told };
        run_observed::<E>(&execution, (&copy.programs, &expected.routes), (&tier, observer))
    };
    let plan = found.map_err(|error| Failure::NotVerified(format!("the plan: {error}")))?;
    Ok((Pair { agreement: agreement(&expected, &shaken, &plan, precision), plan }, trace))
}

/// What the model is left with that knows nothing: the logarithm of its vocabulary.
fn clueless(small: &Shrunk) -> Option<f64> {
    let opened = open(&small.plan).ok()?;
    executor::run::vocabulary(&opened.model).map(|words| (words as f64).ln())
}
