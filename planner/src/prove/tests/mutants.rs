//! False programs: every way to spoil one instruction of a true program, and none is proven.

use std::collections::{BTreeMap, BTreeSet};

use ir::conversion::{Step, StepKind};
use ir::graph::{Layer, Sizes, TensorId};
use ir::lower::{LayerChoice, Recompute, lower, whole_axes};
use ir::mesh::{AxisId, Mesh};
use ir::op::OpKind;
use ir::program::{AxisSet, Home, Instruction, Program, Side, Storage, ValueId};
use ir::sharding::{Placement, Sharding};
use ir::signature::{FactorId, Split, signature};
use ir::strategy::{AxisUse, Strategy, is_legal, placements};

use super::layers;
use crate::prove::{Proof, prove};

/// A layer, its mesh, and a true program for it.
struct Case {
    layer: Layer,
    mesh: Mesh,
    sizes: Sizes,
    program: Program,
}

/// The first axis cuts the batch, and stored parameters; the last cuts heads, experts, the hidden dim of the MLP or
/// the vocabulary, and the sequence elsewhere. Norms and activations are computed again in backward.
fn case(layer: Layer, sizes: &[u64]) -> Case {
    let mesh = Mesh::of_sizes(sizes).unwrap();
    let lengths = layer.sizes(8, 16);
    let (first, last) = (AxisId(0), AxisId(sizes.len() - 1));
    let mut strategies = Vec::new();
    let mut storage = BTreeMap::new();
    for op in &layer.ops {
        let sig = signature(&layer, op);
        let mut strategy = Strategy::SAME;
        let mut assign = |axis: AxisId, names: &[&str]| {
            for name in names {
                let factor = sig.factors.iter().position(|f| f.name == *name && f.split != Split::Whole);
                let Some(factor) = factor else { continue };
                let mut next = strategy;
                next.0[axis.0] = AxisUse::Factor(FactorId(factor as u8));
                if is_legal(&sig, next, &mesh, &lengths) {
                    strategy = next;
                    return;
                }
            }
        };
        assign(last, &["k", "e", "f", "v", "s"]);
        if sizes.len() > 1 {
            assign(first, &["b"]);
        }
        let placed = placements(&sig, strategy);
        for (i, &tensor) in op.operands.iter().enumerate().filter(|(_, t)| layer.is_parameter(**t)) {
            let free = AxisSet(whole_axes(&mesh, placed.operands[i]).0 & AxisSet::of(&[first]).0);
            storage.insert(tensor, Storage::on_device(free, AxisSet::EMPTY, free));
        }
        strategies.push(strategy);
    }
    let again = |name: &str| name.starts_with("norm") || name == "glu" || name.ends_with("rope");
    let recompute =
        layer.ops.iter().map(|op| if again(&op.name) { Recompute::Again } else { Recompute::Keep }).collect();
    let on_stream = |whole: bool| {
        if whole {
            return Sharding::REPLICATED;
        }
        let cut = Sharding::REPLICATED.with(last, Placement::Shard(1));
        if sizes.len() > 1 { cut.with(first, Placement::Shard(0)) } else { cut }
    };
    let (stream, out) = (on_stream(layer.stream_in.is_empty()), on_stream(layer.has_loss()));
    let choice = LayerChoice {
        stream,
        out,
        strategies,
        recompute,
        kept: Home::Device,
        parameters: Home::Device,
        storage,
        shared: BTreeSet::new(),
    };
    let program = lower(&layer, &mesh, &lengths, &choice).unwrap();
    Case { layer, mesh, sizes: lengths, program }
}

fn cases() -> Vec<Case> {
    let layers = [
        layers::dense,
        layers::experts,
        layers::head,
        layers::latent,
        layers::opt,
        layers::joining,
        layers::ahead,
    ];
    layers.iter().flat_map(|layer| [case(layer(), &[2]), case(layer(), &[2, 2])]).collect()
}

#[test]
fn the_programs_that_are_spoilt_are_true() {
    for Case { layer, mesh, sizes, program } in cases() {
        let proof = prove(&layer, &mesh, &sizes, &program);
        assert!(matches!(proof, Proof::Proven { .. }), "{} {:?}: {proof:?}", layer.name, mesh.axes.len());
    }
}

/// A spoilt program and what was done to it.
struct Mutant {
    what: String,
    program: Program,
}

/// Refuses every mutant of a kind on every case. At least `by_rules` must make sense instruction by instruction, so
/// that only their meaning is wrong.
#[track_caller]
fn check_refused(by_rules: usize, mutate: impl Fn(&Case) -> Vec<Mutant>) {
    let mut n_by_rules = 0;
    for case in cases() {
        for Mutant { what, program } in mutate(&case) {
            assert_ne!(program, case.program, "{what} changes nothing");
            match prove(&case.layer, &case.mesh, &case.sizes, &program) {
                Proof::NotProven { reason } => {
                    n_by_rules += usize::from(reason.contains("is not what the layer says"))
                }
                proven @ Proof::Proven { .. } => {
                    panic!("layer {}, {} axes, {what}: {proven:?}", case.layer.name, case.mesh.n_axes())
                }
            }
        }
    }
    assert!(n_by_rules >= by_rules, "only {n_by_rules} were refused for what they mean");
}

impl Case {
    fn mutant(&self, what: impl Into<String>, change: impl FnOnce(&mut Program)) -> Mutant {
        let mut program = self.program.clone();
        change(&mut program);
        Mutant { what: what.into(), program }
    }

    fn name(&self, id: ValueId) -> String {
        let value = self.program.value(id);
        let gradient = if value.side == Side::Gradient { "gradient of " } else { "" };
        format!("{gradient}{}", self.layer.tensors[value.tensor.0].name)
    }

    /// Every list of steps in the program, as a path to it.
    fn step_lists(&self) -> Vec<Path> {
        let p = &self.program;
        let in_code = |code: &[Instruction], section: Section| {
            (0..code.len()).map(|i| Path::Code(section, i)).collect::<Vec<_>>()
        };
        let updates = (0..p.updates.len()).flat_map(|i| [Path::Reduce(i), Path::Gather(i)]);
        in_code(&p.forward, Section::Forward)
            .into_iter()
            .chain(in_code(&p.backward, Section::Backward))
            .chain(updates)
            .filter(|path| !path.steps(p).is_empty())
            .collect()
    }

    /// Every step, replaced in each of the ways that `change` gives.
    fn with_steps(&self, change: impl Fn(&Case, &Step) -> Vec<Vec<Step>>) -> Vec<Mutant> {
        let mut list = Vec::new();
        for path in self.step_lists() {
            for (i, step) in path.steps(&self.program).iter().enumerate() {
                for steps in change(self, step) {
                    let what = format!("{} {i}: {step:?} becomes {steps:?}", path.describe(self));
                    list.push(self.mutant(what, |program| {
                        path.steps_mut(program).splice(i..=i, steps);
                    }));
                }
            }
        }
        list
    }
}

#[derive(Clone, Copy, Debug)]
enum Section {
    Forward,
    Backward,
}

impl Section {
    fn code(self, program: &Program) -> &Vec<Instruction> {
        match self {
            Self::Forward => &program.forward,
            Self::Backward => &program.backward,
        }
    }

    fn code_mut(self, program: &mut Program) -> &mut Vec<Instruction> {
        match self {
            Self::Forward => &mut program.forward,
            Self::Backward => &mut program.backward,
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Path {
    Code(Section, usize),
    Reduce(usize),
    Gather(usize),
}

impl Path {
    fn steps(self, program: &Program) -> &[Step] {
        match self {
            Self::Code(section, i) => steps_of(&section.code(program)[i]),
            Self::Reduce(i) => &program.updates[i].reduce,
            Self::Gather(i) => &program.updates[i].gather,
        }
    }

    fn steps_mut(self, program: &mut Program) -> &mut Vec<Step> {
        match self {
            Self::Reduce(i) => &mut program.updates[i].reduce,
            Self::Gather(i) => &mut program.updates[i].gather,
            Self::Code(section, i) => match &mut section.code_mut(program)[i] {
                Instruction::Convert { steps, .. }
                | Instruction::Parameter { gather: steps, .. }
                | Instruction::Accumulate { reduce: steps, .. } => steps,
                other @ (Instruction::Load { .. }
                | Instruction::Forward { .. }
                | Instruction::Backward { .. }
                | Instruction::Free { .. }) => panic!("{other:?} has no steps"),
            },
        }
    }

    fn describe(self, case: &Case) -> String {
        match self {
            Self::Code(section, i) => format!("{section:?} {:?}", section.code(&case.program)[i]),
            Self::Reduce(_) | Self::Gather(_) => format!("{self:?}"),
        }
    }
}

fn steps_of(instruction: &Instruction) -> &[Step] {
    match instruction {
        Instruction::Convert { steps, .. }
        | Instruction::Parameter { gather: steps, .. }
        | Instruction::Accumulate { reduce: steps, .. } => steps,
        Instruction::Load { .. }
        | Instruction::Forward { .. }
        | Instruction::Backward { .. }
        | Instruction::Free { .. } => &[],
    }
}

fn of_kind(step: &Step, kind: StepKind) -> Vec<Step> {
    vec![Step { kind, ..step.clone() }]
}

#[test]
fn a_step_is_left_out() {
    check_refused(60, |case| case.with_steps(|_, _| vec![vec![]]));
}

#[test]
fn a_step_is_done_twice() {
    check_refused(60, |case| case.with_steps(|_, step| vec![vec![step.clone(), step.clone()]]));
}

#[test]
fn a_step_goes_along_another_axis() {
    check_refused(50, |case| {
        case.with_steps(|case, step| {
            let others = case.mesh.axis_ids().filter(|axis| !step.axes.contains(axis));
            others.map(|axis| vec![Step { axes: vec![axis], ..step.clone() }]).collect()
        })
    });
}

#[test]
fn a_step_goes_along_fewer_axes() {
    check_refused(0, |case| {
        case.with_steps(|_, step| {
            let n = if step.axes.len() > 1 { step.axes.len() } else { 0 };
            (0..n).map(|i| vec![Step { axes: vec![step.axes[i]], ..step.clone() }]).collect()
        })
    });
}

#[test]
fn a_reduction_is_replaced_by_keeping_the_own_term() {
    check_refused(50, |case| {
        case.with_steps(|_, step| match step.kind {
            StepKind::ReduceScatter { dim } => vec![of_kind(step, StepKind::Slice { dim })],
            StepKind::AllReduce => vec![of_kind(step, StepKind::Zero), of_kind(step, StepKind::AllReduceMax)],
            StepKind::AllReduceMax => vec![of_kind(step, StepKind::Zero), of_kind(step, StepKind::AllReduce)],
            StepKind::AllGather { .. }
            | StepKind::AllToAll { .. }
            | StepKind::Slice { .. }
            | StepKind::Zero => vec![],
        })
    });
}

#[test]
fn what_is_whole_is_summed() {
    check_refused(10, |case| {
        case.with_steps(|_, step| match step.kind {
            StepKind::Slice { dim } => vec![of_kind(step, StepKind::ReduceScatter { dim })],
            StepKind::AllGather { .. } => {
                vec![vec![step.clone(), Step { kind: StepKind::AllReduce, ..step.clone() }]]
            }
            StepKind::Zero => vec![of_kind(step, StepKind::AllReduce)],
            StepKind::AllReduce
            | StepKind::AllReduceMax
            | StepKind::ReduceScatter { .. }
            | StepKind::AllToAll { .. } => vec![],
        })
    });
}

#[test]
fn blocks_are_joined_along_another_dim() {
    check_refused(0, |case| {
        case.with_steps(|_, step| match step.kind {
            StepKind::AllGather { dim } => vec![of_kind(step, StepKind::AllGather { dim: dim + 1 })],
            StepKind::ReduceScatter { dim } => vec![of_kind(step, StepKind::ReduceScatter { dim: dim + 1 })],
            StepKind::Slice { dim } => vec![of_kind(step, StepKind::Slice { dim: dim + 1 })],
            StepKind::AllToAll { from, to } => vec![
                of_kind(step, StepKind::AllToAll { from: to, to: from }),
                of_kind(step, StepKind::AllToAll { from, to: to + 1 }),
            ],
            StepKind::AllReduce | StepKind::AllReduceMax | StepKind::Zero => vec![],
        })
    });
}

/// All sections with the position of every instruction in them.
fn places(program: &Program) -> Vec<(Section, usize)> {
    let all = |section: Section| (0..section.code(program).len()).map(move |i| (section, i));
    all(Section::Forward).chain(all(Section::Backward)).collect()
}

#[test]
fn an_instruction_is_forgotten() {
    check_refused(0, |case| {
        let places = places(&case.program).into_iter();
        // Keeping a value too long is a waste, not a mistake.
        let needed = |&(section, i): &(Section, usize)| {
            !matches!(section.code(&case.program)[i], Instruction::Free { .. })
        };
        places
            .filter(needed)
            .map(|(section, i)| {
                let what = format!("{section:?} {i} {:?}", section.code(&case.program)[i]);
                case.mutant(what, |program| drop(section.code_mut(program).remove(i)))
            })
            .collect()
    });
}

#[test]
fn a_value_is_not_saved() {
    check_refused(0, |case| {
        let saved = &case.program.saved;
        let all = (0..saved.len()).map(|i| {
            case.mutant(format!("{} is not saved", case.name(saved[i])), |program| {
                program.saved.remove(i);
            })
        });
        all.collect()
    });
}

#[test]
fn a_value_is_freed_too_early() {
    check_refused(0, |case| {
        let code = &case.program.forward;
        let frees = (1..code.len()).filter(|&i| matches!(code[i], Instruction::Free { .. }));
        let earlier = |i: &usize| !matches!(code[i - 1], Instruction::Free { .. });
        frees
            .filter(earlier)
            .map(|i| case.mutant(format!("{:?}", code[i]), |p| p.forward.swap(i - 1, i)))
            .collect()
    });
}

/// The first values that an instruction could take for this one: same side, same dims, same sharding.
fn look_alikes(case: &Case, id: ValueId) -> Vec<ValueId> {
    let value = case.program.value(id);
    let dims = |tensor: TensorId| &case.layer.tensors[tensor.0].dims;
    let kind = |tensor: TensorId| (case.layer.is_parameter(tensor), case.layer.is_data(tensor));
    // A fork's results are one value under several names, and the names of one value are no mistake.
    let mut root = BTreeMap::new();
    for op in &case.layer.ops {
        if op.kind == OpKind::Fork {
            let from = *root.get(&op.operands[0]).unwrap_or(&op.operands[0]);
            root.extend(op.results.iter().map(|&result| (result, from)));
        }
    }
    let origin = |tensor: TensorId| *root.get(&tensor).unwrap_or(&tensor);
    let same = |&other: &ValueId| {
        let it = case.program.value(other);
        (it.side, it.sharding, kind(it.tensor)) == (value.side, value.sharding, kind(value.tensor))
            && dims(it.tensor) == dims(value.tensor)
            && (value.side == Side::Gradient || origin(it.tensor) != origin(value.tensor))
            && it.tensor != value.tensor
    };
    (0..case.program.values.len()).map(ValueId).filter(same).take(2).collect()
}

fn operands_mut(instruction: &mut Instruction) -> Vec<&mut ValueId> {
    match instruction {
        Instruction::Forward { operands, .. } => operands.iter_mut().collect(),
        Instruction::Backward { operands, gradients, .. } => {
            operands.iter_mut().chain(gradients).filter_map(Option::as_mut).collect()
        }
        Instruction::Convert { input, .. } => vec![input],
        Instruction::Load { .. }
        | Instruction::Parameter { .. }
        | Instruction::Accumulate { .. }
        | Instruction::Free { .. } => vec![],
    }
}

#[test]
fn an_instruction_reads_another_value_of_the_same_form() {
    check_refused(100, |case| {
        let mut list = Vec::new();
        for (section, i) in places(&case.program) {
            let mut instruction = section.code(&case.program)[i].clone();
            let read: Vec<ValueId> = operands_mut(&mut instruction).into_iter().map(|id| *id).collect();
            for (k, &id) in read.iter().enumerate() {
                for other in look_alikes(case, id) {
                    let what = format!("{section:?} {i} reads {} for {}", case.name(other), case.name(id));
                    list.push(case.mutant(what, |program| {
                        // Nothing is freed, so that only the wrong value is to blame.
                        let code = section.code_mut(program);
                        *operands_mut(&mut code[i])[k] = other;
                        code.retain(|one| !matches!(one, Instruction::Free { .. }));
                    }));
                }
            }
        }
        list
    });
}

/// Whether an instruction adds its operands, in whatever order.
fn is_sum(case: &Case, instruction: &Instruction) -> bool {
    match instruction {
        Instruction::Forward { op, .. } => case.layer.ops[op.0].kind == OpKind::Add,
        Instruction::Backward { op, .. } => case.layer.ops[op.0].kind == OpKind::Fork,
        Instruction::Load { .. }
        | Instruction::Parameter { .. }
        | Instruction::Convert { .. }
        | Instruction::Accumulate { .. }
        | Instruction::Free { .. } => false,
    }
}

#[test]
fn two_operands_change_places() {
    check_refused(20, |case| {
        let mut list = Vec::new();
        for (section, i) in places(&case.program) {
            let mut instruction = section.code(&case.program)[i].clone();
            if is_sum(case, &instruction) {
                continue;
            }
            let n = operands_mut(&mut instruction).len();
            let ids: Vec<ValueId> = operands_mut(&mut instruction).into_iter().map(|id| *id).collect();
            for k in (1..n).filter(|&k| ids[k] != ids[k - 1]) {
                list.push(case.mutant(format!("{section:?} {i} operands {} and {k}", k - 1), |program| {
                    let mut ids = operands_mut(&mut section.code_mut(program)[i]);
                    let (before, after) = (*ids[k - 1], *ids[k]);
                    *ids[k - 1] = after;
                    *ids[k] = before;
                }));
            }
        }
        list
    });
}

#[test]
fn a_gradient_is_accumulated_twice() {
    check_refused(0, |case| {
        let code = &case.program.backward;
        let all = (0..code.len()).filter(|&i| matches!(code[i], Instruction::Accumulate { .. }));
        all.map(|i| case.mutant(format!("{:?}", code[i]), |p| p.backward.insert(i, code[i].clone())))
            .collect()
    });
}

#[test]
fn a_parameter_is_stored_as_if_cut_otherwise() {
    check_refused(0, |case| {
        let all = (0..case.program.updates.len()).flat_map(|i| {
            let bits = (0..1 << case.mesh.n_axes()).map(AxisSet);
            let change = move |which: usize| {
                bits.clone().map(move |set| (set, which)).map(move |(set, which)| {
                    case.mutant(format!("update {i} stores {which} in {set:?}"), |program| {
                        let storage = &mut program.updates[i].storage;
                        if which == 0 { storage.parameter = set } else { storage.optimizer = set }
                    })
                })
            };
            change(0).chain(change(1)).collect::<Vec<_>>()
        });
        all.filter(|mutant| mutant.program != case.program).collect()
    });
}

#[test]
fn the_layer_ends_with_another_value() {
    check_refused(0, |case| {
        let others = look_alikes(case, case.program.out[0]).into_iter();
        others
            .map(|other| case.mutant(format!("{} comes out", case.name(other)), |p| p.out = vec![other]))
            .collect()
    });
}

#[test]
fn a_forgotten_update_is_noticed() {
    check_refused(0, |case| {
        let n = case.program.updates.len();
        (0..n).map(|i| case.mutant(format!("update {i}"), |p| drop(p.updates.remove(i)))).collect()
    });
}
