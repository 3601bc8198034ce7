//! `planner prove`: every program of a plan proven equal to its layer, from the file alone.

use std::path::Path;

use frontends::{InputError, Position};
use ir::graph::Layer;
use ir::lower::gradient_tensors;
use ir::plan::Plan;
use ir::plan::check::OpenPlan;
use ir::plan::entry::Proof;
use ir::text::read_program;
use serde::Serialize;

use crate::args::ProveArgs;
use crate::failure::Failure;
use crate::figures;
use crate::input;
use crate::output::json;
use crate::proof::{Attempt, attempt, attempts, splits_backward};
use crate::table::{Side, table};
use crate::terminal::Terminal;

/// The command's answer.
#[derive(Serialize)]
struct Answer {
    proven: bool,
    model: String,
    roles: String,
    programs: Vec<Tried>,
    /// What a proof does not cover, and what does.
    not_covered: Vec<&'static str>,
}

/// One program and its layer.
#[derive(Serialize)]
struct Tried {
    layer: String,
    /// Position in the plan's entries; absent for a program of a file.
    #[serde(skip_serializing_if = "Option::is_none")]
    entry: Option<usize>,
    /// Layers of the model that run it.
    n_layers: u64,
    claims: Vec<String>,
    proof: Proof,
    terms: usize,
    rounds: usize,
    milliseconds: f64,
}

/// Proves a plan, or says what is not proven.
pub(crate) fn run(args: &ProveArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    let (plan, opened) = input::plan(&args.plan)?;
    let kinds = asked(args, &opened)?;
    let programs = match &args.program {
        None => of_plan(&plan, &opened, &kinds),
        Some(file) => of_file(file, (&plan, &opened), kinds[0])?,
    };
    let answer = Answer {
        proven: programs.iter().all(|tried| tried.proof == Proof::Proven),
        model: plan.model.name.clone(),
        roles: opened.roles(&plan).to_string(),
        programs,
        not_covered: not_covered(&plan, &opened),
    };
    let text = if args.json.json { json(&answer)? } else { answer.text() };
    write!(terminal.out, "{text}")?;
    let open = answer.programs.iter().find_map(|tried| match &tried.proof {
        Proof::Proven => None,
        Proof::Open { reason } => Some(format!("`{}` is not proven: {reason}", tried.layer)),
    });
    open.map_or(Ok(()), |what| Err(Failure::NotVerified(what)))
}

/// Layer kinds that are asked for; never none.
fn asked(args: &ProveArgs, opened: &OpenPlan) -> Result<Vec<usize>, Failure> {
    let layers = &opened.model.layers;
    let wanted = |kind: &usize| args.layer.as_ref().is_none_or(|name| layers[*kind].name == *name);
    let kinds: Vec<usize> = (0..layers.len()).filter(wanted).collect();
    if kinds.is_empty() {
        let names: Vec<&str> = layers.iter().map(|layer| layer.name.as_str()).collect();
        return Err(Failure::argument_with_hint(
            format!("{} has no layer kind `{}`", args.plan, args.layer.as_deref().unwrap_or_default()),
            format!("it has {}", names.join(", ")),
        ));
    }
    Ok(kinds)
}

fn of_plan(plan: &Plan, opened: &OpenPlan, kinds: &[usize]) -> Vec<Tried> {
    let counts = plan.entry_counts();
    let (splits, tried) = (splits_backward(plan), attempts(plan, opened));
    let of = |(entry, attempt): (usize, Attempt)| {
        let layer = opened.layer(entry);
        let mut claims = claims(layer);
        if opened.sliced.is_some() {
            claims.push("one slice after others".into());
        }
        if splits {
            claims.push("backward in two parts".into());
        }
        if opened.originals.contains_key(&opened.entries[entry].layer) {
            claims.push("equal form".into());
        }
        Tried::of(layer, (Some(entry), counts[entry]), claims, attempt)
    };
    let wanted = |(entry, _): &(usize, Attempt)| kinds.contains(&opened.entries[*entry].layer);
    tried.into_iter().enumerate().filter(wanted).map(of).collect()
}

/// The same of programs that somebody wrote for a layer kind of the plan, one after the other as `planner show` writes
/// them.
fn of_file(file: &str, (plan, opened): (&Plan, &OpenPlan), kind: usize) -> Result<Vec<Tried>, Failure> {
    let layer = &opened.model.layers[kind];
    let text = input::read_file(Path::new(file), file, input::MAX_PLAN_BYTES)?;
    let counts = plan.entry_counts();
    let of_kind: Vec<usize> =
        (0..opened.entries.len()).filter(|&entry| opened.entries[entry].layer == kind).collect();
    let sizes = layer.sizes(plan.micro_batch, plan.job.sequence);
    let one = |(at, (first_line, text)): (usize, (usize, String))| {
        // Programs of a plan stand in the order of its entries, each on the mesh of its own.
        let entry = of_kind.get(at).or(of_kind.first()).copied().unwrap_or(0);
        let mesh = plan.mesh_of_entry(entry);
        let program = read_program(layer, mesh, &text).map_err(|error| InputError {
            file: file.into(),
            position: Some(Position { line: first_line + error.line, column: 1 }),
            place: String::new(),
            what: error.what,
            hint: Some(format!("`planner show PLAN --program {}` writes the form of a program", layer.name)),
        })?;
        let runs_it = of_kind.iter().filter(|&&entry| opened.entries[entry].program == program);
        let n_layers = runs_it.map(|&entry| counts[entry]).sum();
        let tried = attempt(layer, (mesh, &sizes), &program);
        Ok(Tried::of(layer, (None, n_layers), claims(layer), tried))
    };
    texts(&text).into_iter().enumerate().map(one).collect()
}

/// The programs of a text, each from the line that begins it, and how many lines are before it; never none.
fn texts(text: &str) -> Vec<(usize, String)> {
    let begins = |line: &str| line.split_whitespace().next() == Some("program");
    let mut list = vec![(0, String::new())];
    let mut n_begun = 0;
    for (at, line) in text.lines().enumerate() {
        n_begun += usize::from(begins(line));
        if n_begun > list.len() {
            list.push((at, String::new()));
        }
        if let Some((_, program)) = list.last_mut() {
            program.push_str(line);
            program.push('\n');
        }
    }
    list
}

/// What must hold of any program of a layer.
fn claims(layer: &Layer) -> Vec<String> {
    let (trained, frozen): (Vec<_>, Vec<_>) = layer.parameters().partition(|&one| layer.is_trained(one));
    let gradients = gradient_tensors(layer);
    let backward = layer.stream_in.iter().any(|stream| gradients.contains(stream));
    let counted = |n: usize, noun: &str| (n > 0).then(|| figures::counted(n as u64, noun));
    let claims = [
        Some("forward".to_owned()),
        backward.then(|| "backward".to_owned()),
        counted(trained.len(), "update"),
        counted(frozen.len(), "frozen parameter"),
    ];
    claims.into_iter().flatten().collect()
}

/// What is shown by other means; `docs/rules.md` says why.
fn not_covered(plan: &Plan, opened: &OpenPlan) -> Vec<&'static str> {
    let rings =
        plan.entries.iter().flat_map(|entry| &entry.ops).flat_map(|op| &op.axes).any(|word| word == "ring");
    let tied = !opened.model.ties.is_empty();
    let all = [
        (
            true,
            "what a kernel computes: operators stand for what their lines claim (tests, `planner verify`)",
        ),
        (plan.n_stages > 1, "the order of a pipeline's actions (`planner check`, `planner verify`)"),
        (tied, "that gradients of tied parameters are summed at their owner (`planner verify`)"),
        (rings, "that a ring gives the numbers of gathered keys (`planner verify`)"),
        (opened.sliced.is_some(), "that slices together compute their sequence (`planner verify`)"),
    ];
    all.into_iter().filter(|(applies, _)| *applies).map(|(_, text)| text).collect()
}

impl Tried {
    fn of(
        layer: &Layer,
        (entry, n_layers): (Option<usize>, u64),
        claims: Vec<String>,
        attempt: Attempt,
    ) -> Self {
        Self {
            layer: layer.name.clone(),
            entry,
            n_layers,
            claims,
            proof: attempt.outcome,
            terms: attempt.terms,
            rounds: attempt.rounds,
            milliseconds: attempt.time.as_secs_f64() * 1e3,
        }
    }
}

impl Answer {
    fn text(&self) -> String {
        let columns = [
            ("layer", Side::Left),
            ("layers", Side::Right),
            ("proof", Side::Left),
            ("of", Side::Left),
            ("terms", Side::Right),
            ("rounds", Side::Right),
            ("time", Side::Right),
        ];
        let row = |tried: &Tried| {
            let (word, size) = match &tried.proof {
                Proof::Proven => ("proven", [tried.terms, tried.rounds].map(|n| figures::grouped(n as u64))),
                Proof::Open { .. } => ("not proven", ["-".into(), "-".into()]),
            };
            let [terms, rounds] = size;
            let time = figures::seconds(ir::units::Seconds(tried.milliseconds / 1e3));
            let n_layers = figures::grouped(tried.n_layers);
            vec![tried.layer.clone(), n_layers, word.into(), tried.claims.join(", "), terms, rounds, time]
        };
        let mut text = format!("{}, {}\n\n", self.model, self.roles);
        text.push_str(&table(&columns, &self.programs.iter().map(row).collect::<Vec<_>>()));
        text.push_str("\nnot part of a proof:\n");
        self.not_covered.iter().for_each(|what| text.push_str(&format!("- {what}\n")));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_a_text_begin_where_they_say_so() {
        let all = texts("# mine\nprogram # one\nforward\n\nprogram\nforward\nbackward\n");
        let expected = [(0, "# mine\nprogram # one\nforward\n\n"), (4, "program\nforward\nbackward\n")];
        assert_eq!(all, expected.map(|(at, text)| (at, text.to_owned())));
        assert_eq!(texts(""), [(0, String::new())]);
    }
}
