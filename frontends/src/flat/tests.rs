//! Small graphs and the layers that are found in them.

use ir::flat::FlatDocument;
use ir::native::{DimDocument, Length, OpDocument, TensorDocument, TensorRole};
use ir::op::{Activation, Gating, OpKind};
use proptest::prelude::*;

use super::*;
use crate::model::read_model;

const STREAM: &str = "b s h";

/// A flat document under construction.
#[derive(Clone)]
struct Graph(FlatDocument);

impl Graph {
    fn new() -> Self {
        let dim = |(name, length): (&str, Length)| DimDocument { name: name.into(), length };
        let dims = [
            ("b", Length::MicroBatch),
            ("s", Length::Sequence),
            ("v", Length::Uneven(50)),
            ("h", Length::Fixed(8)),
            ("g", Length::Fixed(8)),
            ("f", Length::Fixed(32)),
            ("n", Length::Fixed(2)),
        ];
        let graph = Self(FlatDocument {
            planner_model: 1,
            name: "flat".into(),
            default_sequence: 16,
            dims: dims.into_iter().map(dim).collect(),
            tensors: Vec::new(),
            ops: Vec::new(),
            out: "loss".into(),
        });
        graph.tensor("tokens", "b s", TensorRole::Tokens).tensor("labels", "b s", TensorRole::Labels)
    }

    fn tensor(mut self, name: &str, dims: &str, role: TensorRole) -> Self {
        self.0.tensors.push(TensorDocument {
            name: name.into(),
            dims: dims.into(),
            role,
            trainable: true,
            by: 1,
        });
        self
    }

    /// Adds an operator with one result, which is named like it.
    fn op(mut self, name: &str, kind: OpKind, operands: &[&str], dims: &str) -> Self {
        let operands = operands.iter().map(|&operand| operand.into()).collect();
        self.0.ops.push(OpDocument { name: name.into(), kind, operands, results: vec![name.into()] });
        self.tensor(name, dims, TensorRole::Activation)
    }

    fn linear(self, name: &str, x: &str, weight: &str, dims: &str) -> Self {
        let w = format!("{name}.w");
        self.tensor(&w, weight, TensorRole::Parameter).op(name, OpKind::Linear, &[x, &w], dims)
    }

    fn norm(self, name: &str, x: &str) -> Self {
        let g = format!("{name}.g");
        let kind = OpKind::RmsNorm { eps: 1e-5, shift: 0.0 };
        self.tensor(&g, "h", TensorRole::ParameterOne).op(name, kind, &[x, &g], STREAM)
    }

    fn lookup(self, name: &str) -> Self {
        let table = format!("{name}.table");
        let graph = self.tensor(&table, "v h", TensorRole::Parameter);
        graph.op(name, OpKind::Embed, &["tokens", &table], STREAM)
    }

    fn add(self, name: &str, a: &str, b: &str) -> Self {
        self.op(name, OpKind::Add, &[a, b], STREAM)
    }

    /// `x + down(act(up(norm(x))))`, called `at.add`.
    fn block(self, at: &str, x: &str, inner: &str) -> Self {
        let name = |part: &str| format!("{at}.{part}");
        self.norm(&name("norm"), x)
            .linear(&name("up"), &name("norm"), &format!("h {inner}"), &format!("b s {inner}"))
            .op(&name("act"), OpKind::Act { act: Activation::Gelu }, &[&name("up")], &format!("b s {inner}"))
            .linear(&name("down"), &name("act"), &format!("{inner} h"), STREAM)
            .add(&name("add"), x, &name("down"))
    }

    /// `x + out(gate(norm(x)) * memory)`, called `at.add`: what reads a second value in every layer.
    fn cross(self, at: &str, x: &str, memory: &str) -> Self {
        let name = |part: &str| format!("{at}.{part}");
        let kind = OpKind::Glu { gating: Gating::Product { act: Activation::Silu } };
        self.norm(&name("norm"), x)
            .linear(&name("gate"), &name("norm"), "h g", "b s g")
            .linear(&name("memory"), memory, "h g", "b s g")
            .op(&name("glu"), kind, &[&name("gate"), &name("memory")], "b s g")
            .linear(&name("out"), &name("glu"), "g h", STREAM)
            .add(&name("add"), x, &name("out"))
    }

    /// `n` blocks; the last is `at.{n-1}.add`.
    fn blocks(self, at: &str, n: usize, x: &str) -> Self {
        let from = |i: usize| if i == 0 { x.to_owned() } else { format!("{at}.{}.add", i - 1) };
        (0..n).fold(self, |graph, i| graph.block(&format!("{at}.{i}"), &from(i), "f"))
    }

    fn head(self, x: &str) -> Self {
        self.norm("head.norm", x)
            .linear("head.logits", "head.norm", "v h", "b s v")
            .op("head.max", OpKind::RowMax, &["head.logits"], "b s")
            .op("head.sum", OpKind::SumExp, &["head.logits", "head.max"], "b s")
            .op("head.pick", OpKind::Pick, &["head.logits", "labels"], "b s")
            .op("head.entropy", OpKind::CrossEntropy, &["head.sum", "head.max", "head.pick"], "b s")
            .op("loss", OpKind::SumLoss, &["head.entropy"], "")
    }

    fn text(&self) -> String {
        serde_json::to_string(&self.0).unwrap()
    }

    #[track_caller]
    fn model(&self) -> Model {
        read_model("flat.json", &self.text()).unwrap_or_else(|error| panic!("{error}"))
    }

    fn fault(&self) -> String {
        let error = read_model("flat.json", &self.text()).map(|_| ()).unwrap_err().to_string();
        error.split_once(": ").unwrap().1.to_owned()
    }

    /// First and last operator of every layer.
    fn borders(&self) -> String {
        let whole = ir::native::read_layer(&self.0.clone().into_layer(), "").unwrap();
        let flow = Flow::new(&whole).unwrap();
        let layers = layers::layers(&flow, &Cuts::new(&flow, 16), 1024).unwrap();
        let ends = |ops: std::ops::Range<usize>| match ops.len() {
            1 => flow.op(ops.start).name.clone(),
            _ => format!("{}..{}", flow.op(ops.start).name, flow.op(ops.end - 1).name),
        };
        layers.into_iter().map(ends).collect::<Vec<_>>().join(" ")
    }

    /// Kinds in order, with what they take and leave.
    #[track_caller]
    fn streams(&self) -> String {
        let model = self.model();
        let run = |run: &ir::graph::Segment| {
            let layer = &model.layers[run.layer];
            let names = |tensors: &[ir::graph::TensorId]| {
                tensors
                    .iter()
                    .map(|tensor| layer.tensors[tensor.0].name.as_str())
                    .collect::<Vec<_>>()
                    .join(" ")
            };
            format!("{} x{}: {} -> {}", layer.name, run.count, names(&layer.stream_in), names(&layer.out))
        };
        model.sequence.iter().map(run).collect::<Vec<_>>().join("\n")
    }

    /// Kinds in order, with counts.
    #[track_caller]
    fn kinds(&self) -> String {
        let model = self.model();
        let run = |run: &ir::graph::Segment| match run.count {
            1 => model.layers[run.layer].name.clone(),
            count => format!("{} x{count}", model.layers[run.layer].name),
        };
        model.sequence.iter().map(run).collect::<Vec<_>>().join(", ")
    }
}

#[test]
fn equal_blocks_are_one_kind_between_embedding_and_head() {
    let graph = Graph::new().lookup("table").blocks("mlp", 4, "table").head("mlp.3.add");
    assert_eq!(graph.kinds(), "embedding, mlp x4, head");
    let model = graph.model();
    let names: Vec<&str> = model.layers[1].ops.iter().map(|op| op.name.as_str()).collect();
    assert_eq!(names, ["stream.fork", "norm", "up", "act", "down", "add"]);
    let tensors: Vec<&str> = model.layers[1].tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(tensors[..3], ["stream", "stream.1", "stream.2"]);
    assert!(tensors.contains(&"up.w"), "{tensors:?}");
}

/// Two blocks that could be parted, and are never found without each other.
#[test]
fn what_repeats_together_is_one_layer() {
    let pair = |graph: Graph, i: usize, x: &str| {
        let first = format!("{i}.first");
        graph.block(&first, x, "f").block(&format!("{i}.second"), &format!("{first}.add"), "g")
    };
    // Alike but for their widths: two kinds that take turns.
    let graph =
        pair(pair(pair(Graph::new().lookup("table"), 0, "table"), 1, "0.second.add"), 2, "1.second.add");
    assert_eq!(
        graph.head("2.second.add").kinds(),
        "embedding, first, second, first, second, first, second, head"
    );
    // Not alike: one kind of both.
    let pair = |graph: Graph, i: usize, x: &str| {
        let graph = graph.block(&format!("{i}.first"), x, "f");
        let (second, x) = (format!("{i}.second"), format!("{i}.first.add"));
        graph.norm(&format!("{second}.norm"), &x).add(&format!("{second}.add"), &x, &format!("{second}.norm"))
    };
    let graph =
        pair(pair(pair(Graph::new().lookup("table"), 0, "table"), 1, "0.second.add"), 2, "1.second.add");
    assert_eq!(graph.head("2.second.add").kinds(), "embedding, layer x3, head");
}

#[test]
fn a_chain_of_one_width_is_cut_into_its_words() {
    let mut graph = Graph::new().lookup("table");
    let mut x = "table".to_owned();
    for i in 0..5 {
        let (up, act) = (format!("{i}.up"), format!("{i}.act"));
        graph = graph.linear(
            &up,
            &x,
            if i % 2 == 0 { "h g" } else { "g h" },
            if i % 2 == 0 { "b s g" } else { STREAM },
        );
        graph = graph.op(
            &act,
            OpKind::Act { act: Activation::Gelu },
            &[&up],
            if i % 2 == 0 { "b s g" } else { STREAM },
        );
        x = act;
    }
    graph = graph.linear("back", &x, "g h", STREAM);
    assert_eq!(
        graph.head("back").borders(),
        "table 0.up..0.act 1.up..1.act 2.up..2.act 3.up..3.act 4.up..4.act back..loss"
    );
}

#[test]
fn without_repetition_every_narrow_place_is_a_border() {
    let graph = Graph::new().lookup("table").block("a", "table", "f").cross("b", "a.add", "a.add");
    assert_eq!(graph.head("b.add").borders(), "table a.norm..a.add b.norm..b.add head.norm..loss");
}

#[test]
fn blocks_of_blocks_are_told_by_the_smaller_ones() {
    let stage = |graph: Graph, i: usize, x: &str| {
        let graph = graph.linear(&format!("{i}.enter"), x, "h f", "b s f").linear(
            &format!("{i}.leave"),
            &format!("{i}.enter"),
            "f h",
            STREAM,
        );
        graph.blocks(&format!("stage{i}"), 4, &format!("{i}.leave"))
    };
    let graph = stage(stage(Graph::new().lookup("table"), 0, "table"), 1, "stage0.3.add");
    assert_eq!(graph.head("stage1.3.add").kinds(), "embedding, layer, stage x4, layer, stage x4, head");
}

#[test]
fn branches_are_finished_one_by_one() {
    let graph = Graph::new()
        .lookup("left.table")
        .lookup("right.table")
        .blocks("right", 3, "right.table")
        .norm("right.norm", "right.2.add")
        .blocks("left", 2, "left.table")
        .add("join", "left.1.add", "right.norm")
        .blocks("trunk", 2, "join")
        .head("trunk.1.add");
    assert_eq!(
        graph.borders(),
        "right.table right.0.norm..right.0.add right.1.norm..right.1.add right.2.norm..right.2.add right.norm \
         left.table left.0.norm..left.0.add left.1.norm..left.1.add join trunk.0.norm..trunk.0.add \
         trunk.1.norm..trunk.1.add head.norm..loss"
    );
    // The right branch waits below while the left one is worked on, whose layers are equal to its own.
    insta::assert_snapshot!(graph.streams());
}

/// A decoder of `n` layers, each a block and what reads the encoder.
fn encoder_decoder(n: usize) -> Graph {
    let graph =
        Graph::new().lookup("source.table").lookup("target.table").blocks("encoder", 3, "source.table");
    let graph = graph.norm("encoder.norm", "encoder.2.add");
    let from = |i: usize| if i == 0 { "target.table".into() } else { format!("decoder.{}.cross.add", i - 1) };
    let layer = |graph: Graph, i: usize| {
        let own = format!("decoder.{i}.own");
        graph.block(&own, &from(i), "f").cross(
            &format!("decoder.{i}.cross"),
            &format!("{own}.add"),
            "encoder.norm",
        )
    };
    (0..n).fold(graph, layer).head(&format!("decoder.{}.cross.add", n - 1))
}

#[test]
fn an_encoder_stands_before_the_decoder_that_reads_it() {
    assert_eq!(
        encoder_decoder(3).borders(),
        "source.table encoder.0.norm..encoder.0.add encoder.1.norm..encoder.1.add encoder.2.norm..encoder.2.add \
         encoder.norm target.table decoder.0.own.norm..decoder.0.cross.add decoder.1.own.norm..decoder.1.cross.add \
         decoder.2.own.norm..decoder.2.cross.add head.norm..loss"
    );
    // The last decoder layer is a kind of its own: it does not hand the encoder's result on.
    insta::assert_snapshot!(encoder_decoder(3).streams());
}

#[test]
fn what_is_too_large_for_a_layer_is_parted_or_refused_with_the_reason() {
    let act = OpKind::Act { act: Activation::Relu };
    let chain = |dims: &str| {
        let mut graph =
            Graph::new().lookup("table").linear("in", "table", &format!("h {dims}"), &format!("b s {dims}"));
        for i in 0..2100 {
            let before = if i == 0 { "in".to_owned() } else { format!("act{}", i - 1) };
            graph = graph.op(&format!("act{i}"), act.clone(), &[&before], &format!("b s {dims}"));
        }
        graph.linear("out", "act2099", &format!("{dims} h"), STREAM).head("out")
    };
    assert_eq!(
        chain("g").borders(),
        "table in..act1022 act1023..act2046 act2047..head.norm head.logits..loss"
    );
    // Of dims that only sequences and nothing else have, there is no place to cut.
    let mut graph = chain("g");
    graph
        .0
        .tensors
        .iter_mut()
        .filter(|tensor| tensor.dims == "b s g")
        .for_each(|tensor| tensor.dims = "b g s".into());
    assert_eq!(
        graph.fault(),
        "ops[1]: 2102 operators from `in` to `out` hang together, at most 1024 are one layer; the fewest elements cross \
         before `act0`, and `in` does not have the dims of a stream, sequences, tokens and more"
    );
}

#[test]
fn a_cycle_is_named() {
    let mut graph = Graph::new().lookup("table").blocks("mlp", 2, "table").head("mlp.1.add");
    let at = graph.0.ops.iter().position(|op| op.name == "mlp.0.add").unwrap();
    graph.0.ops[at].operands[0] = "mlp.1.act".into();
    let cycle = "`mlp.0.add` `mlp.1.norm` `mlp.1.up` `mlp.1.act` `mlp.0.add`";
    assert_eq!(graph.fault(), format!("ops[5]: operators wait for each other in a cycle of 4: {cycle}"));
}

#[test]
fn what_is_read_or_made_wrongly_is_named_with_its_place() {
    let good = || Graph::new().lookup("table").blocks("mlp", 2, "table").head("mlp.1.add");
    let fault = |change: &dyn Fn(&mut FlatDocument)| {
        let mut graph = good();
        change(&mut graph.0);
        graph.fault()
    };
    let faults = [
        fault(&|flat| flat.ops[3].operands[0] = "nothing".into()),
        fault(&|flat| flat.ops[3].operands[0] = "head.pick".into()),
        fault(&|flat| flat.ops[3].results[0] = "mlp.0.norm".into()),
        fault(&|flat| flat.ops[3].results[0] = "mlp.0.up.w".into()),
        fault(&|flat| flat.ops[3].name = "mlp.0.norm".into()),
        fault(&|flat| flat.tensors.push(flat.tensors[3].clone())),
        fault(&|flat| flat.dims.push(flat.dims[0].clone())),
        fault(&|flat| flat.out = "mlp.0.up".into()),
        fault(&|flat| flat.out = "nothing".into()),
        fault(&|flat| drop(flat.ops.remove(3))),
        fault(&|flat| flat.ops.clear()),
        fault(&|flat| flat.tensors.push(TensorDocument { name: "w".into(), ..flat.tensors[2].clone() })),
        fault(&|flat| flat.ops[5].operands.truncate(1)),
        fault(&|flat| flat.ops[5].operands[1] = "mlp.0.up".into()),
    ];
    insta::assert_snapshot!(faults.join("\n"));
}

#[test]
fn a_parameter_of_several_layers_is_a_tie_and_one_used_twice_in_a_layer_is_refused() {
    let tied = |name: &str, with: &str| {
        let mut graph = Graph::new().lookup("table").blocks("mlp", 3, "table").head("mlp.2.add");
        let op = graph.0.ops.iter().position(|op| op.name == name).unwrap();
        let old = std::mem::replace(&mut graph.0.ops[op].operands[1], with.into());
        graph.0.tensors.retain(|tensor| tensor.name != old);
        graph
    };
    let ends = tied("head.logits", "table.table");
    assert_eq!(ends.kinds(), "embedding, mlp x3, head");
    let model = ends.model();
    let [tie] = model.ties[..] else { panic!("{:?}", model.ties) };
    assert_eq!((tie.owner.layer, tie.copy.layer), (0, 2));
    let inner = tied("mlp.2.up", "mlp.0.up.w");
    assert_eq!(inner.kinds(), "embedding, mlp, mlp-2, mlp-3, head");
    assert_eq!(inner.model().n_parameters(), 2 * 50 * 8 + 3 * 8 + 5 * 8 * 32 + 8);
}

#[test]
fn a_parameter_that_one_layer_uses_twice_is_refused() {
    let tied = |mut graph: Graph, name: &str, with: &str| {
        let op = graph.0.ops.iter().position(|op| op.name == name).unwrap();
        let old = std::mem::replace(&mut graph.0.ops[op].operands[1], with.into());
        graph.0.tensors.retain(|tensor| tensor.name != old);
        graph
    };
    let graph = Graph::new()
        .lookup("table")
        .block("mlp", "table", "g")
        .block("last", "mlp.add", "g")
        .head("last.add");
    assert_eq!(
        tied(graph, "mlp.down", "mlp.up.w").fault(),
        "ops[4].operands[1]: `mlp.up.w` is used by `mlp.up` too, in the layer from `mlp.norm` to `mlp.add`: a \
         parameter is used once in a layer, and may be shared by layers"
    );
    // Where the layer can be parted between the two, it is.
    let pair = |graph: Graph, i: usize, x: &str| {
        let graph = graph.block(&format!("{i}.first"), x, "f");
        let (second, x) = (format!("{i}.second"), format!("{i}.first.add"));
        graph.norm(&format!("{second}.norm"), &x).add(&format!("{second}.add"), &x, &format!("{second}.norm"))
    };
    let graph = pair(pair(Graph::new().lookup("table"), 0, "table"), 1, "0.second.add").head("1.second.add");
    assert_eq!(graph.kinds(), "embedding, layer x2, head");
    let graph = tied(graph, "0.second.norm", "0.first.norm.g");
    assert_eq!(graph.kinds(), "embedding, first, second, layer, head");
}

/// What a value is, as a number: equal for values that are computed in the same way from the same data. Parameters are
/// told apart by their lengths alone.
#[derive(Debug)]
struct Meaning(flow::Numbering<String>);

impl Meaning {
    fn given(&mut self, layer: &Layer, tensor: ir::graph::TensorId) -> usize {
        self.0.of(format!("{:?} {:?}", layer.tensors[tensor.0].role, layer.extents(tensor)))
    }

    /// Values of all tensors of a layer that takes some values.
    fn of_layer(&mut self, layer: &Layer, ops: &[usize], taken: &[usize]) -> Vec<usize> {
        let mut values: Vec<usize> = layer.tensor_ids().map(|tensor| self.given(layer, tensor)).collect();
        layer.stream_in.iter().zip(taken).for_each(|(tensor, &value)| values[tensor.0] = value);
        for op in ops.iter().map(|&op| &layer.ops[op]) {
            let operands: Vec<usize> = op.operands.iter().map(|operand| values[operand.0]).collect();
            for (index, result) in op.results.iter().enumerate() {
                values[result.0] = if op.kind == OpKind::Fork {
                    operands[0]
                } else {
                    self.0.of(format!("{:?} {operands:?} {index}", op.kind))
                };
            }
        }
        values
    }

    /// The loss of a model, its layers worked off over their stack.
    fn of_model(&mut self, model: &Model) -> Vec<usize> {
        let mut stack: Vec<usize> = Vec::new();
        for layer in model.kinds_in_order().into_iter().map(|kind| &model.layers[kind]) {
            let taken = stack.split_off(stack.len() - layer.stream_in.len());
            let ops: Vec<usize> = (0..layer.ops.len()).collect();
            let values = self.of_layer(layer, &ops, &taken);
            stack.extend(layer.out.iter().map(|tensor| values[tensor.0]));
        }
        stack
    }
}

/// Any graph of norms, products, functions and sums over one or two texts; what nothing reads is added up at the end.
fn any_graph(steps: &[(u8, usize, usize)]) -> Graph {
    let mut graph = Graph::new().lookup("first").lookup("second");
    let mut values = vec!["first".to_owned(), "second".to_owned()];
    let mut is_read = vec![false; 2];
    for (at, &(kind, a, b)) in steps.iter().enumerate() {
        // Mostly one of the latest.
        let recent = |x: usize| values.len() - 1 - (x % values.len()).min(x / 7 % 4);
        let (a, b) = (recent(a), b % values.len());
        let name = format!("op.{at}");
        is_read[a] = true;
        graph = match kind % 4 {
            0 => graph.norm(&name, &values[a]),
            1 => graph.linear(&format!("{name}.in"), &values[a], "h g", "b s g").linear(
                &name,
                &format!("{name}.in"),
                "g h",
                STREAM,
            ),
            2 => graph.op(&name, OpKind::Act { act: Activation::Relu }, &[&values[a]], STREAM),
            _ => {
                is_read[b] = true;
                graph.add(&name, &values[a], &values[b])
            }
        };
        values.push(name);
        is_read.push(false);
    }
    let unread: Vec<String> =
        values.iter().zip(&is_read).filter(|(_, read)| !**read).map(|(name, _)| name.clone()).collect();
    let mut last = unread[0].clone();
    for (at, value) in unread.iter().enumerate().skip(1) {
        let sum = format!("sum.{at}");
        graph = graph.add(&sum, &last, value);
        last = sum;
    }
    graph.head(&last)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn layers_compute_what_the_operators_did(
        steps in prop::collection::vec((any::<u8>(), any::<usize>(), any::<usize>()), 0..40),
        keys in prop::collection::vec(any::<u32>(), 400),
    ) {
        let graph = any_graph(&steps);
        let model = graph.model();
        let whole = ir::native::read_layer(&graph.0.clone().into_layer(), "").unwrap();
        let flow = Flow::new(&whole).unwrap();
        let mut meaning = Meaning(flow::Numbering::new());
        let values = meaning.of_layer(&whole, &flow.order, &[]);
        prop_assert_eq!(meaning.of_model(&model), vec![values[flow.loss().0]]);
        let elements: u64 = whole.n_parameters();
        prop_assert_eq!(model.n_parameters(), elements);
        let mut keys = keys.iter().cycle();
        let mut shuffled = graph;
        shuffled.0.ops.sort_by_cached_key(|_| *keys.next().unwrap_or(&0));
        prop_assert_eq!(shuffled.model(), model);
    }

    #[test]
    fn the_order_of_the_file_does_not_matter(seed in prop::collection::vec(any::<u32>(), 200), n in 1_usize..4) {
        let graph = Graph::new().lookup("table").blocks("mlp", n, "table").head(&format!("mlp.{}.add", n - 1));
        let model = graph.model();
        let mut keys = seed.iter().cycle();
        let mut shuffled = graph;
        shuffled.0.ops.sort_by_cached_key(|_| *keys.next().unwrap_or(&0));
        shuffled.0.tensors.sort_by_cached_key(|_| *keys.next().unwrap_or(&0));
        prop_assert_eq!(shuffled.model(), model);
    }
}

/// The files that tests of the whole program plan for.
#[test]
fn unequal_layers_are_kinds_of_their_own() {
    let model = read_model("m.json", include_str!("../../../tests/good/unequal-layers.json")).unwrap();
    let runs: Vec<(&str, u64)> =
        model.sequence.iter().map(|run| (model.layers[run.layer].name.as_str(), run.count)).collect();
    let expected = [("embedding", 1), ("decoder", 2), ("decoder-2", 2), ("decoder", 2), ("head", 1)];
    assert_eq!(runs, expected);
    assert_eq!(model.ties.len(), 1);
}
