//! When values of a program are freed: behind their last reading.

use std::collections::BTreeSet;

use crate::program::{Instruction, ValueId};

/// Frees a value that a section begins with and never reads, before all else.
pub(crate) fn free_unread(code: &mut Vec<Instruction>, value: ValueId, kept: &BTreeSet<ValueId>) {
    let touches = |one: &Instruction| {
        matches!(one, Instruction::Free { value: freed } if *freed == value) || one.read().contains(&value)
    };
    if !kept.contains(&value) && !code.iter().any(touches) {
        code.insert(0, Instruction::Free { value });
    }
}

/// Marks the last reading of every value that is not kept.
pub(crate) fn insert_frees(code: &mut Vec<Instruction>, kept: &BTreeSet<ValueId>) {
    let mut seen: Vec<bool> = Vec::new();
    let mut is_first = |value: ValueId| {
        seen.resize(seen.len().max(value.0 + 1), false);
        !std::mem::replace(&mut seen[value.0], true)
    };
    for &value in kept {
        is_first(value);
    }
    let mut reversed = Vec::with_capacity(code.len() * 2);
    for instruction in std::mem::take(code).into_iter().rev() {
        let touched = instruction.read().into_iter().chain(instruction.written());
        let mut frees: Vec<ValueId> = touched.filter(|&value| is_first(value)).collect();
        frees.sort_unstable();
        reversed.extend(frees.into_iter().rev().map(|value| Instruction::Free { value }));
        reversed.push(instruction);
    }
    reversed.reverse();
    *code = reversed;
}
