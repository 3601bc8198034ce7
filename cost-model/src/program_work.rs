//! The work of a program's operators on the device with the largest blocks, sizes read off the shardings of its values.

use std::cell::OnceCell;

use ir::graph::{Layer, OpId, Sizes};
use ir::mesh::{AxisId, Mesh};
use ir::op_work::{KernelChoice, backward_work, op_work};
use ir::program::{Instruction, Program, ValueId};
use ir::sharding::Sharding;
use ir::signature::{FactorId, Signature, may_ring, signature};
use ir::work::{Pass, Work};

use crate::ring::RingSizes;

/// A program and what it is about.
pub(crate) struct ProgramWork<'a> {
    layer: &'a Layer,
    mesh: &'a Mesh,
    sizes: &'a Sizes,
    program: &'a Program,
    /// Per operator, what was asked of it first: prices and bytes ask the same again and again.
    operators: Vec<OnceCell<Option<Operator>>>,
}

/// An operator that forward runs.
struct Operator {
    sig: Signature,
    operands: Vec<ValueId>,
    /// Local length of each of its factors.
    local: Vec<f64>,
}

impl<'a> ProgramWork<'a> {
    pub(crate) fn new(layer: &'a Layer, mesh: &'a Mesh, sizes: &'a Sizes, program: &'a Program) -> Self {
        let operators = layer.ops.iter().map(|_| OnceCell::new()).collect();
        Self { layer, mesh, sizes, program, operators }
    }

    /// Work of an operator in one pass. Backward and recomputation run where forward ran.
    pub(crate) fn of(&self, op: OpId, pass: Pass, kernels: &KernelChoice) -> Vec<Work> {
        let Some(Operator { sig, local, .. }) = self.operator(op) else { return Vec::new() };
        op_work((self.layer, &self.layer.ops[op.0], sig), local, self.sizes, pass, kernels)
    }

    fn operator(&self, op: OpId) -> Option<&Operator> {
        let made = || {
            let (operands, results) = self.forward(op)?;
            let sig = signature(self.layer, &self.layer.ops[op.0]);
            let local = self.local_lengths(&sig, (operands, results));
            Some(Operator { sig, operands: operands.to_vec(), local })
        };
        self.operators[op.0].get_or_init(made).as_ref()
    }

    /// Axes round which blocks of an operator's keys travel, and their sizes; nothing where none do.
    pub(crate) fn ring(&self, op: OpId, element_bytes: f64) -> Option<(Vec<AxisId>, RingSizes)> {
        if !may_ring(&self.layer.ops[op.0]) {
            return None;
        }
        let Operator { sig, operands, local, .. } = self.operator(op)?;
        let axes = self.program.ring_axes(sig, *operands.get(1)?);
        let n: u64 = axes.iter().map(|&axis| self.mesh.size(axis)).product();
        (!axes.is_empty()).then(|| (axes, RingSizes::new(sig, local, n, element_bytes)))
    }

    fn forward(&self, op: OpId) -> Option<(&[ValueId], &[ValueId])> {
        self.program.forward.iter().find_map(|one| {
            let Instruction::Forward { op: own, operands, results } = one else { return None };
            (*own == op).then_some((operands.as_slice(), results.as_slice()))
        })
    }

    /// Work of an operator's backward, as far as gradients are asked for.
    pub(crate) fn backward(
        &self,
        op: OpId,
        gradients: &[Option<ValueId>],
        kernels: &KernelChoice,
    ) -> Vec<Work> {
        let Some(Operator { sig, local, .. }) = self.operator(op) else { return Vec::new() };
        let gets: Vec<bool> = gradients.iter().map(Option::is_some).collect();
        backward_work((self.layer, &self.layer.ops[op.0], sig), local, self.sizes, kernels, &gets)
    }

    /// Local length of every factor, from a tensor that has it.
    fn local_lengths(&self, sig: &Signature, (operands, results): (&[ValueId], &[ValueId])) -> Vec<f64> {
        let sharding = |id: &ValueId| self.program.value(*id).sharding;
        let length = |(i, factor): (usize, &ir::signature::Factor)| {
            let id = FactorId(i as u8);
            let operand =
                operands.iter().enumerate().find_map(|(k, v)| Some((sharding(v), sig.operand_dim(k, id)?)));
            let result =
                || results.iter().enumerate().find_map(|(k, v)| Some((sharding(v), sig.result_dim(k, id)?)));
            let whole = self.sizes.dims[factor.dim.0];
            // Of travelling blocks, all are walked.
            if sig.ring.is_some_and(|ring| ring.keys == id) {
                return whole as f64;
            }
            let local = |(cut, dim): (Sharding, usize)| cut.local_size(self.mesh, dim, whole);
            operand.or_else(result).map_or(whole, local) as f64
        };
        sig.factors.iter().enumerate().map(length).collect()
    }
}
