//! Every operator on small odd shapes: the layers that the other tests run.

use ir::graph::{Data, Dim, DimId, Extent, Init, Layer, Op, Role, Sizes, Tensor as GraphTensor, TensorId};
use ir::op::{
    Activation as A, AttentionBias as Bias, AttentionMask as Mask, Gating, GroupScore, Normalize,
    OpKind as K, RotarySide, RouterScore,
};
use ir::signature::{Signature, check_operands, signature};
use ndarray::IxDyn;

use super::Noise;
use crate::kernels::{Context, Index, KernelError, Tensor, Value};

/// An operator in a layer of its own, with values for its operands and gradients for its results.
pub(super) struct Case {
    pub(super) name: String,
    pub(super) layer: Layer,
    pub(super) sizes: Sizes,
    pub(super) signature: Signature,
    pub(super) operands: Vec<Value<f64>>,
    pub(super) gradients: Vec<Tensor<f64>>,
}

impl Case {
    /// Of a kind and a text `x[b:2 s:3 h:5] w[h f:4] -> y[b s f]`; a dim has its length where it first stands.
    pub(super) fn new(kind: K, text: &str) -> Self {
        let (operands, results) = text.split_once(" -> ").unwrap();
        let mut parser = Parser { lengths: Vec::new(), layer: empty_layer() };
        let operands = parser.tensors(operands);
        let results = parser.tensors(results);
        let Parser { lengths, mut layer } = parser;
        layer.out = vec![results[0]];
        layer.ops.push(Op { name: "op".into(), kind, operands, results });
        let op = &layer.ops[0];
        check_operands(&layer, op).unwrap();
        let signature = signature(&layer, op);
        let sizes = Sizes { filled: vec![1.0; lengths.len()], dims: lengths };
        let mut case = Self {
            name: format!("{:?} {text}", op.kind),
            layer,
            sizes,
            signature,
            operands: vec![],
            gradients: vec![],
        };
        case.fill();
        case
    }

    pub(super) fn kind(&self) -> &K {
        &self.layer.ops[0].kind
    }

    /// The rows of every loop where nothing is cut.
    pub(super) fn whole(&self) -> Vec<std::ops::Range<u64>> {
        self.signature.factors.iter().map(|factor| 0..self.sizes.dims[factor.dim.0]).collect()
    }

    pub(super) fn context<'a>(&'a self, blocks: &'a [std::ops::Range<u64>]) -> Context<'a> {
        Context { kind: self.kind(), signature: &self.signature, blocks }
    }

    /// Results of the kernel on operands that are not cut.
    pub(super) fn forward(&self, operands: &[Value<f64>]) -> Vec<Tensor<f64>> {
        let results =
            crate::kernels::forward(&self.context(&self.whole()), &operands.iter().collect::<Vec<_>>());
        floats(results.unwrap_or_else(|error| panic!("{}: {error}", self.name)))
    }

    /// Gradients by the kernel, given only what the operator's line saves.
    pub(super) fn backward(&self, gradients: &[Tensor<f64>]) -> Vec<Option<Tensor<f64>>> {
        backward(self, &self.whole(), &self.operands, gradients)
            .unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    fn fill(&mut self) {
        let mut noise = Noise::new(self.name.len() as u64);
        let shape = |tensor: &TensorId| -> Vec<usize> {
            self.layer.shape(*tensor, &self.sizes).into_iter().map(|n| n as usize).collect()
        };
        let op = &self.layer.ops[0];
        let length = |name: &str| {
            self.signature
                .factor(name)
                .map_or(0, |f| self.sizes.dims[self.signature.factors[f.0 as usize].dim.0] as i64)
        };
        let keys = op.operands.get(1).map_or(0, |k| shape(k).get(1).map_or(0, |&t| t as i64));
        let value = |tensor: &TensorId| {
            let name = self.layer.tensors[tensor.0].name.as_str();
            let shape = shape(tensor);
            let mut floats = || noise.tensor(&shape);
            match name {
                // Every third token is not counted.
                "labels" if length("v") == 0 => {
                    let mut i = 0;
                    Value::Index(Index::from_shape_simple_fn(IxDyn(&shape), || {
                        i += 1;
                        if i % 3 == 0 { -100 } else { 1 }
                    }))
                }
                "ids" | "labels" => {
                    let v = length("v") as usize;
                    Value::Index(Index::from_shape_simple_fn(IxDyn(&shape), || noise.below(v) as i64))
                }
                "position" | "kpos" => Value::Index(counted(&shape, 0)),
                "qpos" => Value::Index(counted(&shape, keys - length("s"))),
                // Most experts have no weight.
                "routes" => Value::Float(floats().mapv(|w| if w < 0.3 { 0.0 } else { w })),
                "e" | "slopes" => Value::Float(floats().mapv(|x| 1.5 + x)),
                _ => Value::Float(floats()),
            }
        };
        let operands: Vec<_> = op.operands.iter().map(value).collect();
        let gradients = op.results.iter().map(|result| Noise::new(7).tensor(&shape(result))).collect();
        (self.operands, self.gradients) = (operands, gradients);
    }
}

/// The numbers of results.
pub(super) fn floats(values: Vec<Value<f64>>) -> Vec<Tensor<f64>> {
    values.into_iter().map(|value| value.into_float().unwrap()).collect()
}

/// Backward on blocks, given only what the operator's line saves.
pub(super) fn backward(
    case: &Case,
    blocks: &[std::ops::Range<u64>],
    operands: &[Value<f64>],
    gradients: &[Tensor<f64>],
) -> Result<Vec<Option<Tensor<f64>>>, KernelError> {
    let saves = case.kind().line().saves;
    let saved: Vec<_> =
        operands.iter().enumerate().map(|(i, value)| saves.contains(&i).then_some(value)).collect();
    let gradients: Vec<_> = gradients.iter().map(Some).collect();
    crate::kernels::backward(&case.context(blocks), &saved, &gradients)
}

fn counted(shape: &[usize], first: i64) -> Index {
    let n: usize = shape.iter().product();
    Index::from_shape_vec(IxDyn(shape), (first..first + n as i64).collect()).unwrap()
}

fn empty_layer() -> Layer {
    Layer { name: "layer".into(), dims: vec![], tensors: vec![], ops: vec![], stream_in: vec![], out: vec![] }
}

struct Parser {
    lengths: Vec<u64>,
    layer: Layer,
}

impl Parser {
    fn tensors(&mut self, text: &str) -> Vec<TensorId> {
        let list: Vec<&str> = text.split(']').filter(|part| !part.trim().is_empty()).collect();
        list.into_iter().map(|part| self.tensor(part.trim())).collect()
    }

    fn tensor(&mut self, text: &str) -> TensorId {
        let (name, dims) = text.split_once('[').unwrap();
        let dims = dims.split_whitespace().map(|dim| self.dim(dim)).collect();
        let role = match name {
            "ids" => Role::Data(Data::Tokens),
            "labels" => Role::Data(Data::Labels),
            "position" | "qpos" | "kpos" => Role::Data(Data::Positions),
            "slopes" => Role::Data(Data::AlibiSlopes),
            "correction" => Role::Data(Data::RouterBias),
            "w" | "g" | "c" | "table" | "sinks" => Role::Parameter(Init::Normal),
            _ => Role::Activation,
        };
        self.layer.tensors.push(GraphTensor { name: name.into(), dims, role });
        TensorId(self.layer.tensors.len() - 1)
    }

    fn dim(&mut self, text: &str) -> DimId {
        let Some((name, length)) = text.split_once(':') else {
            return DimId(self.layer.dims.iter().position(|dim| dim.name == text).unwrap());
        };
        let length: u64 = length.parse().unwrap();
        let extent = match name {
            "b" => Extent::MicroBatch,
            "s" => Extent::Sequence,
            "t" => Extent::UpToSlice,
            "c" => Extent::Slots { filled: 0.5, capacity: None },
            "slots" => Extent::Slots { filled: 0.5, capacity: Some(1.0) },
            "v" => Extent::Uneven(length),
            _ => Extent::Fixed(length),
        };
        self.layer.dims.push(Dim { name: name.into(), extent });
        self.lengths.push(length);
        DimId(self.lengths.len() - 1)
    }
}

/// All cases.
pub(super) fn cases() -> Vec<Case> {
    let list = [tables(), products(), norms(), attentions(), elementwise(), structure(), routers(), losses()];
    list.into_iter().flatten().map(|(kind, text)| Case::new(kind, text)).collect()
}

type List = Vec<(K, &'static str)>;

fn tables() -> List {
    vec![
        (K::Embed, "ids[b:2 s:3] table[v:7 h:4] -> y[b s h]"),
        (K::AddPosition { offset: 2 }, "x[b:2 s:3 h:4] position[s] table[p:6 h] -> y[b s h]"),
    ]
}

fn products() -> List {
    vec![
        (K::Linear, "x[b:2 s:3 h:5] w[h f:4] -> y[b s f]"),
        (K::Linear, "x[b:2 s:3 h:5] w[v:7 h] -> y[b s v]"),
        (K::Linear, "x[b:2 s:3 h:4] w[h k:2 r:3 d:5] -> y[b s k r d]"),
        (K::Linear, "x[b:2 s:3 k:2 r:3 n:5] w[k r n h:4] -> y[b s h]"),
        (K::Linear, "x[b:2 e:3 c:4 h:5] w[e h f:2] -> y[b e c f]"),
        (K::Linear, "x[b:2 s:3 k:4 d:5] w[l:2 k d] -> y[b s k l]"),
        (K::Linear, "x[b:1 s:3 h:1] w[h f:1] -> y[f b s]"),
        (K::Linear, "x[b:2 s:3 h:5] w[f:4 o:2] -> y[b f s o h]"),
        (K::Linear, "x[h:3] w[h f:2] -> y[f]"),
        (K::Bias, "x[b:2 s:3 h:5] c[h] -> y[b s h]"),
        (K::Bias, "x[b:2 s:3 k:2 r:2 d:4] c[k r d] -> y[b s k r d]"),
        (K::Bias, "x[b:2 e:3 c:2 h:4] bias[h e] -> y[b e c h]"),
    ]
}

fn norms() -> List {
    let rope = |dims, side| K::Rope { theta: 100.0, dims, side };
    vec![
        (K::RmsNorm { eps: 1e-5, shift: 0.0 }, "x[b:2 s:3 h:5] g[h] -> y[b s h]"),
        (K::RmsNorm { eps: 1e-2, shift: 1.0 }, "x[b:2 s:3 k:2 d:4] g[d] -> y[b s k d]"),
        (K::LayerNorm { eps: 1e-5 }, "x[b:2 s:3 h:5] g[h] c[h] -> y[b s h]"),
        (rope(4, RotarySide::First), "x[b:2 s:3 k:2 r:3 d:4] position[s] -> y[b s k r d]"),
        (rope(4, RotarySide::First), "x[b:2 s:5 k:2 d:7] position[s] -> y[b s k d]"),
        (rope(2, RotarySide::Last), "x[b:2 s:5 k:2 d:5] position[s] -> y[b s k d]"),
        (rope(4, RotarySide::Last), "x[b:2 s:3 p:4] position[s] -> y[b s p]"),
    ]
}

fn attentions() -> List {
    let attention =
        |scale, window, softcap, bias| K::Attention { scale, window, softcap, bias, mask: Mask::Causal };
    let full = |softcap, bias| K::Attention { scale: None, window: None, softcap, bias, mask: Mask::Full };
    vec![
        (
            attention(None, None, None, Bias::None),
            "q[b:2 s:5 k:2 r:3 d:4] k[b s k d] v[b s k n:3] qpos[s] kpos[s] -> y[b s k r n]",
        ),
        (
            attention(Some(0.7), Some(3), None, Bias::None),
            "q[b:2 s:5 k:2 r:1 d:3] k[b s k d] v[b s k n:3] qpos[s] kpos[s] -> y[b s k r n]",
        ),
        (
            attention(None, Some(2), Some(0.8), Bias::None),
            "q[b:1 s:4 k:1 r:3 d:2] k[b s k d] v[b s k n:2] qpos[s] kpos[s] -> y[b s k r n]",
        ),
        (
            attention(None, None, None, Bias::Slopes),
            "q[b:2 s:4 k:2 r:2 d:3] k[b s k d] v[b s k n:3] qpos[s] kpos[s] slopes[k r] -> y[b s k r n]",
        ),
        (
            attention(None, Some(3), None, Bias::Sinks),
            "q[b:2 s:5 k:2 r:2 d:3] k[b s k d] v[b s k n:4] qpos[s] kpos[s] sinks[k r] -> y[b s k r n]",
        ),
        (
            attention(None, None, None, Bias::None),
            "q[b:2 s:3 k:2 r:2 d:6] k[b t:5 k d] v[b t k n:3] qpos[s] kpos[t] -> y[b s k r n]",
        ),
        (full(None, Bias::None), "q[b:2 s:4 k:2 r:3 d:4] k[b s k d] v[b s k n:3] -> y[b s k r n]"),
        // Queries whose dim has the name that keys' loops have.
        (full(None, Bias::None), "q[b:2 t:4 k:2 r:1 d:3] k[b t k d] v[b t k n:2] -> y[b t k r n]"),
        (full(Some(0.9), Bias::None), "q[b:2 s:3 k:2 r:2 d:4] k[b m:6 k d] v[b m k n:3] -> y[b s k r n]"),
        (
            full(None, Bias::Sinks),
            "q[b:2 s:5 k:2 r:2 d:3] k[b m:2 k d] v[b m k n:4] sinks[k r] -> y[b s k r n]",
        ),
    ]
}

fn elementwise() -> List {
    let act = |act| (K::Act { act }, "x[b:2 s:3 f:5] -> y[b s f]");
    let glu = |gating| (K::Glu { gating }, "gate[b:2 s:3 f:5] up[b s f] -> y[b s f]");
    let mut list = vec![
        glu(Gating::Product { act: A::Silu }),
        glu(Gating::Product { act: A::GeluTanh }),
        glu(Gating::ClampedProduct { limit: 0.5 }),
        (K::Gate, "x[b:2 s:3 h:5] z[b s] -> y[b s h]"),
        (K::Add, "a[b:2 s:3 h:5] other[b s h] -> y[b s h]"),
        (K::Scale { by: -0.3 }, "x[b:2 s:3 h:5] -> y[b s h]"),
        (K::Softcap { cap: 0.6 }, "z[b:2 s:3 v:5] -> y[b s v]"),
    ];
    list.extend([A::Silu, A::Gelu, A::GeluTanh, A::Relu, A::ReluSquared, A::Sigmoid].map(act));
    list
}

fn structure() -> List {
    vec![
        (K::Fork, "x[b:2 s:3 h:5] -> y[b s h] z[b s h] u[b s h]"),
        (K::Split { sizes: vec![3, 1, 2] }, "x[b:2 s:3 g:6] -> y[b s m:3] z[b s] u[b s p:2]"),
        (K::Split { sizes: vec![1, 4] }, "x[b:2 s:3 k:2 g:5] -> y[b s k o:1] z[b s k m:4]"),
        (K::Concat { sizes: vec![3, 1, 2] }, "y[b:2 s:3 m:3] z[b s] u[b s p:2] -> x[b s g:6]"),
        (K::Concat { sizes: vec![1, 1] }, "y[b:2 s:3 h:4] z[b s h] -> x[b s a:2 h]"),
        (K::Concat { sizes: vec![4, 4] }, "y[b:2 s:3 h:4] z[b s h] -> x[b s g:8]"),
        (K::Extend, "x[b:2 s:3 k:2 d:4] -> y[b t:3 k d]"),
        (K::AppendShared, "x[b:2 s:3 k:2 m:4] shared[b s p:3] -> y[b s k d:7]"),
    ]
}

fn routers() -> List {
    let route = |top_k, score, normalize, scale| K::Route {
        top_k,
        score,
        normalize,
        scale,
        groups: 1,
        top_groups: 1,
        group_score: GroupScore::Max,
    };
    let grouped = |score, group_score| K::Route {
        top_k: 2,
        score,
        normalize: Normalize::Sum,
        scale: 2.5,
        groups: 3,
        top_groups: 2,
        group_score,
    };
    vec![
        (route(2, RouterScore::Softmax, Normalize::Sum, 1.0), "z[b:2 s:3 e:5] -> y[b s e]"),
        (route(2, RouterScore::Softmax, Normalize::No, 1.5), "z[b:2 s:3 e:5] -> y[b s e]"),
        (route(3, RouterScore::SoftmaxOfChosen, Normalize::No, 1.0), "z[b:2 s:3 e:5] -> y[b s e]"),
        (route(1, RouterScore::Sigmoid, Normalize::No, 1.0), "z[b:2 s:3 e:5] -> y[b s e]"),
        (route(5, RouterScore::Sigmoid, Normalize::Sum, 1.0), "z[b:2 s:3 e:5] correction[e] -> y[b s e]"),
        (grouped(RouterScore::Sigmoid, GroupScore::TopTwo), "z[b:2 s:3 e:9] correction[e] -> y[b s e]"),
        (grouped(RouterScore::Softmax, GroupScore::Max), "z[b:2 s:3 e:6] -> y[b s e]"),
        (K::Dispatch, "x[b:2 s:3 h:4] routes[b s e:5] -> y[b e c:3 h]"),
        (K::Combine, "z[b:2 e:5 c:3 h:4] routes[b s:3 e] -> y[b s h]"),
        (K::Dispatch, "x[b:2 s:6 h:4] routes[b s e:5] position[s] -> y[b e slots:2 h]"),
        (K::Combine, "z[b:2 e:5 slots:2 h:4] weights[b s:6 e] position[s] -> y[b s h]"),
    ]
}

fn losses() -> List {
    vec![
        (K::RowMax, "z[b:2 s:3 v:7] -> m[b s]"),
        (K::SumExp, "z[b:2 s:3 v:7] m[b s] -> e[b s]"),
        (K::Pick, "z[b:2 s:3 v:7] labels[b s] -> t[b s]"),
        (K::RowMax, "z[b:2 s:3 a:2 v:7] -> m[b s a]"),
        (K::SumExp, "z[b:2 s:3 a:2 v:7] m[b s a] -> e[b s a]"),
        (K::Pick, "z[b:2 s:3 a:2 v:7] labels[b s a] -> t[b s a]"),
        (K::CrossEntropy, "e[b:2 s:3] m[b s] t[b s] -> l[b s]"),
        (K::Weigh { by: vec![1.0, -0.3] }, "l[b:2 s:3 a:2] -> y[b s a]"),
        (K::SumLoss, "l[b:2 s:4 a:2] labels[b s a] -> loss[]"),
        (K::SumLoss, "l[b:2 s:3] -> loss[]"),
        (K::SumLoss, "l[b:2 s:4] labels[b s] -> loss[]"),
    ]
}

/// Number of a kind. A new kind does not compile until it has a number here, and fails below until it has a case.
fn number(kind: &K) -> usize {
    match kind {
        K::Embed => 0,
        K::AddPosition { .. } => 1,
        K::Linear => 2,
        K::Bias => 3,
        K::RmsNorm { .. } => 4,
        K::LayerNorm { .. } => 5,
        K::Rope { side: RotarySide::First, .. } => 6,
        K::Rope { side: RotarySide::Last, .. } => 7,
        K::Attention { bias: Bias::None, mask: Mask::Causal, .. } => 8,
        K::Attention { bias: Bias::Slopes, .. } => 9,
        K::Attention { bias: Bias::Sinks, mask: Mask::Causal, .. } => 10,
        K::Glu { gating: Gating::Product { .. } } => 11,
        K::Glu { gating: Gating::ClampedProduct { .. } } => 12,
        K::Act { act: A::Silu } => 13,
        K::Act { act: A::Gelu } => 14,
        K::Act { act: A::GeluTanh } => 15,
        K::Act { act: A::Relu } => 16,
        K::Act { act: A::ReluSquared } => 17,
        K::Act { act: A::Sigmoid } => 18,
        K::Gate => 19,
        K::Add => 20,
        K::Scale { .. } => 21,
        K::Softcap { .. } => 22,
        K::Fork => 23,
        K::Split { .. } => 24,
        K::AppendShared => 25,
        K::Route { score: RouterScore::Softmax, .. } => 26,
        K::Route { score: RouterScore::SoftmaxOfChosen, .. } => 27,
        K::Route { score: RouterScore::Sigmoid, .. } => 28,
        K::Dispatch => 29,
        K::Combine => 30,
        K::RowMax => 31,
        K::SumExp => 32,
        K::Pick => 33,
        K::CrossEntropy => 34,
        K::SumLoss => 35,
        K::Concat { .. } => 39,
        K::Weigh { .. } => 40,
        K::Extend => 36,
        K::Attention { bias: Bias::None, mask: Mask::Full, .. } => 37,
        K::Attention { bias: Bias::Sinks, mask: Mask::Full, .. } => 38,
    }
}

/// One more than the last of them.
const N_KINDS: usize = 41;

#[test]
fn every_operator_has_a_case() {
    let found: std::collections::BTreeSet<_> = cases().iter().map(|case| number(case.kind())).collect();
    assert_eq!(found, (0..N_KINDS).collect());
}
