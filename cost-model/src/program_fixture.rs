//! Layers small enough to price by hand, and choices for them.

use std::collections::{BTreeMap, BTreeSet};

use ir::graph::{Data, Dim, DimId, Extent, Init, Layer, Op, Role, Sizes, Tensor, TensorId};
use ir::lower::{LayerChoice, Recompute, lower};
use ir::mesh::{AxisId, MAX_AXES, Mesh};
use ir::op::{Activation, GroupScore, Normalize, OpKind, RouterScore};
use ir::program::{AxisSet, Home, Program, Storage};
use ir::sharding::{Placement, Sharding};
use ir::signature::signature;
use ir::strategy::{AxisUse, Strategy};

/// Lengths of the layers below.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub b: u64,
    pub s: u64,
    pub h: u64,
    pub heads: u64,
    pub f: u64,
}

struct Builder {
    layer: Layer,
}

impl Builder {
    fn new(name: &str, dims: &[(&str, Extent)]) -> Self {
        let dims = dims.iter().map(|&(name, extent)| Dim { name: name.into(), extent }).collect();
        let layer =
            Layer { name: name.into(), dims, tensors: vec![], ops: vec![], stream_in: vec![], out: vec![] };
        Self { layer }
    }

    fn tensor(&mut self, name: &str, dims: &str, role: Role) {
        let dim = |name| DimId(self.layer.dims.iter().position(|dim| dim.name == name).unwrap());
        let dims = dims.split_whitespace().map(dim).collect();
        self.layer.tensors.push(Tensor { name: name.into(), dims, role });
    }

    fn parameter(&mut self, name: &str, dims: &str) {
        self.tensor(name, dims, Role::Parameter(Init::Normal));
    }

    fn ids(&self, names: &str) -> Vec<TensorId> {
        let id = |name| TensorId(self.layer.tensors.iter().position(|tensor| tensor.name == name).unwrap());
        names.split_whitespace().map(id).collect()
    }

    /// An operator whose results are new activations of the given dims.
    fn op(&mut self, name: &str, kind: OpKind, operands: &str, (results, dims): (&str, &str)) {
        for result in results.split_whitespace() {
            self.tensor(result, dims, Role::Activation);
        }
        let (operands, results) = (self.ids(operands), self.ids(results));
        self.layer.ops.push(Op { name: name.into(), kind, operands, results });
    }

    fn done(mut self, stream: &str, out: &str) -> Layer {
        self.layer.stream_in = self.ids(stream);
        self.layer.out = self.ids(out);
        for op in &self.layer.ops {
            ir::signature::check_operands(&self.layer, op).unwrap();
        }
        self.layer
    }
}

/// `x -> up -> act -> down`.
pub(crate) fn mlp(shape: Shape) -> Layer {
    let dims = [
        ("b", Extent::MicroBatch),
        ("s", Extent::Sequence),
        ("h", Extent::Fixed(shape.h)),
        ("f", Extent::Fixed(shape.f)),
    ];
    let mut build = Builder::new("mlp", &dims);
    build.tensor("x", "b s h", Role::Activation);
    build.parameter("w_up", "h f");
    build.parameter("w_down", "f h");
    build.op("up", OpKind::Linear, "x w_up", ("u", "b s f"));
    build.op("act", OpKind::Act { act: Activation::Gelu }, "u", ("a", "b s f"));
    build.op("down", OpKind::Linear, "a w_down", ("y", "b s h"));
    build.done("x", "y")
}

/// A GPT layer without biases and dropout: norm, attention, residual, norm, two products, residual.
pub(crate) fn gpt(shape: Shape) -> Layer {
    let dims = [
        ("b", Extent::MicroBatch),
        ("s", Extent::Sequence),
        ("h", Extent::Fixed(shape.h)),
        ("k", Extent::Fixed(shape.heads)),
        ("r", Extent::Fixed(1)),
        ("d", Extent::Fixed(shape.h / shape.heads)),
        ("n", Extent::Fixed(shape.h / shape.heads)),
        ("f", Extent::Fixed(shape.f)),
    ];
    let mut build = Builder::new("gpt", &dims);
    build.tensor("x", "b s h", Role::Activation);
    build.tensor("position", "s", Role::Data(Data::Positions));
    for name in ["g1", "c1", "g2", "c2"] {
        build.parameter(name, "h");
    }
    for (name, dims) in
        [("wq", "h k r d"), ("wk", "h k d"), ("wv", "h k n"), ("wo", "k r n h"), ("w1", "h f"), ("w2", "f h")]
    {
        build.parameter(name, dims);
    }
    let norm = || OpKind::LayerNorm { eps: 1e-5 };
    let attention = OpKind::CAUSAL_ATTENTION;
    build.op("fork_x", OpKind::Fork, "x", ("x1 x2", "b s h"));
    build.op("norm_1", norm(), "x2 g1 c1", ("a", "b s h"));
    build.op("fork_a", OpKind::Fork, "a", ("aq ak av", "b s h"));
    build.op("q", OpKind::Linear, "aq wq", ("qs", "b s k r d"));
    build.op("k", OpKind::Linear, "ak wk", ("ks", "b s k d"));
    build.op("v", OpKind::Linear, "av wv", ("vs", "b s k n"));
    build.op("attention", attention, "qs ks vs position position", ("o", "b s k r n"));
    build.op("o", OpKind::Linear, "o wo", ("y", "b s h"));
    build.op("add_1", OpKind::Add, "x1 y", ("z", "b s h"));
    build.op("fork_z", OpKind::Fork, "z", ("z1 z2", "b s h"));
    build.op("norm_2", norm(), "z2 g2 c2", ("m", "b s h"));
    build.op("up", OpKind::Linear, "m w1", ("u", "b s f"));
    build.op("act", OpKind::Act { act: Activation::Gelu }, "u", ("e", "b s f"));
    build.op("down", OpKind::Linear, "e w2", ("w", "b s h"));
    build.op("add_2", OpKind::Add, "z1 w", ("out", "b s h"));
    build.done("x", "out")
}

/// Router, dispatch, one expert product each way, combine; a quarter of the slots hold a token.
pub(crate) fn moe(shape: Shape, experts: u64) -> Layer {
    let dims = [
        ("b", Extent::MicroBatch),
        ("s", Extent::Sequence),
        ("h", Extent::Fixed(shape.h)),
        ("e", Extent::Fixed(experts)),
        ("c", Extent::Slots { filled: 0.25, capacity: None }),
        ("f", Extent::Fixed(shape.f)),
    ];
    let mut build = Builder::new("moe", &dims);
    build.tensor("x", "b s h", Role::Activation);
    for (name, dims) in [("w_router", "h e"), ("w_up", "e h f"), ("w_down", "e f h")] {
        build.parameter(name, dims);
    }
    let route = OpKind::Route {
        top_k: experts / 4,
        score: RouterScore::Softmax,
        normalize: Normalize::No,
        scale: 1.0,
        groups: 1,
        top_groups: 1,
        group_score: GroupScore::Max,
    };
    build.op("fork_x", OpKind::Fork, "x", ("x1 x2", "b s h"));
    build.op("router", OpKind::Linear, "x1 w_router", ("r", "b s e"));
    build.op("route", route, "r", ("p", "b s e"));
    build.op("fork_p", OpKind::Fork, "p", ("p1 p2", "b s e"));
    build.op("dispatch", OpKind::Dispatch, "x2 p1", ("t", "b e c h"));
    build.op("up", OpKind::Linear, "t w_up", ("u", "b e c f"));
    build.op("act", OpKind::Act { act: Activation::Gelu }, "u", ("a", "b e c f"));
    build.op("down", OpKind::Linear, "a w_down", ("z", "b e c h"));
    build.op("combine", OpKind::Combine, "z p2", ("y", "b s h"));
    build.done("x", "y")
}

/// `x -> head -> scores`, and the loss over them.
pub(crate) fn head(shape: Shape) -> Layer {
    head_of(shape, "b s")
}

/// The same of so many predictions of every token.
pub(crate) fn head_ahead(shape: Shape, n: u64) -> Layer {
    let mut layer = head_of(shape, "b s a");
    layer.dims.iter_mut().filter(|dim| dim.name == "a").for_each(|dim| dim.extent = Extent::Fixed(n));
    layer
}

fn head_of(shape: Shape, rows: &str) -> Layer {
    let dims = [
        ("b", Extent::MicroBatch),
        ("s", Extent::Sequence),
        ("a", Extent::Fixed(1)),
        ("h", Extent::Fixed(shape.h)),
        ("v", Extent::Uneven(shape.f)),
    ];
    let (stream, scores) = (format!("{rows} h"), format!("{rows} v"));
    let mut build = Builder::new("head", &dims);
    build.tensor("x", &stream, Role::Activation);
    build.tensor("labels", rows, Role::Data(Data::Labels));
    build.parameter("w", "h v");
    build.op("scores", OpKind::Linear, "x w", ("z", &scores));
    build.op("fork_z", OpKind::Fork, "z", ("z1 z2 z3", &scores));
    build.op("max", OpKind::RowMax, "z1", ("m", rows));
    build.op("fork_m", OpKind::Fork, "m", ("m1 m2", rows));
    build.op("sum", OpKind::SumExp, "z2 m1", ("e", rows));
    build.op("pick", OpKind::Pick, "z3 labels", ("t", rows));
    build.op("cross", OpKind::CrossEntropy, "e m2 t", ("l", rows));
    build.op("loss", OpKind::SumLoss, "l", ("loss", ""));
    build.done("x", "loss")
}

/// What one axis does in every operator: the name of a factor, or `defer`.
pub(crate) struct AxisPlan {
    pub stream: Placement,
    /// The factor that every operator splits that is not named, if it has it.
    pub elsewhere: Option<&'static str>,
    pub uses: &'static [(&'static str, &'static str)],
}

/// The batch and the stream's first dim are split everywhere.
pub(crate) const DATA: AxisPlan = AxisPlan { stream: Placement::Shard(0), elsewhere: Some("b"), uses: &[] };

/// Experts of [`moe`] are split, tokens elsewhere.
pub(crate) const EXPERT: AxisPlan = AxisPlan {
    stream: Placement::Shard(0),
    elsewhere: Some("b"),
    uses: &[("up", "e"), ("act", "e"), ("down", "e")],
};

/// Megatron's tensor parallelism of [`gpt`].
pub(crate) const TENSOR: AxisPlan = AxisPlan {
    stream: Placement::Replicate,
    elsewhere: None,
    uses: &[
        ("fork_a", "defer"),
        ("q", "k"),
        ("k", "k"),
        ("v", "k"),
        ("attention", "k"),
        ("o", "k"),
        ("up", "f"),
        ("act", "f"),
        ("down", "f"),
    ],
};

/// The same with norms and residuals cut along the sequence.
pub(crate) const TENSOR_AND_SEQUENCE: AxisPlan = AxisPlan {
    stream: Placement::Shard(1),
    elsewhere: None,
    uses: &[
        ("fork_x", "s"),
        ("norm_1", "s"),
        ("fork_a", "defer"),
        ("q", "k"),
        ("k", "k"),
        ("v", "k"),
        ("attention", "k"),
        ("o", "k"),
        ("add_1", "s"),
        ("fork_z", "s"),
        ("norm_2", "s"),
        ("up", "f"),
        ("act", "f"),
        ("down", "f"),
        ("add_2", "s"),
    ],
};

/// A layer lowered with one plan per axis of its mesh.
pub(crate) struct Lowered {
    pub layer: Layer,
    pub mesh: Mesh,
    pub sizes: Sizes,
    pub program: Program,
}

/// What to lower besides the axes.
pub(crate) struct Extra<'a> {
    pub storage: Storage,
    pub recompute: &'a [&'a str],
}

/// Everything kept, every state where it is used.
pub(crate) const PLAIN: Extra<'static> =
    Extra { storage: Storage::on_device(AxisSet::EMPTY, AxisSet::EMPTY, AxisSet::EMPTY), recompute: &[] };

pub(crate) fn lowered(
    layer: Layer,
    shape: Shape,
    mesh: &[u64],
    plans: &[AxisPlan],
    extra: &Extra<'_>,
) -> Lowered {
    let mesh = Mesh::of_sizes(mesh).unwrap();
    let sizes = layer.sizes(shape.b, shape.s);
    let strategies = layer.ops.iter().map(|op| {
        let sig = signature(&layer, op);
        let mut uses = [AxisUse::Same; MAX_AXES];
        for (axis, plan) in plans.iter().enumerate() {
            let named = plan.uses.iter().find(|(name, _)| *name == op.name);
            uses[axis] = match named.map(|(_, what)| *what).or(plan.elsewhere) {
                None => AxisUse::Same,
                Some("defer") => AxisUse::Defer,
                Some(factor) => sig.factor(factor).map_or(AxisUse::Same, AxisUse::Factor),
            };
        }
        Strategy(uses)
    });
    let mut stream = Sharding::REPLICATED;
    for (axis, plan) in plans.iter().enumerate() {
        stream = stream.with(AxisId(axis), plan.stream);
    }
    let again = |name: &String| extra.recompute.contains(&name.as_str());
    let is_loss = layer.has_loss();
    let choice = LayerChoice {
        stream,
        out: if is_loss { Sharding::REPLICATED } else { stream },
        strategies: strategies.collect(),
        recompute: layer
            .ops
            .iter()
            .map(|op| if again(&op.name) { Recompute::Again } else { Recompute::Keep })
            .collect(),
        kept: Home::Device,
        parameters: Home::Device,
        storage: layer.parameters().map(|tensor| (tensor, extra.storage)).collect::<BTreeMap<_, _>>(),
        shared: BTreeSet::new(),
    };
    let program = lower(&layer, &mesh, &sizes, &choice).unwrap();
    Lowered { layer, mesh, sizes, program }
}
