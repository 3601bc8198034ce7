//! Backward against central differences of the sum of the results, weighted by the arriving gradients.

use super::assert_close;
use super::cases::{Case, cases};
use crate::kernels::{Tensor, Value};
use ir::op::{AttentionBias, OpKind};

/// Balances the error of the difference, `step^2`, against that of the arithmetic, `1e-16 / step`.
const STEP: f64 = 1e-5;

#[test]
fn backward_is_the_derivative_of_forward() {
    for case in cases() {
        let found = case.backward(&case.gradients);
        for (i, gradient) in found.iter().enumerate() {
            let what = format!("gradient of operand {i} of {}", case.name);
            assert_eq!(gradient.is_some(), has_gradient(&case, i), "{what}");
            if let Some(gradient) = gradient {
                assert_close(gradient, &by_differences(&case, i), 1e-8, &what);
            }
        }
    }
}

#[test]
fn backward_is_linear_in_the_arriving_gradient() {
    for case in cases() {
        let twice: Vec<_> = case.gradients.iter().map(|g| g.mapv(|g| 2.0 * g)).collect();
        for (one, two) in case.backward(&case.gradients).iter().zip(case.backward(&twice)) {
            if let (Some(one), Some(two)) = (one, two) {
                assert_close(&two, &(one * 2.0), 1e-14, &case.name);
            }
        }
    }
}

#[test]
fn nothing_leaves_where_no_gradient_arrives() {
    for case in cases() {
        let blocks = case.whole();
        let operands: Vec<_> = case.operands.iter().map(Some).collect();
        let none = vec![None; case.gradients.len()];
        let found = crate::kernels::backward(&case.context(&blocks), &operands, &none).unwrap();
        assert_eq!(found, vec![None; operands.len()], "{}", case.name);
    }
}

#[test]
fn a_result_without_a_gradient_counts_as_zero() {
    for case in cases().into_iter().filter(|case| case.gradients.len() > 1) {
        let blocks = case.whole();
        let mut given: Vec<_> = case.gradients.iter().map(Some).collect();
        given[0] = None;
        let found =
            crate::kernels::backward(&case.context(&blocks), &vec![None; case.operands.len()], &given)
                .unwrap();
        let mut zeroed = case.gradients.clone();
        zeroed[0].fill(0.0);
        assert_eq!(found, case.backward(&zeroed), "{}", case.name);
    }
}

fn has_gradient(case: &Case, operand: usize) -> bool {
    let slopes = matches!(case.kind(), OpKind::Attention { bias: AttentionBias::Slopes, .. }) && operand == 5;
    case.operands[operand].as_float().is_some() && case.kind().differentiates(operand) && !slopes
}

fn by_differences(case: &Case, operand: usize) -> Tensor<f64> {
    let own = case.operands[operand].as_float().unwrap();
    let mut operands = case.operands.clone();
    let mut objective = |at: usize, by: f64| {
        let mut moved = own.clone();
        *moved.iter_mut().nth(at).unwrap() += by;
        operands[operand] = Value::Float(moved);
        let results = case.forward(&operands);
        results.iter().zip(&case.gradients).map(|(y, g)| (y * g).sum()).sum::<f64>()
    };
    let slopes =
        (0..own.len()).map(|at| (objective(at, STEP) - objective(at, -STEP)) / (2.0 * STEP)).collect();
    Tensor::from_shape_vec(own.raw_dim(), slopes).unwrap()
}
