//! `planner verify`: a small copy of a plan, run with real numbers and held to one device and to the prediction.

use executor::RankMemory;
use executor::audit::Audited;
use executor::compare::{Comparison, Precision, Quantity, compare_rounded};
use executor::kernels::Real;
use executor::run::{Outcome, run_programs, run_routed};
use ir::plan::check::{OpenPlan, open};
use ir::plan::entry::Proof;
use ir::shrink::Shrunk;
use ir::work::Pass;
use serde::Serialize;

use crate::args::{ElementArg, VerifyArgs};
use crate::copy::{self, SEED, SmallRun, small};
use crate::failure::Failure;
use crate::figures;
use crate::input;
use crate::memory::Memory;
use crate::output::json;
use crate::priced;
use crate::proof::{outcomes, proof_words};
use crate::table::{Side, list, table};
use crate::terminal::Terminal;

mod alone;
mod counts;

use alone::{Exact, Sound, alone, shaken, sound_seed};
use counts::{BytesCheck, Counted, counted, predicted};

/// Differences that are told; there may be as many as tensors.
const SHOWN: usize = 8;

/// The command's answer.
#[derive(Serialize)]
struct Verdict {
    verified: bool,
    model: String,
    roles: String,
    shrunk: Vec<String>,
    n_ranks: u64,
    n_steps: u32,
    proofs: Vec<LayerProof>,
    /// Whether the cluster of the whole plan has the memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<Memory>,
    runs: Vec<RunVerdict>,
}

/// Whether the program of an entry of the whole plan was proven; not being so is no failure.
#[derive(Serialize)]
struct LayerProof {
    layer: String,
    proof: Proof,
}

/// The answer for one number format.
#[derive(Serialize)]
struct RunVerdict {
    precision: &'static str,
    /// Of parameters and tokens.
    seed: u64,
    tolerance: f64,
    numbers_equal: bool,
    n_tensors: usize,
    /// Everything that differs too much, else the one that differs most.
    worst: Vec<Difference>,
    unmatched: Vec<String>,
    /// In bf16, each kind of operator against its own tolerance.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    operators: Vec<OperatorCheck>,
    bytes: Vec<BytesCheck>,
    saved: Vec<BytesCheck>,
    peak_saved: Vec<BytesCheck>,
    /// Size of each rank's arena, planned and used, and the most bytes that live in it at once.
    arena: Vec<BytesCheck>,
    live: Vec<BytesCheck>,
    /// Size, planned and used, of each rank's arena in the host's memory, where there are any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    host: Vec<BytesCheck>,
    /// The same on the hosts' drives.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    nvme: Vec<BytesCheck>,
    losses: Vec<f64>,
    /// How often the experts of a token were fixed to those that one device chose, its own choice being another.
    n_experts_fixed: u64,
    /// Choices of experts by one device, and how many of them found no slot; nothing where nothing can be dropped.
    #[serde(skip_serializing_if = "Option::is_none")]
    dropped: Option<Dropped>,
    /// What rounding alone does on one device, against double precision, in units of what is allowed.
    #[serde(skip_serializing_if = "Option::is_none")]
    one_device: Option<f64>,
}

/// One kind of operator, one way, against exact arithmetic on the same operands.
#[derive(Clone, Debug, Serialize)]
struct OperatorCheck {
    operator: &'static str,
    pass: &'static str,
    n_runs: u64,
    /// Largest difference in units of what is allowed.
    excess: f64,
}

impl OperatorCheck {
    fn all(outcome: &Outcome) -> Vec<Self> {
        let one = |(&(operator, pass), checked): (&(&'static str, Pass), &Audited)| Self {
            operator,
            pass: match pass {
                Pass::Forward => "forward",
                Pass::Backward => "backward",
            },
            n_runs: checked.n_runs,
            excess: checked.excess,
        };
        outcome.audit.iter().map(one).collect()
    }

    fn holds(&self) -> bool {
        self.excess <= 1.0
    }
}

/// Choices of experts that found no slot, in all steps.
#[derive(Clone, Copy, Debug, Serialize)]
struct Dropped {
    dropped: u64,
    chosen: u64,
}

#[derive(Serialize)]
struct Difference {
    quantity: &'static str,
    step: usize,
    layer_idx: usize,
    tensor: String,
    difference: f64,
    /// In units of what is allowed.
    excess: f64,
}

/// Verifies a plan, or says what differs.
pub(crate) fn run_command(args: &VerifyArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    let (plan, whole) = input::plan_of_forms(&args.plan)?;
    let predicted = priced::prediction(&args.plan, &plan, &whole)?;
    let memory = Memory::of(&plan, &whole, &predicted);
    let small = small(&args.plan, (&plan, &whole), &args.copy)?;
    writeln!(
        terminal.err,
        "running {} of the {}plan",
        figures::counted(small.plan.n_devices(), "rank"),
        if args.copy.whole { "" } else { "shrunk " }
    )?;
    let opened =
        open(&small.plan).map_err(|error| Failure::bug(format!("{}: {}", error.place, error.what)))?;
    let proofs = plan.entries.iter().zip(outcomes(&plan, &whole));
    let proofs = proofs.map(|(entry, proof)| LayerProof { layer: entry.layer.clone(), proof }).collect();
    let verdict = Verdict { memory, ..verdict((&small, &opened), proofs, args.precision)? };
    let text = if args.json.json { json(&verdict)? } else { report(&verdict) };
    write!(terminal.out, "{text}")?;
    if verdict.verified {
        return verdict.memory.map_or(Ok(()), |memory| memory.judge(&args.plan, &args.memory));
    }
    Err(Failure::NotVerified(format!("{}: {}", args.plan, first_difference(&verdict))))
}

fn verdict(
    (small, opened): (&Shrunk, &OpenPlan),
    proofs: Vec<LayerProof>,
    precision: ElementArg,
) -> Result<Verdict, Failure> {
    let run = SmallRun::new(small, opened)?;
    let mut runs = Vec::new();
    let precisions: &[Precision] = match precision {
        ElementArg::F64 => &[Precision::F64],
        ElementArg::F32 => &[Precision::F32],
        ElementArg::Bf16 => &[Precision::Bf16],
        ElementArg::Both => &[Precision::F64, Precision::F32],
        ElementArg::All => &[Precision::F64, Precision::F32, Precision::Bf16],
    };
    let mut exact = Exact::new();
    for &precision in precisions {
        runs.push(match precision {
            Precision::F64 => held::<f64>(&run, precision, &mut exact)?,
            Precision::F32 | Precision::Bf16 => held::<f32>(&run, precision, &mut exact)?,
        });
    }
    Ok(Verdict {
        verified: runs.iter().all(RunVerdict::holds),
        model: small.plan.model.name.clone(),
        roles: small.plan.roles.to_string(),
        shrunk: small.changes.clone(),
        n_ranks: small.plan.n_devices(),
        n_steps: copy::STEPS,
        proofs,
        memory: None,
        runs,
    })
}

/// Runs the copy and one device, and holds one to the other and the copy's bytes to the prediction.
fn held<E: Real>(
    small: &SmallRun<'_>,
    precision: Precision,
    exact: &mut Exact,
) -> Result<RunVerdict, Failure> {
    let (seed, expected, rounded) = match precision {
        Precision::F64 => (SEED, alone::<E>(small, (precision, SEED))?, None),
        Precision::F32 | Precision::Bf16 => {
            let Sound { seed, alone, exact, excess } = sound_seed::<E>(small, precision, exact)?;
            (seed, alone, Some((exact, excess)))
        }
    };
    let execution = small.execution(precision, seed);
    let tier = |a: usize, b: usize| small.tier_between(a, b);
    // In single precision rounding may decide between two experts; then both runs shall take the same.
    let found: Outcome = match precision {
        Precision::F64 => run_programs::<E>(&execution, &small.programs, &tier),
        Precision::F32 | Precision::Bf16 => run_routed::<E>(&execution, &small.programs, &expected, &tier),
    }
    .map_err(|error| Failure::NotVerified(format!("the plan: {error}")))?;
    let exact: Vec<&Outcome> = rounded.iter().map(|(exact, _)| &**exact).collect();
    let first = compare_rounded((&expected, &exact), &found, precision);
    let excess = rounded.as_ref().map(|(_, excess)| *excess);
    let differs = first.failures().next().is_some() && first.unmatched.is_empty();
    let (comparison, one_device) = match precision {
        Precision::F64 | Precision::F32 | Precision::Bf16 if differs => {
            let (shaken, far) = shaken::<E>(small, (precision, seed), &expected)?;
            let others: Vec<&Outcome> = exact.into_iter().chain([&shaken]).collect();
            (compare_rounded((&expected, &others), &found, precision), Some(far.max(excess.unwrap_or(0.0))))
        }
        Precision::F64 | Precision::F32 | Precision::Bf16 => (first, excess),
    };
    let should = predicted(small, (execution.edges.element_bytes::<E>(), size_of::<E>() as u64));
    let verdict = RunVerdict::of((&comparison, precision, seed), &found, (&should, &counted(small, &found)));
    Ok(RunVerdict { dropped: dropped(&expected), one_device, ..verdict })
}

fn planned(memory: &RankMemory) -> (u64, u64) {
    (memory.planned_peak, memory.high_water)
}

/// What one device dropped: the same for every plan.
fn dropped(expected: &Outcome) -> Option<Dropped> {
    let sum = |of: fn(&(u64, u64)) -> u64| expected.dropped.values().map(of).sum();
    let all = Dropped { dropped: sum(|pair| pair.0), chosen: sum(|pair| pair.1) };
    (!expected.dropped.is_empty()).then_some(all)
}

/// Arenas behind those of the devices, where there are any.
fn of_arenas(what: &str, arenas: &[RankMemory]) -> Vec<BytesCheck> {
    match arenas.iter().any(|arena| arena.planned_peak > 0) {
        true => BytesCheck::of_ranks(what, arenas, planned),
        false => Vec::new(),
    }
}

impl RunVerdict {
    fn of(
        (comparison, precision, seed): (&Comparison, Precision, u64),
        outcome: &Outcome,
        (should, is): (&Counted, &Counted),
    ) -> Self {
        let failures = comparison.failures().count();
        let told = comparison.worst.iter().take(failures.clamp(1, SHOWN));
        Self {
            precision: match precision {
                Precision::F32 => "f32",
                Precision::F64 => "f64",
                Precision::Bf16 => "bf16",
            },
            seed,
            tolerance: precision.tolerance(),
            numbers_equal: comparison.is_equal(),
            n_tensors: comparison.worst.len(),
            worst: told
                .map(|one| Difference {
                    quantity: match one.quantity {
                        Quantity::Loss => "loss",
                        Quantity::Gradient => "gradient",
                        Quantity::Parameter => "parameter",
                    },
                    step: one.step,
                    layer_idx: one.layer_idx,
                    tensor: one.tensor.clone(),
                    difference: one.difference,
                    excess: one.excess,
                })
                .collect(),
            unmatched: comparison.unmatched.clone(),
            operators: OperatorCheck::all(outcome),
            bytes: BytesCheck::all(&should.sent, &is.sent),
            saved: BytesCheck::all(&should.saved, &is.saved),
            peak_saved: BytesCheck::all(&should.peak_saved, &is.peak_saved),
            arena: BytesCheck::of_ranks("arena", &outcome.memory, planned),
            live: BytesCheck::of_ranks("most live at once", &outcome.memory, |memory| {
                (memory.lower_bound, memory.most_live)
            }),
            host: of_arenas("arena on the host", &outcome.host),
            nvme: of_arenas("arena on the drives", &outcome.nvme),
            losses: outcome.losses.clone(),
            n_experts_fixed: outcome.rerouted.values().sum(),
            dropped: None,
            one_device: None,
        }
    }

    fn holds(&self) -> bool {
        self.numbers_equal
            && self.checks().all(BytesCheck::holds)
            && self.operators.iter().all(OperatorCheck::holds)
    }

    fn checks(&self) -> impl Iterator<Item = &BytesCheck> {
        let kept = self.saved.iter().chain(&self.peak_saved);
        let behind = self.host.iter().chain(&self.nvme);
        self.bytes.iter().chain(kept).chain(&self.arena).chain(&self.live).chain(behind)
    }
}

/// What is wrong, in a sentence; the first thing where there are several.
fn first_difference(verdict: &Verdict) -> String {
    for run in &verdict.runs {
        if let Some(worst) = run.worst.first().filter(|worst| worst.excess > 1.0) {
            return format!("in {} {}", run.precision, sentence(worst));
        }
        if let Some(what) = run.unmatched.first() {
            return format!("in {} {what}", run.precision);
        }
        if let Some(operator) = run.operators.iter().find(|operator| !operator.holds()) {
            return format!("in {} {}", run.precision, operator_sentence(operator));
        }
        if let Some(check) = run.checks().find(|check| !check.holds()) {
            return format!("in {} {check}", run.precision);
        }
    }
    "something differs".into()
}

fn sentence(difference: &Difference) -> String {
    let Difference { quantity, step, layer_idx, tensor, difference, excess } = difference;
    let of = if tensor.is_empty() { String::new() } else { format!(" of `{tensor}` of layer {layer_idx}") };
    format!(
        "the {quantity}{of} in step {step} differs by {difference:.2e}, {excess:.3} times what is allowed"
    )
}

fn operator_sentence(check: &OperatorCheck) -> String {
    let OperatorCheck { operator, pass, excess, .. } = check;
    format!("{pass} of `{operator}` rounds {excess:.3} times what is allowed")
}

fn report(verdict: &Verdict) -> String {
    let mut lines = vec![
        ("plan", format!("{}, {}", verdict.model, verdict.roles)),
        ("shrunk", if verdict.shrunk.is_empty() { "nothing".into() } else { verdict.shrunk.join(", ") }),
        (
            "run",
            format!(
                "{} on threads for {} steps, against one device",
                figures::counted(verdict.n_ranks, "rank"),
                verdict.n_steps
            ),
        ),
        ("proof", proof_words(verdict.proofs.iter().map(|one| (one.layer.as_str(), Some(&one.proof))))),
    ];
    lines.splice(1..1, verdict.memory.iter().flat_map(Memory::lines));
    let mut parts = vec![list(&lines)];
    parts.push(numbers(&verdict.runs));
    parts.extend(verdict.runs.iter().filter(|run| !run.operators.is_empty()).map(operators));
    if let Some(run) = verdict.runs.first() {
        parts.push(bytes(run));
    }
    for run in verdict.runs.iter().filter(|run| !run.holds()) {
        parts.push(differences(run));
    }
    let fits = verdict.memory.as_ref().is_none_or(Memory::fits);
    parts.push(match (verdict.verified, fits) {
        (true, true) => "verified\n".into(),
        (true, false) => "verified, but the plan does not fit in memory\n".into(),
        (false, _) => "NOT verified\n".into(),
    });
    parts.join("\n")
}

fn numbers(runs: &[RunVerdict]) -> String {
    let columns = [
        ("numbers", Side::Left),
        ("compared", Side::Right),
        ("tolerance", Side::Right),
        ("largest difference", Side::Right),
        ("of what is allowed", Side::Right),
        ("", Side::Left),
    ];
    let rows: Vec<Vec<String>> = runs
        .iter()
        .map(|run| {
            let worst = run.worst.first();
            vec![
                run.precision.into(),
                figures::counted(run.n_tensors as u64, "tensor"),
                format!("{:.0e}", run.tolerance),
                worst.map_or("-".into(), |worst| format!("{:.2e}", worst.difference)),
                worst.map_or("-".into(), |worst| figures::percent(worst.excess)),
                if run.numbers_equal { "equal".into() } else { "DIFFERENT".into() },
            ]
        })
        .collect();
    let fixed = runs.iter().filter(|run| run.n_experts_fixed > 0);
    let note = |run: &RunVerdict| {
        let times = figures::counted(run.n_experts_fixed, "choice");
        format!("in {}: {times} of experts, too close to call, taken from the one device\n", run.precision)
    };
    let alone = runs.iter().filter_map(|run| Some((run.precision, run.one_device.filter(|&far| far > 1.0)?)));
    let far = |(precision, far): (&str, f64)| {
        let far = figures::percent(far);
        format!(
            "in {precision}: rounding alone takes {far} on one device; tensors may differ by what it makes of them\n"
        )
    };
    let drops = runs.iter().filter_map(|run| run.dropped.map(|dropped| (run.precision, dropped)));
    let lost = |(precision, Dropped { dropped, chosen }): (&str, Dropped)| {
        format!("in {precision}: {dropped} of {chosen} choices of experts dropped for want of a slot\n")
    };
    let notes: String = alone.map(far).chain(fixed.map(note)).collect();
    table(&columns, &rows) + &notes + &drops.map(lost).collect::<String>()
}

/// Every kind of operator against its own tolerance.
fn operators(run: &RunVerdict) -> String {
    let columns = [
        ("operator", Side::Left),
        ("runs", Side::Right),
        ("forward, of what is allowed", Side::Right),
        ("backward", Side::Right),
        ("", Side::Left),
    ];
    let mut rows: Vec<Vec<String>> = Vec::new();
    for forward in run.operators.iter().filter(|check| check.pass == "forward") {
        let backward =
            run.operators.iter().find(|check| check.pass != "forward" && check.operator == forward.operator);
        let holds = forward.holds() && backward.is_none_or(OperatorCheck::holds);
        rows.push(vec![
            forward.operator.into(),
            figures::grouped(forward.n_runs + backward.map_or(0, |check| check.n_runs)),
            figures::percent(forward.excess),
            backward.map_or("-".into(), |check| figures::percent(check.excess)),
            if holds { "equal".into() } else { "DIFFERENT".into() },
        ]);
    }
    format!("in {}:\n{}", run.precision, table(&columns, &rows))
}

fn bytes(run: &RunVerdict) -> String {
    let columns =
        [("bytes", Side::Left), ("predicted", Side::Right), ("counted", Side::Right), ("", Side::Left)];
    let row = |check: &BytesCheck| {
        let words = if check.holds() { "equal" } else { "DIFFERENT" };
        vec![
            check.what.clone(),
            figures::grouped(check.predicted),
            figures::grouped(check.counted),
            words.into(),
        ]
    };
    let mut rows: Vec<Vec<String>> = run.bytes.iter().map(row).collect();
    rows.push(row(&BytesCheck::sum("saved activations, all ranks", &run.saved)));
    rows.push(row(&BytesCheck::sum("most saved at once, all ranks", &run.peak_saved)));
    rows.push(row(&BytesCheck::sum("most live at once, all ranks", &run.live)));
    rows.push(row(&BytesCheck::sum("arenas of all ranks", &run.arena)));
    if !run.host.is_empty() {
        rows.push(row(&BytesCheck::sum("arenas on the hosts", &run.host)));
    }
    if !run.nvme.is_empty() {
        rows.push(row(&BytesCheck::sum("arenas on the drives", &run.nvme)));
    }
    format!("in {}:\n{}", run.precision, table(&columns, &rows))
}

/// Everything that differs, a line each, as far as it is told.
fn differences(run: &RunVerdict) -> String {
    let numbers = run.worst.iter().filter(|worst| worst.excess > 1.0).map(sentence);
    let bytes = run.checks().filter(|check| !check.holds()).map(ToString::to_string);
    let operators = run.operators.iter().filter(|check| !check.holds()).map(operator_sentence);
    let all: Vec<String> =
        numbers.chain(run.unmatched.iter().cloned()).chain(operators).chain(bytes).collect();
    let mut text: String =
        all.iter().take(SHOWN).map(|line| format!("in {}: {line}\n", run.precision)).collect();
    if all.len() > SHOWN {
        text.push_str(&format!("in {}: and {} more; --json has all\n", run.precision, all.len() - SHOWN));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(what: &str, predicted: u64, counted: u64) -> BytesCheck {
        BytesCheck { what: what.into(), predicted, counted }
    }

    fn run(excess: f64, bytes: Vec<BytesCheck>) -> RunVerdict {
        let tensor = "w".to_owned();
        let worst =
            Difference { quantity: "gradient", step: 0, layer_idx: 1, tensor, difference: 1e-8, excess };
        RunVerdict {
            precision: "f64",
            seed: SEED,
            tolerance: 1e-9,
            numbers_equal: excess <= 1.0,
            n_tensors: 1,
            worst: vec![worst],
            unmatched: Vec::new(),
            operators: Vec::new(),
            bytes,
            saved: Vec::new(),
            peak_saved: Vec::new(),
            arena: Vec::new(),
            host: Vec::new(),
            nvme: Vec::new(),
            live: Vec::new(),
            losses: Vec::new(),
            n_experts_fixed: 0,
            dropped: None,
            one_device: None,
        }
    }

    fn verdict(run: RunVerdict) -> Verdict {
        Verdict {
            verified: run.holds(),
            model: "m".into(),
            roles: "dp 2".into(),
            shrunk: Vec::new(),
            n_ranks: 2,
            n_steps: 2,
            proofs: Vec::new(),
            memory: None,
            runs: vec![run],
        }
    }

    #[test]
    fn one_byte_too_many_is_a_difference() {
        let verdict =
            verdict(run(0.5, vec![check("update, all-gather", 8, 8), check("tie, send-receive", 8, 9)]));
        assert!(!verdict.verified);
        assert_eq!(first_difference(&verdict), "in f64 tie, send-receive: 8 B predicted, 9 B counted");
        assert!(
            report(&verdict)
                .ends_with("in f64: tie, send-receive: 8 B predicted, 9 B counted\n\nNOT verified\n")
        );
    }

    #[test]
    fn a_number_that_is_off_is_named() {
        let verdict = verdict(run(10.0, Vec::new()));
        assert!(!verdict.verified);
        let expected = "in f64 the gradient of `w` of layer 1 in step 0 differs by 1.00e-8, 10.000 times what is allowed";
        assert_eq!(first_difference(&verdict), expected);
    }

    #[test]
    fn differences_of_opposite_sign_do_not_cancel() {
        assert!(!BytesCheck::sum("all", &[check("a", 8, 9), check("b", 8, 7)]).holds());
        assert!(BytesCheck::sum("all", &[check("a", 8, 8), check("b", 8, 8)]).holds());
    }
}
