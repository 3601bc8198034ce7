//! `planner goodput`: what is left of a plan's speed when devices fail: by formula, and by walking through failures.

use cost_model::Constants;
use cost_model::memory::StateBytes;
use cost_model::reliability::{
    Checkpoint, Failure as Stop, Ledger, MOST_FAILURES, Upkeep, at_random,
    between_failures as between_failures_of, checkpoint, replay,
};
use ir::plan::Plan;
use ir::plan::prediction::Prediction;
use ir::units::{Bytes, Seconds};
use serde::Serialize;

use crate::args::GoodputArgs;
use crate::failure::Failure;
use crate::figures;
use crate::input::read_lines;
use crate::memory::Memory;
use crate::output::json;
use crate::priced;
use crate::table::{Side, table};
use crate::terminal::Terminal;

/// Seconds of a day.
const DAY_S: f64 = 86_400.0;

/// Days that are walked through where neither they nor a trace are given.
const DAYS: f64 = 30.0;

/// The command's answer.
#[derive(Serialize)]
struct Answer {
    n_devices: u64,
    step_time_s: Seconds,
    checkpoint_bytes: Bytes,
    checkpoint_stall_s: Seconds,
    restart_s: Seconds,
    mean_time_between_failures_s: Seconds,
    young_interval_s: Seconds,
    daly_interval_s: Seconds,
    interval_s: Seconds,
    /// Where the failures are from: a file, or a seed.
    failures: String,
    /// By formula.
    goodput: f64,
    walked: Walked,
    tokens_per_day: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    price_per_trillion_tokens: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    joules_per_token: Option<f64>,
}

/// What the walk through the failures found.
#[derive(Serialize)]
struct Walked {
    days: f64,
    goodput: f64,
    useful_s: Seconds,
    lost_s: Seconds,
    checkpoints_s: Seconds,
    down_s: Seconds,
    n_failures: u64,
    n_checkpoints: u64,
}

/// Failures that are expected of a walk at most: random ones are never so many more that they are cut off.
const MOST_WALKED: f64 = 0.9 * MOST_FAILURES as f64;

/// Prices a plan and lets its devices fail.
pub(crate) fn run(args: &GoodputArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    let (plan, opened) = priced::plan(&args.plan, terminal)?;
    let memory = plan.predicted.as_ref().and_then(|predicted| Memory::of(&plan, &opened, predicted));
    if let Some(what) = memory.and_then(|memory| memory.overflow()) {
        writeln!(terminal.err, "warning: the plan does not fit: {what}")?;
    }
    let states = StateBytes::adamw(plan.job.precision, plan.job.engine.gradients);
    let n_trained = opened.model.n_trained() as f64;
    let of_plan = checkpoint(n_trained, states, &plan.cluster, &Constants::load());
    let answer = answer(args, &plan, of_plan)?;
    let text = if args.json.json { json(&answer)? } else { answer.text() };
    write!(terminal.out, "{text}")?;
    Ok(())
}

fn answer(args: &GoodputArgs, plan: &Plan, checkpoint: Checkpoint) -> Result<Answer, Failure> {
    let predicted = plan.predicted.as_ref().ok_or_else(|| Failure::bug("the plan has no prediction"))?;
    let trace = args.trace.as_deref().map(read_trace).transpose()?;
    let restart = args.restart.map_or(Constants::load().restart_s, Seconds);
    let period = Period::of((args, trace.as_deref()), restart)?;
    let (end, days) = (period.end, period.end.0 / DAY_S);
    let between_failures = between_failures(args, plan, period)?;
    let stall = args.stall.map_or(checkpoint.stall, Seconds);
    let upkeep = Upkeep { between_failures, stall, restart };
    let interval = args.interval.map_or(upkeep.daly().max(checkpoint.write), Seconds);
    if !(interval.0.is_finite() && interval.0 > 0.0) {
        let hint = "name it with --interval SECONDS";
        return Err(Failure::argument_with_hint("no time between checkpoints follows from failures", hint));
    }
    let expected = end / between_failures;
    if trace.is_none() && expected > MOST_WALKED {
        return Err(Failure::argument_with_hint(
            format!(
                "{expected:.2e} failures in {days} days are more than the {MOST_WALKED:.0e} that are walked through"
            ),
            "take fewer --days: the shares are the same",
        ));
    }
    let (failures, of) = match (trace, &args.trace) {
        (Some(trace), Some(file)) => (trace, file.clone()),
        _ => (at_random(between_failures, end, args.seed), format!("at random, seed {}", args.seed)),
    };
    let ledger = replay(upkeep, interval, &failures, end);
    Ok(Answer {
        checkpoint_bytes: checkpoint.bytes,
        failures: of,
        ..Answer::of((plan, predicted), (upkeep, interval), (&ledger, days))
    })
}

/// The time that is walked through.
#[derive(Clone, Copy)]
struct Period {
    end: Seconds,
    /// Mean time between the failures of the trace that are in it.
    of_trace: Option<Seconds>,
}

impl Period {
    /// As many days as were asked for; or all of a trace, until training goes on behind its last failure; or a month.
    fn of((args, trace): (&GoodputArgs, Option<&[Stop]>), restart: Seconds) -> Result<Self, Failure> {
        let asked = args.days.map(|days| Seconds(DAY_S * days));
        let Some(trace) = trace else {
            return Ok(Self { end: asked.unwrap_or(Seconds(DAY_S * DAYS)), of_trace: None });
        };
        let last = trace.last().copied().unwrap_or(Stop { at: Seconds::ZERO, gone: Seconds::ZERO });
        let (end, observed) = match asked {
            Some(end) => (end, end),
            None => (last.at + last.gone + restart, last.at),
        };
        let n_failures = trace.iter().filter(|stop| stop.at < end).count();
        if n_failures == 0 && args.failures.is_none() {
            let what = match asked {
                Some(_) => "no failure of the trace is in the days asked for",
                None => "the trace ends with its last failure, and with --restart 0 training goes on at once",
            };
            let hint = "take more --days, or say with --failures how often devices fail";
            return Err(Failure::argument_with_hint(what, hint));
        }
        Ok(Self { end, of_trace: Some(observed / n_failures as f64) })
    }
}

/// Mean time between failures of the job: as told, as the cluster has it, or as the trace does.
fn between_failures(args: &GoodputArgs, plan: &Plan, period: Period) -> Result<Seconds, Failure> {
    let found = match args.failures {
        Some(rate) => Some(Seconds(3600.0 * 1e6 / (rate * plan.n_whole_devices() as f64))),
        None => period.of_trace.or_else(|| between_failures_of(&plan.cluster)),
    };
    found.ok_or_else(|| {
        let hint = "give a --trace, --failures per million device hours, or `failures_per_million_device_hours` in \
                    the cluster file";
        Failure::argument_with_hint("nothing says how often devices fail", hint)
    })
}

fn read_trace(file: &str) -> Result<Vec<Stop>, Failure> {
    let text = read_lines(file, frontends::MAX_FILE_BYTES)?;
    stops(&text).map_err(|what| {
        let hint = "a trace is a CSV file with the columns at_s and, if wanted, gone_s: seconds since training began, \
                    in order, and seconds for which devices are gone";
        Failure::argument_with_hint(format!("{file}: {what}"), hint)
    })
}

/// The failures of a trace, or what is wrong with it.
fn stops(text: &str) -> Result<Vec<Stop>, String> {
    let cells = |line: &str| line.split(',').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let header = lines.next().map(|(_, line)| cells(line)).unwrap_or_default();
    if !matches!(header.iter().map(String::as_str).collect::<Vec<_>>()[..], ["at_s"] | ["at_s", "gone_s"]) {
        return Err(format!("expected the columns `at_s,gone_s`, found `{}`", header.join(",")));
    }
    let mut failures: Vec<Stop> = Vec::new();
    for (at, line) in lines {
        let wrong = |what: &str| format!("line {}: {what}", at + 1);
        let number = |cell: &String| {
            let number = cell.parse::<f64>().ok().filter(|number| (0.0..=1e12).contains(number));
            number.map(Seconds).ok_or_else(|| wrong(&format!("expected seconds from 0 on, found `{cell}`")))
        };
        let own = cells(line);
        let stop = match &own[..] {
            [at] => Stop { at: number(at)?, gone: Seconds::ZERO },
            [at, gone] if gone.is_empty() => Stop { at: number(at)?, gone: Seconds::ZERO },
            [at, gone] => Stop { at: number(at)?, gone: number(gone)? },
            _ => return Err(wrong("expected one or two numbers")),
        };
        if failures.last().is_some_and(|last| last.at > stop.at) {
            return Err(wrong("times are in order"));
        }
        failures.push(stop);
    }
    if failures.is_empty() { Err("it has no failure".into()) } else { Ok(failures) }
}

impl Answer {
    fn of(
        (plan, predicted): (&Plan, &Prediction),
        (upkeep, interval): (Upkeep, Seconds),
        (ledger, days): (&Ledger, f64),
    ) -> Self {
        let tokens = plan.job.sequence as f64 * plan.job.global_batch as f64;
        let goodput = upkeep.goodput(interval);
        let lasts = ledger.useful > Seconds::ZERO;
        let times = if lasts { (ledger.useful + ledger.lost) / ledger.useful } else { 1.0 };
        Self {
            n_devices: plan.n_whole_devices(),
            step_time_s: predicted.step_time_s,
            checkpoint_bytes: Bytes::ZERO,
            checkpoint_stall_s: upkeep.stall,
            restart_s: upkeep.restart,
            mean_time_between_failures_s: upkeep.between_failures,
            young_interval_s: upkeep.young(),
            daly_interval_s: upkeep.daly(),
            interval_s: interval,
            failures: String::new(),
            goodput,
            walked: Walked {
                days,
                goodput: ledger.goodput(),
                useful_s: ledger.useful,
                lost_s: ledger.lost,
                checkpoints_s: ledger.checkpoints,
                down_s: ledger.down,
                n_failures: ledger.n_failures,
                n_checkpoints: ledger.n_checkpoints,
            },
            tokens_per_day: tokens / predicted.step_time_s.0 * DAY_S * ledger.goodput(),
            // Where nothing lasts there is no token to pay for.
            price_per_trillion_tokens: predicted
                .cost_per_step
                .filter(|_| lasts)
                .map(|price| price / tokens * 1e12 / ledger.goodput()),
            joules_per_token: predicted
                .energy_per_step_joules
                .filter(|_| lasts)
                .map(|joules| joules / tokens * times),
        }
    }

    fn text(&self) -> String {
        let walked = &self.walked;
        let time = figures::duration;
        let mut text = format!(
            "{}, a failure every {}; a checkpoint of {} after every {} of training (Young {}, Daly {}) that stalls \
             {}; {} until training goes on\n\n",
            figures::counted(self.n_devices, "device"),
            time(self.mean_time_between_failures_s),
            figures::bytes(self.checkpoint_bytes),
            time(self.interval_s),
            time(self.young_interval_s),
            time(self.daly_interval_s),
            time(self.checkpoint_stall_s),
            time(self.restart_s),
        );
        let all = walked.useful_s + walked.lost_s + walked.checkpoints_s + walked.down_s;
        let row = |name: &str, part: Seconds| vec![name.to_owned(), time(part), figures::percent(part / all)];
        let name = format!("{}, failures {}", time(Seconds(walked.days * DAY_S)), self.failures);
        let columns = [(name.as_str(), Side::Left), ("time", Side::Right), ("share", Side::Right)];
        text += &table(
            &columns,
            &[
                row("training that lasts", walked.useful_s),
                row("training that failures undid", walked.lost_s),
                row("checkpoints", walked.checkpoints_s),
                row("from failures until training went on", walked.down_s),
            ],
        );
        text += &format!(
            "{}, {}\ngoodput {} walked, {} by formula (Daly 2006)\n{} tokens a day\n",
            figures::counted(walked.n_failures, "failure"),
            figures::counted(walked.n_checkpoints, "checkpoint"),
            figures::percent(walked.goodput),
            figures::percent(self.goodput),
            figures::count(self.tokens_per_day),
        );
        if let Some(price) = self.price_per_trillion_tokens {
            text += &format!("price of 10^12 tokens: {}\n", figures::count(price));
        }
        if let Some(joules) = self.joules_per_token {
            text += &format!("energy of a token, with what failures undid: {}\n", figures::energy(joules));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_of_a_trace_name_their_line() {
        let found = |text: &str| stops(text).map(|all| all.len());
        assert_eq!(found("at_s\n1\n2\n"), Ok(2));
        assert_eq!(found("at_s,gone_s\n1,5\n\n2,\n3\n"), Ok(3));
        assert_eq!(found("at_s\n2\n1\n"), Err("line 3: times are in order".into()));
        assert_eq!(found("at_s\nnever\n"), Err("line 2: expected seconds from 0 on, found `never`".into()));
        assert_eq!(found("time\n1\n"), Err("expected the columns `at_s,gone_s`, found `time`".into()));
        assert_eq!(found("at_s\n"), Err("it has no failure".into()));
    }
}
