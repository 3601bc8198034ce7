//! Tolerances of bf16, operator by operator: every kernel keeps its own, and one that rounds otherwise does not.

use ir::op::OpKind;

use super::Noise;
use super::cases::{Case, cases};
use crate::audit::{self, Leaves};
use crate::element::Element;
use crate::kernels::{self, Tensor, Value, backward, forward};
use crate::routing;

type Rounding = fn(f32) -> f32;

pub(super) fn nearest(value: f32) -> f32 {
    value.to_bf16()
}

/// Towards zero: wrong by up to the whole distance to the next number.
pub(super) fn truncated(value: f32) -> f32 {
    f32::from_bits(value.to_bits() & 0xffff_0000)
}

pub(super) fn bf16(tensor: &Tensor<f64>) -> Tensor<f32> {
    tensor.mapv(|value| (value as f32).to_bf16())
}

pub(super) fn operands(case: &Case) -> Vec<Value<f32>> {
    let one = |value: &Value<f64>| match value {
        Value::Float(tensor) => Value::Float(bf16(tensor)),
        Value::Index(index) => Value::Index(index.clone()),
    };
    case.operands.iter().map(one).collect()
}

/// Excess of a case's forward whose results are rounded so.
fn forward_excess(case: &Case, round: Rounding) -> f64 {
    let (whole, operands) = (case.whole(), operands(case));
    let (context, refs) = (case.context(&whole), operands.iter().collect::<Vec<_>>());
    let mut found = forward(&context, &refs).unwrap();
    for value in &mut found {
        if let Value::Float(tensor) = value {
            tensor.mapv_inplace(round);
        }
    }
    let found: Vec<_> = found.iter().map(|value| (value, Leaves::Rounded)).collect();
    audit::forward((&context, None), &refs, &found).unwrap()
}

/// The same of backward.
fn backward_excess(case: &Case, round: Rounding) -> f64 {
    let (whole, operands) = (case.whole(), operands(case));
    let context = case.context(&whole);
    let saves = case.kind().line().saves;
    let given: Vec<Option<&Value<f32>>> = operands
        .iter()
        .enumerate()
        .map(|(i, value)| (saves.contains(&i) || value.as_index().is_some()).then_some(value))
        .collect();
    let arriving: Vec<Tensor<f32>> = case.gradients.iter().map(bf16).collect();
    let arriving: Vec<_> = arriving.iter().map(Some).collect();
    let mut found = backward(&context, &given, &arriving).unwrap();
    found.iter_mut().flatten().for_each(|tensor| tensor.mapv_inplace(round));
    let found: Vec<_> =
        found.iter().map(|tensor| tensor.as_ref().map(|tensor| (tensor, Leaves::Rounded))).collect();
    audit::backward((&context, None), &given, &arriving, &found).unwrap()
}

#[test]
fn every_operator_keeps_its_tolerance() {
    for case in cases().into_iter().filter(|case| !routing::is_router(case.kind())) {
        let excess = [forward_excess(&case, nearest), backward_excess(&case, nearest)];
        assert!(excess.iter().all(|excess| *excess <= 1.0), "{}: {excess:?}", case.name);
    }
}

/// A loss is one element: moves of its terms up and down may cancel, roundings of its sum are there all the same.
#[test]
fn sums_of_a_few_losses_keep_their_tolerance_whatever_the_losses() {
    let case = Case::new(OpKind::SumLoss, "l[b:2 s:8] -> loss[]");
    let (whole, mut noise) = (case.whole(), Noise::new(5));
    let context = case.context(&whole);
    let mut n_found = 0;
    for _ in 0..500 {
        let losses = noise.tensor(&[2, 8]).mapv(|x| (2.0 + x) as f32);
        let operand = Value::Float(losses.clone());
        let excess = |loss: f32| {
            let found: Value<f32> = Value::Float(Tensor::from_elem(ndarray::IxDyn(&[]), loss));
            audit::forward((&context, None), &[&operand], &[(&found, Leaves::Single)]).unwrap()
        };
        let single = losses.iter().fold(0.0, |sum, loss| sum + loss);
        assert!(excess(single) <= 1.0, "{}: {losses}", excess(single));
        let rounded = losses.iter().fold(0.0, |sum, loss| nearest(sum + loss));
        n_found += usize::from(excess(rounded) > 1.0);
    }
    assert!(n_found > 490, "{n_found}");
}

#[test]
fn a_result_that_is_cut_off_instead_of_rounded_is_found() {
    let mut found = 0;
    for case in cases().into_iter().filter(|case| !routing::is_router(case.kind())) {
        // What only moves numbers leaves nothing to round, and of a few numbers none may be far from the cut.
        let moves = forward_excess(&case, nearest) < 0.5;
        let n_results: usize = case.gradients.iter().map(Tensor::len).sum();
        let is_found = forward_excess(&case, truncated) > 1.0;
        assert!(moves || n_results < 12 || is_found, "{}", case.name);
        found += usize::from(is_found);
    }
    assert!(found > 10, "{found}");
}

/// A product whose sums are rounded after every term.
fn product_in_bf16(x: &Tensor<f32>, w: &Tensor<f32>, n_terms: usize) -> Tensor<f32> {
    let (rows, columns) = (x.shape()[1], w.shape()[1]);
    Tensor::from_shape_fn(vec![1, rows, columns], |at| {
        (0..n_terms).fold(0.0_f32, |sum, k| (sum + x[[0, at[1], k]] * w[[k, at[2]]]).to_bf16())
    })
}

#[test]
fn a_product_that_adds_in_bf16_or_lacks_a_term_is_found() {
    for h in [8_usize, 64, 256] {
        let case = Case::new(OpKind::Linear, &format!("x[b:1 s:5 h:{h}] w[h f:7] -> y[b s f]"));
        let (whole, operands) = (case.whole(), operands(&case));
        let (context, refs) = (case.context(&whole), operands.iter().collect::<Vec<_>>());
        let judge = |y: Tensor<f32>| {
            audit::forward((&context, None), &refs, &[(&Value::Float(y), Leaves::Rounded)]).unwrap()
        };
        let (x, w) = (operands[0].as_float().unwrap(), operands[1].as_float().unwrap());
        assert!(judge(product_in_bf16(x, w, h)) > 1.0, "{h} terms added in bf16");
        let all = kernels::forward(&context, &refs).unwrap()[0].as_float().unwrap().clone();
        assert!(judge(all.mapv(nearest)) <= 1.0);
        // Rounded only at the end, but without the last term.
        let last = |at: &[usize]| x[[0, at[1], h - 1]] * w[[h - 1, at[2]]];
        let less = Tensor::from_shape_fn(all.raw_dim(), |at| all[&at] - last(&[at[0], at[1], at[2]]));
        assert!(judge(less.mapv(nearest)) > 1.0, "a term of {h} is missing");
    }
}
