//! The simulator against closed forms, a chain against the same as a graph, and the bound below all.

use ir::schedule::{Schedule, table};
use proptest::prelude::*;

use super::*;

fn schedule(virtual_stages: u32) -> Schedule {
    if virtual_stages == 1 { Schedule::OneFOneB } else { Schedule::Interleaved { virtual_stages } }
}

const ONE: Placement = Placement::Looped { virtual_stages: 1 };

/// Every chunk F = 1, B = 2, every transfer `boundary`.
fn unit(p: u32, placement: Placement, boundary: f64, transfers: Transfers) -> PipelineTimes {
    let n_chunks = placement.n_chunks(p) as usize;
    PipelineTimes {
        placement,
        n_slices: 1,
        forward: vec![Seconds(1.0); n_chunks],
        backward: vec![Seconds(2.0); n_chunks],
        parts: None,
        boundary: vec![Seconds(boundary); n_chunks - 1],
        branches: None,
        transfers,
    }
}

/// The same chunks as a graph.
fn graph(times: &PipelineTimes, pairs: &[(u32, u32)], transfer: f64) -> PipelineTimes {
    let transfers = pairs.iter().map(|&pair| (pair, vec![Seconds(transfer)])).collect();
    PipelineTimes {
        boundary: vec![Seconds::ZERO; times.boundary.len()],
        branches: Some(Branches::new(times.forward.len(), transfers)),
        ..times.clone()
    }
}

/// A chain is a graph too.
#[test]
fn a_chain_as_a_graph_takes_as_long() {
    for schedule in [Schedule::GPipe, Schedule::OneFOneB, Schedule::ZbH1, Schedule::ZbV, Schedule::Chimera] {
        for transfers in [Transfers::Exposed, Transfers::Overlapped] {
            let table = table(schedule, 4, 6).unwrap();
            let mut chain = unit(4, schedule.placement(), 0.25, transfers);
            let n = chain.forward.len();
            chain.parts = Some(BackwardParts { input: vec![Seconds(1.0); n], weight: vec![Seconds(1.0); n] });
            let pairs: Vec<(u32, u32)> = (1..n as u32).map(|to| (to - 1, to)).collect();
            let spans = |times: &PipelineTimes| {
                let ranks = simulate(&table, times).unwrap().ranks;
                ranks.iter().map(|rank| (rank.sending_s, rank.spans.clone())).collect::<Vec<_>>()
            };
            assert!(spans(&chain) == spans(&graph(&chain, &pairs, 0.25)), "{schedule} {transfers:?}");
        }
    }
}

/// Chunks 0 and 1, and 2 and 3 beside them, meet in 4: three chunks fill the pipeline instead of five.
#[test]
fn branches_fill_a_pipeline_side_by_side() {
    let times = unit(5, ONE, 0.0, Transfers::Overlapped);
    let joined = graph(&times, &[(0, 1), (1, 4), (2, 3), (3, 4)], 0.0);
    for schedule in [Schedule::GPipe, Schedule::OneFOneB] {
        let table = table(schedule, 5, 8).unwrap();
        let [chain, branched] = [&times, &joined].map(|times| makespan(&table, times).unwrap().0);
        assert_eq!((chain, branched), (8.0 * 3.0 + 4.0 * 3.0, 8.0 * 3.0 + 2.0 * 3.0), "{schedule}");
        let bound = lower_bound(5, 8, &joined).0;
        assert!(bound <= branched && bound > 0.9 * 8.0 * 3.0, "{bound}");
    }
}

fn check_bubble(schedule: Schedule, p: u32, m: u32) {
    let v = schedule.n_virtual_stages();
    let times = unit(p, schedule.placement(), 0.0, Transfers::Overlapped);
    let timeline = simulate(&table(schedule, p, m).unwrap(), &times).unwrap();
    // A chunk's F + B is 3, so a stage's is 3 v and the bubble (p - 1) 3 v / v.
    let work = f64::from(m * 3 * v);
    assert_eq!(timeline.makespan_s.0, work + f64::from((p - 1) * 3), "{schedule} p={p} m={m}");
    for rank in &timeline.ranks {
        assert_eq!((rank.busy_s.0, rank.bubble_s.0), (work, f64::from((p - 1) * 3)));
    }
    let bound = lower_bound(p, m, &times).0 / timeline.makespan_s.0;
    assert!((1.0 - 1e-8..1.0).contains(&bound), "{schedule} p={p} m={m}: {bound}");
}

#[test]
fn closed_forms_of_the_bubble_are_exact() {
    for (p, m, v) in
        [(4, 8, 1), (8, 8, 1), (8, 32, 1), (8, 16, 2), (8, 32, 4), (4, 8, 3), (35, 280, 3), (16, 64, 4)]
    {
        check_bubble(schedule(v), p, m);
        check_bubble(Schedule::GPipe, p, m);
    }
}

/// Free transfers, and every chunk takes F forward, I back to its input, W back to its weights, I + W in one.
fn costs(p: u32, schedule: Schedule, [forward, input, weight]: [f64; 3]) -> PipelineTimes {
    let placement = schedule.placement();
    let each = |cost| vec![Seconds(cost); placement.n_chunks(p) as usize];
    let parts = BackwardParts { input: each(input), weight: each(weight) };
    PipelineTimes {
        placement,
        n_slices: 1,
        forward: each(forward),
        backward: each(input + weight),
        parts: Some(parts),
        boundary: vec![Seconds::ZERO; placement.n_chunks(p) as usize - 1],
        branches: None,
        transfers: Transfers::Overlapped,
    }
}

/// Idle time of every rank in a step where ranks go on by themselves, and where all wait for the slowest.
fn bubbles(schedule: Schedule, (p, m): (u32, u32), costs_of: [f64; 3]) -> (f64, f64) {
    let times = costs(p, schedule, costs_of);
    let timeline = simulate(&table(schedule, p, m).unwrap(), &times).unwrap();
    assert!(lower_bound(p, m, &times) <= timeline.makespan_s, "{schedule} p={p} m={m}");
    assert!(busiest(p, m, &times) <= timeline.period_s, "{schedule} p={p} m={m}");
    let busy = timeline.ranks[0].busy_s;
    timeline.ranks.iter().for_each(|rank| assert!((rank.busy_s.0 - busy.0).abs() < 1e-9));
    ((timeline.period_s - busy).0, (timeline.makespan_s - busy).0)
}

const SHAPES: [(u32, u32); 8] = [(2, 4), (2, 8), (3, 9), (4, 8), (4, 16), (6, 24), (8, 16), (8, 32)];
const EQUAL: [f64; 3] = [1.0, 1.0, 1.0];

/// arXiv 2401.10241 table 2: ZB-H1 `(p - 1)(F + B - W)`, ZB-H2 `(p - 1)(F + B - 2 W)`, the latter where ranks go on
/// to the next step by themselves.
#[test]
fn closed_forms_of_zb_h1_and_zb_h2_are_exact() {
    for (p, m) in SHAPES {
        for [f, b, w] in [EQUAL, [3.0, 3.5, 2.5], [1.0, 1.25, 0.75]] {
            let times = f64::from(p - 1);
            assert_eq!(bubbles(Schedule::ZbH1, (p, m), [f, b, w]).1, times * (f + b - w), "p={p} m={m}");
            assert_eq!(
                bubbles(Schedule::ZbH2, (p, m), [f, b, w]).0,
                times * (f + b - 2.0 * w),
                "p={p} m={m}"
            );
        }
    }
}

/// arXiv 2405.15362 table 1 in units of equal chunk actions, 1F1B having `6 (p - 1)`: ZB-V close to none, V-Half half
/// and V-Min two thirds of it. ZB-V's `p - 1` is what a V cannot avoid where all ranks end together: the last rank
/// begins `p - 1` forwards late.
#[test]
fn bubbles_of_the_v_shaped_schedules_are_those_published() {
    for (p, m) in SHAPES {
        let whole = 6.0 * f64::from(p - 1);
        let of = |schedule| bubbles(schedule, (p, m), EQUAL).1;
        assert_eq!(of(Schedule::ZbV), f64::from(p - 1), "p={p} m={m}");
        assert!(of(Schedule::VHalf) <= 0.5 * whole, "p={p} m={m}: {}", of(Schedule::VHalf));
        let reorder = if p.is_multiple_of(3) { 2.0 } else { 0.0 };
        assert!(of(Schedule::VMin) <= 2.0 / 3.0 * whole + reorder, "p={p} m={m}: {}", of(Schedule::VMin));
    }
}

/// `deepseek-ai/DualPipe` README without overlap, so that F&B = F + B: `(p - 1)(F + 2 B - 3 W)` for chunks; here less,
/// `(p - 1)(F + B - 2 W)` for equal parts, B being both parts.
#[test]
fn the_bubble_of_dualpipe_v_is_below_the_one_published() {
    for (p, m) in SHAPES {
        let times = f64::from(p - 1);
        assert_eq!(bubbles(Schedule::DualPipeV, (p, m), EQUAL).1, times * 1.0, "p={p} m={m}");
        for [f, i, w] in [[3.0, 4.0, 2.0], [1.0, 1.5, 0.5]] {
            let published = times * (f + 2.0 * (i + w) - 3.0 * w);
            assert!(bubbles(Schedule::DualPipeV, (p, m), [f, i, w]).1 <= published, "p={p} m={m}");
        }
    }
}

/// arXiv 2107.06925 table 2, ratio `(p - 2) / (2 m + p - 2)` where forward and backward take equal time; and arXiv
/// 2308.15762: `(p - 1)(F + B) / (2 w)` of whole stages.
#[test]
fn closed_forms_of_chimera_and_hanayo_are_exact() {
    let even = [1.0, 0.5, 0.5];
    for (p, m) in SHAPES {
        if p.is_multiple_of(2) {
            let (bubble, m, p) = (bubbles(Schedule::Chimera, (p, m), even).1, f64::from(m), f64::from(p));
            assert_eq!(bubble / (2.0 * m + bubble), (p - 2.0) / (2.0 * m + p - 2.0), "p={p} m={m}");
        }
        let waves = |waves| Schedule::Hanayo { waves };
        assert_eq!(bubbles(waves(1), (p, m), even).1, f64::from(2 * (p - 1)), "p={p} m={m}");
        for n in 1..=3 {
            assert_eq!(bubbles(waves(n), (p, p), even).1, f64::from(2 * (p - 1)), "p={p} w={n}");
        }
    }
}

/// DAPPLE (arXiv 2007.01045 section 5): more warm-up changes nothing while transfers are free. Breadth-first (arXiv
/// 2211.05953 section 4.1): `(p - 1)(F + B) / v` of whole stages, for any number of micro-batches.
#[test]
fn closed_forms_of_eager_dapple_and_breadth_first_are_exact() {
    for (p, m) in SHAPES {
        let whole = f64::from(p - 1) * 3.0;
        assert_eq!(bubbles(Schedule::Eager, (p, m), EQUAL).1, whole, "p={p} m={m}");
        assert_eq!(bubbles(Schedule::Dapple { warm_up: p }, (p, m), EQUAL).1, whole, "p={p} m={m}");
        for virtual_stages in 1..=3 {
            let schedule = Schedule::BreadthFirst { virtual_stages };
            assert_eq!(bubbles(schedule, (p, m), EQUAL).1, whole, "p={p} m={m} v={virtual_stages}");
        }
    }
}

/// Every slice of a chunk takes its share of F = 1 and B = 2; transfers are free.
fn sliced(p: u32, shares: &[f64]) -> PipelineTimes {
    let each = |whole: f64| (0..p).flat_map(|_| shares.iter().map(|share| Seconds(whole * share))).collect();
    PipelineTimes {
        n_slices: shares.len() as u32,
        forward: each(1.0),
        backward: each(2.0),
        boundary: vec![Seconds::ZERO; (p as usize - 1) * shares.len()],
        branches: None,
        ..unit(p, ONE, 0.0, Transfers::Overlapped)
    }
}

fn makespan_of(schedule: Schedule, (p, m): (u32, u32), shares: &[f64]) -> f64 {
    let (rows, times) = (table(schedule, p, m).unwrap(), sliced(p, shares));
    let timeline = simulate(&rows, &times).unwrap();
    assert!(lower_bound(p, m, &times) <= timeline.makespan_s, "{schedule} p={p} m={m}");
    timeline.makespan_s.0
}

/// arXiv 2406.03488 section 3.2 and 2102.07988 equation 1, equal slices: 1F1B's and GPipe's bubble, with m k units of a
/// k-th: `(p - 1)(F + B) / k`.
#[test]
fn closed_forms_of_slices_are_exact() {
    for (p, m) in SHAPES.into_iter().chain([(4, 1), (8, 3)]) {
        for k in [2, 4, 8] {
            let shares = vec![1.0 / f64::from(k); k as usize];
            let expected = 3.0 * f64::from(m) + 3.0 * f64::from(p - 1) / f64::from(k);
            for schedule in [Schedule::Seq1F1B { slices: k }, Schedule::TeraPipe { slices: k }] {
                assert_eq!(makespan_of(schedule, (p, m), &shares), expected, "{schedule} p={p} m={m}");
            }
        }
    }
}

/// arXiv 2102.07988 equation 5: the forward of unequal slices takes their sum, and the longest `p - 1` times again; and
/// as much backward.
#[test]
fn terapipe_waits_for_the_longest_slice() {
    for (p, m) in SHAPES {
        let shares = [0.5, 0.25, 0.25];
        let time = makespan_of(Schedule::TeraPipe { slices: 3 }, (p, m), &shares);
        assert_eq!(time, 3.0 * f64::from(m) + 3.0 * 0.5 * f64::from(p - 1), "p={p} m={m}");
    }
}

#[test]
fn eager_1f1b_hides_transfers_that_1f1b_waits_for() {
    let time = |schedule: Schedule| {
        let times = unit(4, schedule.placement(), 1.0, Transfers::Overlapped);
        makespan(&table(schedule, 4, 16).unwrap(), &times).unwrap()
    };
    assert!(time(Schedule::Eager) < time(Schedule::OneFOneB));
}

#[test]
fn a_split_backward_without_times_of_its_parts_is_an_error() {
    let rows = table(Schedule::ZbH1, 2, 4).unwrap();
    let times = unit(2, ONE, 0.0, Transfers::Exposed);
    assert_eq!(simulate(&rows, &times), Err(SimulateError::NoParts));
}

#[test]
fn exposed_transfers_cost_a_rank_two_per_micro_batch() {
    let times = |transfers| unit(2, ONE, 0.25, transfers);
    let rows = table(Schedule::OneFOneB, 2, 8).unwrap();
    let exposed = simulate(&rows, &times(Transfers::Exposed)).unwrap();
    assert_eq!(exposed.ranks[0].sending_s.0, 8.0 * 0.25);
    assert_eq!(exposed.ranks[1].sending_s.0, 8.0 * 0.25);
    let overlapped = simulate(&rows, &times(Transfers::Overlapped)).unwrap();
    assert_eq!(overlapped.ranks[0].sending_s.0, 0.0);
    assert!(overlapped.makespan_s < exposed.makespan_s);
    for rank in &exposed.ranks {
        assert_eq!(rank.busy_s + rank.sending_s + rank.bubble_s, exposed.makespan_s);
    }
}

#[test]
fn the_slowest_stage_sets_the_pace() {
    let mut times = unit(3, ONE, 0.0, Transfers::Overlapped);
    times.forward[1] = Seconds(10.0);
    let makespan = makespan(&table(Schedule::OneFOneB, 3, 10).unwrap(), &times).unwrap();
    // One forward in, ten times 12 in the middle, one backward out, as the last rank's 3 hides between.
    assert!((123.0..126.5).contains(&makespan.0), "{makespan:?}");
}

#[test]
fn times_that_do_not_fit_are_an_error() {
    let rows = table(Schedule::OneFOneB, 4, 8).unwrap();
    let error = simulate(&rows, &unit(6, ONE, 0.0, Transfers::Exposed)).unwrap_err();
    insta::assert_snapshot!(error, @"4 ranks need times for 4 chunks of 1 slices and a transfer between neighbours, found 6 forward, 6 backward and 5 transfers");
}

proptest! {
    #[test]
    fn the_bound_never_exceeds_the_simulated_time(
        p in 1..6_u32,
        groups in 1..5_u32,
        v in 1..4_u32,
        times in proptest::collection::vec((0.0..3.0_f64, 0.0..3.0_f64, 0.0..1.0_f64), 18),
        exposed in proptest::bool::ANY,
        gpipe in proptest::bool::ANY,
    ) {
        let schedule = if gpipe { Schedule::GPipe } else { schedule(v) };
        let (m, n_chunks) = (p * groups, schedule.placement().n_chunks(p) as usize);
        let times = PipelineTimes {
            placement: schedule.placement(),
            n_slices: 1,
            parts: None,
            forward: times[..n_chunks].iter().map(|time| Seconds(time.0)).collect(),
            backward: times[..n_chunks].iter().map(|time| Seconds(time.1)).collect(),
            boundary: times[1..n_chunks].iter().map(|time| Seconds(time.2)).collect(),
            branches: None,
            transfers: if exposed { Transfers::Exposed } else { Transfers::Overlapped },
        };
        let rows = table(schedule, p, m).unwrap();
        let timeline = simulate(&rows, &times).unwrap();
        prop_assert!(lower_bound(p, m, &times) <= timeline.makespan_s);
        prop_assert!(busiest(p, m, &times) <= timeline.period_s);
        prop_assert_eq!(makespan(&rows, &times).unwrap(), timeline.makespan_s);
        let sums = |rank: &RankTimeline| RankTotals { busy_s: rank.busy_s, sending_s: rank.sending_s };
        let summed = Totals {
            period_s: timeline.period_s,
            ranks: timeline.ranks.iter().map(sums).collect(),
        };
        prop_assert_eq!(totals(&rows, &times).unwrap(), summed);
        for rank in &timeline.ranks {
            let parts = rank.busy_s + rank.sending_s + rank.bubble_s;
            prop_assert!((parts.0 - timeline.makespan_s.0).abs() <= 1e-9 * timeline.makespan_s.0);
        }
    }
}
