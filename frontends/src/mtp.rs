//! Multi-token prediction: behind the decoder stand modules that predict tokens further ahead (DeepSeek-V3, arXiv
//! 2412.19437, section 2.2; as NVIDIA/Megatron-LM trains it, megatron/core/transformer/multi_token_prediction.py).
//!
//! Module `k` takes the stream of the module before, behind that one's final norm, and the embedding of the token `k`
//! ahead, norms both, puts them side by side, and a product brings them back to the width of the stream:
//! `y = [e(t_k); n] w`. A decoder layer of the model's last kind follows, then a norm. Embedding and head are the
//! model's own. The modules' losses have a weight; like that of the next token they are divided by the number of tokens
//! that have one.
//!
//! Of a chain of layers is made: `.. decoder | mtp: x -> (n, y) | decoder: y -> x | head: (n, x)`. What waits for the
//! head lies below on the stack. In the head the streams are stacked along a dim of their own, so that one product
//! makes all scores, and one gradient is that of the head's matrix.

use ir::builder::LayerBuilder;
use ir::graph::{
    Data, Dim, DimId, Extent, Init, Layer, Model, Op, OpId, ParameterRef, Role, Segment, Tensor, TensorId,
    Tie,
};
use ir::op::OpKind;

/// What the losses of all modules together count, beside the loss of the next token (Megatron's
/// `mtp_loss_scaling_factor`; DeepSeek-V3 had 0.3 at first and 0.1 later, section 4.2).
const WEIGHT: f64 = 0.1;

/// Most modules: what was trained had one.
const MAX_MODULES: u64 = 8;

const STREAM: &str = "b s h";

/// Puts so many modules behind the decoder of a model.
///
/// # Errors
/// A sentence about the number, or about what of the model is not as the modules need it.
pub fn predict_ahead(model: &mut Model, n_modules: u64) -> Result<(), String> {
    if n_modules == 0 || n_modules > MAX_MODULES {
        return Err(format!("{n_modules} modules, expected 1 to {MAX_MODULES}"));
    }
    let parts = parts(model)?;
    let modules: Vec<Layer> = (1..=n_modules).map(|ahead| module(model, &parts, ahead)).collect();
    let head = head(&model.layers[parts.head], &parts, n_modules as usize)?;
    let table = ParameterRef { layer: parts.embedding, tensor: parts.table };
    let decoder = Segment { layer: parts.decoder, count: 1 };
    model.sequence.pop();
    for layer in modules {
        let copy = layer.tensors.iter().position(|tensor| tensor.name == TABLE).map(TensorId);
        let at = model.layers.len();
        model.layers.push(layer);
        model.sequence.extend([Segment { layer: at, count: 1 }, decoder]);
        model.ties.extend(copy.map(|tensor| Tie { owner: table, copy: ParameterRef { layer: at, tensor } }));
    }
    model.layers[parts.head] = head;
    model.sequence.push(Segment { layer: parts.head, count: 1 });
    Ok(())
}

const TABLE: &str = "table";

/// What the modules share with the model.
struct Parts {
    /// The layer kinds.
    embedding: usize,
    decoder: usize,
    head: usize,
    /// The embedding's table `[v h]`.
    table: TensorId,
    /// The head's norm of the stream, and the product behind it.
    norm: OpId,
    logits: OpId,
}

/// Finds them in a chain: tokens are looked up, decoder layers follow, and the head is a norm, a product and the loss.
fn parts(model: &Model) -> Result<Parts, String> {
    let [first, .., before, last] = model.sequence.as_slice() else {
        return Err("the model has no layers between embedding and head".into());
    };
    if !model.is_chain() {
        return Err("the model is no chain of layers".into());
    }
    let (embedding, head) = (&model.layers[first.layer], &model.layers[last.layer]);
    let lookup = embedding.ops.first().filter(|op| op.kind == OpKind::Embed);
    let of_tokens = lookup.filter(|op| embedding.tensors[op.operands[0].0].role == Role::Data(Data::Tokens));
    let others = embedding.ops.iter().skip(1).find(|op| !matches!(op.kind, OpKind::Scale { .. }));
    let table = match (of_tokens, others) {
        (Some(op), None) => op.operands[1],
        (_, Some(op)) => {
            let what = op.kind.line().name;
            return Err(format!(
                "`{}` of layer `{}` is {what}: of embeddings only a lookup, perhaps scaled, can be shared",
                op.name, embedding.name
            ));
        }
        (None, None) => return Err(format!("layer `{}` looks up no tokens", embedding.name)),
    };
    let reader = |tensor: TensorId| head.reader(tensor);
    let is_norm =
        |op: &OpId| matches!(head.ops[op.0].kind, OpKind::RmsNorm { .. } | OpKind::LayerNorm { .. });
    let is_product = |op: &OpId| head.ops[op.0].kind == OpKind::Linear;
    let norm = head.stream_in.first().and_then(|&stream| reader(stream)).filter(is_norm);
    let logits = norm.and_then(|norm| reader(head.ops[norm.0].results[0])).filter(is_product);
    let (Some(norm), Some(logits)) = (norm, logits) else {
        return Err(format!("layer `{}` is no norm of the stream with a product behind it", head.name));
    };
    Ok(Parts { embedding: first.layer, decoder: before.layer, head: last.layer, table, norm, logits })
}

/// What stands before the decoder layer of a module.
fn module(model: &Model, parts: &Parts, ahead: u64) -> Layer {
    let (embedding, head) = (&model.layers[parts.embedding], &model.layers[parts.head]);
    let extent = |at: usize| embedding.dims[embedding.tensors[parts.table.0].dims[at].0].extent;
    let width = embedding.parameter_elements(parts.table) / extent(0).fixed().unwrap_or(1).max(1);
    let name = if ahead == 1 { "mtp".into() } else { format!("mtp-{ahead}") };
    let mut b = LayerBuilder::new(&free(name, |name| model.layers.iter().any(|layer| layer.name == name)));
    b.dim("v", extent(0));
    b.fixed("h", width);
    b.fixed("g", 2 * width);
    let kind = &head.ops[parts.norm.0].kind;
    let x = b.stream();
    let normed = norm(&mut b, "norm", kind, x);
    let ids = b.tensor("ids", "b s", Role::Data(Data::Ahead(ahead)));
    let table = b.tensor(TABLE, "v h", embedding.tensors[parts.table.0].role);
    let mut e = b.op("lookup", OpKind::Embed, &[ids, table], STREAM);
    for op in &embedding.ops[1..] {
        e = b.op(&op.name, op.kind.clone(), &[e], STREAM);
    }
    let e = norm(&mut b, "embedding_norm", kind, e);
    let before = norm(&mut b, "stream_norm", kind, normed);
    let joined = b.op("join", OpKind::Concat { sizes: vec![width, width] }, &[e, before], "b s g");
    let weight = b.parameter("project.weight", "g h", Init::Normal);
    let y = b.op("project", OpKind::Linear, &[joined, weight], STREAM);
    b.finish_with(&[normed, y])
}

/// A norm of the kind that the model ends with.
fn norm(b: &mut LayerBuilder, name: &str, kind: &OpKind, x: TensorId) -> TensorId {
    let from_zero = matches!(kind, OpKind::RmsNorm { shift, .. } if *shift != 0.0);
    let init = if from_zero { Init::Zero } else { Init::One };
    let mut operands = vec![x, b.parameter(&format!("{name}.weight"), "h", init)];
    if matches!(kind, OpKind::LayerNorm { .. }) {
        operands.push(b.parameter(&format!("{name}.bias"), "h", Init::Zero));
    }
    b.op(name, kind.clone(), &operands, STREAM)
}

/// The head over the streams of the decoder, normed, of all modules but the last, normed, and of the last.
fn head(own: &Layer, parts: &Parts, n_modules: usize) -> Result<Layer, String> {
    let mut layer = own.clone();
    let n = n_modules + 1;
    let dim = free("a".into(), |name| own.dims.iter().any(|dim| dim.name == name));
    layer.dims.push(Dim { name: dim, extent: Extent::Fixed(n as u64) });
    let predictions = DimId(layer.dims.len() - 1);
    let last = own.stream_in[0];
    let dims = own.tensors[last.0].dims.clone();
    let mut normed: Vec<TensorId> = Vec::new();
    for i in 0..n_modules {
        let name = if i == 0 { "main".into() } else { format!("ahead-{i}") };
        normed.push(tensor(&mut layer, &name, dims.clone()));
    }
    layer.stream_in = normed.iter().copied().chain([last]).collect();
    let (result, z) = (own.ops[parts.norm.0].results[0], own.ops[parts.logits.0].results[0]);
    normed.push(result);
    let [rows, columns] = [&dims[..dims.len() - 1], &dims[dims.len() - 1..]];
    if own.tensors[z.0].dims.len() != dims.len() || own.tensors[z.0].dims[..rows.len()] != *rows {
        return Err(format!(
            "`{}` of layer `{}` has other rows than the stream",
            own.tensors[z.0].name, own.name
        ));
    }
    for op in &own.ops[parts.logits.0..] {
        let is_known = op.name == own.ops[parts.logits.0].name || is_of_loss(&op.kind);
        if !is_known {
            let what = op.kind.line().name;
            return Err(format!(
                "`{}` of layer `{}` is {what}: expected a loss behind the product",
                op.name, own.name
            ));
        }
        let labels = op.operands.iter().filter(|tensor| own.is_data(**tensor));
        for &TensorId(at) in op.results.iter().chain(labels) {
            let dims = &mut layer.tensors[at].dims;
            if dims.starts_with(rows) && !dims.contains(&predictions) {
                dims.insert(rows.len(), predictions);
            }
        }
    }
    let stacked = tensor(&mut layer, "stack", [rows, &[predictions], columns].concat());
    let sizes = vec![1; n];
    let stack =
        Op { name: "stack".into(), kind: OpKind::Concat { sizes }, operands: normed, results: vec![stacked] };
    layer.ops[parts.logits.0].operands[0] = stacked;
    weigh(&mut layer, n_modules);
    layer.ops.insert(parts.logits.0, stack);
    Ok(layer)
}

/// What may stand between the scores and the loss: of every prediction it makes its own.
fn is_of_loss(kind: &OpKind) -> bool {
    matches!(
        kind,
        OpKind::Bias
            | OpKind::Scale { .. }
            | OpKind::Softcap { .. }
            | OpKind::Fork
            | OpKind::RowMax
            | OpKind::SumExp
            | OpKind::Pick
            | OpKind::CrossEntropy
            | OpKind::SumLoss
    )
}

/// Gives the losses of the modules their weight before all are added.
fn weigh(layer: &mut Layer, n_modules: usize) {
    let Some(at) = layer.ops.iter().position(|op| op.kind == OpKind::SumLoss) else { return };
    let losses = layer.ops[at].operands[0];
    let weighed = tensor(layer, "weighed", layer.tensors[losses.0].dims.clone());
    let of_module = WEIGHT / n_modules as f64;
    let by = [1.0].into_iter().chain(std::iter::repeat_n(of_module, n_modules)).collect();
    layer.ops[at].operands[0] = weighed;
    let name = "weigh".into();
    layer
        .ops
        .insert(at, Op { name, kind: OpKind::Weigh { by }, operands: vec![losses], results: vec![weighed] });
}

fn tensor(layer: &mut Layer, name: &str, dims: Vec<DimId>) -> TensorId {
    let name = free(name.into(), |name| layer.tensors.iter().any(|tensor| tensor.name == name));
    layer.tensors.push(Tensor { name, dims, role: Role::Activation });
    TensorId(layer.tensors.len() - 1)
}

/// The name itself, or with as many primes as make it new.
fn free(mut name: String, is_taken: impl Fn(&str) -> bool) -> String {
    while is_taken(&name) {
        name.push('\'');
    }
    name
}

#[cfg(test)]
mod tests {
    use ir::op_work::{Counted, model_flops};
    use ir::signature::signature;

    use super::*;

    fn shipped(name: &str) -> Model {
        crate::read_model(&format!("{name}.json"), crate::shipped_model(name).unwrap().text).unwrap()
    }

    fn ahead(name: &str, n_modules: u64) -> Result<Model, String> {
        let mut model = shipped(name);
        predict_ahead(&mut model, n_modules)?;
        assert_eq!(ir::graph::check(&model), Ok(()), "{name}");
        Ok(model)
    }

    /// By formula: a layer of experts, three norms and the projection. With a second embedding and head, which the
    /// published weights store, the model has the 685 billion that its page counts.
    #[test]
    fn the_module_of_deepseek_v3_has_11_6_billion_parameters() {
        let (h, r_q, r_kv, heads) = (7168, 1536, 512, 128);
        let attention =
            h * r_q + r_q + r_q * heads * 192 + h * (r_kv + 64) + r_kv + r_kv * heads * 256 + heads * 128 * h;
        let experts = h * 256 + 257 * 3 * h * 2048;
        let module = 2 * h * h + 3 * h + attention + experts + 2 * h;
        let found = ahead("deepseek-v3", 1).unwrap();
        assert_eq!(found.n_parameters(), shipped("deepseek-v3").n_parameters() + module);
        assert_eq!(module, 11_610_067_968);
        assert_eq!((found.n_parameters() + 2 * 129_280 * h) / 1_000_000_000, 684);
        let names: Vec<&str> =
            found.sequence.iter().map(|run| found.layers[run.layer].name.as_str()).collect();
        assert_eq!(names, ["embedding", "dense", "moe", "mtp", "moe", "head"]);
    }

    /// Two products per weight and token: those of a layer of experts, of the projection, and the head once more.
    #[test]
    fn a_module_takes_a_layer_a_projection_and_the_head_once_more() {
        let flops = |layer: &Layer| -> f64 {
            let sizes = layer.sizes(2, 4096);
            layer
                .ops
                .iter()
                .map(|op| model_flops(layer, op, &signature(layer, op), &sizes, Counted::Once))
                .sum()
        };
        let total = |model: &Model| -> f64 {
            model.sequence.iter().map(|run| run.count as f64 * flops(&model.layers[run.layer])).sum()
        };
        let (without, with) = (shipped("deepseek-v3"), ahead("deepseek-v3", 1).unwrap());
        let moe = without.layers.iter().find(|layer| layer.name == "moe").unwrap();
        let (tokens, h, v) = (2.0 * 4096.0, 7168.0, 129_280.0);
        let module = flops(moe) + 2.0 * tokens * (2.0 * h * h + h * v);
        assert_eq!(total(&with) - total(&without), module);
    }

    #[test]
    fn scores_are_of_every_prediction_and_losses_of_modules_have_a_weight() {
        let model = ahead("llama-3-8b", 2).unwrap();
        let head = &model.layers[model.sequence.last().unwrap().layer];
        let sizes = head.sizes(3, 5);
        let shape = |name: &str| {
            head.shape(TensorId(head.tensors.iter().position(|tensor| tensor.name == name).unwrap()), &sizes)
        };
        assert_eq!(shape("logits"), [3, 5, 3, 128_256]);
        assert_eq!([shape("labels"), shape("cross_entropy")], [[3, 5, 3]; 2]);
        let by =
            head.ops.iter().find_map(|op| if let OpKind::Weigh { by } = &op.kind { Some(by) } else { None });
        assert_eq!(by.unwrap(), &[1.0, 0.05, 0.05]);
        assert_eq!(head.stream_in.len(), 3);
    }

    #[test]
    fn every_shipped_model_predicts_ahead_or_says_why_it_cannot() {
        for shipped in crate::shipped_models() {
            match ahead(shipped.name, 2) {
                Ok(model) => assert!(model.n_parameters() > self::shipped(shipped.name).n_parameters()),
                Err(what) => {
                    assert!(what.contains("of embeddings only a lookup"), "{}: {what}", shipped.name)
                }
            }
        }
        assert!(ahead("llama-3-8b", 0).is_err() && ahead("llama-3-8b", 9).is_err());
        let mut twice = ahead("llama-3-8b", 1).unwrap();
        assert_eq!(predict_ahead(&mut twice, 1), Err("the model is no chain of layers".into()));
    }
}
