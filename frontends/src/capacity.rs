//! A capacity for every expert of a model: tokens beyond it are dropped (Fedus et al. 2022, arXiv 2101.03961, section
//! 2.2; Lepikhin et al. 2020, arXiv 2006.16668, algorithm 1).
//!
//! Capacity counts within a sequence, so that what is dropped is the model's affair and not the plan's: slots are
//! `factor * tokens * top_k / experts`, and tokens take them in the order of their positions.

use ir::graph::{Data, Extent, Layer, Model, Role, Tensor, TensorId};
use ir::op::OpKind;

/// Gives the experts of a model a capacity. False, and nothing is changed, where it has none or a factor that is not a
/// positive number.
pub fn limit_experts(model: &mut Model, factor: f64) -> bool {
    let routes = |layer: &Layer| layer.ops.iter().any(|op| op.kind == OpKind::Dispatch);
    let is_factor = factor > 0.0 && factor.is_finite();
    if !is_factor || !model.layers.iter().any(routes) {
        return false;
    }
    model.layers.iter_mut().filter(|layer| routes(layer)).for_each(|layer| limit(layer, factor));
    true
}

fn limit(layer: &mut Layer, factor: f64) {
    for dim in &mut layer.dims {
        if let Extent::Slots { capacity, .. } = &mut dim.extent {
            *capacity = Some(factor);
        }
    }
    let positions = positions(layer);
    for op in &mut layer.ops {
        if matches!(op.kind, OpKind::Dispatch | OpKind::Combine) {
            op.operands.truncate(2);
            op.operands.extend(positions);
        }
    }
}

/// The layer's positions, which it gets if it has none. `None` for a layer without a sequence.
fn positions(layer: &mut Layer) -> Option<TensorId> {
    let role = Role::Data(Data::Positions);
    if let Some(at) = layer.tensors.iter().position(|tensor| tensor.role == role) {
        return Some(TensorId(at));
    }
    let sequence = layer.dims.iter().position(|dim| dim.extent == Extent::Sequence)?;
    let name = (0..).map(|i| format!("slot_positions{}", if i == 0 { String::new() } else { i.to_string() }));
    let mut free = name.filter(|name| layer.tensors.iter().all(|tensor| tensor.name != *name));
    let name = free.next()?;
    layer.tensors.push(Tensor { name, dims: vec![ir::graph::DimId(sequence)], role });
    Some(TensorId(layer.tensors.len() - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shipped(name: &str) -> Model {
        let text = crate::shipped_model(name).unwrap().text;
        crate::read_model(&format!("{name}.json"), text).unwrap()
    }

    #[test]
    fn a_factor_makes_slots_of_what_is_expected() {
        let mut model = shipped("mixtral-8x7b");
        assert!(limit_experts(&mut model, 1.25));
        assert_eq!(ir::graph::check(&model), Ok(()));
        let layer = model.layers.iter().find(|layer| layer.dims.iter().any(|dim| dim.name == "c")).unwrap();
        let at = layer.dims.iter().position(|dim| dim.name == "c").unwrap();
        let sizes = layer.sizes(1, 4096);
        // Two of eight experts: 1024 of 4096 tokens are expected.
        assert_eq!((sizes.dims[at], sizes.filled[at]), (1280, 1.0));
        assert!(!limit_experts(&mut shipped("llama-3-8b"), 1.25));
        assert!(!limit_experts(&mut model, f64::NAN));
    }
}
