//! Whether a graph is a model: layers in an order in which each finds its streams, operators over tensors that exist,
//! ties that fit.

use std::collections::BTreeSet;

use super::{Dim, Extent, Layer, Model, ParameterRef, TensorId};

/// A broken invariant of a graph.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GraphError {
    /// The model as a whole.
    #[error("{0}")]
    Model(String),
    /// One layer kind.
    #[error("layer `{layer}`: {what}")]
    Layer {
        /// The kind.
        layer: String,
        /// What is wrong.
        what: String,
    },
}

/// Checks every invariant of a model.
///
/// # Errors
/// The first one that is broken, with the layer and the operator or tensor in its text.
pub fn check(model: &Model) -> Result<(), GraphError> {
    let fail = |text: String| Err(GraphError::Model(text));
    if model.sequence.is_empty() {
        return fail("the sequence of layers is empty".into());
    }
    if let Some(run) = model.sequence.iter().find(|run| run.layer >= model.layers.len() || run.count == 0) {
        return fail(format!(
            "the sequence names layer {} times {}, which does not exist",
            run.layer, run.count
        ));
    }
    for layer in &model.layers {
        check_layer(layer).map_err(|what| GraphError::Layer { layer: layer.name.clone(), what })?;
    }
    check_sequence(model).map_err(GraphError::Model)?;
    check_ties(model)
}

/// Every layer finds on the stack what it reads, in the dims in which it reads it, and the loss is left.
fn check_sequence(model: &Model) -> Result<(), String> {
    let mut stack: Vec<(Vec<Extent>, &str)> = Vec::new();
    let last = model.sequence.len() - 1;
    for (i, run) in model.sequence.iter().enumerate() {
        let layer = &model.layers[run.layer];
        let name = &layer.name;
        if layer.has_loss() != (i == last) || (i == last && run.count != 1) {
            return Err(format!("layer `{name}`: exactly the last layer ends in the loss"));
        }
        if i == 0 && !layer.stream_in.is_empty() {
            return Err(format!("layer `{name}`: the first layer reads tokens instead of the stream"));
        }
        if run.count > 1 && !layer.hands_on() {
            return Err(format!("layer `{name}` repeats, but does not leave what it reads"));
        }
        let (n, found) = (layer.stream_in.len(), stack.len());
        let Some(rest) = found.checked_sub(n) else {
            return Err(format!("layer `{name}` reads {n} streams, but layers before leave {found} for it"));
        };
        let taken = stack.split_off(rest);
        let mut pairs = taken.iter().zip(&layer.stream_in);
        if let Some((_, stream)) = pairs.find(|((left, _), read)| *left != layer.extents(**read)) {
            let stream = &layer.tensors[stream.0].name;
            return Err(format!(
                "layer `{name}` reads `{stream}` in other dims than a layer before leaves it"
            ));
        }
        stack.extend(layer.out.iter().map(|&out| (layer.extents(out), name.as_str())));
    }
    match stack.as_slice() {
        [_] => Ok(()),
        [(_, layer), ..] => Err(format!("layer `{layer}` leaves a stream that no layer reads")),
        [] => Err("no layer leaves the loss".into()),
    }
}

fn check_ties(model: &Model) -> Result<(), GraphError> {
    for tie in &model.ties {
        for side in [tie.owner, tie.copy] {
            let valid = model
                .layers
                .get(side.layer)
                .is_some_and(|layer| side.tensor.0 < layer.tensors.len() && layer.is_parameter(side.tensor));
            let times: u64 =
                model.sequence.iter().filter(|run| run.layer == side.layer).map(|run| run.count).sum();
            if !valid || times != 1 {
                return Err(GraphError::Model("a tie must join parameters of layers that occur once".into()));
            }
        }
        let elements = |side: ParameterRef| model.layers[side.layer].parameter_elements(side.tensor);
        if elements(tie.owner) != elements(tie.copy) {
            return Err(GraphError::Model("a tie joins parameters of different size".into()));
        }
        let is_trained = |side: ParameterRef| model.layers[side.layer].is_trained(side.tensor);
        if is_trained(tie.owner) != is_trained(tie.copy) {
            return Err(GraphError::Model(
                "a tie joins a parameter that is trained to one that is not".into(),
            ));
        }
    }
    Ok(())
}

fn check_layer(layer: &Layer) -> Result<(), String> {
    let unique = |names: Vec<&str>, what: &str| {
        let mut seen = BTreeSet::new();
        names
            .into_iter()
            .find(|name| !seen.insert(*name))
            .map_or(Ok(()), |n| Err(format!("two {what} are named `{n}`")))
    };
    unique(layer.dims.iter().map(|dim| dim.name.as_str()).collect(), "dims")?;
    unique(layer.tensors.iter().map(|tensor| tensor.name.as_str()).collect(), "tensors")?;
    unique(layer.ops.iter().map(|op| op.name.as_str()).collect(), "operators")?;
    check_ids(layer)?;
    let mut ready: BTreeSet<TensorId> =
        layer.tensor_ids().filter(|&t| layer.is_data(t) || layer.is_parameter(t)).collect();
    ready.extend(&layer.stream_in);
    let mut read = BTreeSet::new();
    for op in &layer.ops {
        if let Some(tensor) = op.operands.iter().find(|tensor| !ready.contains(tensor)) {
            return Err(format!(
                "operator `{}` reads `{}` before it is computed",
                op.name, layer.tensors[tensor.0].name
            ));
        }
        for &tensor in op.operands.iter().filter(|&&t| !layer.is_data(t)) {
            if !read.insert(tensor) {
                return Err(format!(
                    "`{}` has two readers: put a `fork` between",
                    layer.tensors[tensor.0].name
                ));
            }
        }
        if let Some(tensor) = op.results.iter().find(|&&tensor| !ready.insert(tensor)) {
            return Err(format!("operator `{}` computes `{}` again", op.name, layer.tensors[tensor.0].name));
        }
        crate::signature::check_operands(layer, op)?;
    }
    let unread = |t: &TensorId| !layer.is_data(*t) && !read.contains(t) && !layer.out.contains(t);
    if let Some(tensor) = layer.tensor_ids().find(unread) {
        return Err(format!("`{}` is never read", layer.tensors[tensor.0].name));
    }
    let computed = |t: &TensorId| layer.producer(*t).is_some() && !read.contains(t);
    if layer.out.is_empty() || !layer.out.iter().all(computed) {
        return Err("the outgoing stream must be computed and not read in the layer".into());
    }
    check_streams(layer)
}

/// A layer names a stream once, all are cut alike, and backward gives the gradient of each.
fn check_streams(layer: &Layer) -> Result<(), String> {
    let rank = |tensor: &TensorId| layer.tensors[tensor.0].dims.len();
    for (side, which) in [(&layer.stream_in, "incoming"), (&layer.out, "outgoing")] {
        if side.iter().collect::<BTreeSet<_>>().len() < side.len() {
            return Err(format!("one tensor is two of the {which} streams"));
        }
        if side.windows(2).any(|pair| rank(&pair[0]) != rank(&pair[1])) {
            return Err(format!("the {which} streams have different numbers of dims, and are cut alike"));
        }
    }
    let gradients = crate::lower::gradient_tensors(layer);
    let without = layer.stream_in.iter().find(|tensor| !gradients.contains(tensor));
    without.map_or(Ok(()), |tensor| {
        Err(format!(
            "nothing that the layer leaves depends smoothly on its stream `{}`",
            layer.tensors[tensor.0].name
        ))
    })
}

fn check_ids(layer: &Layer) -> Result<(), String> {
    let n = layer.tensors.len();
    let tensors = layer.ops.iter().flat_map(|op| op.operands.iter().chain(&op.results));
    if tensors.chain(&layer.stream_in).chain(&layer.out).any(|tensor| tensor.0 >= n) {
        return Err("an operator names a tensor that does not exist".into());
    }
    if layer.tensors.iter().flat_map(|tensor| &tensor.dims).any(|dim| dim.0 >= layer.dims.len()) {
        return Err("a tensor names a dim that does not exist".into());
    }
    let zero = |dim: &&Dim| dim.extent.fixed() == Some(0);
    layer.dims.iter().find(zero).map_or(Ok(()), |dim| Err(format!("dim `{}` has length zero", dim.name)))
}
