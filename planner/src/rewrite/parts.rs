//! Which parameters of the model that was asked for lie where in the parameters of a layer, fused or not.
//!
//! A fused parameter is read by a product or a bias, and a split gives the parts of its result back: their lengths are
//! the split's, so that a shrunk layer tells those of its own.

use std::collections::BTreeMap;

use ir::graph::{Layer, TensorId};
use ir::op::OpKind;
use ir::region::{Part, Within};

use super::variants;

/// The layer that another stands for.
#[derive(Clone, Copy, Debug)]
pub struct Stands<'a> {
    /// The layer in its form, of any lengths: as the plan has it.
    pub form: &'a Layer,
    /// What it stands for.
    pub original: &'a Layer,
}

/// The parts of every parameter of a layer. Where the layer is a form of another, `stands` says which: the form must
/// have the layer's operators and tensors, be its lengths what they may.
///
/// Nothing where the form is none of the original's.
pub fn parts(layer: &Layer, stands: Option<Stands<'_>>) -> Option<BTreeMap<TensorId, Vec<Part>>> {
    let sizes = layer.sizes(0, 0);
    let whole = |name: &str, tensor: TensorId| {
        vec![Part { name: name.to_owned(), shape: layer.shape(tensor, &sizes), within: None }]
    };
    let Some(Stands { form, original }) = stands else {
        let of = |tensor: TensorId| (tensor, whole(&layer.tensors[tensor.0].name, tensor));
        return Some(layer.parameters().map(of).collect());
    };
    let renamed = |layer: &Layer| Layer { name: form.name.clone(), ..layer.clone() };
    let variant = variants(original).into_iter().find(|variant| renamed(&variant.layer) == *form)?;
    let name = |tensor: TensorId| original.tensors[tensor.0].name.clone();
    let mut all = BTreeMap::new();
    for &(old, new) in &variant.kept {
        all.insert(new, whole(&name(old), new));
    }
    for fused in &variant.fused {
        let lengths = lengths(layer, fused.tensor)?;
        let shape = layer.shape(fused.tensor, &sizes);
        if lengths.len() != fused.parts.len() || lengths.iter().sum::<u64>() != *shape.get(fused.dim)? {
            return None;
        }
        let mut from = 0;
        let mut list = Vec::new();
        for (part, &length) in fused.parts.iter().zip(&lengths) {
            let keeps_dim = original.tensors[part.tensor.0].dims.len() == shape.len();
            let mut own = shape.clone();
            if keeps_dim {
                own[fused.dim] = length;
            } else {
                own.remove(fused.dim);
            }
            let within = Some(Within { dim: fused.dim, rows: (from, from + length), keeps_dim });
            list.push(Part { name: name(part.tensor), shape: own, within });
            from += length;
        }
        all.insert(fused.tensor, list);
    }
    Some(all)
}

/// Lengths into which what a fused parameter makes is split.
fn lengths(layer: &Layer, parameter: TensorId) -> Option<Vec<u64>> {
    let mut tensor = parameter;
    // A product, perhaps a bias, and the split: no path is longer than the layer.
    for _ in 0..layer.ops.len() {
        let op = &layer.ops[layer.reader(tensor)?.0];
        if let OpKind::Split { sizes } = &op.kind {
            return Some(sizes.clone());
        }
        tensor = *op.results.first()?;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::shipped_tests::shipped_layers;
    use super::*;

    #[test]
    fn parts_of_every_form_are_the_parameters_of_the_original() {
        let mut n_fused = 0;
        for original in shipped_layers() {
            let own: BTreeMap<&str, Vec<u64>> = original
                .parameters()
                .map(|tensor| {
                    (original.tensors[tensor.0].name.as_str(), original.shape(tensor, &original.sizes(0, 0)))
                })
                .collect();
            for variant in variants(&original) {
                let layer = &variant.layer;
                let found = parts(layer, Some(Stands { form: layer, original: &original })).unwrap();
                let all: BTreeMap<&str, Vec<u64>> =
                    found.values().flatten().map(|part| (part.name.as_str(), part.shape.clone())).collect();
                assert_eq!(all, own, "{}: {}", original.name, variant.name);
                n_fused += usize::from(!variant.fused.is_empty());
                for fused in &variant.fused {
                    let rows: Vec<_> = found[&fused.tensor]
                        .iter()
                        .filter_map(|part| part.within.as_ref().map(|within| within.rows))
                        .collect();
                    let known: Vec<_> =
                        fused.parts.iter().map(|part| (part.from, part.from + part.length)).collect();
                    assert_eq!(rows, known);
                }
            }
        }
        assert!(n_fused > 10);
    }
}
