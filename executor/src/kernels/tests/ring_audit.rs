//! Tolerances of bf16 on a ring: two blocks of keys keep them, and blocks that are missed or sums that are cut do not.

use std::ops::Range;

use ir::op::OpKind;
use ndarray::{Axis, Slice};

use super::audit::{bf16, nearest, operands, truncated};
use super::cases::{Case, cases};
use crate::audit::Leaves;
use crate::kernels::ring::{Attended, Turn, attend, block_backward};
use crate::kernels::{Context, Tensor, Value};
use crate::ring_audit::{BackwardWitness, ForwardWitness};

/// Attention whose keys are halved: rows of one half, and the operands of each.
struct Halved<'a> {
    case: &'a Case,
    rows: Vec<Range<u64>>,
    halves: [Vec<Value<f32>>; 2],
    gradient: Tensor<f32>,
}

impl<'a> Halved<'a> {
    fn of(case: &'a Case) -> Option<Self> {
        let keys = case.signature.operands[1][1].0 as usize;
        let mut rows = case.whole();
        let half = rows[keys].end / 2;
        if half * 2 != rows[keys].end {
            return None;
        }
        rows[keys] = 0..half;
        let all = operands(case);
        let halves =
            [0..half, half..2 * half].map(|rows| all.iter().enumerate().map(|one| cut(one, &rows)).collect());
        Some(Self { case, rows, halves, gradient: bf16(&case.gradients[0]) })
    }

    fn context(&self) -> Context<'_> {
        self.case.context(&self.rows)
    }

    fn half(&self, at: usize) -> Vec<&Value<f32>> {
        self.halves[at].iter().collect()
    }

    fn attended(&self) -> (Attended<f32>, Attended<f32>) {
        let own = attend(&self.context(), &self.half(0), Turn::First).unwrap();
        let mut all = own.clone();
        all.merge(&attend(&self.context(), &self.half(1), Turn::Later).unwrap());
        (own, all)
    }
}

/// Keys, values and their positions.
fn cut((operand, value): (usize, &Value<f32>), rows: &Range<u64>) -> Value<f32> {
    let slice = Slice::from(rows.start as usize..rows.end as usize);
    match (operand, value) {
        (1 | 2, Value::Float(numbers)) => Value::Float(numbers.slice_axis(Axis(1), slice).to_owned()),
        (4, Value::Index(positions)) => Value::Index(positions.slice_axis(Axis(0), slice).to_owned()),
        _ => value.clone(),
    }
}

fn all() -> Vec<Case> {
    cases().into_iter().filter(|case| matches!(case.kind(), OpKind::Attention { .. })).collect()
}

#[test]
fn forward_over_both_halves_keeps_its_tolerance_and_over_one_does_not() {
    let mut n_found = [0; 2];
    for case in &all() {
        let Some(halved) = Halved::of(case) else { continue };
        let (own, all) = halved.attended();
        let mut witness = ForwardWitness::new(&halved.context(), &halved.half(0), 2).unwrap();
        witness.meet(&halved.context(), &halved.half(1)).unwrap();
        let result = witness.result();
        let excess = |y: &Attended<f32>, round: fn(f32) -> f32| {
            result.excess(&y.y.mapv(round).into_dyn(), Leaves::Rounded)
        };
        assert!(excess(&all, nearest) <= 1.0, "{}: {}", case.name, excess(&all, nearest));
        n_found[0] += usize::from(excess(&own, nearest) > 1.0);
        n_found[1] += usize::from(excess(&all, truncated) > 1.0);
    }
    assert!(n_found.iter().all(|n| *n > 0), "{n_found:?}");
}

#[test]
fn sums_of_gradients_keep_their_tolerance_and_cut_ones_do_not() {
    let mut n_checked = 0;
    for case in &all() {
        let Some(halved) = Halved::of(case) else { continue };
        let (context, (_, all)) = (halved.context(), halved.attended());
        let given = (&all, &halved.gradient);
        let own = block_backward(&context, &halved.half(0), given, Turn::First).unwrap();
        let next = block_backward(&context, &halved.half(1), given, Turn::Later).unwrap();
        let came = (next.dk.mapv(|d| d * 0.7), next.dv.mapv(|d| d * 0.7));
        let passed = (&came.0 + &next.dk, &came.1 + &next.dv);
        let met = |passed: &(Tensor<f32>, Tensor<f32>)| {
            let mut witness = BackwardWitness::new(&context, &halved.half(0), given, 2).unwrap();
            witness.meet(&context, &halved.half(1), (Some(&came), passed)).unwrap();
            witness
        };
        let witness = met(&passed);
        assert!(witness.worst <= 1.0, "{}: {}", case.name, witness.worst);
        // What is passed on stays in single precision, and lacks no term.
        assert!(met(&(passed.0.mapv(nearest), passed.1.mapv(nearest))).worst > 1.0, "{}", case.name);
        assert!(met(&came).worst > 1.0, "{}", case.name);

        let home = (own.dk.mapv(|d| d * 0.7), own.dv.mapv(|d| d * 0.7));
        let results = witness.results(Some(&home));
        let found = [&own.dq + &next.dq, &home.0 + &own.dk, &home.1 + &own.dv];
        for (result, found) in results.iter().zip(&found) {
            let excess = result.as_ref().unwrap().excess(&found.mapv(nearest), Leaves::Rounded);
            assert!(excess <= 1.0, "{}: {excess}", case.name);
        }
        assert!(results[2].as_ref().unwrap().excess(&own.dv.mapv(nearest), Leaves::Rounded) > 1.0);
        n_checked += 1;
    }
    assert!(n_checked > 0);
}
