//! Calls that make no sense are refused, never a panic.

use super::cases::{Case, cases};
use super::rows;
use crate::kernels::{Context, Index, KernelError, Tensor, Value, backward, forward};

fn refs(values: &[Value<f64>]) -> Vec<&Value<f64>> {
    values.iter().collect()
}

#[test]
fn an_operand_of_another_shape_is_refused() {
    for case in cases() {
        let blocks = case.whole();
        let ctx = case.context(&blocks);
        for (i, own) in case.operands.iter().enumerate() {
            for dim in 0..own.shape().len() {
                let mut operands = case.operands.clone();
                operands[i] = rows(own, dim, 0..own.shape()[dim] as u64 - 1);
                let error = forward(&ctx, &refs(&operands)).unwrap_err();
                assert!(
                    matches!(error, KernelError::Shape { position, .. } if position == i),
                    "{}: {error}",
                    case.name
                );
            }
        }
    }
}

#[test]
fn integers_in_the_place_of_numbers_are_refused_and_the_reverse() {
    for case in cases() {
        let blocks = case.whole();
        for (i, own) in case.operands.iter().enumerate() {
            let mut operands = case.operands.clone();
            operands[i] = match own {
                Value::Float(tensor) => Value::Index(Index::zeros(tensor.raw_dim())),
                Value::Index(index) => Value::Float(Tensor::zeros(index.raw_dim())),
            };
            let error = forward(&case.context(&blocks), &refs(&operands)).unwrap_err();
            assert!(
                matches!(error, KernelError::Type { operand, .. } if operand == i),
                "{}: {error}",
                case.name
            );
        }
    }
}

#[test]
fn too_few_operands_gradients_or_blocks_are_refused() {
    for case in cases() {
        let blocks = case.whole();
        let ctx = case.context(&blocks);
        let (operands, given) = (refs(&case.operands), vec![None; case.operands.len()]);
        let count = |error: KernelError| {
            assert!(matches!(error, KernelError::Count { .. }), "{}: {error}", case.name)
        };
        count(forward(&ctx, &operands[1..]).unwrap_err());
        count(backward::<f64>(&ctx, &given, &[]).unwrap_err());
        count(backward::<f64>(&ctx, &given[1..], &vec![None; case.gradients.len()]).unwrap_err());
        count(forward(&case.context(&[]), &operands).unwrap_err());
    }
}

#[test]
fn a_saved_operand_that_backward_was_not_given_is_named() {
    for case in cases() {
        let blocks = case.whole();
        let gradients: Vec<_> = case.gradients.iter().map(Some).collect();
        let found = backward(&case.context(&blocks), &vec![None; case.operands.len()], &gradients);
        // A line names operands that some forms of the operator lack.
        let saves = case.kind().line().saves;
        let has = saves.iter().any(|&operand| operand < case.operands.len());
        assert_eq!(found.is_err(), has, "{}", case.name);
        if let Err(error) = found {
            assert!(
                matches!(error, KernelError::Missing { operand, .. } if saves.contains(&operand)),
                "{error}"
            );
        }
    }
}

#[test]
fn a_kind_with_the_signature_of_another_does_not_panic() {
    let all = cases();
    for kind in all.iter().map(Case::kind) {
        for other in &all {
            let blocks = other.whole();
            let ctx = Context { kind, signature: &other.signature, blocks: &blocks };
            let _ = forward(&ctx, &refs(&other.operands));
            let operands: Vec<_> = other.operands.iter().map(Some).collect();
            let _ = backward(&ctx, &operands, &other.gradients.iter().map(Some).collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_loop_without_rows_does_not_panic() {
    for case in cases() {
        for cut in 0..case.signature.factors.len() {
            let mut blocks = case.whole();
            blocks[cut] = 0..0;
            let shape = |dims: &Vec<ir::signature::FactorId>| -> Vec<usize> {
                dims.iter().map(|f| blocks[f.0 as usize].end as usize).collect()
            };
            let empty = |(own, dims): (&Value<f64>, _)| match own {
                Value::Float(_) => Value::Float(Tensor::zeros(shape(dims))),
                Value::Index(_) => Value::Index(Index::zeros(shape(dims))),
            };
            let operands: Vec<_> = case.operands.iter().zip(&case.signature.operands).map(empty).collect();
            let gradients: Vec<_> =
                case.signature.results.iter().map(|dims| Tensor::zeros(shape(dims))).collect();
            let ctx = case.context(&blocks);
            let _ = forward(&ctx, &refs(&operands));
            let operands: Vec<_> = operands.iter().map(Some).collect();
            let _ = backward(&ctx, &operands, &gradients.iter().map(Some).collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_position_outside_its_table_is_refused() {
    let case = Case::new(
        ir::op::OpKind::AddPosition { offset: 2 },
        "x[b:1 s:3 h:2] position[s] table[p:4 h] -> y[b s h]",
    );
    let error = forward(&case.context(&case.whole()), &refs(&case.operands)).unwrap_err();
    assert_eq!(error.to_string(), "operator `add-position`: row 4 of a table of 4 rows");
}
