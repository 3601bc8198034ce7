//! The numbers a run begins with: parameters, tokens and tables, each a function of the seed and its place.
//!
//! Whole tensors; every rank cuts its block from the same one, so that no plan can change them. Random numbers are
//! `splitmix64` of a counter (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"), so that an
//! element does not depend on how many were drawn before it.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::f64::consts::PI;
use std::ops::Range;

use ndarray::{ArrayD, IxDyn};

use ir::graph::{Data, Dim, DimId, Extent, Init, Layer, Model, Role, TensorId};
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

/// The texts of a batch: token tensors of one name are one text, whichever layers read them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Texts {
    /// The text that labels continue: of those over sequences the last that layers read, if there is one from a
    /// vocabulary like that of the loss among these.
    continued: Option<String>,
    /// Rows of the smallest table that each is looked up in; those of the scores count for the one that is continued.
    rows: BTreeMap<String, u64>,
    /// Columns of the scores that labels point into, or fewer where tables in which tokens ahead are looked up have
    /// fewer rows.
    scores: Option<u64>,
}

impl Texts {
    /// Those of a model; `None` where tokens or labels have no table to point into.
    pub(crate) fn of(model: &Model) -> Option<Self> {
        let mut texts = Self::default();
        let mut over_sequences = Vec::new();
        let mut ahead: Option<u64> = None;
        for run in &model.sequence {
            let layer = &model.layers[run.layer];
            let sizes = layer.sizes(0, 0);
            for op in &layer.ops {
                let text = op.operands.first().map(|tensor| &layer.tensors[tensor.0]);
                let text = text.filter(|_| op.kind == OpKind::Embed);
                if let Some(text) = text {
                    let rows = layer.shape(op.operands[1], &sizes).first().copied()?;
                    if matches!(text.role, Role::Data(Data::Ahead(_))) {
                        ahead = ahead.into_iter().chain([rows]).min();
                        continue;
                    }
                    texts
                        .rows
                        .entry(text.name.clone())
                        .and_modify(|least| *least = rows.min(*least))
                        .or_insert(rows);
                    let is_sequence = |dim: &DimId| layer.dims[dim.0].extent == Extent::Sequence;
                    if text.dims.iter().any(is_sequence) {
                        over_sequences.push(text.name.clone());
                    }
                } else if op.kind == OpKind::Pick {
                    let columns = layer.shape(op.operands[0], &sizes).last().copied();
                    texts.scores = texts.scores.into_iter().chain(columns).min();
                }
            }
        }
        texts.scores = texts.scores.into_iter().chain(ahead).min();
        let speaks = |name: &&String| texts.rows.get(*name).copied() == texts.scores;
        let continued = over_sequences.iter().rfind(speaks).or(over_sequences.last());
        texts.continued = continued.cloned();
        if let (Some(name), Some(columns)) = (continued, texts.scores) {
            texts.rows.entry(name.clone()).and_modify(|least| *least = columns.min(*least));
        }
        let is_drawn = |role: Role| matches!(role, Role::Data(Data::Tokens | Data::Ahead(_) | Data::Labels));
        let asks = model.layers.iter().flat_map(|layer| &layer.tensors).any(|tensor| is_drawn(tensor.role));
        (!asks || texts.vocabulary().is_some()).then_some(texts)
    }

    /// Words of the text that labels continue, or of labels that continue none.
    pub(crate) fn vocabulary(&self) -> Option<u64> {
        let continued = self.continued.as_ref().and_then(|name| self.rows.get(name));
        continued.copied().or(self.scores).or_else(|| self.rows.values().min().copied())
    }

    /// The stream of random numbers of a text, and its words.
    fn text(&self, name: &str) -> Drawn {
        match self.rows.get(name) {
            Some(&words) if self.continued.as_deref() != Some(name) => {
                Drawn { stream: format!("text {name}").into(), words }
            }
            Some(_) | None => self.continued(),
        }
    }

    fn continued(&self) -> Drawn {
        Drawn { stream: CONTINUED.into(), words: self.vocabulary().unwrap_or(1) }
    }
}

/// What the tokens of a text are drawn from.
struct Drawn {
    /// Name of the stream of random numbers.
    stream: Cow<'static, str>,
    words: u64,
}

/// The stream of random numbers of the text that labels continue.
const CONTINUED: &str = "tokens";

/// What data tensors are made from.
pub(crate) struct Batch<'a> {
    pub(crate) seed: u64,
    /// Position in its sequence of every token, in the order in which they are laid out.
    pub(crate) positions: &'a [u64],
    pub(crate) texts: &'a Texts,
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
                let text = self.texts.text(&layer.tensors[tensor.0].name);
                let token = |row, at| self.token(&text, (seq, row), at);
                Value::Index(self.by_place((&shape, &dims), first, token))
            }
            Data::Labels => {
                Value::Index(self.by_place((&shape, &dims), first, |row, at| self.label(seq, row, at)))
            }
            Data::Ahead(by) => {
                let text = self.texts.continued();
                let token = |row, at| self.token(&text, (seq, row), at + by);
                Value::Index(self.by_place((&shape, &dims), first, token))
            }
            Data::Positions => Value::Index(self.by_place((&shape, &dims), first, |_, at| at as i64)),
            Data::Features => {
                let name = format!("features {}", layer.tensors[tensor.0].name);
                Value::Float(self.features((&shape, &dims), first, (&name, seq)).mapv(E::from_f64))
            }
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
        let left_out = position < prompt || (length > 1 && position + 1 >= length);
        if self.counting == Counting::Answers && left_out {
            return IGNORED;
        }
        self.token(&self.texts.continued(), (seq, row), position + 1)
    }

    fn token(&self, drawn: &Drawn, (seq, row): (u64, u64), position: u64) -> i64 {
        let random = Random::new(self.seed, self.sequence(seq, row), &drawn.stream);
        let vocabulary = drawn.words.max(1);
        match self.text {
            Text::Noise => (random.bits(position) % vocabulary) as i64,
            Text::Chain => chained(random, position, vocabulary) as i64,
        }
    }

    /// A sequence of a micro-batch, counted from the first of training.
    fn sequence(&self, seq: u64, row: u64) -> u64 {
        self.first_sequence + seq * self.micro_batch + row
    }

    /// Integers as a function of the sequence and of the place in it, from the `first` token of a slice on; along a
    /// third dim, of the places after that.
    fn by_place(
        &self,
        (shape, dims): (&[u64], &[&Dim]),
        first: usize,
        value: impl Fn(u64, u64) -> i64,
    ) -> ArrayD<i64> {
        let shape: Vec<usize> = shape.iter().map(|&n| n as usize).collect();
        let along = |extent: Extent| dims.iter().position(|dim| dim.extent == extent);
        let row = along(Extent::MicroBatch);
        let mut others = (0..dims.len()).filter(|dim| Some(*dim) != row);
        let (at, after) = (others.next(), others.next());
        ArrayD::from_shape_fn(IxDyn(&shape), |i| {
            let place = at.map_or(0, |dim| self.place(dims[dim].extent, first, i[dim]));
            let after = after.map_or(0, |dim| i[dim] as u64);
            value(row.map_or(0, |dim| i[dim] as u64), place + after)
        })
    }

    /// Where the `i`-th row of a dim is: of a sequence as its tokens are laid out, else the `i`-th.
    fn place(&self, extent: Extent, first: usize, i: usize) -> u64 {
        match extent {
            Extent::Sequence => self.positions[first + i],
            Extent::UpToSlice => self.positions[i],
            Extent::Fixed(_) | Extent::Uneven(_) | Extent::MicroBatch | Extent::Slots { .. } => i as u64,
        }
    }

    /// Normal numbers of a name, each a function of its sequence and of its place there.
    fn features(
        &self,
        (shape, dims): (&[u64], &[&Dim]),
        first: usize,
        (name, seq): (&str, u64),
    ) -> ArrayD<f64> {
        let lengths: Vec<usize> = shape.iter().map(|&n| n as usize).collect();
        let random = |row| Random::new(self.seed, self.sequence(seq, row), name);
        let rows: Vec<Random> = (0..self.micro_batch).map(random).collect();
        let is_row = |dim: usize| dims[dim].extent == Extent::MicroBatch;
        // Of a slice, places are those in its whole sequence.
        let whole = |dim: usize| match dims[dim].extent {
            Extent::Sequence | Extent::UpToSlice => self.positions.len() as u64,
            Extent::Fixed(_) | Extent::Uneven(_) | Extent::MicroBatch | Extent::Slots { .. } => shape[dim],
        };
        ArrayD::from_shape_fn(IxDyn(&lengths), |i| {
            let inner = (0..dims.len()).filter(|&dim| !is_row(dim));
            let at = inner.fold(0, |at, dim| at * whole(dim) + self.place(dims[dim].extent, first, i[dim]));
            let row = (0..dims.len()).find(|&dim| is_row(dim)).map_or(0, |dim| i[dim]);
            rows.get(row).map_or(0.0, |random| random.normal(at))
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
    use ir::graph::Segment;

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

    /// One text of fifty words.
    fn texts() -> Texts {
        Texts {
            continued: Some("tokens".into()),
            rows: BTreeMap::from([("tokens".into(), 50)]),
            scores: None,
        }
    }

    #[test]
    fn micro_batches_count_different_numbers_of_tokens() {
        let (positions, texts): (Vec<u64>, Texts) = ((0..16).collect(), texts());
        let batch = Batch {
            seed: 1,
            positions: &positions,
            texts: &texts,
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
        let texts = texts();
        let batch = |first_sequence| Batch {
            seed: 1,
            positions: &[0, 1, 2, 3],
            texts: &texts,
            micro_batch: 2,
            counting: Counting::Answers,
            text: Text::Chain,
            first_sequence,
        };
        let (whole, rest) = (batch(0), batch(6));
        let text = texts.text("tokens");
        assert_eq!(whole.token(&text, (4, 1), 2), rest.token(&text, (1, 1), 2));
        assert_eq!(whole.label(4, 1, 2), rest.label(1, 1, 2));
        assert_eq!(whole.n_counted(4), rest.n_counted(1));
    }

    #[test]
    fn labels_are_the_tokens_that_follow() {
        let texts = texts();
        let text = texts.text("tokens");
        let batch = Batch {
            seed: 1,
            positions: &[0, 3, 1, 2],
            texts: &texts,
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
            batch.by_place((&[2, 4], &dims), 0, |r, p| batch.token(&text, (5, r), p + shift))
        };
        let (tokens, labels) = (of(0), of(1));
        for row in 0..2 {
            assert_eq!(labels[[row, 0]], tokens[[row, 2]]);
            assert_eq!(labels[[row, 2]], tokens[[row, 3]]);
            assert_eq!(labels[[row, 3]], tokens[[row, 1]]);
        }
    }

    /// A batch of two sequences of eight tokens in zig-zag order over two devices.
    fn zig_zag<'a>(texts: &'a Texts, positions: &'a [u64]) -> Batch<'a> {
        let (counting, text) = (Counting::All, Text::Noise);
        Batch { seed: 1, positions, texts, micro_batch: 2, counting, text, first_sequence: 0 }
    }

    const ZIG_ZAG: [u64; 8] = [0, 1, 6, 7, 2, 3, 4, 5];

    fn given(batch: &Batch<'_>, (name, dims): (&str, &str), data: Data, tokens: Range<u64>) -> Value<f64> {
        let mut b = ir::builder::LayerBuilder::new("layer");
        [("t", 5), ("m", 3)].into_iter().for_each(|(name, length)| b.fixed(name, length));
        let tensor = b.tensor(name, dims, Role::Data(data));
        let layer = b.finish(tensor);
        batch.data(&layer, 0, data, Slot { tensor, seq: 3, tokens })
    }

    #[test]
    fn texts_of_other_names_are_other_texts_and_what_has_a_fixed_length_keeps_its_order() {
        let rows = [("tokens", 50), ("source", 40)].map(|(name, rows)| (name.to_owned(), rows));
        let texts = Texts { continued: Some("tokens".into()), rows: BTreeMap::from(rows), scores: Some(50) };
        let batch = zig_zag(&texts, &ZIG_ZAG);
        let index = |tensor, data| given(&batch, tensor, data, 0..8).as_index().unwrap().clone();
        let source = index(("source", "b t"), Data::Tokens);
        assert!(source.shape() == [2, 5] && source.iter().all(|token| (0..40).contains(token)), "{source}");
        assert_eq!(index(("positions", "t"), Data::Positions).into_raw_vec_and_offset().0, [0, 1, 2, 3, 4]);
        assert_eq!(
            index(("positions", "s"), Data::Positions).iter().map(|&at| at as u64).collect::<Vec<_>>(),
            ZIG_ZAG
        );
        let (own, other) = (index(("tokens", "b s"), Data::Tokens), index(("source", "b s"), Data::Tokens));
        assert_ne!(own, other);
        assert_eq!(other[[1, 4]], source[[1, 2]]);
        let labels = index(("labels", "b s"), Data::Labels);
        // The token after position 6 stands beside it, that after position 1 where the other run begins.
        assert_eq!([labels[[1, 2]], labels[[1, 1]]], [own[[1, 3]], own[[1, 4]]]);
    }

    #[test]
    fn what_is_ahead_is_of_the_text_that_labels_continue() {
        let texts = Texts { continued: Some("tokens".into()), scores: Some(50), ..Texts::default() };
        let all = zig_zag(&texts, &ZIG_ZAG);
        let batch = Batch { counting: Counting::Answers, ..all };
        let index = |tensor, data| given(&batch, tensor, data, 0..8).as_index().unwrap().clone();
        let own = index(("tokens", "b s"), Data::Tokens);
        let ahead = index(("ids", "b s"), Data::Ahead(2));
        let labels = index(("labels", "b s m"), Data::Labels);
        let at = |position: u64| ZIG_ZAG.iter().position(|&one| one == position).unwrap();
        for row in 0..2 {
            for position in 0..8_u64 {
                if position < 6 {
                    assert_eq!(ahead[[row, at(position)]], own[[row, at(position + 2)]]);
                }
                for prediction in 0..3 {
                    let label = labels[[row, at(position), prediction]];
                    let next = position + prediction as u64 + 1;
                    // The prompt is at most the first half of a sequence; nothing follows the last token.
                    let counts = label != IGNORED;
                    assert!(counts || next <= 4 || next >= 8, "{label} at {position}, {prediction} further");
                    assert!(!counts || (next < 8 && label == own[[row, at(next)]]));
                }
            }
        }
        assert_eq!(labels.index_axis(ndarray::Axis(2), 0), index(("labels", "b s"), Data::Labels));
    }

    #[test]
    fn features_are_functions_of_their_sequence_and_place() {
        let texts = Texts::default();
        let natural: Vec<u64> = (0..8).collect();
        let (batch, mixed) = (zig_zag(&texts, &natural), zig_zag(&texts, &ZIG_ZAG));
        let numbers =
            |batch, tensor, tokens| given(batch, tensor, Data::Features, tokens).into_float().unwrap();
        let patches = numbers(&batch, ("patches", "b t m"), 0..8);
        assert_eq!(patches.shape(), [2, 5, 3]);
        assert_eq!(patches, numbers(&mixed, ("patches", "b t m"), 0..8));
        assert_ne!(patches, numbers(&batch, ("frames", "b t m"), 0..8));
        let all = patches.iter().map(|x| (x * 1e6) as i64).collect::<std::collections::BTreeSet<_>>();
        assert_eq!(all.len(), 30);
        let frames = numbers(&batch, ("frames", "b s m"), 0..8);
        let order = ZIG_ZAG.map(|at| at as usize);
        assert_eq!(numbers(&mixed, ("frames", "b s m"), 0..8), frames.select(ndarray::Axis(1), &order));
        let slice = numbers(&batch, ("frames", "b s m"), 3..7);
        assert_eq!(slice, frames.select(ndarray::Axis(1), &[3, 4, 5, 6]));
    }

    #[test]
    fn labels_continue_the_last_text_over_sequences_whose_words_they_are() {
        const WORDS: u64 = 19;
        let scores = || {
            let mut b = ir::builder::LayerBuilder::new("scores");
            b.dim("v", Extent::Uneven(WORDS));
            let z = b.tensor("z", "b s v", Role::Activation);
            let labels = b.tensor("labels", "b s", Role::Data(Data::Labels));
            let picked = b.op("picked", OpKind::Pick, &[z, labels], "b s");
            b.finish(picked)
        };
        let of = |tables: &[(&str, &str, u64)]| {
            let mut b = ir::builder::LayerBuilder::new("embedding");
            [("h", 8), ("t", 5)].into_iter().for_each(|(name, length)| b.fixed(name, length));
            let mut out = TensorId(0);
            for (i, (name, dim, rows)) in tables.iter().enumerate() {
                b.dim(&format!("v{i}"), Extent::Uneven(*rows));
                let tokens = b.tensor(name, &format!("b {dim}"), Role::Data(Data::Tokens));
                let table = b.parameter(&format!("table{i}"), &format!("v{i} h"), Init::Normal);
                out = b.op(&format!("y{i}"), OpKind::Embed, &[tokens, table], &format!("b {dim} h"));
            }
            let model = Model {
                name: "texts".into(),
                default_sequence: 8,
                layers: vec![b.finish(out), scores()],
                sequence: [0, 1].map(|layer| Segment { layer, count: 1 }).to_vec(),
                ties: Vec::new(),
            };
            Texts::of(&model).unwrap()
        };
        let texts =
            of(&[("source", "s", WORDS), ("target", "s", WORDS), ("kinds", "s", 2), ("image", "t", 30)]);
        assert_eq!((texts.continued.as_deref(), texts.vocabulary()), (Some("target"), Some(WORDS)));
        assert_eq!((texts.text("kinds").words, texts.text("image").words), (2, 30));
        assert_eq!(
            (texts.text("target").stream, texts.text("source").stream),
            ("tokens".into(), "text source".into())
        );
        let texts = of(&[("tokens", "s", 12)]);
        assert_eq!((texts.continued.as_deref(), texts.vocabulary()), (Some("tokens"), Some(12)));
    }
}
