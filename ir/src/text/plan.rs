//! A plan as text: everything that fixes its run, the choices a line per operator and parameter.
//!
//! What a plan only reports (names of roles, prediction, search, runners-up, warnings, originals of fused layers) is
//! not part of the text: reading derives the roles again and leaves the rest out.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::TextError;
use super::graph::{self, fields};
use super::words::{Line, home_text, lines, write_fields, write_name};
use crate::mesh::{Mesh, MeshAxis};
use crate::names::{Arrangement, Roles, roles};
use crate::plan::entry::{CollectiveEntry, Entry, OpEntry, ParameterEntry};
use crate::plan::{EntryRun, Plan, check};
use crate::program::{Home, StateHome};
use crate::schedule::Schedule;

/// Fields of the document that have lines of their own, or that are left out.
const PLACED: [&str; 14] = [
    "job",
    "roles",
    "mesh",
    "stage_meshes",
    "entries",
    "chunks",
    "predicted",
    "search",
    "runners_up",
    "warnings",
    "forms",
    "cluster",
    "model",
    "inputs",
];

/// Writes a plan.
pub fn write_plan(plan: &Plan) -> String {
    let value = |json: Result<Value, serde_json::Error>| json.unwrap_or_default();
    let document = value(serde_json::to_value(plan));
    let own = document.as_object().into_iter().flatten().filter(|(key, _)| !PLACED.contains(&key.as_str()));
    let mut text = format!("plan{}\n", write_fields(own));
    let mut object = |name: &str| {
        let of = document.get(name).and_then(Value::as_object).into_iter().flatten();
        text.push_str(&format!("{name}{}\n", write_fields(of)));
    };
    object("inputs");
    object("job");
    let axis = |axis: &MeshAxis| format!(" {}={}", axis.name, axis.size);
    let axes = |mesh: &Mesh| mesh.axes.iter().map(axis).collect::<String>();
    text.push_str(&format!("mesh{}\n", axes(&plan.mesh)));
    plan.stage_meshes.iter().for_each(|mesh| text.push_str(&format!("stage{}\n", axes(mesh))));
    for chunk in &plan.chunks {
        let run = |run: &EntryRun| format!(" {}*{}", run.entry, run.count);
        text.push_str(&format!("chunk{}\n", chunk.iter().map(run).collect::<String>()));
    }
    plan.entries.iter().for_each(|entry| write_entry(&mut text, entry));
    text.push_str(&graph::write_model(&plan.model));
    text.push_str(&format!("cluster {}\n", document.get("cluster").cloned().unwrap_or_default()));
    text
}

fn write_entry(text: &mut String, entry: &Entry) {
    let (layer, stream, out) = (write_name(&entry.layer), &entry.stream, &entry.out);
    let homes = [("kept", entry.kept_home), ("parameters", entry.parameters_home)];
    let on_host = homes.into_iter().filter(|(_, home)| *home == Home::Host);
    let homes: String = on_host.map(|(what, _)| format!(" {what} host")).collect();
    text.push_str(&format!("entry {layer} {} -> {}{homes}\n", write_name(stream), write_name(out)));
    if let Some(proof) = &entry.proof {
        text.push_str(&format!("  proof {}\n", serde_json::to_value(proof).unwrap_or_default()));
    }
    for op in &entry.ops {
        let axes: String = op.axes.iter().map(|word| format!(" {word}")).collect();
        let again = if op.recompute { " recompute" } else { "" };
        text.push_str(&format!("  do {} :{axes}{again}\n", write_name(&op.op)));
    }
    let cut = |axes: &[String]| if axes.is_empty() { "-".into() } else { axes.join(",") };
    for parameter in &entry.parameters {
        text.push_str(&format!(
            "  store {} {} {} {}{}{}\n",
            write_name(&parameter.tensor),
            cut(&parameter.parameter),
            cut(&parameter.gradient),
            cut(&parameter.optimizer),
            home_text(parameter.optimizer_home),
            if parameter.shared { " shared" } else { "" },
        ));
    }
    for row in &entry.collectives {
        let [class, kind, algorithm] = [
            serde_json::to_value(row.class),
            serde_json::to_value(row.collective),
            serde_json::to_value(row.algorithm),
        ]
        .map(|value| value.unwrap_or_default().as_str().unwrap_or_default().to_owned());
        let tensors: String = row.tensors.iter().map(|name| format!(" {}", write_name(name))).collect();
        text.push_str(&format!("  run {class} {kind} {algorithm} {}{tensors}\n", cut(&row.axes)));
    }
}

/// Reads a plan, and derives what it reports of its roles.
///
/// # Errors
/// The first line that does not fit. Whether the plan is sound is for [`check::open`] to say.
pub fn read_plan(text: &str) -> Result<Plan, TextError> {
    let all = lines(text)?;
    let Some(first) = all.first() else {
        return Err(TextError { line: 1, what: "expected `plan`, found nothing".into() });
    };
    let begin = all.iter().position(|line| line.words[0] == "model");
    let begin = begin.ok_or_else(|| first.error("the text has no `model`"))?;
    let end = all.iter().position(|line| line.words[0] == "cluster").unwrap_or(all.len()).max(begin);
    let mut reader = Reader::default();
    for line in all[..begin].iter().chain(&all[end..]) {
        reader.line(line)?;
    }
    let model = graph::read_lines(&all[begin..end])?;
    let mut document = reader.document;
    let json =
        |value: Result<Value, serde_json::Error>| value.map_err(|error| first.error(error.to_string()));
    document.insert("model".into(), json(serde_json::to_value(model))?);
    if !reader.stages.is_empty() {
        document.insert("stage_meshes".into(), Value::Array(reader.stages));
    }
    document.insert("entries".into(), json(serde_json::to_value(reader.entries))?);
    document.insert("chunks".into(), json(serde_json::to_value(reader.chunks))?);
    document.insert("roles".into(), json(serde_json::to_value(no_roles()))?);
    let mut plan: Plan = serde_json::from_value(Value::Object(document))
        .map_err(|error| first.error(format!("the plan: {error}")))?;
    if let Ok(opened) = check::open(&plan) {
        plan.roles = opened.roles(&plan);
    }
    Ok(plan)
}

/// Roles of a plan that is not read yet.
fn no_roles() -> Roles {
    roles(&Arrangement {
        mesh: &Mesh { axes: Vec::new() },
        layers: Vec::new(),
        n_stages: 1,
        schedule: Schedule::OneFOneB,
        micro_batch: 1,
        n_micro_batches: 1,
    })
}

#[derive(Default)]
struct Reader {
    document: Map<String, Value>,
    stages: Vec<Value>,
    chunks: Vec<Vec<EntryRun>>,
    entries: Vec<Entry>,
}

impl Reader {
    fn line(&mut self, line: &Line<'_>) -> Result<(), TextError> {
        match line.words[0] {
            "plan" => self.document.extend(fields(line, 1)?),
            name @ ("inputs" | "job") => {
                self.document.insert(name.into(), Value::Object(fields(line, 1)?.into_iter().collect()));
            }
            "mesh" => {
                self.document.insert("mesh".into(), mesh(line)?);
            }
            "stage" => self.stages.push(mesh(line)?),
            "chunk" => {
                let runs = line.words[1..].iter().map(|word| entry_run(line, word));
                self.chunks.push(runs.collect::<Result<_, _>>()?);
            }
            "cluster" => {
                let cluster = line.words.get(1).and_then(|word| serde_json::from_str(word).ok());
                let cluster: Value = cluster.ok_or_else(|| line.error("expected the cluster as JSON"))?;
                self.document.insert("cluster".into(), cluster);
            }
            "entry" => self.entries.push(entry(line)?),
            "proof" => {
                let proof = line.words.get(1).and_then(|word| serde_json::from_str(word).ok());
                self.entry(line)?.proof = Some(proof.ok_or_else(|| line.error("expected a proof as JSON"))?);
            }
            "do" => {
                let op = op_entry(line)?;
                self.entry(line)?.ops.push(op);
            }
            "store" => {
                let parameter = parameter_entry(line)?;
                self.entry(line)?.parameters.push(parameter);
            }
            "run" => {
                let row = collective_entry(line)?;
                self.entry(line)?.collectives.push(row);
            }
            word => return Err(line.error(format!("a plan has no `{word}`"))),
        }
        Ok(())
    }

    fn entry(&mut self, line: &Line<'_>) -> Result<&mut Entry, TextError> {
        self.entries.last_mut().ok_or_else(|| line.error("expected `entry LAYER` before it"))
    }
}

fn mesh(line: &Line<'_>) -> Result<Value, TextError> {
    let axis = |(name, size): (String, Value)| serde_json::json!({ "name": name, "size": size });
    let axes: Vec<Value> = fields(line, 1)?.into_iter().map(axis).collect();
    Ok(serde_json::json!({ "axes": axes }))
}

fn entry_run(line: &Line<'_>, word: &str) -> Result<EntryRun, TextError> {
    let parts = word.split_once('*').and_then(|(e, n)| Some((e.parse().ok()?, n.parse().ok()?)));
    let (entry, count) =
        parts.ok_or_else(|| line.error(format!("expected `entry*count`, found `{word}`")))?;
    Ok(EntryRun { entry, count })
}

fn entry(line: &Line<'_>) -> Result<Entry, TextError> {
    if line.words.get(3) != Some(&"->") {
        return Err(line.error("expected `entry LAYER STREAM -> OUT`"));
    }
    let (layer, stream) = (line.name(1, "the layer's name")?, line.name(2, "a sharding")?);
    let out = line.name(4, "a sharding")?;
    let (mut kept_home, mut parameters_home) = (Home::Device, Home::Device);
    for words in line.words.get(5..).unwrap_or_default().chunks(2) {
        match words {
            ["kept", "host"] => kept_home = Home::Host,
            ["parameters", "host"] => parameters_home = Home::Host,
            _ => {
                let what = "expected `kept host`, `parameters host` or the end, found";
                return Err(line.error(format!("{what} `{}`", words.join(" "))));
            }
        }
    }
    Ok(Entry {
        layer,
        stream,
        out,
        kept_home,
        parameters_home,
        ops: Vec::new(),
        parameters: Vec::new(),
        collectives: Vec::new(),
        proof: None,
    })
}

fn op_entry(line: &Line<'_>) -> Result<OpEntry, TextError> {
    if line.words.get(2) != Some(&":") {
        return Err(line.error("expected `do OPERATOR : AXIS-USES [recompute]`"));
    }
    let mut axes: Vec<String> = line.words[3..].iter().map(|&word| word.to_owned()).collect();
    let recompute = axes.last().is_some_and(|word| word == "recompute");
    if recompute {
        axes.pop();
    }
    Ok(OpEntry { op: line.name(1, "the operator's name")?, axes, recompute })
}

fn parameter_entry(line: &Line<'_>) -> Result<ParameterEntry, TextError> {
    let cut = |at: usize, what: &str| {
        let word = line.words.get(at).ok_or_else(|| line.error(format!("expected the cut of {what}")))?;
        Ok(if *word == "-" { Vec::new() } else { word.split(',').map(str::to_owned).collect() })
    };
    let mut ends: Vec<&str> = line.words.iter().skip(5).copied().collect();
    let shared = ends.last() == Some(&"shared");
    if shared {
        ends.pop();
    }
    let optimizer_home = match ends[..] {
        [] => StateHome::Device,
        [word, ..] => StateHome::of_word(word).ok_or_else(|| {
            line.error(format!("expected `host`, `nvme`, `shared` or the end, found `{word}`"))
        })?,
    };
    Ok(ParameterEntry {
        tensor: line.name(1, "the parameter's name")?,
        parameter: cut(2, "the parameter")?,
        gradient: cut(3, "the gradient")?,
        optimizer: cut(4, "the optimizer state")?,
        optimizer_home,
        shared,
    })
}

fn collective_entry(line: &Line<'_>) -> Result<CollectiveEntry, TextError> {
    let axes = match line.words.get(4) {
        Some(&"-") => Vec::new(),
        Some(word) => word.split(',').map(str::to_owned).collect(),
        None => return Err(line.error("expected `run CLASS COLLECTIVE ALGORITHM AXES [TENSORS]`")),
    };
    let tensors = 5..line.words.len();
    Ok(CollectiveEntry {
        class: word(line, 1)?,
        collective: word(line, 2)?,
        algorithm: word(line, 3)?,
        axes,
        tensors: tensors.map(|at| line.name(at, "a tensor's name")).collect::<Result<_, _>>()?,
    })
}

/// A word of a closed list, spelt as in the document.
fn word<T: DeserializeOwned>(line: &Line<'_>, at: usize) -> Result<T, TextError> {
    let text = line.words.get(at).copied().unwrap_or_default();
    serde_json::from_value(Value::String(text.into())).map_err(|error| line.error(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::{Algorithm, CollectiveKind, CommunicationClass};
    use crate::plan::samples::{Family, Policy, Sample};

    /// What of a plan its text holds.
    fn bare(plan: Plan) -> Plan {
        Plan {
            predicted: None,
            search: None,
            runners_up: Vec::new(),
            warnings: Vec::new(),
            forms: Vec::new(),
            ..plan
        }
    }

    fn sample(family: Family) -> Plan {
        let mut sample = Sample::new(family, &[(2, Policy::Data), (2, Policy::TensorSequence)]);
        (sample.n_stages, sample.zero, sample.recompute) = (2, 3, |op: &str| op.contains("norm"));
        sample.plan()
    }

    #[test]
    fn plans_survive() {
        for family in [Family::Dense, Family::Experts, Family::Latent] {
            let mut plan = bare(sample(family));
            plan.entries[1].kept_home = Home::Host;
            plan.entries[1].parameters_home = Home::Host;
            plan.entries[1].parameters[0].optimizer_home = StateHome::Host;
            plan.entries[1].parameters[1].optimizer_home = StateHome::Nvme;
            plan.cluster.groups[0].nvme = Some(crate::plan::samples::drives());
            plan.roles = check::open(&plan).unwrap().roles(&plan);
            let text = write_plan(&plan);
            assert_eq!(read_plan(&text).as_ref(), Ok(&plan), "{text}");
            assert_eq!(write_plan(&read_plan(&text).unwrap()), text);
        }
    }

    #[test]
    fn algorithms_survive() {
        let mut plan = bare(sample(Family::Dense));
        let row = |axes: &[&str], tensors: &[&str]| CollectiveEntry {
            class: CommunicationClass::GradientReduce,
            collective: CollectiveKind::AllReduce,
            algorithm: Algorithm::InSwitch,
            axes: axes.iter().map(|&axis| axis.into()).collect(),
            tensors: tensors.iter().map(|&name| name.into()).collect(),
        };
        plan.entries[1].collectives = vec![row(&["x0", "x1"], &[]), row(&["x1"], &["a b", "c"])];
        let text = write_plan(&plan);
        assert!(text.contains("  run gradient-reduce all-reduce in-switch x0,x1\n"), "{text}");
        assert_eq!(read_plan(&text).unwrap().entries, plan.entries, "{text}");
    }

    #[test]
    fn the_text_of_a_plan() {
        insta::assert_snapshot!(write_plan(&sample(Family::Dense)));
    }

    #[test]
    fn errors_name_the_line() {
        let text = write_plan(&sample(Family::Dense));
        let broken = text.replacen(" : ", " ", 1);
        let number = 1 + text.lines().position(|line| line.contains(" : ")).unwrap();
        let error = read_plan(&broken).unwrap_err().to_string();
        assert_eq!(error, format!("line {number}: expected `do OPERATOR : AXIS-USES [recompute]`"));
        assert_eq!(read_plan("").unwrap_err().to_string(), "line 1: expected `plan`, found nothing");
        assert_eq!(read_plan("plan").unwrap_err().to_string(), "line 1: the text has no `model`");
    }
}
