//! One layer on one mesh, as tests of the choice problem ask about it.

use cost_model::Constants;
use cost_model::program_memory::MemoryContext;
use ir::cluster::{Cluster, Precision};
use ir::engine::{Engine, GradientFormat, TensorOverlap};
use ir::op_work::KernelChoice;
use ir::token_order::TokenOrder;
use ir::work::AttentionKernel;
use planner::prices::Machine;

/// The first devices of a cluster in bf16, with flash attention.
pub fn machine<'a>(cluster: &'a Cluster, constants: &'a Constants, token_order: TokenOrder) -> Machine<'a> {
    Machine {
        cluster,
        device: &cluster.groups[0].device,
        home: None,
        constants,
        precision: Precision::Bf16,
        kernels: KernelChoice::of(&Engine::default(), (AttentionKernel::Flash, token_order), 2.0),
        gradients: GradientFormat::Full,
        tensor_overlap: TensorOverlap::Absent,
    }
}

/// What decides on such a machine what programs keep.
pub fn memory_context<'a>(machine: &Machine<'a>) -> MemoryContext<'a> {
    let Machine { precision, kernels, constants, .. } = *machine;
    MemoryContext { precision, engine: constants.engine, kernels, constants }
}
