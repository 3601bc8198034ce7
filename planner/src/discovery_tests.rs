//! What the search finds on its own: nothing in it names a parallelism.
//!
//! One layer on one mesh, its fastest choice, and what the literature would call it: read off the loops that the axes
//! cut and the collectives of the program.

use std::collections::BTreeSet;

use cost_model::Constants;
use ir::graph::Layer;
use ir::lower::lower;
use ir::mesh::Mesh;
use ir::plan::entry::Entry;
use ir::program::{Instruction, Program};

use crate::clock::{Clock, Covers};
use crate::given::Given;
use crate::layer_problem::LayerProblem;
use crate::prices::Prices;
use crate::solve::eliminate;
use crate::test_models::{Width, a100s, dense, experts, machine, mlp_only};

/// What a layer does on a mesh where nothing but time counts.
struct Found {
    entry: Entry,
    layer: Layer,
    program: Program,
}

/// A question: the devices along each axis, the nodes they fill, sequences and tokens of a micro-batch, and how many of
/// these make a step.
#[derive(Clone, Copy)]
struct Setting<'a> {
    axes: &'a [u64],
    n_nodes: u64,
    micro_batch: u64,
    sequence: u64,
    n_micro_batches: f64,
}

fn find(layer: Layer, setting: Setting<'_>) -> Found {
    let cluster = a100s(setting.n_nodes);
    let constants = Constants::load();
    let mesh = Mesh::of_sizes(setting.axes).unwrap();
    let prices = Prices::new(machine(&cluster, &constants), &mesh, &[]);
    let sizes = layer.sizes(setting.micro_batch, setting.sequence);
    let clock = Clock::beside((setting.n_micro_batches, 1.0), 32.0, Covers::default(), &constants);
    let problem = LayerProblem::new(&layer, &sizes, &prices, clock, &Given::default()).unwrap();
    let (_, choices) = eliminate(&problem.problem, 0.0).unwrap();
    let choice = problem.choice(&choices);
    let (entry, program) =
        (Entry::of(&layer, &mesh, &choice), lower(&layer, &mesh, &sizes, &choice).unwrap());
    Found { entry, layer, program }
}

impl Found {
    /// The loop that an operator cuts along the only axis.
    fn cut(&self, op: &str) -> &str {
        let found = self.entry.ops.iter().find(|entry| entry.op == op);
        &found.unwrap_or_else(|| panic!("no {op}: {:?}", self.entry.ops)).axes[0]
    }

    /// Every conversion of activations that moves bytes: `all-gather norm`.
    fn collectives(&self, section: &[Instruction]) -> BTreeSet<String> {
        let mut list = BTreeSet::new();
        for instruction in section {
            let Instruction::Convert { input, steps, .. } = instruction else { continue };
            let tensor = &self.layer.tensors[self.program.value(*input).tensor.0].name;
            let moving = steps.iter().filter(|step| step.kind.is_collective());
            list.extend(moving.map(|step| format!("{} {tensor}", step.kind.name())));
        }
        list
    }

    /// The loops that operators cut, forks aside.
    fn cuts(&self) -> BTreeSet<&str> {
        let ops = self.entry.ops.iter().filter(|entry| !entry.op.ends_with(".fork"));
        ops.map(|entry| entry.axes[0].as_str()).collect()
    }

    /// What happens to gradients and parameters once per step, whatever parameter it is.
    fn per_step(&self) -> BTreeSet<&'static str> {
        let steps = self.program.updates.iter().flat_map(|update| update.reduce.iter().chain(&update.gather));
        steps.filter(|step| step.kind.is_collective()).map(|step| step.kind.name()).collect()
    }
}

/// Holds the collectives of forward and backward to a list each.
#[track_caller]
fn assert_collectives(found: &Found, forward: &[&str], backward: &[&str]) {
    let of = |section| found.collectives(section).into_iter().collect::<Vec<_>>();
    assert_eq!((of(&found.program.forward), of(&found.program.backward)), (words(forward), words(backward)));
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

const LLAMA_7B: Width = Width { hidden: 4096, kv_heads: 32, group: 1, head: 128, ffn: 11008 };

/// The same with four query heads to each of eight KV heads.
const GROUPED: Width = Width { kv_heads: 8, group: 4, ..LLAMA_7B };
const WIDE: Width = Width { ffn: 16384, ..LLAMA_7B };
const NODE: Setting<'_> =
    Setting { axes: &[8], n_nodes: 1, micro_batch: 1, sequence: 4096, n_micro_batches: 4.0 };

#[test]
fn an_axis_across_nodes_with_many_sequences_is_data_parallel_with_zero() {
    let found = find(dense(LLAMA_7B), Setting { axes: &[16], n_nodes: 2, micro_batch: 16, ..NODE });
    assert_eq!(found.cuts(), ["b"].into());
    assert_collectives(&found, &[], &[]);
    // All parameters share out their optimizer state: those of norms are sent with the others.
    assert_eq!(found.per_step(), ["all-gather", "reduce-scatter"].into());
    let storage = |name: &str| found.entry.parameters.iter().find(|one| one.tensor == name).unwrap();
    assert_eq!((storage("w_up").optimizer.len(), storage("w_up").parameter.len()), (1, 0));
    assert_eq!(storage("norm1.weight").optimizer.len(), 1);
}

#[test]
fn a_wide_mlp_whose_batch_cannot_be_cut_is_cut_by_columns_then_rows_with_tokens_between() {
    let found = find(mlp_only(Width { ffn: 131_072, ..LLAMA_7B }), Setting { sequence: 16384, ..NODE });
    let cuts = ["norm", "gate", "up", "glu", "down", "add"].map(|op| found.cut(op));
    assert_eq!(cuts, ["s", "f", "f", "f", "f", "s"]);
    // Korthikanti et al. 2022 (arXiv 2205.05198), figure 5: g gathers tokens, g-bar scatters them; backward the
    // other way round, and the input of the first product is gathered once more.
    assert_collectives(
        &found,
        &["all-gather norm", "reduce-scatter down"],
        &["all-gather down", "all-gather norm", "reduce-scatter norm"],
    );
    assert!(found.entry.stream.starts_with("s@") && found.entry.out.starts_with("s@"));
}

#[test]
fn few_tokens_are_summed_instead_of_cut() {
    let found = find(mlp_only(WIDE), Setting { sequence: 128, ..NODE });
    let cuts = ["norm", "gate", "up", "glu", "down", "add"].map(|op| found.cut(op));
    assert_eq!(cuts, ["-", "f", "f", "f", "f", "-"]);
    // Shoeybi et al. 2019 (arXiv 1909.08053), figure 3a: g after the second product, f before the first in backward.
    assert_collectives(&found, &["all-reduce down"], &["all-reduce norm"]);
}

#[test]
fn routed_experts_are_spread_and_tokens_sent_to_them() {
    let layer = experts(Width { ffn: 14336, ..LLAMA_7B }, 8, 2);
    let found = find(layer, Setting { micro_batch: 8, ..NODE });
    let cuts = ["norm", "router", "dispatch", "gate", "up", "down", "combine", "add"].map(|op| found.cut(op));
    assert_eq!(cuts, ["b", "b", "b", "e", "e", "e", "b", "b"]);
    let exchanges = ["all-to-all dispatch", "all-to-all down"];
    assert_collectives(&found, &exchanges, &exchanges);
}

#[test]
fn a_long_sequence_on_a_node_swaps_tokens_for_heads_at_attention() {
    let found = find(dense(LLAMA_7B), Setting { sequence: 131_072, ..NODE });
    assert_eq!(found.cuts(), ["k", "s"].into());
    assert_eq!(found.cut("core"), "k");
    // Jacobs et al. 2023 (arXiv 2309.14509): queries, keys and values in, the result out.
    let exchanges = ["all-to-all core", "all-to-all k.rope", "all-to-all q.rope", "all-to-all v"];
    assert_collectives(&found, &exchanges, &exchanges);
}

#[test]
fn a_long_sequence_on_more_devices_than_heads_gathers_keys_and_values() {
    let setting = Setting { axes: &[16], n_nodes: 2, sequence: 131_072, ..NODE };
    let found = find(dense(GROUPED), setting);
    assert_eq!(found.cuts(), ["s"].into());
    // Dubey et al. 2024 (arXiv 2407.21783), section 3.3.2.
    assert_collectives(
        &found,
        &["all-gather k.rope", "all-gather v"],
        &["all-gather k.rope", "all-gather v", "reduce-scatter k.rope", "reduce-scatter v"],
    );
}
