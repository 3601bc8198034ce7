//! The shrunk model: new lengths, and the attributes of operators that go with them.

use serde_json::Value;

use crate::graph::{Extent, Layer, Model, Op};
use crate::op::{OpKind, RotarySide};
use crate::plan::Plan;
use crate::plan::check::OpenPlan;
use crate::shrink::dims::ClassId;
use crate::shrink::lengths::{Part, SmallSizes, small_route};

/// The model with the lengths of `sizes`.
pub(super) fn adapt(plan: &Plan, open: &OpenPlan, sizes: &SmallSizes) -> Model {
    let mut model = open.model.clone();
    for (l, layer) in open.model.layers.iter().enumerate() {
        let small = &mut model.layers[l];
        for (d, dim) in layer.dims.iter().enumerate() {
            let length = sizes.lengths[sizes.classes.class(l, crate::graph::DimId(d)).0];
            small.dims[d].extent = match dim.extent {
                Extent::Fixed(_) => Extent::Fixed(length),
                Extent::Uneven(_) => Extent::Uneven(length),
                Extent::Slots { filled, capacity } => {
                    Extent::Slots { filled: filled_share(layer, filled, l, sizes), capacity }
                }
                Extent::MicroBatch | Extent::Sequence | Extent::UpToSlice => dim.extent,
            };
        }
        for (o, op) in layer.ops.iter().enumerate() {
            small.ops[o].kind = adapt_kind((l, layer), op, plan.job.sequence, sizes);
        }
    }
    model
}

/// Class of the dim of which an operator's attributes speak, with its lengths before and after: that which has parts,
/// else the last of its first operand.
fn described((l, layer): (usize, &Layer), op: &Op, sizes: &SmallSizes) -> Option<(ClassId, u64, u64)> {
    let class = if matches!(op.kind, OpKind::Split { .. } | OpKind::Concat { .. }) {
        sizes.classes.of_parts((l, layer), op)?
    } else {
        sizes.classes.last((l, layer), *op.operands.first()?)?
    };
    Some((class, sizes.classes.length(class)?, sizes.lengths[class.0]))
}

fn adapt_kind(layer: (usize, &Layer), op: &Op, sequence: u64, sizes: &SmallSizes) -> OpKind {
    let mut kind = op.kind.clone();
    let Some((class, before, after)) = described(layer, op, sizes) else { return kind };
    if let OpKind::Rope { dims, side, .. } = &mut kind {
        *dims = rotated(*dims, *side, (class, before, after), sizes);
    }
    if let OpKind::Attention { window: Some(window), .. } = &mut kind {
        let (l, layer) = layer;
        let keys = op.operands.get(1).and_then(|keys| layer.tensors[keys.0].dims.get(1));
        let keys = keys.map(|&dim| sizes.classes.class(l, dim));
        let fixed = keys.and_then(|keys| Some((sizes.classes.length(keys)?, sizes.lengths[keys.0])));
        let (large, small) = fixed.unwrap_or((sequence, sizes.sequence));
        // A window that hides something still does; one that hides nothing may stay.
        *window = if *window < large { (small / 2).max(1) } else { *window };
    }
    if let OpKind::Split { sizes: parts } | OpKind::Concat { sizes: parts } = &mut kind {
        let sum = sizes.sums.iter().find(|sum| sum.total == class && sum.parts.len() == parts.len());
        for (size, part) in parts.iter_mut().zip(sum.iter().flat_map(|sum| &sum.parts)) {
            *size = match part {
                Part::Class(class) => sizes.lengths[class.0],
                Part::Constant(n) => *n,
            };
        }
    }
    if let OpKind::Route { top_k, groups, top_groups, .. } = &mut kind {
        let small = small_route(*top_k, *groups, *top_groups);
        *top_k = if *top_k >= before { after } else { small.top_k.min(after) };
        (*groups, *top_groups) = (small.groups, small.top_groups);
    }
    kind
}

/// All of a head stays all of it, a part of a known length goes with that part, any other share becomes half.
fn rotated(
    dims: u64,
    side: RotarySide,
    (class, before, after): (ClassId, u64, u64),
    sizes: &SmallSizes,
) -> u64 {
    if dims > before {
        return dims;
    }
    if dims == before {
        return after;
    }
    let parts = sizes.sums.iter().filter(|sum| sum.total == class).flat_map(|sum| &sum.parts);
    let mut fitting = parts.filter_map(|part| match part {
        Part::Class(part) => (sizes.classes.length(*part) == Some(dims)).then(|| sizes.lengths[part.0]),
        Part::Constant(n) => (*n == dims).then_some(*n),
    });
    let part = match side {
        RotarySide::First => fitting.next(),
        RotarySide::Last => fitting.next_back(),
    };
    part.unwrap_or((after / 2).next_multiple_of(2).min(after))
}

/// The expected share of slots in use, with the small router's numbers in place of the large one's.
fn filled_share(layer: &Layer, filled: f64, l: usize, sizes: &SmallSizes) -> f64 {
    let share = |top_k: u64, experts: u64| top_k as f64 / experts.max(1) as f64;
    let ratio = layer.ops.iter().find_map(|op| {
        let OpKind::Route { top_k, .. } = op.kind else { return None };
        let (_, before, after) = described((l, layer), op, sizes)?;
        let OpKind::Route { top_k: small, .. } = adapt_kind((l, layer), op, 0, sizes) else { return None };
        Some(share(small, after) / share(top_k, before))
    });
    (filled * ratio.unwrap_or(1.0)).min(1.0)
}

/// What differs between two models that differ in lengths and attributes only, one line each.
pub(super) fn changes(before: &Model, after: &Model) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut note = |line: String| {
        if !lines.contains(&line) {
            lines.push(line);
        }
    };
    for (old, new) in before.layers.iter().zip(&after.layers) {
        for (a, b) in old.dims.iter().zip(&new.dims) {
            if let (Some(m), Some(n)) = (a.extent.fixed(), b.extent.fixed())
                && m != n
            {
                note(format!("dim {}: {m} -> {n}", a.name));
            }
        }
        for (a, b) in old.ops.iter().zip(&new.ops) {
            attribute_changes(a, b).into_iter().for_each(&mut note);
        }
    }
    lines
}

fn attribute_changes(before: &Op, after: &Op) -> Vec<String> {
    let fields = |op: &Op| match serde_json::to_value(&op.kind) {
        Ok(Value::Object(fields)) => fields,
        _ => serde_json::Map::new(),
    };
    let (old, new) = (fields(before), fields(after));
    let changed = old
        .iter()
        .filter_map(|(name, value)| new.get(name).filter(|n| *n != value).map(|n| (name, value, n)));
    changed.map(|(name, value, now)| format!("{} {name}: {value} -> {now}", before.name)).collect()
}
