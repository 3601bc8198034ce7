//! Operators against closed formulas and against each other.

use ir::op::{
    Activation, AttentionBias, AttentionMask, Gating, GroupScore, Normalize, OpKind as K, RotarySide,
    RouterScore,
};
use ndarray::{IxDyn, arr1, arr2};

use super::cases::Case;
use super::{Noise, assert_close, rows};
use crate::kernels::{Index, Tensor, Value, forward};

/// The only result of a kind on the given numbers.
fn run(kind: K, text: &str, operands: &[Value<f64>]) -> Tensor<f64> {
    Case::new(kind, text).forward(operands).remove(0)
}

fn float(shape: &[usize], elements: &[f64]) -> Value<f64> {
    Value::Float(Tensor::from_shape_vec(IxDyn(shape), elements.to_vec()).unwrap())
}

fn index(elements: &[i64]) -> Value<f64> {
    Value::Index(Index::from_shape_vec(IxDyn(&[elements.len()]), elements.to_vec()).unwrap())
}

fn softmax(z: &[f64]) -> Vec<f64> {
    let total: f64 = z.iter().map(|z| z.exp()).sum();
    z.iter().map(|z| z.exp() / total).collect()
}

#[test]
fn the_parts_of_cross_entropy_give_minus_the_log_of_the_probability() {
    let z = [0.3, -1.2, 2.0, 500.0, 501.0, 499.5];
    let text = "z[b:1 s:2 v:3]";
    let scores = float(&[1, 2, 3], &z);
    let labels = Value::Index(Index::from_shape_vec(IxDyn(&[1, 2]), vec![1, 2]).unwrap());
    let m = run(K::RowMax, &format!("{text} -> m[b s]"), std::slice::from_ref(&scores));
    let e = run(K::SumExp, &format!("{text} m[b s] -> e[b s]"), &[scores.clone(), m.clone().into()]);
    let t = run(K::Pick, &format!("{text} labels[b s] -> t[b s]"), &[scores, labels]);
    let l = run(K::CrossEntropy, "e[b:1 s:2] m[b s] t[b s] -> l[b s]", &[e.into(), m.into(), t.into()]);
    let second: Vec<f64> = z[3..].iter().map(|z| z - 500.0).collect();
    let expected = arr2(&[[-softmax(&z[..3])[1].ln(), -softmax(&second)[2].ln()]]).into_dyn();
    assert_close(&l, &expected, 1e-12, "loss");
    let loss = run(K::SumLoss, "l[b:1 s:2] -> loss[]", &[l.clone().into()]);
    assert_eq!(loss[IxDyn(&[])], l.sum());
}

#[test]
fn a_split_product_is_two_products() {
    let case = Case::new(K::Linear, "x[b:2 s:3 h:5] w[h g:6] -> y[b s g]");
    let fused = case.forward(&case.operands).remove(0);
    let parts = Case::new(K::Split { sizes: vec![2, 4] }, "x[b:2 s:3 g:6] -> y[b s m:2] z[b s p:4]")
        .forward(&[fused.into()]);
    for (part, (range, text)) in parts
        .iter()
        .zip([(0..2, "x[b:2 s:3 h:5] w[h m:2] -> y[b s m]"), (2..6, "x[b:2 s:3 h:5] w[h p:4] -> y[b s p]")])
    {
        let alone = run(K::Linear, text, &[case.operands[0].clone(), rows(&case.operands[1], 1, range)]);
        assert_eq!(*part, alone);
    }
}

#[test]
fn a_gated_unit_is_an_activation_times_its_other_half() {
    let case = Case::new(
        K::Glu { gating: Gating::Product { act: Activation::Gelu } },
        "gate[b:2 s:3 f:5] up[b s f] -> y[b s f]",
    );
    let act = run(K::Act { act: Activation::Gelu }, "x[b:2 s:3 f:5] -> y[b s f]", &case.operands[..1]);
    assert_close(
        &case.forward(&case.operands)[0],
        &(act * case.operands[1].as_float().unwrap()),
        1e-15,
        "gated unit",
    );
}

#[test]
fn activations_have_known_values() {
    let at = [-1.0, 0.5, 2.0];
    // The formulas of the kinds' documentation by Python's `math`.
    let known = [
        (Activation::Silu, [-0.2689414213699951, 0.3112296656009273, 1.7615941559557646]),
        (Activation::Gelu, [-0.15865525393145707, 0.34573123063700656, 1.9544997361036416]),
        (Activation::GeluTanh, [-0.15880800939172324, 0.34571400982514394, 1.954597694087775]),
        (Activation::ReluSquared, [0.0, 0.25, 4.0]),
    ];
    for (act, expected) in known {
        let y = run(K::Act { act }, "x[f:3] -> y[f]", &[float(&[3], &at)]);
        assert_close(&y, &arr1(&expected).into_dyn(), 1e-15, &format!("{act:?}"));
    }
}

#[test]
fn rotation_keeps_lengths_and_products_of_equal_distance() {
    let text = "x[s:2 d:4] position[s] -> y[s d]";
    let kind = K::Rope { theta: 10.0, dims: 4, side: RotarySide::First };
    let mut noise = Noise::new(1);
    let x = noise.tensor(&[2, 4]);
    let turn = |positions: &[i64]| run(kind.clone(), text, &[x.clone().into(), index(positions)]);
    assert_eq!(turn(&[0, 0]), x);
    let product = |y: Tensor<f64>| {
        y.index_axis(ndarray::Axis(0), 0)
            .iter()
            .zip(y.index_axis(ndarray::Axis(0), 1))
            .map(|(a, b)| a * b)
            .sum::<f64>()
    };
    assert!((product(turn(&[3, 8])) - product(turn(&[13, 18]))).abs() < 1e-13);
    assert!((turn(&[5, 6]).mapv(|y| y * y).sum() - x.mapv(|x| x * x).sum()).abs() < 1e-13);
}

#[test]
fn rotation_pairs_the_halves() {
    let kind = K::Rope { theta: 4.0, dims: 4, side: RotarySide::Last };
    let y = run(
        kind,
        "x[s:1 d:5] position[s] -> y[s d]",
        &[float(&[1, 5], &[9.0, 1.0, 0.0, 0.0, 1.0]), index(&[3])],
    );
    // Pair 0 turns by 3, pair 1 by 3 / sqrt(4).
    let expected = arr2(&[[9.0, 3_f64.cos(), -1.5_f64.sin(), 3_f64.sin(), 1.5_f64.cos()]]).into_dyn();
    assert_close(&y, &expected, 1e-15, "rotation");
}

const HEAD: &str = "q[b:1 s:1 k:1 r:1 d:1] k[b t:3 k d] v[b t k n:1]";

/// One query of value one against keys at positions 0, 1, 2.
fn attend(kind: K, keys: &[f64; 3], position: i64, extra: Option<f64>) -> f64 {
    let mut operands =
        vec![float(&[1; 5], &[1.0]), float(&[1, 3, 1, 1], keys), float(&[1, 3, 1, 1], &[1.0, 10.0, 100.0])];
    let K::Attention { bias, mask, .. } = &kind else { panic!("{kind:?} is not attention") };
    let positions = match mask {
        AttentionMask::Full => "",
        AttentionMask::Causal => {
            operands.extend([index(&[position]), index(&[0, 1, 2])]);
            " qpos[s] kpos[t]"
        }
    };
    operands.extend(extra.map(|extra| float(&[1, 1], &[extra])));
    let bias = match bias {
        AttentionBias::None => "",
        AttentionBias::Slopes => " slopes[k r]",
        AttentionBias::Sinks => " sinks[k r]",
    };
    run(kind, &format!("{HEAD}{positions}{bias} -> y[b s k r n]"), &operands).sum()
}

fn attention(window: Option<u64>, softcap: Option<f64>, bias: AttentionBias) -> K {
    K::Attention { scale: Some(2.0), window, softcap, bias, mask: AttentionMask::Causal }
}

#[test]
fn attention_is_a_weighted_mean_of_what_is_seen() {
    let plain = attention(None, None, AttentionBias::None);
    let keys = [0.1, 0.7, -0.4];
    let mean =
        |scores: &[f64], values: &[f64]| softmax(scores).iter().zip(values).map(|(p, v)| p * v).sum::<f64>();
    let close =
        |found: f64, expected: f64| assert!((found - expected).abs() < 1e-12, "{found} is not {expected}");
    close(attend(plain.clone(), &keys, 0, None), 1.0);
    close(attend(plain.clone(), &keys, 2, None), mean(&[0.2, 1.4, -0.8], &[1.0, 10.0, 100.0]));
    close(attend(plain, &keys, -1, None), 0.0);
    let window = attention(Some(2), None, AttentionBias::None);
    close(attend(window, &keys, 2, None), mean(&[1.4, -0.8], &[10.0, 100.0]));
    let capped = |score: f64| 0.5 * (score / 0.5).tanh();
    let cap = attention(None, Some(0.5), AttentionBias::None);
    close(attend(cap, &keys, 1, None), mean(&[capped(0.2), capped(1.4)], &[1.0, 10.0]));
    let slopes = attention(None, None, AttentionBias::Slopes);
    close(attend(slopes, &keys, 2, Some(0.3)), mean(&[0.2, 1.7, -0.2], &[1.0, 10.0, 100.0]));
    let sinks = attention(None, None, AttentionBias::Sinks);
    close(attend(sinks, &keys, 1, Some(0.9)), mean(&[0.2, 1.4, 0.9], &[1.0, 10.0, 0.0]));
    // Without a mask the first query sees the last key.
    let full = |softcap, bias| K::Attention {
        scale: Some(2.0),
        window: None,
        softcap,
        bias,
        mask: AttentionMask::Full,
    };
    let all = mean(&[0.2, 1.4, -0.8], &[1.0, 10.0, 100.0]);
    close(attend(full(None, AttentionBias::None), &keys, 0, None), all);
    let all = mean(&[capped(0.2), capped(1.4), capped(-0.8)], &[1.0, 10.0, 100.0]);
    close(attend(full(Some(0.5), AttentionBias::None), &keys, 0, None), all);
    let all = mean(&[0.2, 1.4, -0.8, 0.9], &[1.0, 10.0, 100.0, 0.0]);
    close(attend(full(None, AttentionBias::Sinks), &keys, 0, Some(0.9)), all);
}

#[test]
fn combine_after_dispatch_weighs_a_token_by_its_weights() {
    let case = Case::new(K::Dispatch, "x[b:2 s:3 h:4] routes[b s e:5] -> y[b e c:3 h]");
    let slots = case.forward(&case.operands).remove(0);
    let back = run(
        K::Combine,
        "z[b:2 e:5 c:3 h:4] routes[b s:3 e] -> y[b s h]",
        &[slots.into(), case.operands[1].clone()],
    );
    let total = case.operands[1].as_float().unwrap().sum_axis(ndarray::Axis(2)).insert_axis(ndarray::Axis(2));
    assert_close(&back, &(case.operands[0].as_float().unwrap() * &total), 1e-15, "combined tokens");
}

fn route(score: RouterScore, top_k: u64, normalize: Normalize) -> K {
    K::Route { top_k, score, normalize, scale: 1.0, groups: 1, top_groups: 1, group_score: GroupScore::Max }
}

#[test]
fn equal_scores_go_to_the_smaller_expert() {
    let weights = run(
        route(RouterScore::Sigmoid, 2, Normalize::No),
        "z[s:1 e:4] -> y[s e]",
        &[float(&[1, 4], &[-1.0, 0.0, -0.0, 0.0])],
    );
    assert_eq!(weights, arr2(&[[0.0, 0.5, 0.5, 0.0]]).into_dyn());
}

#[test]
fn normalised_weights_of_all_scores_are_those_of_the_chosen() {
    let z = float(&[1, 4], &[0.3, 2.0, -1.0, 1.0]);
    let text = "z[s:1 e:4] -> y[s e]";
    let all = run(route(RouterScore::Softmax, 2, Normalize::Sum), text, std::slice::from_ref(&z));
    let chosen = run(route(RouterScore::SoftmaxOfChosen, 2, Normalize::No), text, &[z]);
    let [one, two] = [softmax(&[2.0, 1.0])[0], softmax(&[2.0, 1.0])[1]];
    assert_close(&all, &chosen, 1e-15, "both orders");
    assert_close(&chosen, &arr2(&[[0.0, one, 0.0, two]]).into_dyn(), 1e-15, "softmax of two");
}

/// Groups {0 1} {2 3} {4 5}; with the correction the best group by its best expert is the third, by its two the first.
#[test]
fn experts_outside_the_best_groups_are_never_chosen_and_the_correction_does_not_weigh() {
    let logit = |p: f64| (p / (1.0 - p)).ln();
    let z = float(&[1, 6], &[0.5, 0.6, 0.1, 0.2, 0.7, 0.1].map(logit));
    let correction = float(&[6], &[0.1, 0.0, 0.0, 0.0, 0.0, 0.0]);
    for (group_score, expected) in [
        (GroupScore::TopTwo, [0.5, 0.6, 0.0, 0.0, 0.0, 0.0]),
        (GroupScore::Max, [0.0, 0.0, 0.0, 0.0, 0.7, 0.1]),
    ] {
        let kind = K::Route {
            top_k: 2,
            score: RouterScore::Sigmoid,
            normalize: Normalize::No,
            scale: 1.0,
            groups: 3,
            top_groups: 1,
            group_score,
        };
        let weights = run(kind, "z[s:1 e:6] correction[e] -> y[s e]", &[z.clone(), correction.clone()]);
        assert_close(&weights, &arr2(&[expected]).into_dyn(), 1e-14, &format!("{group_score:?}"));
    }
}

#[test]
fn the_clamped_unit_stops_at_its_limit() {
    let kind = K::Glu { gating: Gating::ClampedProduct { limit: 7.0 } };
    let y = run(kind, "gate[f:2] up[f] -> y[f]", &[float(&[2], &[9.0, -1.0]), float(&[2], &[-20.0, 8.0])]);
    let swish = |g: f64| g / (1.0 + (-1.702 * g).exp());
    assert_close(&y, &arr1(&[swish(7.0) * -6.0, swish(-1.0) * 8.0]).into_dyn(), 1e-14, "clamped unit");
}

#[test]
fn norms_have_unit_size_and_layer_norm_no_mean() {
    let x = float(&[2, 2], &[3.0, 4.0, -1.0, 7.0]);
    let (one, zero) = (float(&[2], &[1.0, 1.0]), float(&[2], &[0.0, 0.0]));
    let rms =
        run(K::RmsNorm { eps: 0.0, shift: 0.0 }, "x[s:2 h:2] g[h] -> y[s h]", &[x.clone(), one.clone()]);
    let shifted =
        run(K::RmsNorm { eps: 0.0, shift: 1.0 }, "x[s:2 h:2] g[h] -> y[s h]", &[x.clone(), zero.clone()]);
    let root = 12.5_f64.sqrt();
    assert_close(&rms, &arr2(&[[3.0 / root, 4.0 / root], [-0.2, 1.4]]).into_dyn(), 1e-15, "root mean square");
    assert_eq!(rms, shifted);
    let layer = run(K::LayerNorm { eps: 0.0 }, "x[s:2 h:2] g[h] c[h] -> y[s h]", &[x, one, zero]);
    assert_close(&layer, &arr2(&[[-1.0, 1.0], [-1.0, 1.0]]).into_dyn(), 1e-15, "layer norm");
}

#[test]
fn single_precision_agrees_with_double() {
    for case in super::cases::cases() {
        let blocks = case.whole();
        let narrow: Vec<Value<f32>> = case
            .operands
            .iter()
            .map(|value| match value {
                Value::Float(tensor) => Value::Float(tensor.mapv(|x| x as f32)),
                Value::Index(index) => Value::Index(index.clone()),
            })
            .collect();
        let found = forward(&case.context(&blocks), &narrow.iter().collect::<Vec<_>>()).unwrap();
        for (found, expected) in found.into_iter().zip(case.forward(&case.operands)) {
            assert_close(&found.into_float().unwrap().mapv(f64::from), &expected, 1e-5, &case.name);
        }
    }
}
