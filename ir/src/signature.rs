//! The factor signature of an operator in a layer: its loops, and which dims of which operand or result each walks.
//!
//! Derived from the operator's line and the names of its tensors' dims; nothing else in the program looks at dims of
//! operators one by one.

use std::borrow::Cow;

use crate::graph::{DimId, Extent, Layer, Op, TensorId};
use crate::op::{AttentionBias, AttentionMask, Missing, OpKind, Whole};

/// Position of a factor in its operator's signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FactorId(pub u8);

/// One loop of an operator.
#[derive(Clone, Debug, PartialEq)]
pub struct Factor {
    /// Name: that of the dim it walks; for the keys of attention `t`, or `tt` where the queries' dims have that name.
    pub name: String,
    /// A dim it walks; its length is the loop's.
    pub dim: DimId,
    /// What a strategy may do with it.
    pub split: Split,
}

/// What a strategy may do with a factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Cut it where the length divides.
    Even,
    /// Cut it anywhere; blocks may be unequal.
    Uneven,
    /// Never cut it.
    Whole,
}

/// Two loops of which an axis may cut the first while blocks of the second travel round it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RingLoops {
    /// The loop that is split.
    pub queries: FactorId,
    /// The loop whose blocks travel.
    pub keys: FactorId,
}

/// Loops of an operator and the dims they walk.
#[derive(Clone, Debug, PartialEq)]
pub struct Signature {
    /// The loops.
    pub factors: Vec<Factor>,
    /// Per operand, the loop that walks each dim.
    pub operands: Vec<Vec<FactorId>>,
    /// Per result, the loop that walks each dim.
    pub results: Vec<Vec<FactorId>>,
    /// What a loop that a result lacks leaves there.
    pub missing: Missing,
    /// Set where the operator may meet the rows of one loop block by block.
    pub ring: Option<RingLoops>,
}

impl Signature {
    /// Dim of operand `index` that a factor walks.
    pub fn operand_dim(&self, index: usize, factor: FactorId) -> Option<usize> {
        self.operands[index].iter().position(|&f| f == factor)
    }

    /// Dim of result `index` that a factor walks.
    pub fn result_dim(&self, index: usize, factor: FactorId) -> Option<usize> {
        self.results[index].iter().position(|&f| f == factor)
    }

    /// The dim of the first operand that no result walks: where a split cuts.
    pub fn cut_dim(&self) -> Option<usize> {
        self.operands
            .first()?
            .iter()
            .position(|factor| self.results.iter().all(|dims| !dims.contains(factor)))
    }

    /// The dim of the first result that no operand walks: where a concatenation puts its parts side by side.
    pub fn joined_dim(&self) -> Option<usize> {
        self.results
            .first()?
            .iter()
            .position(|factor| self.operands.iter().all(|dims| !dims.contains(factor)))
    }

    /// Factor of a name.
    pub fn factor(&self, name: &str) -> Option<FactorId> {
        self.factors.iter().position(|factor| factor.name == name).map(|i| FactorId(i as u8))
    }

    /// Text form: `x[b s h] w[h f] -> y[b s f]`, whole factors behind.
    pub fn display(&self, layer: &Layer, op: &Op) -> String {
        let side = |tensors: &[TensorId], dims: &[Vec<FactorId>]| {
            let one = |(tensor, dims): (&TensorId, &Vec<FactorId>)| {
                let names: Vec<&str> =
                    dims.iter().map(|f| self.factors[f.0 as usize].name.as_str()).collect();
                format!("{}[{}]", layer.tensors[tensor.0].name, names.join(" "))
            };
            tensors.iter().zip(dims).map(one).collect::<Vec<_>>().join(" ")
        };
        let whole: Vec<&str> =
            self.factors.iter().filter(|f| f.split == Split::Whole).map(|f| f.name.as_str()).collect();
        let tail = if whole.is_empty() { String::new() } else { format!("  whole {}", whole.join(" ")) };
        format!(
            "{}: {} -> {}{tail}",
            op.kind.line().name,
            side(&op.operands, &self.operands),
            side(&op.results, &self.results)
        )
    }
}

/// Whether the signature of an operator may have a ring.
pub fn may_ring(op: &Op) -> bool {
    matches!(op.kind.line().whole, Whole::KeysAndHeadDims)
}

/// The signature of an operator of a layer.
pub fn signature(layer: &Layer, op: &Op) -> Signature {
    let line = op.kind.line();
    let mut builder = Builder { layer, op, factors: Vec::new() };
    let operands: Vec<Vec<FactorId>> =
        op.operands.iter().enumerate().map(|(i, &tensor)| builder.walk(tensor, Some(i))).collect();
    let results: Vec<Vec<FactorId>> = op.results.iter().map(|&tensor| builder.walk(tensor, None)).collect();
    let mut factors = builder.factors;
    let mut close = |id: &FactorId| factors[id.0 as usize].split = Split::Whole;
    let last = |dims: &[FactorId]| dims.last().copied();
    match line.whole {
        Whole::None => {}
        Whole::Last => last(&operands[0]).iter().for_each(&mut close),
        Whole::Tails => operands.iter().chain(&results).filter_map(|d| last(d)).for_each(|id| close(&id)),
        Whole::TableRows => operands[2].first().iter().for_each(|id| close(id)),
        Whole::KeysAndHeadDims => {
            operands[1].get(1).iter().for_each(|id| close(id));
            [&operands[0], &operands[1], &operands[2]]
                .into_iter()
                .filter_map(|d| last(d))
                .for_each(|id| close(&id));
        }
    }
    if line.missing == Missing::Whole {
        // Two results may differ in their dims (the parts of a split); a loop must be in all or in none of them.
        for id in (0..factors.len()).map(|i| FactorId(i as u8)) {
            if results.iter().any(|dims| !dims.contains(&id)) {
                factors[id.0 as usize].split = Split::Whole;
            }
        }
    }
    // A loop that only results walk (the parts of a split) cuts nothing that comes in.
    for id in (0..factors.len()).map(|i| FactorId(i as u8)) {
        if operands.iter().all(|dims| !dims.contains(&id)) {
            factors[id.0 as usize].split = Split::Whole;
        }
    }
    if matches!(op.kind, OpKind::Dispatch | OpKind::Combine) && op.operands.len() > 2 {
        let sequences = factors.iter_mut().filter(|f| layer.dims[f.dim.0].extent == Extent::Sequence);
        sequences.for_each(|factor| factor.split = Split::Whole);
    }
    let loop_at = |operand: usize, dim: usize| operands.get(operand).and_then(|dims| dims.get(dim)).copied();
    let ring = match (line.whole, loop_at(0, 1), loop_at(1, 1)) {
        (Whole::KeysAndHeadDims, Some(queries), Some(keys)) if queries != keys => {
            Some(RingLoops { queries, keys })
        }
        _ => None,
    };
    Signature { factors, operands, results, missing: line.missing, ring }
}

struct Builder<'a> {
    layer: &'a Layer,
    op: &'a Op,
    factors: Vec<Factor>,
}

impl<'a> Builder<'a> {
    fn walk(&mut self, tensor: TensorId, operand: Option<usize>) -> Vec<FactorId> {
        let dims = &self.layer.tensors[tensor.0].dims;
        dims.iter().enumerate().map(|(at, &dim)| self.factor(dim, self.name(dim, at, operand))).collect()
    }

    /// Name of the loop that walks a dim: the dim's, but for the two renamings.
    fn name(&self, dim: DimId, at: usize, operand: Option<usize>) -> Cow<'a, str> {
        let own = &self.layer.dims[dim.0];
        match (&self.op.kind, operand) {
            (OpKind::Attention { .. }, Some(1 | 2)) if at == 1 => Cow::Owned(self.keys_loop()),
            (OpKind::Attention { mask: AttentionMask::Causal, .. }, Some(4)) => Cow::Owned(self.keys_loop()),
            (OpKind::Dispatch | OpKind::Combine, _) if own.extent.is_one_slot_per_token() => {
                let sequence = self.layer.dims.iter().find(|d| d.extent == Extent::Sequence);
                Cow::Borrowed(&sequence.unwrap_or(own).name)
            }
            _ => Cow::Borrowed(&own.name),
        }
    }

    /// Name of the loop over keys: no other loop's, whatever the dims are called.
    fn keys_loop(&self) -> String {
        let queries = self.op.operands.first().map(|queries| self.layer.tensors[queries.0].dims.as_slice());
        let is_taken = |name: &str| {
            queries.is_some_and(|dims| dims.iter().any(|dim| self.layer.dims[dim.0].name == name))
        };
        let mut name = "t".to_owned();
        while is_taken(&name) {
            name.push('t');
        }
        name
    }

    fn factor(&mut self, dim: DimId, name: Cow<'_, str>) -> FactorId {
        if let Some(at) = self.factors.iter().position(|factor| factor.name == name) {
            return FactorId(at as u8);
        }
        let split = match self.layer.dims[dim.0].extent {
            Extent::Uneven(_) => Split::Uneven,
            // Which token has which slot is known only with all tokens of the sequence.
            Extent::Slots { capacity: Some(_), .. } => Split::Whole,
            Extent::Fixed(_)
            | Extent::MicroBatch
            | Extent::Sequence
            | Extent::UpToSlice
            | Extent::Slots { .. } => Split::Even,
        };
        self.factors.push(Factor { name: name.into_owned(), dim, split });
        FactorId((self.factors.len() - 1) as u8)
    }
}

/// Checks the number of operands and results of an operator, and that their dims fit its kind.
///
/// # Errors
/// A sentence that names the operator and what does not fit.
pub fn check_operands(layer: &Layer, op: &Op) -> Result<(), String> {
    let (operands, results) = arity(&op.kind);
    if !operands.contains(&op.operands.len()) || !results.contains(&op.results.len()) {
        return Err(format!(
            "operator `{}`: {} takes {:?} operands and gives {:?} results, found {} and {}",
            op.name,
            op.kind.line().name,
            operands,
            results,
            op.operands.len(),
            op.results.len()
        ));
    }
    mask_rule(layer, op)
        .and_then(|()| shape_rule(layer, op))
        .map_err(|what| format!("operator `{}` ({}): {what}", op.name, op.kind.line().name))
}

/// Allowed numbers of operands and results.
fn arity(kind: &OpKind) -> (Vec<usize>, Vec<usize>) {
    let many: Vec<usize> = (1..=64).collect();
    match kind {
        OpKind::Act { .. } | OpKind::Scale { .. } | OpKind::Softcap { .. } | OpKind::RowMax => {
            (vec![1], vec![1])
        }
        OpKind::Extend | OpKind::Weigh { .. } => (vec![1], vec![1]),
        OpKind::SumLoss => (vec![1, 2], vec![1]),
        OpKind::Fork => (vec![1], many),
        OpKind::Split { sizes } => (vec![1], vec![sizes.len()]),
        OpKind::Concat { sizes } => (vec![sizes.len()], vec![1]),
        OpKind::Embed
        | OpKind::Linear
        | OpKind::Bias
        | OpKind::RmsNorm { .. }
        | OpKind::Rope { .. }
        | OpKind::Glu { .. }
        | OpKind::Gate
        | OpKind::Add
        | OpKind::AppendShared
        | OpKind::SumExp
        | OpKind::Pick => (vec![2], vec![1]),
        OpKind::Dispatch | OpKind::Combine => (vec![2, 3], vec![1]),
        OpKind::AddPosition { .. } | OpKind::LayerNorm { .. } | OpKind::CrossEntropy => (vec![3], vec![1]),
        OpKind::Route { .. } => (vec![1, 2], vec![1]),
        OpKind::Attention { bias, mask, .. } => match bias {
            AttentionBias::None => (vec![mask.n_operands()], vec![1]),
            AttentionBias::Slopes | AttentionBias::Sinks => (vec![mask.n_operands() + 1], vec![1]),
        },
    }
}

/// Windows and slopes count positions, which attention that sees all keys does not know; a causal mask compares
/// positions of one sequence.
fn mask_rule(layer: &Layer, op: &Op) -> Result<(), String> {
    let OpKind::Attention { window, bias, mask, .. } = &op.kind else { return Ok(()) };
    let extent = |operand: usize| {
        let dim = layer.tensors[op.operands[operand].0].dims.get(1);
        dim.map(|dim| layer.dims[dim.0].extent)
    };
    let of_two = matches!((extent(0), extent(1)), (Some(queries), Some(keys))
        if queries != keys && keys != Extent::UpToSlice);
    match mask {
        AttentionMask::Full if window.is_some() => Err("a window needs the mask `causal`".into()),
        AttentionMask::Full if *bias == AttentionBias::Slopes => Err("slopes need the mask `causal`".into()),
        AttentionMask::Causal if of_two => Err(
            "under the mask `causal` queries and keys are of one sequence; for keys of another, use the mask `full`"
                .into(),
        ),
        AttentionMask::Causal | AttentionMask::Full => Ok(()),
    }
}

fn shape_rule(layer: &Layer, op: &Op) -> Result<(), String> {
    let dims = |t: TensorId| layer.tensors[t.0].dims.as_slice();
    let operand = |i: usize| dims(op.operands[i]);
    let result = dims(op.results[0]);
    let has = |all: &[DimId], part: &[DimId]| part.iter().all(|dim| all.contains(dim));
    if let OpKind::Rope { dims: rotated, .. } = &op.kind {
        let there = last_fixed(layer, operand(0));
        if *rotated > there {
            return Err(format!(
                "dims is {rotated}, more than the {there} of the last dim of what it rotates"
            ));
        }
    }
    let ok = match &op.kind {
        OpKind::Linear => {
            let both = |dim: &DimId| operand(0).contains(dim) || operand(1).contains(dim);
            let summed = operand(0).iter().all(|d| result.contains(d) || operand(1).contains(d));
            let used = operand(1).iter().all(|d| result.contains(d) || operand(0).contains(d));
            result.iter().all(both) && summed && used
        }
        OpKind::Bias => operand(0) == result && has(operand(0), operand(1)),
        OpKind::RmsNorm { .. } => {
            operand(0) == result && operand(1) == &result[result.len().saturating_sub(1)..]
        }
        OpKind::LayerNorm { .. } => {
            operand(0) == result
                && operand(1) == operand(2)
                && operand(1) == &result[result.len().saturating_sub(1)..]
        }
        OpKind::Rope { .. } => operand(0) == result && operand(1).len() == 1 && has(operand(0), operand(1)),
        OpKind::Glu { .. } | OpKind::Add => operand(0) == result && operand(1) == result,
        OpKind::Act { .. } | OpKind::Scale { .. } | OpKind::Softcap { .. } => operand(0) == result,
        OpKind::Fork => op.results.iter().all(|&t| dims(t) == operand(0)),
        OpKind::Gate => operand(0) == result && operand(1) == rows(result),
        OpKind::Embed => operand(0).len() == 2 && operand(1).len() == 2 && result.len() == 3,
        OpKind::AddPosition { .. } => operand(0) == result && operand(1).len() == 1 && operand(2).len() == 2,
        OpKind::Attention { mask, .. } => attends(layer, op, *mask),
        OpKind::Split { sizes } => are_parts(layer, op.operands[0], (&op.results, sizes)),
        OpKind::Concat { sizes } => are_parts(layer, op.results[0], (&op.operands, sizes)),
        OpKind::Extend => {
            operand(0).len() == result.len()
                && operand(0).first() == result.first()
                && operand(0).get(2..) == result.get(2..)
        }
        OpKind::AppendShared => operand(0).len() == 4 && operand(1).len() == 3 && result.len() == 4,
        OpKind::Route { top_k, groups, .. } => {
            let experts = last_fixed(layer, result);
            operand(0) == result
                && *top_k >= 1
                && *top_k <= experts
                && *groups >= 1
                && experts.is_multiple_of(*groups)
        }
        OpKind::Dispatch => {
            operand(0).len() == 3
                && operand(1).len() == 3
                && result.len() == 4
                && is_sequence(layer, operand(0)[1])
                && orders_slots(layer, op, result[2])
        }
        OpKind::Combine => {
            operand(0).len() == 4
                && operand(1).len() == 3
                && result.len() == 3
                && is_sequence(layer, result[1])
                && orders_slots(layer, op, operand(0)[2])
        }
        OpKind::RowMax => rows(operand(0)) == result,
        OpKind::SumExp | OpKind::Pick => {
            rows(operand(0)) == result && operand(1) == result && result.len() > 1
        }
        OpKind::CrossEntropy => (0..3).all(|i| operand(i) == result),
        OpKind::Weigh { by } => operand(0) == result && by.len() as u64 == last_fixed(layer, result),
        OpKind::SumLoss => result.is_empty() && op.operands.get(1).is_none_or(|&l| dims(l) == operand(0)),
    };
    if ok {
        Ok(())
    } else {
        Err(format!("the dims of its tensors do not fit: {}", signature(layer, op).display(layer, op)))
    }
}

/// Queries, keys, values and results of attention fit together, and so does its extra operand.
fn attends(layer: &Layer, op: &Op, mask: AttentionMask) -> bool {
    let dims = |t: TensorId| layer.tensors[t.0].dims.as_slice();
    let operand = |i: usize| dims(op.operands[i]);
    let result = dims(op.results[0]);
    let extra = op.operands.get(mask.n_operands()).map(|&extra| dims(extra));
    operand(0).len() == 5
        && operand(1).len() == 4
        && operand(2).len() == 4
        && result.len() == 5
        && operand(0)[..4] == result[..4]
        && operand(0)[4] == operand(1)[3]
        && operand(2)[3] == result[4]
        && operand(1)[0] == operand(0)[0]
        && operand(1)[2] == operand(0)[2]
        && operand(2)[..3] == operand(1)[..3]
        && extra.is_none_or(|extra| extra == &operand(0)[2..4])
}

/// Slots are counted by the tokens of the sequence, so it is those that experts are given.
fn is_sequence(layer: &Layer, dim: DimId) -> bool {
    layer.dims[dim.0].extent == Extent::Sequence
}

/// Positions say in which order tokens take slots, where there are fewer slots than tokens, and only there.
fn orders_slots(layer: &Layer, op: &Op, slots: DimId) -> bool {
    let limited = matches!(layer.dims[slots.0].extent, Extent::Slots { capacity: Some(_), .. });
    let positions = op.operands.get(2).map(|tensor| layer.tensors[tensor.0].dims.as_slice());
    let sequence = |dims: &[DimId]| matches!(dims, [dim] if is_sequence(layer, *dim));
    positions.map_or(!limited, |dims| limited && sequence(dims))
}

/// Each part has the dims of the whole, but for the one that no part has a dim of its own length, or none where that is
/// one.
fn are_parts(layer: &Layer, whole: TensorId, (parts, sizes): (&[TensorId], &[u64])) -> bool {
    let dims = |t: TensorId| layer.tensors[t.0].dims.as_slice();
    let whole = dims(whole);
    let Some(at) = whole.iter().position(|dim| parts.iter().all(|&part| !dims(part).contains(dim))) else {
        return false;
    };
    let part = |(&tensor, &size): (&TensorId, &u64)| {
        let part = dims(tensor);
        let (before, after) = (&whole[..at], &whole[at + 1..]);
        let keeps = part.len() == whole.len() && fixed(layer, part[at]) == size && part[at + 1..] == *after;
        let loses = part.len() + 1 == whole.len() && size == 1 && part[at..] == *after;
        part.starts_with(before) && (keeps || loses)
    };
    let sum: u64 = sizes.iter().sum();
    sum == fixed(layer, whole[at]) && sizes.iter().all(|&n| n > 0) && parts.iter().zip(sizes).all(part)
}

/// All dims but the last.
fn rows(dims: &[DimId]) -> &[DimId] {
    dims.split_last().map_or(dims, |(_, rows)| rows)
}

/// Length of the last dim, where the model fixes it.
fn last_fixed(layer: &Layer, dims: &[DimId]) -> u64 {
    dims.last().map_or(0, |dim| fixed(layer, *dim))
}

fn fixed(layer: &Layer, dim: DimId) -> u64 {
    layer.dims[dim.0].extent.fixed().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builder::LayerBuilder;
    use crate::graph::{Dim, Role, Tensor};

    /// The parts' common dim is a loop that the operand lacks: cutting it would cut nothing that comes in.
    #[test]
    fn a_split_is_whole_in_the_dims_that_it_cuts_and_makes() {
        let dim = |name: &str, extent| Dim { name: name.into(), extent };
        let tensor = |name: &str, dims: [usize; 2]| Tensor {
            name: name.into(),
            dims: dims.map(DimId).to_vec(),
            role: Role::Activation,
        };
        let ids = |ids: &[usize]| ids.iter().copied().map(TensorId).collect();
        let kind = OpKind::Split { sizes: vec![4, 4] };
        let op = Op { name: "split".into(), kind, operands: ids(&[0]), results: ids(&[1, 2]) };
        let layer = Layer {
            name: "layer".into(),
            dims: vec![dim("s", Extent::Sequence), dim("f", Extent::Fixed(8)), dim("d", Extent::Fixed(4))],
            tensors: vec![tensor("x", [0, 1]), tensor("k", [0, 2]), tensor("v", [0, 2])],
            ops: vec![op.clone()],
            stream_in: vec![TensorId(0)],
            out: vec![TensorId(1), TensorId(2)],
        };
        assert_eq!(signature(&layer, &op).display(&layer, &op), "split: x[s f] -> k[s d] v[s d]  whole f d");
    }

    /// Dims may be called `t`; keys still have a loop of their own. A causal mask compares positions of one sequence.
    #[test]
    fn attention_without_a_mask_takes_no_positions_and_keys_of_any_length() {
        let checked = |mask, keys: &str, window: Option<u64>, bias, extra: &[&str]| {
            let mut b = LayerBuilder::new("layer");
            for (name, length) in [("t", 6), ("m", 5), ("k", 2), ("r", 3), ("d", 4)] {
                b.fixed(name, length);
            }
            let mut operands = vec![b.tensor("q", "b t k r d", Role::Activation)];
            operands.push(b.tensor("key", &format!("b {keys} k d"), Role::Activation));
            operands.push(b.tensor("value", &format!("b {keys} k d"), Role::Activation));
            operands.extend(extra.iter().map(|dims| b.tensor(dims, dims, Role::Activation)));
            let kind = OpKind::Attention { scale: None, window, softcap: None, bias, mask };
            let y = b.op("core", kind, &operands, "b t k r d");
            let layer = b.finish(y);
            check_operands(&layer, &layer.ops[0])
                .map(|()| signature(&layer, &layer.ops[0]).display(&layer, &layer.ops[0]))
        };
        let (full, causal) = (AttentionMask::Full, AttentionMask::Causal);
        let (none, slopes) = (AttentionBias::None, AttentionBias::Slopes);
        insta::assert_snapshot!(checked(full, "t", None, none, &[]).unwrap(), @"attention: q[b t k r d] key[b tt k d] value[b tt k d] -> core[b t k r d]  whole d tt");
        insta::assert_snapshot!(checked(full, "m", None, AttentionBias::Sinks, &["k r"]).unwrap(), @"attention: q[b t k r d] key[b tt k d] value[b tt k d] k r[k r] -> core[b t k r d]  whole d tt");
        insta::assert_snapshot!(checked(causal, "t", Some(2), none, &["t", "t"]).unwrap(), @"attention: q[b t k r d] key[b tt k d] value[b tt k d] t[t] t[tt] -> core[b t k r d]  whole d tt");
        insta::assert_snapshot!(checked(causal, "m", None, none, &["t", "m"]).unwrap_err(), @"operator `core` (attention): under the mask `causal` queries and keys are of one sequence; for keys of another, use the mask `full`");
        insta::assert_snapshot!(checked(full, "t", Some(2), none, &[]).unwrap_err(), @"operator `core` (attention): a window needs the mask `causal`");
        insta::assert_snapshot!(checked(full, "t", None, slopes, &["k r"]).unwrap_err(), @"operator `core` (attention): slopes need the mask `causal`");
        insta::assert_snapshot!(checked(full, "t", None, none, &["t", "t"]).unwrap_err(), @"operator `core`: attention takes [3] operands and gives [1] results, found 5 and 1");
        insta::assert_snapshot!(checked(full, "t", None, AttentionBias::Sinks, &["k d"]).unwrap_err(), @"operator `core` (attention): the dims of its tensors do not fit: attention: q[b t k r d] key[b tt k d] value[b tt k d] k d[k d] -> core[b t k r d]  whole d tt");
    }

    #[test]
    fn attention_alone_may_have_a_ring() {
        let mut b = LayerBuilder::new("layer");
        for (name, length) in [("k", 2), ("r", 3), ("d", 4), ("h", 24)] {
            b.fixed(name, length);
        }
        let [q, key, value] = [("q", "b s k r d"), ("key", "b s k d"), ("value", "b s k d")]
            .map(|(name, dims)| b.tensor(name, dims, Role::Activation));
        let positions = b.tensor("positions", "s", Role::Activation);
        let core =
            b.op("core", OpKind::CAUSAL_ATTENTION, &[q, key, value, positions, positions], "b s k r d");
        let weight = b.parameter("weight", "k r d h", crate::graph::Init::Normal);
        let y = b.op("o", OpKind::Linear, &[core, weight], "b s h");
        let layer = b.finish(y);
        assert!(layer.ops.iter().any(may_ring));
        for op in &layer.ops {
            let attends = op.name == "core";
            assert_eq!(
                (may_ring(op), signature(&layer, op).ring.is_some()),
                (attends, attends),
                "{}",
                op.name
            );
        }
    }

    #[test]
    fn experts_are_given_tokens_of_the_sequence() {
        let with = |tokens: Extent| {
            let mut b = crate::builder::LayerBuilder::new("routed");
            b.dim("q", tokens);
            b.fixed("h", 8);
            b.fixed("e", 4);
            b.dim("c", Extent::Slots { filled: 0.5, capacity: None });
            let [x, weight] =
                [("x", "b q h"), ("weight", "b q e")].map(|(n, d)| b.tensor(n, d, Role::Activation));
            let slots = b.op("dispatch", OpKind::Dispatch, &[x, weight], "b e c h");
            let layer = b.finish(slots);
            check_operands(&layer, &layer.ops[0])
        };
        assert_eq!(with(Extent::Sequence), Ok(()));
        assert!(with(Extent::Fixed(8)).is_err());
    }
}
