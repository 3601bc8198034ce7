//! `planner prove`: plans are proven from their file, and spoilt programs are refused, whatever way they are spoilt.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use serde_json::Value;
use tests::planner;

/// Questions whose plans have programs of every kind: cut batch, products, vocabulary, experts, parameters in storage.
const PLANS: [(&str, &[&str]); 3] = [
    (
        "prove-tiny.json",
        &["good/tiny.json", "good/cluster.json", "--devices", "8", "--pin", "dp=2,tp=2,pp=2,zero=1"],
    ),
    ("prove-gpt2.json", &["gpt2", "dgx-h100", "--devices", "4", "--pin", "dp=2,tp=2,zero=3"]),
    ("prove-moe.json", &["mixtral-8x7b", "dgx-h200", "--nodes", "4", "--pin", "tp=2,ep=4,pp=2,etp=2,zero=1"]),
];

fn scratch(name: &str) -> String {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name).to_string_lossy().into_owned()
}

fn write(name: &str, text: &str) -> String {
    let path = scratch(name);
    #[expect(clippy::disallowed_methods, reason = "a test of files")]
    fs::write(&path, text).unwrap();
    path
}

fn read(path: &str) -> String {
    #[expect(clippy::disallowed_methods, reason = "a test of files")]
    fs::read_to_string(path).unwrap()
}

/// Writes a plan, under the name with a prefix of its own for each test.
fn plan(test: &str, (name, question): (&str, &[&str])) -> String {
    let path = scratch(&format!("{test}-{name}"));
    let made = planner(&[&["optimize"], question, &["--global-batch", "64", "-o", &path]].concat());
    assert_eq!(made.code, 0, "{made}");
    path
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn every_program_of_a_plan_is_proven_and_says_what_that_covers() {
    for question in PLANS {
        let file = plan("whole", question);
        let said = planner(&["prove", &file, "--json"]);
        assert_eq!(said.code, 0, "{said}");
        let answer = json(&said.out);
        assert_eq!(answer["proven"], true);
        let programs = answer["programs"].as_array().unwrap();
        assert_eq!(programs.len(), json(&read(&file))["entries"].as_array().unwrap().len());
        for program in programs {
            assert_eq!(program["proof"], "proven");
            assert_eq!(program["claims"][0], "forward", "{program}");
            assert!(program["terms"].as_u64() > Some(0) && program["milliseconds"].as_f64() > Some(0.0));
        }
        assert!(planner(&["prove", &file]).out.contains("not part of a proof"));
    }
}

#[test]
fn what_a_file_says_of_proofs_is_not_read() {
    let file = plan("claimed", PLANS[0]);
    let mut document = json(&read(&file));
    document["entries"][0]["proof"] = serde_json::json!({ "open": { "reason": "nobody tried" } });
    let edited = write("claimed-edited.json", &document.to_string());
    let said = planner(&["prove", &edited]);
    assert_eq!(said.code, 0, "{said}");
}

#[test]
fn a_part_of_a_plan_that_is_asked_for_must_exist() {
    let file = plan("part", PLANS[0]);
    let one = json(&planner(&["prove", &file, "--layer", "mlp", "--json"]).out);
    assert_eq!(one["programs"].as_array().unwrap().len(), 1);
    for words in [
        &["prove", &file, "--layer", "decoder"][..],
        &["prove", &file, "--program", "x.txt"],
        &["prove", &file, "--layer", "mlp", "--program", "no-such.txt"],
    ] {
        let said = planner(words);
        assert_eq!((said.code, said.out.as_str()), (2, ""), "{said}");
    }
    let broken = write("part-broken.txt", "program\nvalue %0 primal nothing replicated\n");
    let said = planner(&["prove", &file, "--layer", "mlp", "--program", &broken]);
    assert_eq!(said.code, 2, "{said}");
    assert!(said.err.contains("part-broken.txt:2"), "{said}");
}

/// A way to spoil a program: its name, and the texts that it makes of one.
type Kind = (&'static str, fn(&str) -> Vec<String>);

const KINDS: [Kind; 5] = [
    ("a dropped collective", dropped_collectives),
    ("a wrong axis", wrong_axes),
    ("a wrong weight", wrong_weights),
    ("a slice for a reduce-scatter", slices_for_reduce_scatters),
    ("a missing gradient reduction", missing_gradient_reductions),
];

/// The program with a line in place of one of its lines.
fn with_line(text: &str, at: usize, line: &str) -> String {
    let lines = text.lines().enumerate().map(|(i, old)| if i == at { line } else { old });
    lines.map(|line| format!("{line}\n")).collect()
}

/// Lines that begin so, with their positions.
fn lines_of<'a>(text: &'a str, starts: &'a [&str]) -> impl Iterator<Item = (usize, &'a str)> {
    let begins = move |line: &str| starts.iter().any(|start| line.trim_start().starts_with(start));
    text.lines().enumerate().filter(move |(_, line)| begins(line))
}

/// Positions of the steps in a line: from a bracket to its end.
fn steps(line: &str) -> Vec<(usize, usize)> {
    let starts = line.match_indices('[').map(|(at, _)| at);
    starts.filter_map(|at| Some((at, at + line[at..].find(']')? + 1))).collect()
}

/// Every step that `change` has something for, in lines that begin so.
fn with_steps(text: &str, starts: &[&str], change: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let mut list = Vec::new();
    for (at, line) in lines_of(text, starts) {
        for (from, to) in steps(line) {
            let changed = change(&line[from..to]);
            list.extend(
                changed.map(|step| with_line(text, at, &format!("{}{step}{}", &line[..from], &line[to..]))),
            );
        }
    }
    list
}

fn dropped_collectives(text: &str) -> Vec<String> {
    let moves = |step: &str| !(step.starts_with("[slice") || step.starts_with("[zero"));
    with_steps(text, &["convert", "parameter"], |step| moves(step).then(String::new))
}

fn missing_gradient_reductions(text: &str) -> Vec<String> {
    let reduces = |step: &str| step.starts_with("[all-reduce") || step.starts_with("[reduce-scatter");
    with_steps(text, &["accumulate", "update"], |step| reduces(step).then(String::new))
}

/// A slice sends nothing, so it has no algorithm.
fn slices_for_reduce_scatters(text: &str) -> Vec<String> {
    with_steps(text, &["convert", "parameter", "accumulate", "update"], |step| {
        let slice = step.strip_prefix("[reduce-scatter").map(|rest| format!("[slice{rest}"))?;
        let silent = slice.split_once(" by ").map(|(moved, _)| format!("{moved}]"));
        Some(silent.unwrap_or(slice))
    })
}

/// The second word of a step names its axes.
fn wrong_axes(text: &str) -> Vec<String> {
    with_steps(text, &["convert", "parameter", "accumulate", "update"], |step| {
        let words: Vec<&str> = step.split(' ').collect();
        let other = match words[1] {
            "x0" => "x1",
            "x1" | "x2" => "x0",
            _ => return None,
        };
        Some([&words[..1], &[other], &words[2..]].concat().join(" "))
    })
}

/// In place of a parameter, another one of the same form, or else the next.
fn wrong_weights(text: &str) -> Vec<String> {
    let loads: Vec<&str> = lines_of(text, &["parameter"])
        .filter_map(|(_, line)| line.split(' ').find(|word| word.starts_with('%')))
        .collect();
    let mut list = Vec::new();
    for (at, line) in lines_of(text, &["run"]) {
        let words: Vec<&str> = line.split(' ').collect();
        for (i, word) in words.iter().enumerate().filter(|(_, word)| loads.contains(word)) {
            let other = loads.iter().find(|other| *other != word);
            list.extend(other.map(|other| {
                let changed = [&words[..i], &[*other], &words[i + 1..]].concat().join(" ");
                // Nothing is freed, so that only the wrong value is to blame.
                let spoilt = with_line(text, at, &changed);
                spoilt
                    .lines()
                    .filter(|line| !line.starts_with("  free"))
                    .map(|line| format!("{line}\n"))
                    .collect()
            }));
        }
    }
    list
}

#[test]
fn spoilt_programs_are_refused_by_kind() {
    let mut refused: BTreeMap<&str, usize> = BTreeMap::new();
    let mut by_meaning = 0;
    for question in PLANS {
        let file = plan("spoilt", question);
        let document = json(&read(&file));
        let mut layers: Vec<&str> = document["entries"]
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| entry["layer"].as_str().unwrap())
            .collect();
        layers.dedup();
        for layer in layers {
            let shown = planner(&["show", &file, "--program", layer]).out;
            // Of several entries of a kind, the first.
            let text = shown.split("\nprogram\n").next().unwrap().trim_end().to_owned() + "\n";
            let prove = |name: &str, text: &str| {
                let program = write(name, text);
                planner(&["prove", &file, "--layer", layer, "--program", &program])
            };
            let whole = prove("spoilt-true.txt", &text);
            assert_eq!(whole.code, 0, "{layer}: {whole}");
            let all = prove("spoilt-none.txt", &shown);
            assert_eq!(all.code, 0, "{layer}: {all}");
            for (kind, spoil) in KINDS {
                for spoilt in spoil(&text) {
                    assert_ne!(spoilt, text, "{kind} changes nothing");
                    let said = prove("spoilt.txt", &spoilt);
                    assert_eq!(said.code, 4, "{kind} in {layer} of {file}: {said}\n{spoilt}");
                    assert!(said.err.contains("is not proven: "), "{said}");
                    *refused.entry(kind).or_insert(0) += 1;
                    by_meaning += usize::from(said.err.contains("is not what the layer says"));
                }
            }
        }
    }
    assert!(refused.len() == KINDS.len() && refused.values().all(|n| *n >= 6), "{refused:?}");
    assert!(refused.values().sum::<usize>() >= 30 && by_meaning >= 15, "{refused:?}, {by_meaning}");
}
