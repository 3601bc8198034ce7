//! Every schedule against the closed forms of its source, and the check against tables that are wrong.

use super::*;

fn print(table: &[Vec<Action>]) -> String {
    table.iter().map(|row| row_text(row)).collect::<Vec<_>>().join("\n")
}

fn rows(schedule: Schedule, p: u32, m: u32) -> Vec<Vec<Action>> {
    table(schedule, p, m).unwrap_or_else(|error| panic!("{schedule} p={p} m={m}: {error}"))
}

fn check(table: &[Vec<Action>], placement: Placement, n_micro_batches: u32) -> Result<(), ScheduleError> {
    check_table(table, shape(table, placement, n_micro_batches))
}

fn shape(table: &[Vec<Action>], placement: Placement, n_micro_batches: u32) -> TableShape {
    TableShape { n_stages: table.len() as u32, placement, n_micro_batches, n_slices: 1 }
}

const ONE: Placement = Placement::Looped { virtual_stages: 1 };

fn interleaved(virtual_stages: u32) -> Schedule {
    Schedule::Interleaved { virtual_stages }
}

/// The (p, m, v) on which the closed forms are tested here and in the simulator.
const CASES: [(u32, u32, u32); 8] =
    [(4, 8, 1), (8, 8, 1), (8, 32, 1), (8, 16, 2), (8, 32, 4), (4, 8, 3), (35, 280, 3), (16, 64, 4)];

#[test]
fn gpipe_runs_all_forwards_first() {
    insta::assert_snapshot!(print(&table(Schedule::GPipe, 2, 3).unwrap()), @r"
    F0 F1 F2 B0 B1 B2
    F0 F1 F2 B0 B1 B2
    ");
}

#[test]
fn one_f_one_b_warms_up_by_the_distance_to_the_last_rank() {
    insta::assert_snapshot!(print(&table(Schedule::OneFOneB, 3, 4).unwrap()), @r"
    F0 F1 F2 B0 F3 B1 B2 B3
    F0 F1 B0 F2 B1 F3 B2 B3
    F0 B0 F1 B1 F2 B2 F3 B3
    ");
}

#[test]
fn interleaved_takes_groups_of_p_micro_batches_through_each_virtual_stage() {
    insta::assert_snapshot!(print(&table(interleaved(2), 2, 4).unwrap()), @r"
    F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0
    F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0
    ");
}

#[test]
fn every_table_passes_the_check() {
    for (p, m, v) in CASES {
        let schedules: &[Schedule] =
            if v == 1 { &[Schedule::GPipe, Schedule::OneFOneB] } else { &[interleaved(v)] };
        for &schedule in schedules {
            let table = table(schedule, p, m).unwrap();
            let placement = Placement::Looped { virtual_stages: v };
            assert_eq!(check(&table, placement, m), Ok(()), "{schedule} p={p} m={m}");
        }
    }
}

#[test]
fn gpipe_keeps_every_micro_batch_in_flight() {
    assert_eq!(peak_in_flight(&table(Schedule::GPipe, 3, 5).unwrap()), [5, 5, 5]);
}

#[test]
fn one_f_one_b_keeps_as_many_in_flight_as_ranks_follow() {
    for (p, m, _) in CASES {
        let peaks = peak_in_flight(&table(Schedule::OneFOneB, p, m).unwrap());
        assert_eq!(peaks, (0..p).map(|rank| m.min(p - rank)).collect::<Vec<_>>());
    }
}

#[test]
fn interleaved_in_flight_has_its_closed_form() {
    for (p, m, v) in CASES.into_iter().filter(|(_, _, v)| *v > 1) {
        let peaks = peak_in_flight(&table(interleaved(v), p, m).unwrap());
        let closed = (0..p).map(|rank| (m * v).min(2 * (p - rank - 1) + (v - 1) * p + 1));
        assert_eq!(peaks, closed.collect::<Vec<_>>(), "p={p} m={m} v={v}");
    }
    let peaks = peak_in_flight(&table(interleaved(3), 35, 280).unwrap());
    assert_eq!(format!("{:.2}", f64::from(peaks[0]) / 3.0), "46.33");
}

#[test]
fn counts_that_no_table_can_have_are_errors() {
    assert_eq!(table(Schedule::GPipe, 0, 1), Err(ScheduleError::Empty));
    assert_eq!(table(interleaved(0), 4, 4), Err(ScheduleError::Empty));
    assert_eq!(table(interleaved(1), 4, 4), Err(ScheduleError::NotInterleaved));
    let error = table(interleaved(2), 4, 6).unwrap_err();
    assert_eq!(error.to_string(), "`interleaved` needs micro-batches in multiples of 4 stages, found 6");
    assert!(matches!(table(Schedule::GPipe, u32::MAX, u32::MAX), Err(ScheduleError::TooLarge { .. })));
}

#[test]
fn a_backward_before_its_forward_is_a_deadlock() {
    let mut rows = table(Schedule::OneFOneB, 2, 2).unwrap();
    rows[1].swap(0, 1);
    let error = check(&rows, ONE, 2).unwrap_err();
    insta::assert_snapshot!(error, @"rank 1: backward of micro-batch 0 on virtual stage 0 waits for ever on forward of micro-batch 0 on virtual stage 0 of rank 1");
}

#[test]
fn a_missing_a_repeated_and_a_stray_action_are_named() {
    let good = table(Schedule::OneFOneB, 2, 2).unwrap();
    let mut rows = good.clone();
    let removed = rows[0].remove(1);
    assert_eq!(check(&rows, ONE, 2), Err(ScheduleError::Missing { rank: 0, action: removed }));
    let first = rows[0][0];
    rows[0].push(first);
    insta::assert_snapshot!(check(&rows, ONE, 2).unwrap_err(), @"rank 0: forward of micro-batch 0 on virtual stage 0 is listed twice");
    let mut rows = good;
    rows[0][0].rank = 1;
    insta::assert_snapshot!(check(&rows, ONE, 2).unwrap_err(), @"rank 0: forward of micro-batch 0 on virtual stage 0 (marked rank 1) does not belong in this table");
}

#[test]
fn names_in_documents_are_those_of_the_literature() {
    let json = |schedule| serde_json::to_string::<Schedule>(&schedule).unwrap();
    assert_eq!(json(Schedule::GPipe), r#""gpipe""#);
    assert_eq!(json(Schedule::OneFOneB), r#""1f1b""#);
    assert_eq!(json(interleaved(4)), r#"{"interleaved":{"virtual_stages":4}}"#);
}

fn check_slices(table: &[Vec<Action>], (m, k): (u32, u32)) -> Result<(), ScheduleError> {
    check_table(table, TableShape { n_slices: k, ..shape(table, ONE, m) })
}

#[test]
fn backwards_of_slices_come_last_to_first() {
    insta::assert_snapshot!(print(&rows(Schedule::Seq1F1B { slices: 2 }, 3, 3)), @r"
    F0/0 F0/1 F1/0 F1/1 B0/1 F2/0 B0/0 F2/1 B1/1 B1/0 B2/1 B2/0
    F0/0 F0/1 F1/0 B0/1 F1/1 B0/0 F2/0 B1/1 F2/1 B1/0 B2/1 B2/0
    F0/0 F0/1 B0/1 F1/0 B0/0 F1/1 B1/1 F2/0 B1/0 F2/1 B2/1 B2/0
    ");
    insta::assert_snapshot!(print(&rows(Schedule::TeraPipe { slices: 3 }, 2, 2)), @r"
    F0/0 F0/1 F0/2 F1/0 F1/1 F1/2 B1/2 B1/1 B1/0 B0/2 B0/1 B0/0
    F0/0 F0/1 F0/2 F1/0 F1/1 F1/2 B1/2 B1/1 B1/0 B0/2 B0/1 B0/0
    ");
}

/// arXiv 2406.03488: `p - r + k - 1` slices of a k-th each where 1F1B holds `p - r` micro-batches; 2102.07988: all.
#[test]
fn what_schedules_of_slices_hold_has_its_closed_form() {
    for (p, m, k) in [(2, 1, 2), (4, 8, 2), (4, 8, 4), (8, 16, 3), (1, 3, 4), (16, 16, 8)] {
        let table = rows(Schedule::Seq1F1B { slices: k }, p, m);
        assert_eq!(check_slices(&table, (m, k)), Ok(()), "p={p} m={m} k={k}");
        let held: Vec<u32> = (0..p).map(|rank| (m * k).min(p - rank + k - 1)).collect();
        assert_eq!(peak_in_flight(&table), held, "p={p} m={m} k={k}");
        let table = rows(Schedule::TeraPipe { slices: k }, p, m);
        assert_eq!(check_slices(&table, (m, k)), Ok(()), "p={p} m={m} k={k}");
        assert_eq!(peak_in_flight(&table), vec![m * k; p as usize]);
    }
    // With one slice the order is that of 1F1B.
    let shape = TableShape { n_stages: 4, placement: ONE, n_micro_batches: 6, n_slices: 1 };
    let whole: Vec<Vec<Action>> = (0..4).map(|rank| tables::seq_1f1b(rank, shape)).collect();
    assert_eq!(whole, rows(Schedule::OneFOneB, 4, 6));
}

#[test]
fn slices_out_of_order_are_named() {
    let table = |rows: &[&str]| -> Vec<Vec<Action>> {
        rows.iter().enumerate().map(|(rank, row)| parse_row(rank as u32, row).unwrap()).collect()
    };
    let said = |rows: &[&str]| check_slices(&table(rows), (1, 2)).unwrap_err().to_string();
    let good = "F0/0 F0/1 B0/1 B0/0";
    insta::assert_snapshot!(said(&[good, "F0/1 F0/0 B0/1 B0/0"]), @"rank 1: forward of slice 1 of micro-batch 0 on virtual stage 0 stands where slice 0 is due: forwards take the slices of a micro-batch in order, backwards from the last to the first");
    insta::assert_snapshot!(said(&["F0/0 F0/1 B0/0 B0/1", good]), @"rank 0: backward of micro-batch 0 on virtual stage 0 stands where slice 1 is due: forwards take the slices of a micro-batch in order, backwards from the last to the first");
    insta::assert_snapshot!(said(&[good, "F0/0 B0/1 F0/1 B0/0"]), @"rank 1: backward of slice 1 of micro-batch 0 on virtual stage 0 waits for ever on forward of slice 1 of micro-batch 0 on virtual stage 0 of rank 1");
    insta::assert_snapshot!(said(&[good, "F0/0 F0/1 B0/1"]), @"rank 1: backward of micro-batch 0 on virtual stage 0 is missing");
    insta::assert_snapshot!(said(&[good, "F0/0 F0/1 B0/1 B0/2"]), @"rank 1: backward of slice 2 of micro-batch 0 on virtual stage 0 (marked rank 1) does not belong in this table");
    // Weights wait for nobody's keys.
    assert_eq!(check_slices(&table(&[good, "F0/0 F0/1 I0/1 I0/0 W0/0 W0/1"]), (1, 2)), Ok(()));
    assert_eq!(super::table(Schedule::TeraPipe { slices: 1 }, 2, 2), Err(ScheduleError::NotSliced));
    assert_eq!(super::table(Schedule::Seq1F1B { slices: 0 }, 2, 2), Err(ScheduleError::Empty));
}

/// Every schedule without parameters that matter to legality, where it has a table.
const ALL: [Schedule; 15] = [
    Schedule::GPipe,
    Schedule::OneFOneB,
    Schedule::Eager,
    Schedule::Dapple { warm_up: 3 },
    Schedule::Interleaved { virtual_stages: 2 },
    Schedule::BreadthFirst { virtual_stages: 3 },
    Schedule::ZbH1,
    Schedule::ZbH2,
    Schedule::ZbV,
    Schedule::VHalf,
    Schedule::VMin,
    Schedule::Hanayo { waves: 1 },
    Schedule::Hanayo { waves: 2 },
    Schedule::DualPipeV,
    Schedule::Chimera,
];

#[test]
fn every_schedule_writes_tables_that_pass_the_check() {
    let mut n_tables = 0;
    for schedule in ALL {
        for p in 1..=9 {
            for m in [1, 2, 3, 5, p, 2 * p, 3 * p + 1, 4 * p] {
                let Ok(rows) = table(schedule, p, m) else { continue };
                assert_eq!(check(&rows, schedule.placement(), m), Ok(()), "{schedule} p={p} m={m}");
                let splits = rows.iter().flatten().any(|action| action.section == Section::BackwardWeight);
                assert_eq!(splits, schedule.splits_backward(), "{schedule} p={p} m={m}");
                n_tables += 1;
            }
        }
    }
    assert!(n_tables > 900, "{n_tables}");
}

#[test]
fn eager_warms_up_twice_as_far_and_dapple_up_to_a_bound() {
    insta::assert_snapshot!(print(&rows(Schedule::Eager, 3, 5)), @r"
    F0 F1 F2 F3 F4 B0 B1 B2 B3 B4
    F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
    F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
    ");
    assert_eq!(peak_in_flight(&rows(Schedule::Eager, 4, 16)), [7, 5, 3, 1]);
    assert_eq!(peak_in_flight(&rows(Schedule::Dapple { warm_up: 5 }, 4, 16)), [5, 4, 3, 1]);
    assert_eq!(rows(Schedule::Dapple { warm_up: 4 }, 4, 16), rows(Schedule::OneFOneB, 4, 16));
    assert_eq!(rows(Schedule::Dapple { warm_up: 99 }, 4, 16), rows(Schedule::Eager, 4, 16));
}

#[test]
fn breadth_first_takes_all_micro_batches_through_each_virtual_stage() {
    insta::assert_snapshot!(print(&rows(Schedule::BreadthFirst { virtual_stages: 2 }, 2, 2)), @r"
    F0.0 F1.0 F0.1 F1.1 B0.1 B1.1 B0.0 B1.0
    F0.0 F1.0 F0.1 F1.1 B0.1 B1.1 B0.0 B1.0
    ");
    assert_eq!(rows(Schedule::BreadthFirst { virtual_stages: 1 }, 4, 5), rows(Schedule::GPipe, 4, 5));
}

#[test]
fn weights_of_zb_h1_follow_by_the_rank() {
    insta::assert_snapshot!(print(&rows(Schedule::ZbH1, 3, 5)), @r"
    F0 F1 F2 I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
    F0 F1 I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
    F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4
    ");
}

#[test]
fn weights_of_zb_h2_follow_by_twice_the_rank() {
    insta::assert_snapshot!(print(&rows(Schedule::ZbH2, 3, 6)), @r"
    F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5
    F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5
    F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
    ");
}

/// arXiv 2401.10241 table 2; 2405.15362 section 3.2: p, 2p - 1, p, p/2 + 1 and p/3 + 1.
#[test]
fn what_zero_bubble_schedules_hold_has_its_closed_form() {
    for p in 2..=12 {
        let m = 4 * p;
        let most = |schedule| peak_in_flight(&rows(schedule, p, m));
        assert_eq!(most(Schedule::ZbH1), vec![p; p as usize]);
        assert_eq!(most(Schedule::ZbH2), vec![2 * p - 1; p as usize]);
        let chunks = |schedule| most(schedule).into_iter().max().unwrap();
        assert_eq!(chunks(Schedule::ZbV), 2 * p, "p={p}");
        assert!(chunks(Schedule::VHalf) <= p + 2, "p={p}");
        assert!(chunks(Schedule::VMin) <= (2 * p).div_ceil(3) + 2, "p={p}");
    }
}

/// arXiv 2107.06925 table 2: between p/2 + 1 and p; 2308.15762: as 1F1B; DualPipe: p + 1 pairs of half stages.
#[test]
fn what_schedules_with_two_chunks_per_rank_hold_has_its_closed_form() {
    assert_eq!(peak_in_flight(&rows(Schedule::Chimera, 8, 8)), [5, 6, 7, 8, 8, 7, 6, 5]);
    for p in [2, 4, 8] {
        assert_eq!(peak_in_flight(&rows(Schedule::Chimera, p, 4 * p)).into_iter().max(), Some(p));
        for waves in 1..=3 {
            let peaks = peak_in_flight(&rows(Schedule::Hanayo { waves }, p, p));
            assert!(peaks.into_iter().all(|chunks| chunks <= 2 * waves * p));
        }
        assert_eq!(peak_in_flight(&rows(Schedule::DualPipeV, p, 2 * p)), vec![2 * p + 1; p as usize]);
    }
}

/// What ranks hold at most of anything, from as many micro-batches on as schedules say.
#[test]
fn more_micro_batches_than_fill_a_pipeline_are_never_under_way() {
    let corners = |schedule, p, m| -> Vec<[Option<u32>; 3]> {
        let most = |row: &Vec<Action>| {
            let held = in_flight(row);
            let most = |of: fn(&InFlight) -> u32| held.iter().map(of).max();
            [most(|now| now.saved), most(|now| now.total()), most(|now| now.carried)]
        };
        rows(schedule, p, m).iter().map(most).collect()
    };
    for schedule in [Schedule::ZbH1, Schedule::ZbH2, Schedule::DualPipeV] {
        for p in 1..10 {
            let enough = schedule.steady_from(p).unwrap();
            let least = corners(schedule, p, enough);
            for m in enough..3 * enough {
                assert_eq!(corners(schedule, p, m), least, "{schedule} p={p} m={m}");
            }
        }
    }
}

#[test]
fn dualpipe_v_sets_forward_beside_backward() {
    insta::assert_snapshot!(print(&rows(Schedule::DualPipeV, 2, 5)), @r"
    F0.0 F1.0 F2.0 F0.1 I0.1 W0.1 F1.1 F3.0 B1.1 F2.1 B0.0 F4.0 B2.1 F3.1 B1.0 B3.1 F4.1 B2.0 B4.1 I3.0 W3.0 I4.0 W4.0
    F0.0 F0.1 F1.0 F1.1 F2.0 B0.1 F2.1 B0.0 F3.0 B1.1 F3.1 B1.0 F4.0 B2.1 F4.1 B2.0 B3.1 B3.0 I4.1 I4.0 W4.1 W4.0
    ");
}

#[test]
fn a_v_passes_back_and_forth() {
    insta::assert_snapshot!(print(&rows(Schedule::VMin, 2, 3)), @r"
    F0.0 F0.1 I0.1 F1.0 W0.1 I0.0 W0.0 F1.1 I1.1 F2.0 W1.1 I1.0 W1.0 F2.1 I2.1 W2.1 I2.0 W2.0
    F0.0 F0.1 I0.1 I0.0 F1.0 F1.1 W0.1 W0.0 I1.1 I1.0 F2.0 F2.1 W1.1 W1.0 I2.1 I2.0 W2.1 W2.0
    ");
}

#[test]
fn chimera_runs_two_pipelines_in_opposite_directions() {
    insta::assert_snapshot!(print(&rows(Schedule::Chimera, 4, 4)), @r"
    F0.0 F2.0 F1.1 B1.1 F3.1 B3.1 B0.0 B2.0
    F0.0 F1.1 F2.0 F3.1 B1.1 B0.0 B3.1 B2.0
    F1.1 F0.0 F3.1 F2.0 B0.0 B1.1 B2.0 B3.1
    F1.1 F3.1 F0.0 B0.0 F2.0 B2.0 B1.1 B3.1
    ");
}

#[test]
fn schedules_without_a_table_for_the_counts_say_what_they_need() {
    let error = |schedule, p, m| table(schedule, p, m).unwrap_err().to_string();
    insta::assert_snapshot!(error(Schedule::DualPipeV, 4, 7), @"`dualpipe-v` needs at least 8 micro-batches, two per stage, found 7");
    insta::assert_snapshot!(error(Schedule::Chimera, 3, 6), @"a bidirectional placement needs an even number of stages, found 3");
    insta::assert_snapshot!(error(Schedule::Custom(ONE), 2, 2), @"a `custom` schedule needs a `table`");
    assert_eq!(
        table(Schedule::Hanayo { waves: u32::MAX }, 2, 2),
        Err(ScheduleError::TooLarge { n_actions: 2 * 2 * 2 * u64::from(u32::MAX) })
    );
    assert_eq!(table(Schedule::Hanayo { waves: 0 }, 2, 2), Err(ScheduleError::Empty));
    assert_eq!(table(Schedule::Dapple { warm_up: 0 }, 2, 2), Err(ScheduleError::Empty));
}

#[test]
fn backward_whole_and_in_parts_is_one_too_many() {
    let mut table = rows(Schedule::ZbH1, 2, 2);
    let weights =
        Action { rank: 1, section: Section::BackwardWeight, virtual_stage: 0, micro_batch: 0, slice: 0 };
    let at = table[1].iter().position(|action| *action == weights).unwrap();
    table[1][at].section = Section::Backward;
    insta::assert_snapshot!(check(&table, ONE, 2).unwrap_err(), @"rank 1: backward of micro-batch 0 on virtual stage 0 is listed twice");
    table[1].remove(at);
    insta::assert_snapshot!(check(&table, ONE, 2).unwrap_err(), @"rank 1: backward to the weights of micro-batch 0 on virtual stage 0 is missing");
}

#[test]
fn weights_before_their_gradient_are_a_deadlock() {
    let mut table = rows(Schedule::ZbH1, 2, 2);
    let at = table[0].iter().position(|action| action.section == Section::BackwardInput).unwrap();
    table[0].swap(at, at + 1);
    insta::assert_snapshot!(check(&table, ONE, 2).unwrap_err(), @"rank 0: backward to the weights of micro-batch 0 on virtual stage 0 waits for ever on backward to the input of micro-batch 0 on virtual stage 0 of rank 0");
}

#[test]
fn a_micro_batch_on_the_wrong_copy_is_out_of_place() {
    let mut table = rows(Schedule::Chimera, 2, 2);
    let action = table[0][0];
    table[0][0].virtual_stage = 1 - action.virtual_stage;
    insta::assert_snapshot!(check(&table, Placement::Bidirectional, 2).unwrap_err(), @"rank 0: forward of micro-batch 0 on virtual stage 1 (marked rank 0) does not belong in this table");
}

#[test]
fn a_message_that_is_received_before_an_earlier_one_has_overtaken_it() {
    let count = |schedule: Schedule, p, m| {
        let table = rows(schedule, p, m);
        overtaken(&table, shape(&table, schedule.placement(), m))
    };
    assert_eq!(count(Schedule::OneFOneB, 4, 8), 0);
    assert_eq!(count(Schedule::ZbH2, 4, 8), 0);
    let rows = [parse_row(0, "F0 F1 B1 B0").unwrap(), parse_row(1, "F1 B1 F0 B0").unwrap()];
    assert_eq!(check(&rows, ONE, 2), Ok(()));
    assert_eq!(overtaken(&rows, shape(&rows, ONE, 2)), 1);
}

/// Any change that leaves the table complete either passes or is a deadlock, never something else.
#[test]
fn a_shuffled_table_passes_or_is_a_deadlock() {
    for schedule in ALL {
        let Ok(mut table) = table(schedule, 4, 8) else { continue };
        let n = table[1].len();
        for i in 0..n {
            let other = (i * 7 + 3) % n;
            table[1].swap(i, other);
            let checked = check(&table, schedule.placement(), 8);
            assert!(
                matches!(checked, Ok(()) | Err(ScheduleError::Deadlock { .. })),
                "{schedule}: {checked:?}"
            );
            table[1].swap(i, other);
        }
    }
}
