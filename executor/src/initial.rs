//! The numbers a run begins with: parameters, tokens and tables, each a function of the seed and its place.
//!
//! Whole tensors; every rank cuts its block from the same one, so that no plan can change them. Random numbers are
//! `splitmix64` of a counter (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"), so that an
//! element does not depend on how many were drawn before it.

use std::f64::consts::PI;
use std::ops::Range;

use ndarray::{ArrayD, IxDyn};

use ir::graph::{Data, Dim, Extent, Init, Layer, Model, TensorId};
use ir::op::OpKind;

use crate::job::Text;
use crate::kernels::{Real, Value};

/// Noise on parameters that begin at one or zero: an error in their gradient shows.
const NOISE: f64 = 0.1;

/// Noise that stands for a router's correction bias: enough to change some choices.
const ROUTER_NOISE: f64 = 0.02;

/// A stream of random numbers that belongs to a name.
#[derive(Clone, Copy)]
struct Random(u64);

impl Random {
    fn new(seed: u64, place: u64, name: &str) -> Self {
        let start = mix(mix(seed) ^ place);
        Self(name.bytes().fold(start, |state, byte| mix(state ^ u64::from(byte))))
    }

    fn bits(self, i: u64) -> u64 {
        mix(self.0.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }

    /// Uniform in `(0, 1)`.
    fn uniform(self, i: u64) -> f64 {
        ((self.bits(i) >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
    }

    /// Standard normal, by Box and Muller 1958.
    fn normal(self, i: u64) -> f64 {
        (-2.0 * self.uniform(2 * i).ln()).sqrt() * (2.0 * PI * self.uniform(2 * i + 1)).cos()
    }
}

fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Initial value of a parameter of the layer at `layer_idx`.
pub(crate) fn parameter(
    seed: u64,
    layer_idx: usize,
    layer: &Layer,
    tensor: TensorId,
    init: Init,
) -> ArrayD<f64> {
    let random = Random::new(seed, layer_idx as u64, &layer.tensors[tensor.0].name);
    // A parameter has no dim of the batch.
    let shape = layer.shape(tensor, &layer.sizes(0, 0));
    let scale = contraction(layer, tensor).sqrt().recip();
    let value = |i: u64| match init {
        Init::Normal => random.normal(i) * scale,
        Init::One => 1.0 + NOISE * random.normal(i),
        Init::Zero => NOISE * random.normal(i),
    };
    from_counter(&shape, value)
}

/// Length of the loops that the reader of a parameter sums over: those of its dims that the result lacks.
fn contraction(layer: &Layer, tensor: TensorId) -> f64 {
    let sizes = layer.sizes(0, 0);
    let result = layer.reader(tensor).and_then(|op| layer.ops[op.0].results.first().copied());
    let kept = |dim| result.is_some_and(|result| layer.tensors[result.0].dims.contains(dim));
    let summed = layer.tensors[tensor.0].dims.iter().filter(|dim| !kept(dim));
    summed.map(|dim| sizes.dims[dim.0].max(1) as f64).product()
}

fn from_counter(shape: &[u64], value: impl Fn(u64) -> f64) -> ArrayD<f64> {
    let shape: Vec<usize> = shape.iter().map(|&n| n as usize).collect();
    let mut i = 0;
    ArrayD::from_shape_simple_fn(IxDyn(&shape), || {
        i += 1;
        value(i - 1)
    })
}

/// Rows of the smallest table that tokens or labels point into; `None` for a model without one.
pub(crate) fn vocabulary(model: &Model) -> Option<u64> {
    let of_layer = |layer: &Layer| {
        let sizes = layer.sizes(0, 0);
        let table = |kind: &OpKind, operands: &[TensorId]| {
            if *kind == OpKind::Embed {
                layer.shape(operands[1], &sizes).first().copied()
            } else if *kind == OpKind::Pick {
                layer.shape(operands[0], &sizes).last().copied()
            } else {
                None
            }
        };
        layer.ops.iter().filter_map(|op| table(&op.kind, &op.operands)).min()
    };
    model.layers.iter().filter_map(of_layer).min()
}

/// What data tensors are made from.
pub(crate) struct Batch<'a> {
    pub(crate) seed: u64,
    /// Position in its sequence of every token, in the order in which they are laid out.
    pub(crate) positions: &'a [u64],
    pub(crate) vocabulary: u64,
    /// Sequences of a micro-batch.
    pub(crate) micro_batch: u64,
    /// Which labels the loss counts.
    pub(crate) counting: Counting,
    /// What the tokens are.
    pub(crate) text: Text,
    /// Sequences before the first of this run.
    pub(crate) first_sequence: u64,
}

/// Words of the chain: few, so that some dozens of steps are enough to learn it.
const WORDS: u64 = 16;

/// One in so many words is drawn instead of following from the one before.
const SURPRISE: u64 = 16;

/// The token at a position of a chain: word `5 w + 3` follows word `w`, modulo the number of words, but for surprises.
/// With 16 words that runs through all of them (Hull, Dobell 1962). Words are spread over the vocabulary.
///
/// Whoever knows the rule is left with the surprises: `ln(16) / 16 + H(1/16) = 0.41` of `ln(16) = 2.77`, at most.
fn chained(random: Random, position: u64, vocabulary: u64) -> u64 {
    let words = vocabulary.min(WORDS);
    let is_drawn = |at: u64| at == 0 || random.bits(2 * at).is_multiple_of(SURPRISE);
    let start = (0..=position).rev().find(|&at| is_drawn(at)).unwrap_or(0);
    let word = (start..position).fold(random.bits(2 * start + 1) % words, |word, _| (5 * word + 3) % words);
    word * (vocabulary / words)
}

/// Label of a token that the loss leaves out, as in PyTorch's cross-entropy.
const IGNORED: i64 = -100;

/// Which tokens the loss counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counting {
    /// All.
    All,
    /// Not those of a prompt at the start of every sequence, of another length in each, and not the last, which has no
    /// next token: so micro-batches count differently.
    Answers,
}

impl Counting {
    /// How a model counts: by its labels, if its loss reads them.
    pub(crate) fn of(model: &Model) -> Self {
        let mut losses =
            model.layers.iter().flat_map(|layer| &layer.ops).filter(|op| op.kind == OpKind::SumLoss);
        if losses.any(|op| op.operands.len() > 1) { Self::Answers } else { Self::All }
    }
}

impl Batch<'_> {
    /// A data tensor, whole, for the `seq`-th micro-batch since the first step, or for a slice of it.
    pub(crate) fn data<E: Real>(&self, layer: &Layer, layer_idx: usize, data: Data, place: Slot) -> Value<E> {
        let Slot { tensor, seq, tokens } = place;
        let first = tokens.start as usize;
        let sizes = layer.sizes_of(self.micro_batch, tokens);
        let shape = layer.shape(tensor, &sizes);
        let dims: Vec<&Dim> = layer.tensors[tensor.0].dims.iter().map(|dim| &layer.dims[dim.0]).collect();
        match data {
            Data::Tokens => {
                Value::Index(self.by_place((&shape, &dims), first, |row, at| self.token(seq, row, at)))
            }
            Data::Labels => {
                Value::Index(self.by_place((&shape, &dims), first, |row, at| self.label(seq, row, at)))
            }
            Data::Positions => Value::Index(self.by_place((&shape, &dims), first, |_, at| at as i64)),
            Data::AlibiSlopes => {
                let heads = shape.iter().product();
                Value::Float(from_counter(&shape, |head| slope(head, heads)).mapv(E::from_f64))
            }
            Data::RouterBias => {
                let random = Random::new(self.seed, layer_idx as u64, &layer.tensors[tensor.0].name);
                let noise = from_counter(&shape, |i| ROUTER_NOISE * random.normal(i));
                Value::Float(noise.mapv(E::from_f64))
            }
        }
    }

    /// Tokens of a micro-batch that the loss counts.
    pub(crate) fn n_counted(&self, seq: u64) -> u64 {
        let places = |row| self.positions.iter().map(move |&at| (row, at));
        let all = (0..self.micro_batch).flat_map(places);
        all.filter(|&(row, at)| self.label(seq, row, at) != IGNORED).count() as u64
    }

    /// The next token, where it counts.
    fn label(&self, seq: u64, row: u64, position: u64) -> i64 {
        let length = self.positions.len() as u64;
        let random = Random::new(self.seed, self.sequence(seq, row), "prompt");
        let prompt = random.bits(0) % length.div_ceil(2).max(1);
        let left_out = position < prompt || (length > 1 && position + 1 == length);
        if self.counting == Counting::Answers && left_out {
            return IGNORED;
        }
        self.token(seq, row, position + 1)
    }

    fn token(&self, seq: u64, row: u64, position: u64) -> i64 {
        let random = Random::new(self.seed, self.sequence(seq, row), "tokens");
        let vocabulary = self.vocabulary.max(1);
        match self.text {
            Text::Noise => (random.bits(position) % vocabulary) as i64,
            Text::Chain => chained(random, position, vocabulary) as i64,
        }
    }

    /// A sequence of a micro-batch, counted from the first of training.
    fn sequence(&self, seq: u64, row: u64) -> u64 {
        self.first_sequence + seq * self.micro_batch + row
    }

    /// Integers as a function of the sequence and of the position in it, from the `first` token of a slice on.
    fn by_place(
        &self,
        (shape, dims): (&[u64], &[&Dim]),
        first: usize,
        value: impl Fn(u64, u64) -> i64,
    ) -> ArrayD<i64> {
        let shape: Vec<usize> = shape.iter().map(|&n| n as usize).collect();
        let along = |extent: Extent| dims.iter().position(|dim| dim.extent == extent);
        let (row, so_far) = (along(Extent::MicroBatch), along(Extent::UpToSlice));
        let own = along(Extent::Sequence).map(|dim| (dim, first));
        let at = own.or(so_far.map(|dim| (dim, 0)));
        ArrayD::from_shape_fn(IxDyn(&shape), |i| {
            let position = at.map_or(0, |(dim, first)| self.positions[first + i[dim]]);
            value(row.map_or(0, |dim| i[dim] as u64), position)
        })
    }
}

/// A tensor of a micro-batch.
#[derive(Clone)]
pub(crate) struct Slot {
    pub(crate) tensor: TensorId,
    /// Micro-batches before this one, counted from the first step.
    pub(crate) seq: u64,
    /// Tokens of every sequence.
    pub(crate) tokens: Range<u64>,
}

/// Slope of a head's position bias: `2^(-8 (i+1) / n)` for `n` heads, `n` a power of two; the rest between those.
///
/// Press, Smith, Lewis 2022 (ALiBi), `get_slopes` of its published code. Two heads: 1/16 and 1/256.
fn slope(head: u64, heads: u64) -> f64 {
    let power = if heads.is_power_of_two() { heads } else { heads.next_power_of_two() / 2 };
    let regular = |i: f64, n: u64| (-8.0 * i / n as f64).exp2();
    if head < power {
        regular((head + 1) as f64, power)
    } else {
        regular((2 * (head - power) + 1) as f64, 2 * power)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_numbers_have_mean_zero_and_variance_one() {
        let random = Random::new(1, 2, "w");
        let n = 20_000;
        let all: Vec<f64> = (0..n).map(|i| random.normal(i)).collect();
        let mean = all.iter().sum::<f64>() / n as f64;
        let variance = all.iter().map(|x| x * x).sum::<f64>() / n as f64;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
    }

    #[test]
    fn streams_of_other_names_places_and_seeds_differ() {
        let first = |seed, place, name| Random::new(seed, place, name).bits(0);
        let all = [first(0, 0, "a"), first(0, 0, "b"), first(0, 1, "a"), first(1, 0, "a")];
        assert!((0..4).all(|i| (0..i).all(|j| all[i] != all[j])));
    }

    /// `get_slopes(3)` and `get_slopes(2)` of the published code.
    #[test]
    fn slopes_are_those_of_the_paper() {
        assert_eq!([0, 1].map(|head| slope(head, 2)), [1.0 / 16.0, 1.0 / 256.0]);
        assert_eq!([0, 1, 2].map(|head| slope(head, 3)), [1.0 / 16.0, 1.0 / 256.0, 0.25]);
    }

    #[test]
    fn micro_batches_count_different_numbers_of_tokens() {
        let positions: Vec<u64> = (0..16).collect();
        let batch = Batch {
            seed: 1,
            positions: &positions,
            vocabulary: 50,
            micro_batch: 2,
            counting: Counting::Answers,
            text: Text::Noise,
            first_sequence: 0,
        };
        let counted: Vec<u64> = (0..4).map(|seq| batch.n_counted(seq)).collect();
        assert!(counted.iter().all(|&n| (2..=30).contains(&n)), "{counted:?}");
        assert!(counted.iter().any(|&n| n != counted[0]), "{counted:?}");
    }

    #[test]
    fn most_words_of_a_chain_follow_from_the_one_before() {
        let random = Random::new(3, 5, "tokens");
        for vocabulary in [1, 7, 16, 50] {
            let words: Vec<u64> = (0..400).map(|at| chained(random, at, vocabulary)).collect();
            let (n, apart) = (vocabulary.min(WORDS), vocabulary / vocabulary.min(WORDS));
            let follows = |pair: &&[u64]| pair[1] == (5 * (pair[0] / apart) + 3) % n * apart;
            assert!(words.iter().all(|&word| word < vocabulary));
            // A surprise may be what was expected.
            assert!((360..400).contains(&(words.windows(2).filter(follows).count())), "{vocabulary}");
        }
    }

    #[test]
    fn the_data_goes_on_where_it_stopped() {
        let batch = |first_sequence| Batch {
            seed: 1,
            positions: &[0, 1, 2, 3],
            vocabulary: 50,
            micro_batch: 2,
            counting: Counting::Answers,
            text: Text::Chain,
            first_sequence,
        };
        let (whole, rest) = (batch(0), batch(6));
        assert_eq!(whole.token(4, 1, 2), rest.token(1, 1, 2));
        assert_eq!(whole.label(4, 1, 2), rest.label(1, 1, 2));
        assert_eq!(whole.n_counted(4), rest.n_counted(1));
    }

    #[test]
    fn labels_are_the_tokens_that_follow() {
        let batch = Batch {
            seed: 1,
            positions: &[0, 3, 1, 2],
            vocabulary: 50,
            micro_batch: 2,
            counting: Counting::All,
            text: Text::Noise,
            first_sequence: 0,
        };
        let dims = [
            Dim { name: "b".into(), extent: Extent::MicroBatch },
            Dim { name: "s".into(), extent: Extent::Sequence },
        ];
        let of = |shift| {
            let dims: Vec<&Dim> = dims.iter().collect();
            batch.by_place((&[2, 4], &dims), 0, |r, p| batch.token(5, r, p + shift))
        };
        let (tokens, labels) = (of(0), of(1));
        for row in 0..2 {
            assert_eq!(labels[[row, 0]], tokens[[row, 2]]);
            assert_eq!(labels[[row, 2]], tokens[[row, 3]]);
            assert_eq!(labels[[row, 3]], tokens[[row, 1]]);
        }
    }
}
