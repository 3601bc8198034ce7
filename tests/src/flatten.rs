//! A model of layers as one list of operators: what a reader that clusters operators is asked about.

use ir::flat::FlatDocument;
use ir::graph::{Layer, Model, TensorId};
use ir::native::{DimDocument, LayerDocument, MODEL_SCHEMA_VERSION, ModelDocument, TensorDocument, write};

/// The same model without its layers. Everything of layer `i` is called `kind.i.name`; a tied parameter is one tensor.
///
/// # Panics
/// Where layers read more than those before leave, which `graph::check` refuses.
pub fn flatten(model: &Model) -> FlatDocument {
    let document = write(model);
    let mut flat = FlatDocument {
        planner_model: MODEL_SCHEMA_VERSION,
        name: model.name.clone(),
        default_sequence: model.default_sequence,
        dims: Vec::new(),
        tensors: Vec::new(),
        ops: Vec::new(),
        out: String::new(),
    };
    let mut stack: Vec<String> = Vec::new();
    for (at, kind) in model.kinds_in_order().into_iter().enumerate() {
        let (layer, own) = (&model.layers[kind], &document.layers[kind]);
        let dims: Vec<String> = own.dims.iter().map(|dim| unified(&mut flat.dims, dim)).collect();
        let taken = stack.split_off(stack.len() - layer.stream_in.len());
        let named = |tensor: TensorId| {
            let name = &own.tensors[tensor.0].name;
            let slot = layer.stream_in.iter().position(|other| *other == tensor);
            let of_stream = slot.map(|slot| taken[slot].clone());
            let owner =
                || owner_of(&document, own, name).unwrap_or_else(|| format!("{}.{at}.{name}", own.name));
            of_stream.unwrap_or_else(owner)
        };
        for (i, tensor) in layer.tensors.iter().enumerate() {
            let name = named(TensorId(i));
            let dims: Vec<&str> = tensor.dims.iter().map(|dim| dims[dim.0].as_str()).collect();
            if flat.tensors.iter().all(|other| other.name != name) {
                flat.tensors.push(TensorDocument { name, dims: dims.join(" "), ..own.tensors[i].clone() });
            }
        }
        for (op, written) in layer.ops.iter().zip(&own.ops) {
            let mut op_flat = written.clone();
            op_flat.name = format!("{}.{at}.{}", own.name, op.name);
            op_flat.operands = op.operands.iter().map(|&tensor| named(tensor)).collect();
            op_flat.results = op.results.iter().map(|&tensor| named(tensor)).collect();
            flat.ops.push(op_flat);
        }
        stack.extend(layer.out.iter().map(|&tensor| named(tensor)));
    }
    flat.out = stack.remove(0);
    flat
}

/// The dim of the whole model that has this name and length, made where there is none.
fn unified(dims: &mut Vec<DimDocument>, dim: &DimDocument) -> String {
    let mut name = dim.name.clone();
    while let Some(other) = dims.iter().find(|other| other.name == name) {
        if other.length == dim.length {
            return name;
        }
        name.push('_');
    }
    dims.push(DimDocument { name: name.clone(), length: dim.length.clone() });
    name
}

/// What the owner of a tied parameter is called; layers with one occur once, so the kind's name will do.
fn owner_of(document: &ModelDocument, layer: &LayerDocument, tensor: &str) -> Option<String> {
    let own = format!("{}.{tensor}", layer.name);
    let tie = document.ties.iter().find(|tie| tie.copy == own || tie.owner == own)?;
    Some(tie.owner.clone())
}

/// What is left of a layer without its names: of every operator its kind and, of what it reads and makes, the role and
/// the lengths of the dims; sorted, for layers may list them in another order.
pub fn content(layer: &Layer) -> Vec<String> {
    let tensor = |id: &TensorId| format!("{:?} {:?}", layer.tensors[id.0].role, layer.extents(*id));
    let mut content: Vec<String> = layer
        .ops
        .iter()
        .map(|op| {
            let read: Vec<String> = op.operands.iter().map(tensor).collect();
            let made: Vec<String> = op.results.iter().map(tensor).collect();
            format!("{:?} {read:?} -> {made:?}", op.kind)
        })
        .collect();
    content.sort();
    content
}
