//! What shows of communication by closed forms, and by events: two witnesses of every shipped model's layers.
//!
//! Where an engine launches nothing beside products and parameters are whole, or everything waits, both are the same.
//! Else the events know the order of kernels, two links that carry at once and how far ahead parameters are fetched;
//! the closed forms do not. `docs/cost-model.md` says which is nearer to published runs.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use cost_model::{Constants, PriceContext, RowPrice, SectionPrice, price_events, price_program};
use frontends::{read_cluster, read_model, shipped_cluster, shipped_model, shipped_models};
use ir::engine::{GradientOverlap, TensorOverlap};
use ir::lower::{LayerChoice, lower};
use ir::mesh::Mesh;
use ir::program::Home;
use ir::token_order::TokenOrder;
use ir::units::Seconds;
use planner::clock::Clock;
use planner::given::{Given, RecomputeRule, StorageRule};
use planner::layer_problem::LayerProblem;
use planner::prices::{Machine, Prices};
use planner::solve;
use serde_json::Value;
use tests::layers::machine;
use tests::planner;

/// Meshes: inside a node, across nodes and inside them, across nodes.
const MESHES: [&[u64]; 3] = [&[8], &[2, 8], &[16, 1]];

/// What layers keep and their parameters, one of them or both on the host.
const HOMES: [[Home; 2]; 3] =
    [[Home::Host, Home::Device], [Home::Device, Home::Host], [Home::Host, Home::Host]];

/// Relative difference of two times that are equal but for the order of additions.
const ROUNDING: f64 = 1e-9;

/// An engine's overlap, and where states are.
#[derive(Clone, Copy, Debug)]
struct Case {
    tensor: TensorOverlap,
    gradient: GradientOverlap,
    storage: StorageRule,
    recompute: RecomputeRule,
    /// Which memory holds what layers keep, and which their parameters.
    homes: [Home; 2],
}

impl Case {
    /// All but the attention core kept on the device.
    const fn of(tensor: TensorOverlap, gradient: GradientOverlap, storage: StorageRule) -> Self {
        Self { tensor, gradient, storage, recompute: RecomputeRule::AttentionOnly, homes: [Home::Device; 2] }
    }
}

/// Events over closed form of every section of every shipped layer at its fastest choice.
fn ratios(sizes: &[u64], case: Case) -> Vec<(f64, String)> {
    let ratio =
        |(closed, events, name): (SectionPrice, RowPrice, String)| (events.seconds / closed.seconds(), name);
    sections(sizes, case).into_iter().map(ratio).collect()
}

/// Every section of every shipped layer at its fastest choice, by closed form and as events.
fn sections(sizes: &[u64], case: Case) -> Vec<(SectionPrice, RowPrice, String)> {
    let mut cluster = read_cluster("dgx-a100-80", shipped_cluster("dgx-a100-80").unwrap().text).unwrap();
    let n_devices = sizes.iter().product::<u64>().max(8);
    (cluster.groups[0].count, cluster.tiers[1].devices) = (n_devices, n_devices);
    let mut constants = Constants::load();
    constants.engine.gradient_overlap = case.gradient;
    let mesh = Mesh::of_sizes(sizes).unwrap();
    let machine =
        Machine { tensor_overlap: case.tensor, ..machine(&cluster, &constants, TokenOrder::ZigZag) };
    let prices = Prices::new(machine.clone(), &mesh, &[]);
    let given = Given { recompute: case.recompute, storage: case.storage, ..Given::default() };
    let context = PriceContext {
        cluster: &cluster,
        device: machine.device,
        precision: machine.precision,
        gradients: machine.gradients,
        constants: &constants,
        kernels: machine.kernels,
        tensor_overlap: machine.tensor_overlap,
        rank_offset: 0,
        home: None,
    };
    let mut found = Vec::new();
    for shipped in shipped_models() {
        let model = read_model(shipped.name, shipped_model(shipped.name).unwrap().text).unwrap();
        for layer in &model.layers {
            let lengths = layer.sizes(4, 2048);
            let clock = Clock::after((8.0, 2.0), 16.0);
            let built = LayerProblem::new(layer, &lengths, &prices, clock, &given).unwrap();
            let (_, choices) = solve::eliminate(&built.problem, 0.0).unwrap();
            let choice =
                LayerChoice { kept: case.homes[0], parameters: case.homes[1], ..built.choice(&choices) };
            let program = lower(layer, &mesh, &lengths, &choice).unwrap();
            let price = price_program(&context, layer, &mesh, &lengths, &program);
            let events = price_events(&context, layer, &mesh, &lengths, &program);
            for (section, closed, events) in
                [("forward", price.forward, events[0]), ("backward", price.backward, events[1])]
            {
                let name = format!("{section} of {} of {} on {sizes:?}, {case:?}", layer.name, model.name);
                found.push((closed, events, name));
            }
        }
    }
    assert!(found.len() >= 240, "{}", found.len());
    found
}

/// Holds every ratio to a range.
#[track_caller]
fn check(sizes: &[u64], case: Case, (least, most): (f64, f64)) {
    for (ratio, name) in ratios(sizes, case) {
        assert!((least - ROUNDING..=most + ROUNDING).contains(&ratio), "{ratio}: {name}");
    }
}

#[test]
fn where_everything_waits_both_are_the_same() {
    let (tensor, gradient) = (TensorOverlap::Absent, GradientOverlap::Absent);
    for sizes in MESHES {
        for storage in [StorageRule::Whole, StorageRule::Gradient] {
            check(sizes, Case::of(tensor, gradient, storage), (1.0, 1.0));
        }
    }
}

/// A layer takes the longer of its work and its link to the host, in a row of them as by the closed form; the link is
/// the longer more often where all is kept than where only a layer's input is.
#[test]
fn what_goes_to_the_host_hides_behind_the_neighbours() {
    let plain = Case::of(TensorOverlap::Absent, GradientOverlap::Absent, StorageRule::Whole);
    let both = [RecomputeRule::Never, RecomputeRule::Always];
    for (sizes, homes) in MESHES.into_iter().flat_map(|sizes| HOMES.map(|homes| (sizes, homes))) {
        let shown = both.map(|recompute| {
            let here = sections(sizes, Case { recompute, ..plain });
            let there = sections(sizes, Case { recompute, homes, ..plain });
            for ((_, alone, _), (closed, events, name)) in here.iter().zip(&there) {
                let expected = alone.seconds.max(closed.moved);
                let ratio = events.seconds / expected;
                // Where the link carries much both ways, a row of so many layers has not settled yet.
                let off = if homes == [Home::Host; 2] { 0.05 } else { ROUNDING };
                assert!((ratio - 1.0).abs() < off, "{events:?} {expected:?}: {name}");
            }
            let shows = |one: &&(SectionPrice, RowPrice, String)| one.0.waiting_for_host() > Seconds::ZERO;
            there.iter().filter(shows).count() as f64 / there.len() as f64
        });
        assert!(shown.iter().all(|share| 0.0 < *share && *share < 1.0), "{shown:?} on {sizes:?}");
        // What is kept is less where it is computed again; parameters are the same.
        assert!(homes != HOMES[0] || shown[1] < shown[0], "{shown:?} on {sizes:?}");
    }
}

#[test]
fn gradients_that_are_sent_behind_a_layer_are_the_same_where_one_link_carries_all() {
    let (tensor, gradient) = (TensorOverlap::Absent, GradientOverlap::Beside);
    for sizes in [MESHES[0], MESHES[2]] {
        check(sizes, Case::of(tensor, gradient, StorageRule::Gradient), (1.0, 1.0));
    }
    // Two links carry at once: less shows.
    check(MESHES[1], Case::of(tensor, gradient, StorageRule::Gradient), (0.9, 1.0));
}

#[test]
fn what_runs_beside_products_is_near() {
    for sizes in MESHES {
        let beside = |tensor| Case::of(tensor, GradientOverlap::Beside, StorageRule::Whole);
        // Of several products that read one tensor, the first gradients of weights come too early to hide anything.
        check(sizes, beside(TensorOverlap::Gradients), (1.0, 1.13));
        check(sizes, beside(TensorOverlap::Chunked), (0.91, 1.06));
    }
}

#[test]
fn parameters_that_are_fetched_ahead_are_near() {
    for sizes in MESHES {
        for tensor in [TensorOverlap::Absent, TensorOverlap::Gradients, TensorOverlap::Chunked] {
            let (gradient, storage) = (GradientOverlap::Beside, StorageRule::Parameter);
            check(sizes, Case::of(tensor, gradient, storage), (0.82, 1.24));
        }
    }
}

fn said(words: &[&str]) -> Value {
    let said = planner(words);
    assert_eq!(said.code, 0, "{said}");
    serde_json::from_str(&said.out).unwrap()
}

/// `explain` has both witnesses of every layer of a plan: the closed ones add up to the stage's own times, and where
/// the events part from them by 3 % and more it says why.
#[test]
fn a_plan_is_explained_by_both_witnesses() {
    let file = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("both-witnesses.json");
    let file = file.to_str().unwrap();
    let job = [
        "llama-3-8b",
        "dgx-a100-80",
        "--nodes",
        "4",
        "--global-batch",
        "64",
        "--pin",
        "pp=1,tp=8,zero=3,axes=named",
    ];
    let plan = planner(&[&["optimize"], &job[..], &["-o", file]].concat());
    assert_eq!(plan.code, 0, "{plan}");
    let explained = said(&["explain", file, "--json"]);
    let overlap = explained["overlap"].as_array().unwrap();
    let number = |one: &Value, name: &str| one[name].as_f64().unwrap();
    let mut told = 0;
    for one in overlap {
        let (closed, events) = (number(one, "closed_form_s"), number(one, "events_s"));
        let streams = ["compute_s", "node_links_s", "network_links_s", "launch_s"];
        let busy: Vec<f64> = streams.iter().map(|name| number(one, name)).collect();
        // Nothing is busy for longer than the layer takes: each stream does one thing at a time.
        assert!(busy.iter().all(|time| *time <= events * (1.0 + ROUNDING)), "{one}");
        assert_eq!(one["why"].is_string(), (events / closed - 1.0).abs() >= 0.03, "{one}");
        told += usize::from(one["why"].is_string());
    }
    let of = |section: &str| -> f64 {
        let own = overlap.iter().filter(|one| one["section"] == section);
        own.map(|one| number(one, "closed_form_s") * number(one, "n_layers")).sum()
    };
    let priced = said(&["estimate", "--plan", file, "--json"]);
    let stage = &priced["stages"][0];
    for (section, name) in [("forward", "forward_s"), ("backward", "backward_s")] {
        let (found, expected) = (of(section), number(stage, name));
        assert!((found / expected - 1.0).abs() < ROUNDING, "{section}: {found} {expected}");
    }
    let text = planner(&["explain", file]).out;
    assert!(told > 0, "{text}");
    assert_eq!(text.matches(" as events: ").count(), told, "{text}");
}

/// Published rows priced by events stand beside those priced by closed forms, row by row.
#[test]
fn published_rows_are_priced_by_both_witnesses() {
    let found = said(&["validate", "--source", "megatron-bridge", "--events", "--json"]);
    let sources = |all: &Value| all["sources"].as_array().unwrap().clone();
    let (closed, events) = (sources(&found), sources(&found["events"]));
    let mut apart = 0;
    for (closed, events) in closed.iter().zip(&events) {
        assert_eq!(closed["name"], events["name"]);
        let rows = |source: &Value| source["rows"].as_array().unwrap().clone();
        for (one, other) in rows(closed).iter().zip(&rows(events)) {
            assert_eq!((&one["id"], &one["measured_s"]), (&other["id"], &other["measured_s"]));
            let ratio = other["predicted_s"].as_f64().unwrap() / one["predicted_s"].as_f64().unwrap();
            assert!((0.8..=1.25).contains(&ratio), "{one} {other}");
            apart += usize::from((ratio - 1.0).abs() > 1e-3);
        }
    }
    assert!(apart > 0, "no row is priced otherwise by events");
}
