//! Low-rank adaptation: a model's own parameters are frozen, and beside chosen products `x w` two thin ones are
//! learned, `y = x w + (alpha / r) x a b` with `a` of `r` columns and `b` of `r` rows (Hu et al. 2021, arXiv
//! 2106.09685, section 4.1). Of a mixture's experts each gets its own `a` and `b`.
//!
//! The factors are operators of the graph like all others: everything after this file sees only products, a scale, an
//! addition and parameters that are frozen.

use std::collections::BTreeSet;

use ir::graph::{Dim, DimId, Extent, Init, Layer, Model, Op, Role, Tensor, TensorId};
use ir::op::OpKind;

/// What is adapted, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    /// Columns of `a`, rows of `b`.
    pub rank: u64,
    /// `x a b` counts `alpha / rank` times; without a word once, which is alpha equal to the rank.
    pub alpha: Option<f64>,
    /// Products to adapt, see `is_target`; none stands for those of attention and MLP.
    pub targets: Vec<String>,
}

/// Largest rank of any model: no known product has so many rows.
const MAX_RANK: u64 = 1 << 16;

/// Hugging Face's names of projections and ours (peft's `target_modules`).
const ALIASES: [(&str, &str); 7] = [
    ("q_proj", "attention.q"),
    ("k_proj", "attention.k"),
    ("v_proj", "attention.v"),
    ("o_proj", "attention.out"),
    ("gate_proj", "mlp.gate"),
    ("up_proj", "mlp.up"),
    ("down_proj", "mlp.down"),
];

/// Freezes a model and adapts its products.
///
/// # Errors
/// A sentence about the rank, alpha or the target that does not fit.
pub fn adapt(model: &mut Model, lora: &Lora) -> Result<(), String> {
    if lora.rank == 0 || lora.rank > MAX_RANK {
        return Err(format!("the rank is {}, expected 1 to {MAX_RANK}", lora.rank));
    }
    if lora.alpha.is_some_and(|alpha| !(alpha > 0.0 && alpha.is_finite())) {
        return Err("alpha must be a positive number".into());
    }
    let targets = |layer: &Layer| -> Vec<String> {
        let chosen = layer.ops.iter().filter(|op| is_product(layer, op) && wants(lora, layer, op));
        chosen.map(|op| op.name.clone()).collect()
    };
    let per_layer: Vec<Vec<String>> = model.layers.iter().map(targets).collect();
    let ops = || model.layers.iter().flat_map(|layer| layer.ops.iter().filter(|op| is_product(layer, op)));
    if let Some(target) = lora.targets.iter().find(|target| !ops().any(|op| is_target(target, &op.name))) {
        let names: BTreeSet<&str> = ops().map(|op| op.name.as_str()).collect();
        let names: Vec<&str> = names.into_iter().collect();
        return Err(format!("no product is called `{target}`: the model has {}", names.join(", ")));
    }
    if per_layer.iter().all(Vec::is_empty) {
        return Err("the model has no products of attention or MLP to adapt".into());
    }
    for (layer, names) in model.layers.iter().zip(&per_layer) {
        names.iter().try_for_each(|name| check_rank(layer, name, lora.rank))?;
    }
    for (layer, names) in model.layers.iter_mut().zip(per_layer) {
        layer.tensors.iter_mut().for_each(freeze);
        if names.is_empty() {
            continue;
        }
        let rank = add_rank(layer, lora.rank);
        names.iter().for_each(|name| adapt_product(layer, name, rank, lora));
    }
    Ok(())
}

/// Whether a word names a product: its name, its last part (`q`), what it belongs to (`attention`), or what Hugging
/// Face calls it (`q_proj`).
fn is_target(word: &str, name: &str) -> bool {
    let word = ALIASES.iter().find(|(alias, _)| *alias == word).map_or(word, |(_, own)| own);
    let part = |(group, last): (&str, &str)| group == word || last == word;
    name == word || name.split_once('.').is_some_and(part)
}

fn wants(lora: &Lora, layer: &Layer, op: &Op) -> bool {
    if lora.targets.is_empty() {
        is_projection(layer, op)
    } else {
        lora.targets.iter().any(|target| is_target(target, &op.name))
    }
}

/// A product of a value and a parameter.
fn is_product(layer: &Layer, op: &Op) -> bool {
    op.kind == OpKind::Linear && !layer.is_parameter(op.operands[0]) && layer.is_parameter(op.operands[1])
}

/// A product of attention or MLP: in a layer that reads the stream and writes it, with columns of its own, and not the
/// scores by which a router chooses.
fn is_projection(layer: &Layer, op: &Op) -> bool {
    let between = !layer.stream_in.is_empty() && !layer.has_loss();
    let dims = |tensor: TensorId| &layer.tensors[tensor.0].dims;
    let has_columns = dims(op.results[0]).iter().any(|dim| !dims(op.operands[0]).contains(dim));
    let reader = |tensor: TensorId| layer.reader(tensor).map(|reader| &layer.ops[reader.0]);
    let biased = reader(op.results[0]).filter(|reader| reader.kind == OpKind::Bias);
    let last = biased.map_or(op.results[0], |bias| bias.results[0]);
    let scores = reader(last).is_some_and(|reader| matches!(reader.kind, OpKind::Route { .. }));
    between && has_columns && !scores
}

fn freeze(tensor: &mut Tensor) {
    if let Role::Parameter(init) = tensor.role {
        tensor.role = Role::Frozen(init);
    }
}

/// A dim for the rank, with a name that is free.
fn add_rank(layer: &mut Layer, rank: u64) -> DimId {
    let mut name = String::from("rank");
    while layer.dims.iter().any(|dim| dim.name == name) {
        name.push('\'');
    }
    layer.dims.push(Dim { name, extent: Extent::Fixed(rank) });
    DimId(layer.dims.len() - 1)
}

/// Refuses a rank beyond that of a product's weight: `a b` has no more than the product itself.
fn check_rank(layer: &Layer, name: &str, rank: u64) -> Result<(), String> {
    let Some(op) = layer.ops.iter().find(|op| op.name == name) else { return Ok(()) };
    let WeightDims { batch, rows, columns } = WeightDims::of(layer, op);
    let length = |dims: &[DimId]| -> u64 {
        let own = dims.iter().filter(|dim| !batch.contains(dim));
        own.filter_map(|dim| layer.dims[dim.0].extent.fixed()).product()
    };
    let (rows, columns) = (length(&rows), length(&columns));
    if rank <= rows.min(columns) {
        return Ok(());
    }
    Err(format!(
        "the rank is {rank}, and `{name}` has a weight of {rows} x {columns}: expected {} at most",
        rows.min(columns)
    ))
}

/// Dims of a product's weight.
struct WeightDims {
    /// Those that input and result have too: experts.
    batch: Vec<DimId>,
    /// Those that are summed over, and of the batch.
    rows: Vec<DimId>,
    /// Those that only the result has.
    columns: Vec<DimId>,
}

impl WeightDims {
    fn of(layer: &Layer, op: &Op) -> Self {
        let dims = |tensor: TensorId| &layer.tensors[tensor.0].dims;
        let (x, w, y) = (dims(op.operands[0]), dims(op.operands[1]), dims(op.results[0]));
        let batch: Vec<DimId> = w.iter().copied().filter(|d| x.contains(d) && y.contains(d)).collect();
        let rows = w.iter().copied().filter(|d| !y.contains(d) || batch.contains(d)).collect();
        let columns = w.iter().copied().filter(|d| !x.contains(d)).collect();
        Self { batch, rows, columns }
    }
}

/// Puts `a`, the scale, `b` and the addition behind a product.
fn adapt_product(layer: &mut Layer, name: &str, rank: DimId, lora: &Lora) {
    let Some(at) = layer.ops.iter().position(|op| op.name == name) else { return };
    let (copy, at) = second_copy(layer, at);
    let WeightDims { batch, rows, columns } = WeightDims::of(layer, &layer.ops[at]);
    let result = layer.ops[at].results[0];
    let dims = |tensor: TensorId| layer.tensors[tensor.0].dims.clone();
    let (x, y) = (dims(copy), dims(result));
    let summed = |d: &DimId| x.contains(d) && !y.contains(d);
    let inner: Vec<DimId> = x.iter().copied().filter(|d| !summed(d)).chain([rank]).collect();
    let base = tensor(layer, format!("{name}.base"), y, Role::Activation);
    layer.ops[at].results[0] = base;
    let parameter = |layer: &mut Layer, part: &str, dims: Vec<DimId>, init| {
        tensor(layer, format!("{name}.{part}.weight"), dims, Role::Parameter(init))
    };
    let a = parameter(layer, "lora_a", [rows, vec![rank]].concat(), Init::Normal);
    let b = parameter(layer, "lora_b", [batch, vec![rank], columns].concat(), Init::Zero);
    let mut low = tensor(layer, format!("{name}.lora_a"), inner.clone(), Role::Activation);
    let delta_dims = layer.tensors[result.0].dims.clone();
    let delta = tensor(layer, format!("{name}.lora_b"), delta_dims, Role::Activation);
    let op = |part: &str, kind, operands: &[TensorId], result| Op {
        name: format!("{name}.{part}"),
        kind,
        operands: operands.to_vec(),
        results: vec![result],
    };
    let mut ops = vec![op("lora_a", OpKind::Linear, &[copy, a], low)];
    let by = lora.alpha.map_or(1.0, |alpha| alpha / lora.rank as f64);
    if by.total_cmp(&1.0).is_ne() {
        let scaled = tensor(layer, format!("{name}.lora_scale"), inner, Role::Activation);
        ops.push(op("lora_scale", OpKind::Scale { by }, &[low], scaled));
        low = scaled;
    }
    ops.push(op("lora_b", OpKind::Linear, &[low, b], delta));
    ops.push(op("lora_add", OpKind::Add, &[base, delta], result));
    layer.ops.splice(at + 1..at + 1, ops);
}

fn tensor(layer: &mut Layer, name: String, dims: Vec<DimId>, role: Role) -> TensorId {
    layer.tensors.push(Tensor { name, dims, role });
    TensorId(layer.tensors.len() - 1)
}

/// What a product reads, once more: from the fork that gives it already, or from a new one before the product. Also
/// where the product is then.
fn second_copy(layer: &mut Layer, at: usize) -> (TensorId, usize) {
    let read = layer.ops[at].operands[0];
    // Of data there may be any number of readers.
    if layer.is_data(read) {
        return (read, at);
    }
    let Tensor { name, dims, .. } = layer.tensors[read.0].clone();
    let copy = tensor(layer, format!("{name}.lora"), dims.clone(), Role::Activation);
    let fork = layer.producer(read).filter(|op| layer.ops[op.0].kind == OpKind::Fork);
    if let Some(fork) = fork {
        layer.ops[fork.0].results.push(copy);
        return (copy, at);
    }
    let first = tensor(layer, format!("{name}.base"), dims, Role::Activation);
    layer.ops[at].operands[0] = first;
    let fork = Op {
        name: format!("{name}.lora_fork"),
        kind: OpKind::Fork,
        operands: vec![read],
        results: vec![first, copy],
    };
    layer.ops.insert(at, fork);
    (copy, at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapted(name: &str, lora: &Lora) -> Result<Model, String> {
        let text = crate::shipped_model(name).unwrap().text;
        let mut model = crate::read_model(&format!("{name}.json"), text).unwrap();
        adapt(&mut model, lora)?;
        assert_eq!(ir::graph::check(&model), Ok(()));
        Ok(model)
    }

    fn lora(rank: u64, alpha: Option<f64>, targets: &[&str]) -> Lora {
        Lora { rank, alpha, targets: targets.iter().map(|&one| one.into()).collect() }
    }

    #[test]
    fn llama_3_8b_at_rank_16_learns_42_million() {
        // An adapter of a product of k by n has r * (k + n) parameters.
        let (h, kv, f) = (4096, 1024, 14336);
        let per_rank = (h + h) + 2 * (h + kv) + (h + h) + 3 * (h + f);
        let model = adapted("llama-3-8b", &lora(16, None, &[])).unwrap();
        assert_eq!(model.n_trained(), 32 * 16 * per_rank);
        assert_eq!(model.n_trained(), 41_943_040);
        assert_eq!(model.n_parameters(), 8_030_261_248 + 41_943_040);
    }

    #[test]
    fn targets_go_by_name_part_or_alias() {
        let (h, kv) = (4096, 1024);
        let expected = 32 * 8 * ((h + h) + (h + kv));
        for targets in [["q_proj", "v_proj"], ["attention.q", "v"]] {
            assert_eq!(adapted("llama-3-8b", &lora(8, None, &targets)).unwrap().n_trained(), expected);
        }
        let error = adapted("llama-3-8b", &lora(8, None, &["query"])).unwrap_err();
        assert!(error.starts_with("no product is called `query`: the model has attention.k, attention.out,"));
        assert!(adapted("llama-3-8b", &lora(0, None, &[])).is_err());
        assert!(adapted("llama-3-8b", &lora(8, Some(f64::NAN), &[])).is_err());
    }

    #[test]
    fn a_rank_beyond_that_of_a_weight_is_refused() {
        assert!(adapted("llama-3-8b", &lora(1024, None, &[])).is_ok());
        assert_eq!(
            adapted("llama-3-8b", &lora(1025, None, &["v"])).unwrap_err(),
            "the rank is 1025, and `attention.v` has a weight of 4096 x 1024: expected 1024 at most"
        );
        assert!(adapted("llama-3-8b", &lora(1025, None, &["mlp"])).is_ok());
        // An expert's weight, not that of all eight together.
        assert!(adapted("mixtral-8x7b", &lora(4097, None, &["mlp.gate"])).is_err());
    }

    #[test]
    fn every_expert_has_factors_of_its_own_and_the_router_has_none() {
        let model = adapted("mixtral-8x7b", &lora(4, Some(8.0), &[])).unwrap();
        let layer = model.layers.iter().find(|layer| layer.dims.iter().any(|dim| dim.name == "e")).unwrap();
        let shape = |name: &str| {
            let at = layer.tensors.iter().position(|tensor| tensor.name == name).map(TensorId);
            at.map(|at| layer.shape(at, &layer.sizes(1, 1)))
        };
        assert_eq!(shape("mlp.gate.lora_a.weight"), Some(vec![8, 4096, 4]));
        assert_eq!(shape("mlp.gate.lora_b.weight"), Some(vec![8, 4, 14336]));
        assert_eq!(shape("attention.out.lora_a.weight"), Some(vec![8, 4, 128, 4]));
        assert_eq!(shape("mlp.router.lora_a.weight"), None);
        let scales = layer.ops.iter().filter(|op| op.kind == OpKind::Scale { by: 2.0 }).count();
        assert_eq!(scales, 7);
    }

    #[test]
    fn every_shipped_model_can_be_adapted() {
        for shipped in crate::shipped_models() {
            let model = adapted(shipped.name, &lora(8, Some(16.0), &[])).unwrap();
            assert!(
                model.n_trained() > 0 && model.n_trained() < model.n_parameters() / 4,
                "{}",
                shipped.name
            );
        }
    }
}
