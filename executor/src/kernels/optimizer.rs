//! The update of a parameter: AdamW (Loshchilov and Hutter 2019), in the order of operations of PyTorch.
//!
//! Element by element, so that any block of a parameter may be updated where its moments are stored.

use super::{KernelError, Real};

/// Settings of AdamW.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Share of a parameter that a step at learning rate one takes off.
    pub weight_decay: f64,
}

/// The running moments of a block of a parameter; zero before the first step.
#[derive(Debug)]
pub struct Moments<'a, T> {
    /// Of the gradient.
    pub m: &'a mut [T],
    /// Of its square.
    pub v: &'a mut [T],
}

/// One step on a block of a parameter; the first step has number one.
///
/// `p -= lr * (decay * p + m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps))`
///
/// The first step moves every element by `lr` against its gradient's sign: `m/(1-beta1) = g`, `v/(1-beta2) = g^2`.
///
/// # Errors
/// Slices of different lengths, or step zero.
pub fn adamw_step<T: Real>(
    param: &mut [T],
    grad: &[T],
    moments: Moments<'_, T>,
    hyper: &AdamW,
    step: u64,
) -> Result<(), KernelError> {
    let op = "adamw";
    let Moments { m, v } = moments;
    for (what, found) in [("gradients", grad.len()), ("first moments", m.len()), ("second moments", v.len())]
    {
        if found != param.len() {
            return Err(KernelError::Count { op, what, found, expected: param.len() });
        }
    }
    if step == 0 {
        return Err(KernelError::Unfit { op, what: "the first step has number one" });
    }
    let unbias = |beta: f64| 1.0 - beta.powf(step as f64);
    let kept = T::from_f64(1.0 - hyper.lr * hyper.weight_decay);
    let rate = T::from_f64(hyper.lr / unbias(hyper.beta1));
    let root = T::from_f64(unbias(hyper.beta2).sqrt());
    let (beta1, beta2, eps) = (T::from_f64(hyper.beta1), T::from_f64(hyper.beta2), T::from_f64(hyper.eps));
    for (((p, &g), m), v) in param.iter_mut().zip(grad).zip(m).zip(v) {
        *m = beta1 * *m + (T::one() - beta1) * g;
        *v = beta2 * *v + (T::one() - beta2) * g * g;
        *p = *p * kept - rate * *m / (v.sqrt() / root + eps);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYPER: AdamW = AdamW { lr: 0.1, beta1: 0.9, beta2: 0.99, eps: 0.0, weight_decay: 0.5 };

    #[test]
    fn the_first_step_decays_and_moves_by_the_rate() {
        let (mut p, mut m, mut v) = ([1.0_f64, -2.0], [0.0; 2], [0.0; 2]);
        adamw_step(&mut p, &[3.0, -4.0], Moments { m: &mut m, v: &mut v }, &HYPER, 1).unwrap();
        for (found, expected) in p.iter().zip([0.95 - 0.1, -1.9 + 0.1]) {
            assert!((found - expected).abs() < 1e-15, "{found} is not {expected}");
        }
    }

    /// Two steps by hand: m = 0.1, then 0.9 * 0.1 + 0.1 * 3 = 0.39; v = 0.01, then 0.99 * 0.01 + 0.01 * 9 = 0.0999.
    #[test]
    fn the_second_step_uses_both_moments() {
        let hyper = AdamW { weight_decay: 0.0, ..HYPER };
        let (mut p, mut m, mut v) = ([0.0_f64], [0.0], [0.0]);
        for (step, g) in [(1, 1.0), (2, 3.0)] {
            adamw_step(&mut p, &[g], Moments { m: &mut m, v: &mut v }, &hyper, step).unwrap();
        }
        let second: f64 = 0.39 / (1.0 - 0.81) / (0.0999_f64 / (1.0 - 0.9801)).sqrt();
        assert!((p[0] + 0.1 + 0.1 * second).abs() < 1e-15);
    }

    #[test]
    fn slices_of_different_lengths_and_step_zero_are_refused() {
        let (mut p, mut m, mut v) = ([1.0; 2], [0.0; 2], [0.0; 1]);
        let short = adamw_step(&mut p, &[1.0; 2], Moments { m: &mut m, v: &mut v }, &HYPER, 1);
        assert_eq!(short.unwrap_err().to_string(), "operator `adamw`: 1 second moments, expected 2");
        let mut v = [0.0; 2];
        assert!(adamw_step(&mut p, &[1.0; 2], Moments { m: &mut m, v: &mut v }, &HYPER, 0).is_err());
        assert_eq!(p, [1.0; 2]);
    }
}
