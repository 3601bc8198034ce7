//! Backward in two parts: what the chunk before waits for, and the rest.
//!
//! The split is read off the program that runs backward whole, so both compute the same by construction:
//! - backward of a product falls into its two products, since the gradient of either operand needs only the other;
//! - the first part is everything that the streams' gradients need; the rest, products that give parameters' gradients
//!   and what only they read, is the second (Qi et al. 2024, arXiv 2401.10241 section 2);
//! - a parameter's gradient is accumulated, and reduced, where it is made;
//! - what the second part reads and the first has, saved or made there, is carried from one to the other; data and
//!   parameters are taken anew.

use std::collections::BTreeSet;

use crate::graph::{Layer, OpId};
use crate::lower::{free_unread, insert_frees};
use crate::program::{Instruction, Program, ValueId};

/// The two parts of a program's backward.
#[derive(Clone, Debug, PartialEq)]
pub struct SplitBackward {
    /// Begins with the gradients of `out`, ends with those of the streams.
    pub input: Vec<Instruction>,
    /// The rest, any time later.
    pub weight: Vec<Instruction>,
    /// Values kept from the first part to the second.
    pub carried: Vec<ValueId>,
}

/// Which part of backward an instruction belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Input,
    Weight,
}

/// Splits the backward of a layer's program.
pub fn split_backward(layer: &Layer, program: &Program) -> SplitBackward {
    let code: Vec<Instruction> =
        program.backward.iter().flat_map(|one| in_products(layer, program, one)).collect();
    let parts = parts(layer, &code, program);
    let made: BTreeSet<ValueId> = pick(&code, &parts, Part::Input).flat_map(Instruction::written).collect();
    let mut input: Vec<Instruction> = pick(&code, &parts, Part::Input).cloned().collect();
    let mut weight: Vec<Instruction> = Vec::new();
    let mut present: BTreeSet<ValueId> = BTreeSet::new();
    let mut carried: BTreeSet<ValueId> = BTreeSet::new();
    for instruction in pick(&code, &parts, Part::Weight) {
        for value in instruction.read() {
            if !present.insert(value) {
                continue;
            }
            match made.contains(&value).then(|| source(&code, value)).flatten() {
                Some(anew) => weight.push(anew.clone()),
                None => {
                    carried.insert(value);
                }
            }
        }
        present.extend(instruction.written());
        weight.push(instruction.clone());
    }
    let kept = carried.iter().chain(&program.stream_gradient).copied().collect();
    insert_frees(&mut input, &kept);
    program.out_gradient.iter().for_each(|&value| free_unread(&mut input, value, &kept));
    insert_frees(&mut weight, &BTreeSet::new());
    SplitBackward { input, weight, carried: carried.into_iter().collect() }
}

fn pick<'a>(code: &'a [Instruction], parts: &'a [Part], part: Part) -> impl Iterator<Item = &'a Instruction> {
    code.iter().zip(parts).filter(move |(_, own)| **own == part).map(|(one, _)| one)
}

/// An instruction without its frees; of a product, one for every operand that gets a gradient.
fn in_products(layer: &Layer, program: &Program, instruction: &Instruction) -> Vec<Instruction> {
    let Instruction::Backward { op, operands, gradients, results } = instruction else {
        let is_free = matches!(instruction, Instruction::Free { .. });
        return if is_free { Vec::new() } else { vec![instruction.clone()] };
    };
    let kind = &layer.ops[op.0].kind;
    if !kind.is_product() {
        return vec![instruction.clone()];
    }
    // The stream's side first: its gradient is waited for.
    let is_parameter = |i: &usize| results[*i].is_some_and(|id| layer.is_parameter(program.value(id).tensor));
    let mut wanted: Vec<usize> = (0..results.len()).filter(|&i| results[i].is_some()).collect();
    wanted.sort_by_key(is_parameter);
    let of_one = |i: usize| {
        let needs = kind.gradient_needs(i);
        let operands = operands.iter().enumerate().map(|(k, id)| id.filter(|_| needs.contains(&k))).collect();
        let results = results.iter().enumerate().map(|(k, id)| id.filter(|_| k == i)).collect();
        Instruction::Backward { op: *op, operands, gradients: gradients.clone(), results }
    };
    wanted.into_iter().map(of_one).collect()
}

/// To the first part belongs what the stream's gradient needs, and the accumulation of what comes along with that.
/// Where an operator that keeps statistics beside its results is computed again, its backward needs that too.
fn parts(layer: &Layer, code: &[Instruction], program: &Program) -> Vec<Part> {
    let mut needed: BTreeSet<ValueId> = program.stream_gradient.iter().copied().collect();
    let mut made: BTreeSet<ValueId> = BTreeSet::new();
    let mut parts = vec![Part::Weight; code.len()];
    let mut statistics: BTreeSet<OpId> = BTreeSet::new();
    for (part, instruction) in parts.iter_mut().zip(code).rev() {
        let kept = matches!(instruction, Instruction::Forward { op, .. } if statistics.contains(op));
        if kept || instruction.written().iter().any(|value| needed.contains(value)) {
            *part = Part::Input;
            if let Instruction::Backward { op, .. } = instruction
                && layer.ops[op.0].kind.keeps_statistics()
            {
                statistics.insert(*op);
            }
            needed.extend(instruction.read());
            made.extend(instruction.written());
        }
    }
    for (part, instruction) in parts.iter_mut().zip(code) {
        if let Instruction::Accumulate { gradient, .. } = instruction
            && made.contains(gradient)
        {
            *part = Part::Input;
        }
    }
    parts
}

/// The instruction that takes a value from data or parameters, if it is one of those.
fn source(code: &[Instruction], value: ValueId) -> Option<&Instruction> {
    code.iter().find(|one| match one {
        Instruction::Load { output } | Instruction::Parameter { output, .. } => *output == value,
        Instruction::Forward { .. }
        | Instruction::Backward { .. }
        | Instruction::Convert { .. }
        | Instruction::Accumulate { .. }
        | Instruction::Free { .. } => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::check::open;
    use crate::plan::samples::{Family, Policy, Sample};

    fn of(family: Family, recompute: fn(&str) -> bool) -> Vec<(Layer, Program, SplitBackward)> {
        let axes = [(2, Policy::Data), (2, Policy::TensorSequence)];
        let plan = Sample { zero: 3, recompute, ..Sample::new(family, &axes) }.plan();
        let opened = open(&plan).unwrap();
        let entries = opened.entries.into_iter();
        let split = |entry: crate::plan::check::OpenEntry| {
            let layer = opened.model.layers[entry.layer].clone();
            let split = split_backward(&layer, &entry.program);
            (layer, entry.program, split)
        };
        entries.map(split).collect()
    }

    fn all() -> Vec<(Layer, Program, SplitBackward)> {
        [Family::Dense, Family::Experts, Family::Latent]
            .into_iter()
            .flat_map(|family| [of(family, |_| false), of(family, |_| true)].concat())
            .collect()
    }

    /// What an instruction computes; loads and gathers of parameters may be repeated.
    fn computed(code: &[Instruction]) -> Vec<ValueId> {
        let is_source =
            |one: &&Instruction| matches!(one, Instruction::Load { .. } | Instruction::Parameter { .. });
        let mut values: Vec<ValueId> =
            code.iter().filter(|one| !is_source(one)).flat_map(Instruction::written).collect();
        values.sort_unstable();
        values
    }

    #[test]
    fn both_parts_together_compute_what_the_whole_does_once() {
        for (layer, program, split) in all() {
            let parts = [split.input.clone(), split.weight.clone()].concat();
            assert_eq!(computed(&parts), computed(&program.backward), "{}", layer.name);
            let sums = |code: &[Instruction]| {
                let is_sum = |one: &&Instruction| matches!(one, Instruction::Accumulate { .. });
                let mut sums: Vec<String> =
                    code.iter().filter(is_sum).map(|one| format!("{one:?}")).collect();
                sums.sort();
                sums
            };
            assert_eq!(sums(&parts), sums(&program.backward), "{}", layer.name);
        }
    }

    #[test]
    fn the_stream_waits_for_no_product_of_a_weight() {
        for (layer, program, split) in all().into_iter().filter(|(layer, ..)| !layer.stream_in.is_empty()) {
            let is_weight = |id: &ValueId| layer.is_parameter(program.value(*id).tensor);
            for one in &split.input {
                let Instruction::Backward { op, results, .. } = one else { continue };
                let yields = results.iter().flatten().any(is_weight);
                assert!(!(yields && layer.ops[op.0].kind.is_product()), "{}: {one:?}", layer.name);
            }
            assert!(computed(&split.weight).iter().any(is_weight), "{}", layer.name);
        }
    }

    #[test]
    fn an_embedding_has_nothing_that_anyone_waits_for() {
        let (_, program, split) = of(Family::Dense, |_| false).swap_remove(0);
        assert_eq!((split.input.len(), split.carried), (0, program.out_gradient));
    }
}
