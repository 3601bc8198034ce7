//! Whether two runs gave the same numbers.
//!
//! ```text
//! max |a - b| <= tolerance * max(max |b| of the tensor, 1e-3 * the largest gradient)
//! ```
//! where `b` is the reference. In bf16 each operator is held to a tolerance of its own where it runs (`audit`); here
//! whole runs are compared, so that what is missing or counted twice shows. Roundings of either sign add in squares:
//! the tolerance is `2^-7` times the square root of the operators that a value has passed, forward to the loss and, for
//! a gradient, back to its layer. Where rounding carries further, in f32 or bf16 (the gradient of a router's scores
//! nearly cancels), that is measured on one device: `|a - b| <= CARRIED * max |b - exact|` is allowed as well, `exact`
//! being the same run in double precision, or with every parameter moved by one rounding, and the largest difference
//! that of all steps: a tensor of few elements may come near in one of them by chance. In f64 the loss, every gradient
//! and every updated parameter within 1e-9; in f32 the loss and every gradient within 1e-4, for AdamW amplifies the
//! rounding of tiny gradients.

use ndarray::ArrayD;

use crate::run::{Outcome, Tensors};

/// Share of the largest gradient below which a tensor's own size no longer matters.
const FLOOR: f64 = 1e-3;

/// Rounding of one operator in bf16: each of two runs rounds its values forward and its gradients back by up to half of
/// a unit in the last place, `2^-8`.
const BF16: f64 = 4.0 * 0.5 / 256.0;

/// Two runs that round differently are each as far from the exact one as the one device is, in one element or another.
const CARRIED: f64 = 4.0;

/// In which numbers the runs were made, and so what is compared and how far it may differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Single.
    F32,
    /// Double.
    F64,
    /// Single, rounded to bf16 between operators and ranks.
    Bf16,
}

impl Precision {
    /// What rounding may change of a number, and is sure to be felt: in bf16, which rounds at every use, half the
    /// distance to the next number, else all of it.
    pub fn unit(self) -> f64 {
        match self {
            Self::F32 => f64::from(f32::EPSILON),
            Self::F64 => f64::EPSILON,
            Self::Bf16 => BF16 / 4.0,
        }
    }

    /// How far numbers may differ, relative to the tensor's largest.
    pub fn tolerance(self) -> f64 {
        match self {
            Self::F32 => 1e-4,
            Self::F64 => 1e-9,
            Self::Bf16 => BF16,
        }
    }
}

/// What a tensor is to its parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Quantity {
    /// The mean loss of a step; of no layer.
    Loss,
    /// A gradient.
    Gradient,
    /// A parameter after its update.
    Parameter,
}

/// The comparison of one tensor in one step.
#[derive(Clone, Debug, PartialEq)]
pub struct Compared {
    /// What it is.
    pub quantity: Quantity,
    /// Step, from zero.
    pub step: usize,
    /// Layer, or zero for the loss.
    pub layer_idx: usize,
    /// Name, empty for the loss.
    pub tensor: String,
    /// `max |a - b|`, infinite where one is not a number.
    pub difference: f64,
    /// The difference in units of what is allowed: above one is a failure.
    pub excess: f64,
}

/// The outcome of a comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Everything compared, the worst first.
    pub worst: Vec<Compared>,
    /// What one run has and the other lacks, or has in another shape.
    pub unmatched: Vec<String>,
}

impl Comparison {
    /// Whether all is within its tolerance and nothing is missing.
    pub fn is_equal(&self) -> bool {
        self.unmatched.is_empty() && self.failures().next().is_none()
    }

    /// What differs too much, the worst first.
    pub fn failures(&self) -> impl Iterator<Item = &Compared> {
        self.worst.iter().filter(|compared| compared.excess > 1.0)
    }
}

/// Compares a run with its reference.
pub fn compare(reference: &Outcome, outcome: &Outcome, precision: Precision) -> Comparison {
    judged((reference, &[]), outcome, precision)
}

/// Compares a run that rounds with its reference, allowing what rounding alone makes of that: its distance from others
/// that differ from it by rounding, such as the exact one.
pub fn compare_rounded(
    (reference, others): (&Outcome, &[&Outcome]),
    outcome: &Outcome,
    precision: Precision,
) -> Comparison {
    judged((reference, others), outcome, precision)
}

fn judged(
    (reference, others): (&Outcome, &[&Outcome]),
    outcome: &Outcome,
    precision: Precision,
) -> Comparison {
    let mut judge = Judge {
        precision,
        others,
        reference,
        floor: FLOOR * largest(reference.gradients.iter().flat_map(Tensors::values)),
        found: Comparison { worst: Vec::new(), unmatched: Vec::new() },
    };
    judge.losses(&reference.losses, &outcome.losses);
    judge.tensors(Quantity::Gradient, &reference.gradients, &outcome.gradients);
    match precision {
        Precision::F64 => judge.tensors(Quantity::Parameter, &reference.parameters, &outcome.parameters),
        Precision::F32 | Precision::Bf16 => {}
    }
    // Stable: equal excesses stay in the order of steps, layers and names.
    judge.found.worst.sort_by(|a, b| b.excess.total_cmp(&a.excess));
    judge.found
}

fn largest<'a>(tensors: impl Iterator<Item = &'a ArrayD<f64>>) -> f64 {
    tensors.flatten().fold(0.0, |most, value| value.abs().max(most))
}

struct Judge<'a> {
    precision: Precision,
    /// The reference rounded otherwise or not at all, where that is to be told.
    others: &'a [&'a Outcome],
    reference: &'a Outcome,
    floor: f64,
    found: Comparison,
}

impl Judge<'_> {
    /// How far a value of a layer may differ.
    fn tolerance(&self, quantity: Quantity, layer_idx: usize) -> f64 {
        let of = |layers: &[usize]| layers.iter().sum::<usize>();
        let n_ops = &self.reference.n_ops;
        let back = if quantity == Quantity::Loss { 0 } else { of(n_ops.get(layer_idx..).unwrap_or(&[])) };
        match self.precision {
            Precision::F32 | Precision::F64 => self.precision.tolerance(),
            Precision::Bf16 => self.precision.tolerance() * ((of(n_ops) + back).max(1) as f64).sqrt(),
        }
    }

    /// How far rounding alone has brought a tensor of the reference from that of another, in the worst of all steps.
    fn carried(&self, key: (Quantity, usize, &str)) -> f64 {
        self.others.iter().map(|other| self.carried_from(other, key)).fold(0.0, f64::max)
    }

    fn carried_from(&self, exact: &Outcome, (quantity, layer_idx, name): (Quantity, usize, &str)) -> f64 {
        let apart = |(b, e): (&f64, &f64)| (b - e).abs();
        let key = (layer_idx, name.to_owned());
        let of = |found: &[Tensors], exact: &[Tensors]| {
            let pairs = found.iter().zip(exact).filter_map(|(b, e)| Some((b.get(&key)?, e.get(&key)?)));
            pairs.flat_map(|(b, e)| b.iter().zip(e)).map(apart).fold(0.0, f64::max)
        };
        match quantity {
            Quantity::Loss => self.reference.losses.iter().zip(&exact.losses).map(apart).fold(0.0, f64::max),
            Quantity::Gradient => of(&self.reference.gradients, &exact.gradients),
            Quantity::Parameter => of(&self.reference.parameters, &exact.parameters),
        }
    }

    fn losses(&mut self, reference: &[f64], found: &[f64]) {
        if reference.len() != found.len() {
            self.found.unmatched.push(format!("{} losses, expected {}", found.len(), reference.len()));
        }
        for (step, (&b, &a)) in reference.iter().zip(found).enumerate() {
            let one = |value| ArrayD::from_elem(ndarray::IxDyn(&[]), value);
            self.tensor((Quantity::Loss, step, 0, ""), &one(b), &one(a));
        }
    }

    fn tensors(&mut self, quantity: Quantity, reference: &[Tensors], found: &[Tensors]) {
        for (step, (reference, found)) in reference.iter().zip(found).enumerate() {
            let extra = found.keys().filter(|key| !reference.contains_key(key));
            let extra =
                extra.map(|(layer, name)| format!("`{name}` of layer {layer} is not in the reference"));
            self.found.unmatched.extend(extra);
            for ((layer_idx, name), b) in reference {
                match found.get(&(*layer_idx, name.clone())) {
                    Some(a) => self.tensor((quantity, step, *layer_idx, name), b, a),
                    None => self.found.unmatched.push(format!("`{name}` of layer {layer_idx} is missing")),
                }
            }
        }
    }

    fn tensor(&mut self, key: (Quantity, usize, usize, &str), b: &ArrayD<f64>, a: &ArrayD<f64>) {
        let (quantity, step, layer_idx, name) = key;
        if a.shape() != b.shape() {
            let text =
                format!("`{name}` of layer {layer_idx} has shape {:?}, expected {:?}", a.shape(), b.shape());
            return self.found.unmatched.push(text);
        }
        let apart = |(a, b): (&f64, &f64)| if (a - b).is_nan() { f64::INFINITY } else { (a - b).abs() };
        let difference = a.iter().zip(b).map(apart).fold(0.0, f64::max);
        let own = self.tolerance(quantity, layer_idx) * largest(std::iter::once(b)).max(self.floor);
        let allowed = own.max(CARRIED * self.carried((quantity, layer_idx, name)));
        let excess = if difference == 0.0 { 0.0 } else { difference / allowed };
        let tensor = name.to_owned();
        self.found.worst.push(Compared { quantity, step, layer_idx, tensor, difference, excess });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One parameter with a large gradient, one with a small.
    fn outcome(large: f64, small: f64, parameter: f64) -> Outcome {
        let one = |value| ArrayD::from_elem(ndarray::IxDyn(&[1]), value);
        let tensors = |a, b| Tensors::from([((1, "large".into()), one(a)), ((1, "small".into()), one(b))]);
        Outcome {
            losses: vec![1.0],
            gradients: vec![tensors(large, small)],
            parameters: vec![tensors(parameter, 1.0)],
            n_ops: vec![1, 1],
            ..Outcome::default()
        }
    }

    fn failures(found: &Outcome, precision: Precision) -> Vec<String> {
        let comparison = compare(&outcome(100.0, 1e-6, 1.0), found, precision);
        comparison.failures().map(|failure| format!("{:?} {}", failure.quantity, failure.tensor)).collect()
    }

    #[test]
    fn a_small_gradient_is_measured_by_the_largest() {
        assert!(failures(&outcome(100.0, 1e-6 + 0.99e-10, 1.0), Precision::F64).is_empty());
        assert_eq!(failures(&outcome(100.0, 1e-6 + 1.01e-10, 1.0), Precision::F64), ["Gradient small"]);
        assert_eq!(failures(&outcome(100.0 + 1.01e-7, 1e-6, 1.0), Precision::F64), ["Gradient large"]);
    }

    #[test]
    fn updated_parameters_are_judged_in_double_precision_only() {
        assert!(failures(&outcome(100.0, 1e-6, 1.1), Precision::F32).is_empty());
        assert_eq!(failures(&outcome(100.0, 1e-6, 1.1), Precision::F64), ["Parameter large"]);
    }

    #[test]
    fn what_rounding_carries_far_on_one_device_may_be_far() {
        let judge = |exact: f64, found: f64| {
            let (reference, exact) = (outcome(100.0, 1.0, 1.0), outcome(100.0, exact, 1.0));
            compare_rounded((&reference, &[&exact]), &outcome(100.0, found, 1.0), Precision::Bf16).is_equal()
        };
        assert!(!judge(1.0, 1.35));
        assert!(judge(1.1, 1.35) && !judge(1.1, 1.45));
    }

    #[test]
    fn what_is_not_a_number_differs_from_everything() {
        assert_eq!(failures(&outcome(f64::NAN, 1e-6, 1.0), Precision::F32), ["Gradient large"]);
    }

    #[test]
    fn a_missing_tensor_is_a_difference() {
        let mut found = outcome(100.0, 1e-6, 1.0);
        found.gradients[0].clear();
        let comparison = compare(&outcome(100.0, 1e-6, 1.0), &found, Precision::F64);
        assert!(!comparison.is_equal());
        assert_eq!(comparison.unmatched[0], "`large` of layer 1 is missing");
    }
}
