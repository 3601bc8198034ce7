//! A program as text: its values, then a line per instruction.
//!
//! ```text
//! program
//! value %0 primal x b@x0
//! value %1 primal x replicated
//! forward
//!   convert %0 -> %1 [all-gather(0) x0 0@x0 -> replicated]
//! ```
//!
//! Values stand by number, tensors, operators and axes by name. The dims of a sharding stand by name where they belong
//! to a value, by number inside a step, which may work on a flattened block.

use std::collections::BTreeSet;

use super::TextError;
use super::words::{Line, home_text, lines, write_name};
use crate::collective::Algorithm;
use crate::conversion::{Step, StepKind};
use crate::graph::{Layer, OpId, TensorId};
use crate::mesh::{AxisId, Mesh};
use crate::plan::entry::{read_sharding, write_sharding};
use crate::program::{
    AxisSet, Frozen, Home, Instruction, Program, Side, StateHome, Storage, Update, Value, ValueId,
};
use crate::sharding::Sharding;

/// In place of a value that is not there.
const NONE: &str = "_";

/// Names of the dims of a flattened or unknown tensor, for shardings inside steps.
const NUMBERS: [&str; 16] =
    ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15"];

/// Writes a program of a layer on a mesh.
pub fn write_program(layer: &Layer, mesh: &Mesh, program: &Program) -> String {
    let writer = Writer { layer, mesh };
    let mut text = String::from("program\n");
    for (i, value) in program.values.iter().enumerate() {
        let tensor = &layer.tensors[value.tensor.0];
        let side = match value.side {
            Side::Primal => "primal",
            Side::Gradient => "gradient",
        };
        let sharding = write_sharding(value.sharding, mesh, &dims(layer, value.tensor));
        text.push_str(&format!("value %{i} {side} {} {sharding}\n", write_name(&tensor.name)));
    }
    let ends = [
        ("stream", &program.stream),
        ("out", &program.out),
        ("out-gradient", &program.out_gradient),
        ("stream-gradient", &program.stream_gradient),
    ];
    for (name, list) in ends {
        let list = if list.is_empty() { format!(" {NONE}") } else { values(list) };
        text.push_str(&format!("{name}{list}\n"));
    }
    text.push_str(&format!("saved{}\n", values(&program.saved)));
    if program.kept == Home::Host {
        text.push_str("kept host\n");
    }
    if program.parameters == Home::Host {
        text.push_str("parameters host\n");
    }
    for (name, section) in sections(program) {
        text.push_str(&format!("{name}\n"));
        section.iter().for_each(|one| text.push_str(&format!("  {}\n", writer.instruction(one))));
    }
    text.push_str("updates\n");
    program.updates.iter().for_each(|one| text.push_str(&format!("  {}\n", writer.update(one))));
    program.frozen.iter().for_each(|one| text.push_str(&format!("  {}\n", writer.frozen(one))));
    for tensor in &program.shared {
        text.push_str(&format!("  shared {}\n", write_name(&layer.tensors[tensor.0].name)));
    }
    text
}

fn sections(program: &Program) -> [(&'static str, &Vec<Instruction>); 2] {
    [("forward", &program.forward), ("backward", &program.backward)]
}

fn dims(layer: &Layer, tensor: TensorId) -> Vec<&str> {
    layer.tensors[tensor.0].dims.iter().map(|dim| layer.dims[dim.0].name.as_str()).collect()
}

fn values(list: &[ValueId]) -> String {
    list.iter().map(|value| format!(" %{}", value.0)).collect()
}

fn maybe(value: Option<ValueId>) -> String {
    value.map_or(NONE.into(), |value| format!("%{}", value.0))
}

fn maybes(list: &[Option<ValueId>]) -> String {
    list.iter().map(|&value| format!(" {}", maybe(value))).collect()
}

struct Writer<'a> {
    layer: &'a Layer,
    mesh: &'a Mesh,
}

impl Writer<'_> {
    fn op(&self, op: OpId) -> String {
        write_name(&self.layer.ops[op.0].name)
    }

    fn instruction(&self, one: &Instruction) -> String {
        match one {
            Instruction::Load { output } => format!("load -> %{}", output.0),
            Instruction::Parameter { output, gather } => {
                format!("parameter -> %{}{}", output.0, self.steps(gather))
            }
            Instruction::Forward { op, operands, results } => {
                format!("run {}{} ->{}", self.op(*op), values(operands), values(results))
            }
            Instruction::Backward { op, operands, gradients, results } => {
                let given = format!("{} |{}", maybes(operands), maybes(gradients));
                format!("differentiate {}{given} ->{}", self.op(*op), maybes(results))
            }
            Instruction::Convert { input, output, steps } => {
                format!("convert %{} -> %{}{}", input.0, output.0, self.steps(steps))
            }
            Instruction::Accumulate { gradient, reduce } => {
                format!("accumulate %{}{}", gradient.0, self.steps(reduce))
            }
            Instruction::Free { value } => format!("free %{}", value.0),
        }
    }

    fn update(&self, update: &Update) -> String {
        let tensor = &self.layer.tensors[update.tensor.0];
        let used = write_sharding(update.used, self.mesh, &dims(self.layer, update.tensor));
        let Storage { parameter, gradient, optimizer, home } = update.storage;
        let home = home_text(home);
        let cuts: String = [parameter, gradient, optimizer].map(|cut| format!(" {}", self.cut(cut))).concat();
        let (reduce, gather) = (self.steps(&update.reduce), self.steps(&update.gather));
        format!("update {}{cuts}{home} {used} :{reduce} :{gather}", write_name(&tensor.name))
    }

    fn frozen(&self, frozen: &Frozen) -> String {
        let tensor = &self.layer.tensors[frozen.tensor.0];
        let used = write_sharding(frozen.used, self.mesh, &dims(self.layer, frozen.tensor));
        format!("frozen {} {} {used}", write_name(&tensor.name), self.cut(frozen.cut))
    }

    fn cut(&self, cut: AxisSet) -> String {
        if cut.is_empty() { "-".into() } else { self.axes(&cut.axes()) }
    }

    fn axes(&self, axes: &[AxisId]) -> String {
        axes.iter().map(|axis| self.mesh.axes[axis.0].name.as_str()).collect::<Vec<_>>().join(",")
    }

    fn steps(&self, steps: &[Step]) -> String {
        steps.iter().map(|step| format!(" {}", self.step(step))).collect()
    }

    fn step(&self, step: &Step) -> String {
        let sharding = |sharding| write_sharding(sharding, self.mesh, &NUMBERS);
        let (before, after) = (sharding(step.before), sharding(step.after));
        let by = if step.algorithm == step.kind.plainest() {
            String::new()
        } else {
            format!(" by {}", step.algorithm.name())
        };
        format!("[{} {} {before} -> {after}{by}]", kind(step.kind), self.axes(&step.axes))
    }
}

fn kind(kind: StepKind) -> String {
    match kind {
        StepKind::AllReduce => "all-reduce".into(),
        StepKind::AllReduceMax => "all-reduce-max".into(),
        StepKind::ReduceScatter { dim } => format!("reduce-scatter({dim})"),
        StepKind::AllGather { dim } => format!("all-gather({dim})"),
        StepKind::AllToAll { from, to } => format!("all-to-all({from},{to})"),
        StepKind::Slice { dim } => format!("slice({dim})"),
        StepKind::Zero => "zero".into(),
    }
}

/// Reads a program of a layer on a mesh.
///
/// # Errors
/// The first line that does not fit, or names what the layer and the mesh lack.
pub fn read_program(layer: &Layer, mesh: &Mesh, text: &str) -> Result<Program, TextError> {
    let mut reader = Reader::new(layer, mesh);
    let all = lines(text)?;
    for line in &all {
        reader.line(line)?;
    }
    reader.finish()
}

/// Where instructions go.
#[derive(Clone, Copy)]
enum Part {
    Forward,
    Backward,
}

struct Reader<'a> {
    layer: &'a Layer,
    mesh: &'a Mesh,
    program: Program,
    part: Option<Part>,
    /// Of the lines that stand once, those that were read.
    read: BTreeSet<&'static str>,
    last: usize,
}

/// What lines begin with that stand in a program no more than once.
const ONCE: [&str; 11] = [
    "program",
    "updates",
    "forward",
    "backward",
    "stream",
    "out",
    "out-gradient",
    "stream-gradient",
    "saved",
    "kept",
    "parameters",
];

impl<'a> Reader<'a> {
    fn new(layer: &'a Layer, mesh: &'a Mesh) -> Self {
        let program = Program {
            values: Vec::new(),
            forward: Vec::new(),
            backward: Vec::new(),
            updates: Vec::new(),
            frozen: Vec::new(),
            shared: BTreeSet::new(),
            saved: Vec::new(),
            kept: Home::Device,
            parameters: Home::Device,
            stream: Vec::new(),
            out: Vec::new(),
            out_gradient: Vec::new(),
            stream_gradient: Vec::new(),
        };
        Self { layer, mesh, program, part: None, read: BTreeSet::new(), last: 1 }
    }

    fn finish(self) -> Result<Program, TextError> {
        let program = self.program;
        if !program.out.is_empty() && program.out_gradient.len() == program.out.len() {
            return Ok(program);
        }
        Err(TextError { line: self.last, what: "the program has no `out` or no `out-gradient`".into() })
    }

    fn line(&mut self, line: &Line<'_>) -> Result<(), TextError> {
        self.last = line.number;
        if let Some(word) = ONCE.into_iter().find(|word| *word == line.words[0])
            && !self.read.insert(word)
        {
            return Err(line.error(format!("`{word}` stands here a second time")));
        }
        match line.words[0] {
            "program" => {}
            "updates" => self.part = None,
            "forward" => self.part = Some(Part::Forward),
            "backward" => self.part = Some(Part::Backward),
            "value" => {
                let value = self.read_value(line)?;
                self.program.values.push(value);
            }
            "stream" => self.program.stream = self.values(line)?,
            "out" => self.program.out = self.values(line)?,
            "out-gradient" => self.program.out_gradient = self.values(line)?,
            "stream-gradient" => self.program.stream_gradient = self.values(line)?,
            "saved" => self.program.saved = self.values(line)?,
            "kept" => match line.words.get(1) {
                Some(&"host") => self.program.kept = Home::Host,
                _ => return Err(line.error("expected `kept host`")),
            },
            "parameters" => match line.words.get(1) {
                Some(&"host") => self.program.parameters = Home::Host,
                _ => return Err(line.error("expected `parameters host`")),
            },
            "update" => {
                let update = self.update(line)?;
                self.program.updates.push(update);
            }
            "frozen" => {
                let tensor = self.tensor(line, 1)?;
                let cut = self.cut(line, 2)?;
                let used = self.sharding(line, 3..line.words.len(), tensor)?;
                self.program.frozen.push(Frozen { tensor, used, cut });
            }
            "shared" => {
                let tensor = self.tensor(line, 1)?;
                self.program.shared.insert(tensor);
            }
            _ => {
                let instruction = self.instruction(line)?;
                match self.part {
                    Some(Part::Forward) => self.program.forward.push(instruction),
                    Some(Part::Backward) => self.program.backward.push(instruction),
                    None => return Err(line.error("expected `forward` or `backward` before it")),
                }
            }
        }
        Ok(())
    }

    fn read_value(&self, line: &Line<'_>) -> Result<Value, TextError> {
        if line.words.get(1) != Some(&format!("%{}", self.program.values.len()).as_str()) {
            return Err(line.error(format!("expected `value %{}`", self.program.values.len())));
        }
        let side = match line.words.get(2) {
            Some(&"primal") => Side::Primal,
            Some(&"gradient") => Side::Gradient,
            _ => return Err(line.error("expected `primal` or `gradient`")),
        };
        let tensor = self.tensor(line, 3)?;
        Ok(Value { tensor, side, sharding: self.sharding(line, 4..line.words.len(), tensor)? })
    }

    fn tensor(&self, line: &Line<'_>, at: usize) -> Result<TensorId, TextError> {
        let name = line.name(at, "a tensor")?;
        let found = self.layer.tensors.iter().position(|tensor| tensor.name == name).map(TensorId);
        found.ok_or_else(|| line.error(format!("the layer has no tensor `{name}`")))
    }

    fn sharding(
        &self,
        line: &Line<'_>,
        words: std::ops::Range<usize>,
        tensor: TensorId,
    ) -> Result<Sharding, TextError> {
        let text = line.words.get(words).unwrap_or_default().join(" ");
        read_sharding(&text, self.mesh, &dims(self.layer, tensor)).map_err(|what| line.error(what))
    }

    fn maybe(&self, line: &Line<'_>, at: usize) -> Result<Option<ValueId>, TextError> {
        if line.words.get(at) == Some(&NONE) { Ok(None) } else { self.value(line, at).map(Some) }
    }

    /// All values of a line; none where it says so, or says nothing.
    fn values(&self, line: &Line<'_>) -> Result<Vec<ValueId>, TextError> {
        let none = line.words[1..] == [NONE];
        let n = if none { 1 } else { line.words.len() };
        (1..n).map(|at| self.value(line, at)).collect()
    }

    fn value(&self, line: &Line<'_>, at: usize) -> Result<ValueId, TextError> {
        let word = line.words.get(at).copied().unwrap_or("the end");
        let number = word.strip_prefix('%').and_then(|number| number.parse().ok());
        let id: usize = number.ok_or_else(|| line.error(format!("expected a value, found `{word}`")))?;
        if id >= self.program.values.len() {
            return Err(line.error(format!("there is no value `{word}`")));
        }
        Ok(ValueId(id))
    }

    /// Positions of the words after `from` up to a mark, or to the first step.
    fn until(line: &Line<'_>, from: usize, mark: &str) -> std::ops::Range<usize> {
        let ends = |word: &&str| **word == *mark || word.starts_with('[');
        let n = line.words.iter().skip(from).position(ends);
        from..n.map_or(line.words.len(), |n| from + n)
    }

    /// Between what an instruction takes and what it gives.
    fn arrow(line: &Line<'_>, at: usize) -> Result<(), TextError> {
        match line.words.get(at) {
            Some(&"->") => Ok(()),
            found => {
                Err(line.error(format!("expected `->`, found `{}`", found.copied().unwrap_or("the end"))))
            }
        }
    }

    fn instruction(&self, line: &Line<'_>) -> Result<Instruction, TextError> {
        let list = |range: std::ops::Range<usize>| range.map(|at| self.value(line, at)).collect();
        let maybes = |range: std::ops::Range<usize>| range.map(|at| self.maybe(line, at)).collect();
        match line.words[0] {
            "load" => {
                Self::arrow(line, 1)?;
                Ok(Instruction::Load { output: self.value(line, 2)? })
            }
            "parameter" => {
                Self::arrow(line, 1)?;
                Ok(Instruction::Parameter { output: self.value(line, 2)?, gather: self.steps(line, 3)? })
            }
            "run" => {
                let operands = Self::until(line, 2, "->");
                let results: Result<Vec<ValueId>, TextError> = list(operands.end + 1..line.words.len());
                let operands: Result<Vec<ValueId>, TextError> = list(operands);
                Ok(Instruction::Forward { op: self.op(line)?, operands: operands?, results: results? })
            }
            "differentiate" => {
                let operands = Self::until(line, 2, "|");
                let gradients = Self::until(line, operands.end + 1, "->");
                let results: Result<Vec<_>, TextError> = maybes(gradients.end + 1..line.words.len());
                let (operands, gradients): (Result<Vec<_>, TextError>, Result<Vec<_>, TextError>) =
                    (maybes(operands), maybes(gradients));
                let (operands, gradients, results) = (operands?, gradients?, results?);
                Ok(Instruction::Backward { op: self.op(line)?, operands, gradients, results })
            }
            "convert" => {
                Self::arrow(line, 2)?;
                let (input, output) = (self.value(line, 1)?, self.value(line, 3)?);
                Ok(Instruction::Convert { input, output, steps: self.steps(line, 4)? })
            }
            "accumulate" => {
                Ok(Instruction::Accumulate { gradient: self.value(line, 1)?, reduce: self.steps(line, 2)? })
            }
            "free" => Ok(Instruction::Free { value: self.value(line, 1)? }),
            word => Err(line.error(format!("a program has no `{word}`"))),
        }
    }

    fn op(&self, line: &Line<'_>) -> Result<OpId, TextError> {
        let name = line.name(1, "an operator")?;
        let found = self.layer.ops.iter().position(|op| op.name == name).map(OpId);
        found.ok_or_else(|| line.error(format!("the layer has no operator `{name}`")))
    }

    fn update(&self, line: &Line<'_>) -> Result<Update, TextError> {
        let tensor = self.tensor(line, 1)?;
        let cut = |at: usize| self.cut(line, at);
        let home = line.words.get(5).and_then(|word| StateHome::of_word(word));
        let cuts = Storage::on_device(cut(2)?, cut(3)?, cut(4)?);
        let storage = Storage { home: home.unwrap_or_default(), ..cuts };
        let used = Self::until(line, if home.is_some() { 6 } else { 5 }, ":");
        let second =
            used.end + 1 + line.words.iter().skip(used.end + 1).take_while(|word| **word != ":").count();
        let reduce: Result<Vec<Step>, TextError> = line
            .words
            .get(used.end + 1..second)
            .unwrap_or_default()
            .iter()
            .map(|w| self.step(line, w))
            .collect();
        let gather = self.steps(line, second + 1)?;
        Ok(Update { tensor, used: self.sharding(line, used, tensor)?, storage, reduce: reduce?, gather })
    }

    /// Axes that cut a state, or `-`.
    fn cut(&self, line: &Line<'_>, at: usize) -> Result<AxisSet, TextError> {
        match line.words.get(at) {
            Some(&"-") => Ok(AxisSet::EMPTY),
            Some(word) => self.axes(line, word).map(|axes| AxisSet::of(&axes)),
            None => Err(line.error("expected the axes that cut each state, or `-`")),
        }
    }

    fn axes(&self, line: &Line<'_>, word: &str) -> Result<Vec<AxisId>, TextError> {
        let find = |name: &str| {
            let at = self.mesh.axes.iter().position(|axis| axis.name == name).map(AxisId);
            at.ok_or_else(|| line.error(format!("the mesh has no axis `{name}`")))
        };
        word.split(',').map(find).collect()
    }

    fn steps(&self, line: &Line<'_>, from: usize) -> Result<Vec<Step>, TextError> {
        line.words.iter().skip(from).map(|word| self.step(line, word)).collect()
    }

    fn step(&self, line: &Line<'_>, word: &str) -> Result<Step, TextError> {
        let wrong = || line.error(format!("expected `[collective axes before -> after]`, found `{word}`"));
        let inner = word.strip_prefix('[').and_then(|w| w.strip_suffix(']')).ok_or_else(wrong)?;
        let mut parts = inner.splitn(3, ' ');
        let (Some(name), Some(axes), Some(rest)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(wrong());
        };
        let (before, after) = rest.split_once(" -> ").ok_or_else(wrong)?;
        let sharding = |text| read_sharding(text, self.mesh, &NUMBERS).map_err(|what| line.error(what));
        let kind = read_kind(name).ok_or_else(wrong)?;
        let (after, algorithm) = match after.split_once(" by ") {
            Some((after, name)) => (after, read_algorithm(kind, name).ok_or_else(wrong)?),
            None => (after, kind.plainest()),
        };
        Ok(Step {
            kind,
            algorithm,
            axes: self.axes(line, axes)?,
            before: sharding(before)?,
            after: sharding(after)?,
        })
    }
}

fn read_algorithm(kind: StepKind, name: &str) -> Option<Algorithm> {
    kind.collective()?.algorithms().iter().copied().find(|algorithm| algorithm.name() == name)
}

fn read_kind(word: &str) -> Option<StepKind> {
    let (name, dims) = match word.strip_suffix(')').and_then(|word| word.split_once('(')) {
        Some((name, dims)) => {
            (name, dims.split(',').map(|dim| dim.parse().ok()).collect::<Option<Vec<u8>>>()?)
        }
        None => (word, Vec::new()),
    };
    match (name, dims.as_slice()) {
        ("all-reduce", []) => Some(StepKind::AllReduce),
        ("all-reduce-max", []) => Some(StepKind::AllReduceMax),
        ("reduce-scatter", &[dim]) => Some(StepKind::ReduceScatter { dim }),
        ("all-gather", &[dim]) => Some(StepKind::AllGather { dim }),
        ("all-to-all", &[from, to]) => Some(StepKind::AllToAll { from, to }),
        ("slice", &[dim]) => Some(StepKind::Slice { dim }),
        ("zero", []) => Some(StepKind::Zero),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lower::lower;
    use crate::plan::samples::{Family, Policy, Sample};

    #[test]
    fn programs_survive() {
        for family in [Family::Dense, Family::Experts, Family::Latent] {
            for policy in [Policy::TensorSequence, Policy::Gather, Policy::Ulysses, Policy::Expert] {
                let mut sample = Sample::new(family, &[(2, Policy::Data), (2, policy)]);
                (sample.zero, sample.recompute) = (3, |op: &str| op.contains("norm"));
                let (model, mesh) = (sample.model(), sample.mesh());
                for layer in &model.layers {
                    let program =
                        lower(layer, &mesh, &layer.sizes(4, 64), &sample.choice(layer, &mesh)).unwrap();
                    let text = write_program(layer, &mesh, &program);
                    assert_eq!(read_program(layer, &mesh, &text).as_ref(), Ok(&program), "{text}");
                }
            }
        }
    }

    #[test]
    fn what_stands_twice_or_points_nowhere_is_refused() {
        let sample = Sample::new(Family::Dense, &[(2, Policy::Data), (2, Policy::TensorSequence)]);
        let (model, mesh) = (sample.model(), sample.mesh());
        let layer = &model.layers[1];
        let program = lower(layer, &mesh, &layer.sizes(4, 64), &sample.choice(layer, &mesh)).unwrap();
        let text = write_program(layer, &mesh, &program);
        let said = |text: &str| read_program(layer, &mesh, text).unwrap_err().what;
        let line = |word: &str| text.lines().find(|line| line.trim_start().starts_with(word)).unwrap();
        let out = line("out ");
        assert_eq!(said(&text.replace(out, &format!("{out}\n{out}"))), "`out` stands here a second time");
        let load = line("load ");
        assert_eq!(said(&text.replace(load, &load.replace("->", "-0"))), "expected `->`, found `-0`");
    }

    #[test]
    fn frozen_parameters_survive() {
        let mut sample = Sample::new(Family::Dense, &[(2, Policy::Data)]);
        sample.zero = 3;
        let (mut model, mesh) = (sample.model(), sample.mesh());
        let layer = &mut model.layers[1];
        let mut choice = sample.choice(layer, &mesh);
        let first = layer.parameters().next().unwrap();
        layer.tensors[first.0].role = crate::graph::Role::Frozen(crate::graph::Init::Normal);
        choice.storage.insert(first, Storage::frozen(AxisSet::of(&[AxisId(0)])));
        let program = lower(layer, &mesh, &layer.sizes(4, 64), &choice).unwrap();
        assert_eq!((program.frozen.len(), program.held().count()), (1, layer.parameters().count()));
        let text = write_program(layer, &mesh, &program);
        assert_eq!(read_program(layer, &mesh, &text).as_ref(), Ok(&program), "{text}");
    }

    #[test]
    fn states_on_the_host_and_its_drives_survive() {
        let mut sample = Sample::new(Family::Dense, &[(2, Policy::Data)]);
        sample.zero = 2;
        let (model, mesh) = (sample.model(), sample.mesh());
        let layer = &model.layers[1];
        let mut choice = sample.choice(layer, &mesh);
        let first = layer.parameters().next().unwrap();
        for home in [StateHome::Host, StateHome::Nvme] {
            choice.storage.entry(first).and_modify(|storage| storage.home = home);
            let program = lower(layer, &mesh, &layer.sizes(4, 64), &choice).unwrap();
            let text = write_program(layer, &mesh, &program);
            assert_eq!(text.matches(&format!(" {} ", home.word())).count(), 1, "{text}");
            assert_eq!(read_program(layer, &mesh, &text).as_ref(), Ok(&program), "{text}");
        }
    }

    #[test]
    fn algorithms_survive() {
        let sample = Sample::new(Family::Dense, &[(2, Policy::TensorSequence)]);
        let (model, mesh) = (sample.model(), sample.mesh());
        let layer = &model.layers[1];
        let mut program = lower(layer, &mesh, &layer.sizes(4, 64), &sample.choice(layer, &mesh)).unwrap();
        for one in &mut program.forward {
            if let Instruction::Convert { steps, .. } = one {
                steps[0].algorithm = Algorithm::TwoLevel;
            }
        }
        let text = write_program(layer, &mesh, &program);
        assert!(text.contains(" by two-level]"), "{text}");
        assert_eq!(read_program(layer, &mesh, &text).as_ref(), Ok(&program), "{text}");
    }

    #[test]
    fn the_text_of_a_program() {
        let sample = Sample::new(Family::Dense, &[(2, Policy::Data), (2, Policy::TensorSequence)]);
        let (model, mesh) = (sample.model(), sample.mesh());
        let layer = &model.layers[1];
        let program = lower(layer, &mesh, &layer.sizes(4, 64), &sample.choice(layer, &mesh)).unwrap();
        insta::assert_snapshot!(write_program(layer, &mesh, &program));
    }

    #[test]
    fn errors_name_the_line() {
        let sample = Sample::new(Family::Dense, &[(2, Policy::Data)]);
        let (model, mesh) = (sample.model(), sample.mesh());
        let error = |text: &str| read_program(&model.layers[1], &mesh, text).unwrap_err().to_string();
        assert_eq!(error("program\nload -> %0"), "line 2: there is no value `%0`");
        assert_eq!(error("value %0 primal nothing b@x0"), "line 1: the layer has no tensor `nothing`");
        assert_eq!(error("program"), "line 1: the program has no `out` or no `out-gradient`");
    }
}
