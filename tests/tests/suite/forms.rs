//! Equal forms of layers in the search: they win where they save, lose where they cannot be cut, and no bound lies.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use cost_model::Constants;
use frontends::{Size, read_cluster, read_model, rescale, shipped_cluster, shipped_model};
use ir::plan::Plan;
use ir::plan::check::open;
use planner::candidate::{Candidate, Scope, micro_batches};
use planner::forms::Forms;
use planner::given::{Given, RecomputeRule};
use planner::layer_problem::LayerProblem;
use planner::prices::Prices;
use planner::request::{Job, Pins, Progress, Request, SequenceParallel, Solver};
use planner::rewrite::{Variant, is_form_of, variants};
use planner::shapes::{Facts, shapes};
use planner::solve::eliminate;

fn question(model: &str, cluster: &str, devices: u64, pins: Pins) -> Request {
    let model = read_model(model, shipped_model(model).unwrap().text).unwrap();
    let cluster = read_cluster(cluster, shipped_cluster(cluster).unwrap().text).unwrap();
    let cluster = rescale(&cluster, Size::Devices(devices)).unwrap();
    let job = Job { global_batch: 64, ..Job::defaults(&model, &cluster) };
    Request { model, cluster, job, pins, solver: Solver::Structured }
}

fn plan(request: &Request) -> Plan {
    planner::optimize(request, &|_: Progress| ()).unwrap()
}

/// Candidates of one stage.
fn candidates(request: &Request) -> Vec<Candidate> {
    let n = request.cluster.n_devices();
    let facts = Facts::new(&request.model, request.job.sequence, request.cluster.tiers[0].devices);
    let of_shape = |shape: planner::shapes::Shape| {
        let all = micro_batches(request, &shape, 1).into_iter().map(|micro_batch| Candidate {
            shape: shape.clone(),
            meshes: Vec::new(),
            n_stages: 1,
            micro_batch,
            n_micro_batches: request.job.global_batch / micro_batch,
        });
        all.collect::<Vec<_>>()
    };
    shapes(n, facts, &request.pins).into_iter().flat_map(of_shape).collect()
}

#[test]
fn a_fused_form_wins_in_predicted_time_where_it_saves() {
    let request = question("llama-3-8b", "dgx-h100", 8, Pins::default());
    let plan = plan(&request);
    assert!(!plan.forms.is_empty());
    let opened = open(&plan).unwrap();
    for (&layer, original) in &opened.originals {
        assert_ne!(opened.model.layers[layer].ops, original.ops);
        assert!(is_form_of(&opened.model.layers[layer], original));
    }
    // The same devices, stages and micro-batch with the layers as they were read are slower.
    let constants = Constants::load();
    let scope = Scope::new(&request, &constants).unwrap();
    let all = candidates(&request);
    let faster = all.iter().filter_map(|candidate| {
        let bound = scope.bound(candidate, Forms::All)?;
        let plain = scope.evaluate(candidate, &bound, Forms::Leading).ok()?;
        let fused = scope.evaluate(candidate, &bound, Forms::All).ok()?;
        Some(fused.step_time() < plain.step_time())
    });
    assert!(faster.collect::<Vec<_>>().contains(&true));
}

#[test]
fn queries_keys_and_values_stay_apart_where_key_heads_are_fewer_than_devices() {
    // Two key-value heads on eight devices: keys are the same on four of them, queries are cut further.
    let pins = Pins { tp: Some(8), sequence_parallel: Some(SequenceParallel::Off), ..Pins::default() };
    let text = shipped_model("llama-3-8b").unwrap().text;
    let text = text.replace("\"num_key_value_heads\": 8", "\"num_key_value_heads\": 2");
    let model = read_model("two-heads", &text).unwrap();
    let request = Request { model, ..question("llama-3-8b", "dgx-h100", 8, pins) };
    let together = "attention.q+attention.k+attention.v";
    assert!(
        request.model.layers.iter().any(|layer| variants(layer).iter().any(|form| form.name == together))
    );
    let plan = plan(&request);
    assert!(plan.model.layers.iter().all(|layer| layer.ops.iter().all(|op| op.name != together)));
}

#[test]
fn the_bound_of_a_candidate_is_the_least_of_all_forms() {
    let request = question("mixtral-8x7b", "dgx-h100", 8, Pins::default());
    let constants = Constants::load();
    let scope = Scope::new(&request, &constants).unwrap();
    let mut n_saved = 0;
    for candidate in &candidates(&request) {
        let Some(bound) = scope.bound(candidate, Forms::All) else { continue };
        let prices = Prices::new(scope.machine.clone(), &candidate.shape.mesh, &candidate.shape.rules);
        let clock = scope.clock(candidate, bound.covers);
        let given = Given { recompute: RecomputeRule::Never, ..Given::default() };
        let time = |form: &Variant| {
            let sizes = form.layer.sizes(candidate.micro_batch, request.job.sequence);
            let problem = LayerProblem::new(&form.layer, &sizes, &prices, clock, &given)?;
            Some(eliminate(&problem.problem, 0.0)?.0)
        };
        let of_kind = |forms: &Vec<Variant>| forms.iter().filter_map(time).fold(f64::INFINITY, f64::min);
        let least: f64 =
            scope.forms.iter().zip(&scope.counts).map(|(forms, &count)| of_kind(forms) * count as f64).sum();
        assert!(
            (bound.work.average * candidate.n_stages as f64 - least).abs() <= 1e-9 * least,
            "{:?} {least}",
            bound.work
        );
        n_saved += usize::from(bound.saving.0 > 0.0);
    }
    assert!(n_saved > 0);
}
