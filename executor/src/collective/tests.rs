//! Every collective against its definition, with the bytes it sends, and what happens when members disagree.

use std::collections::BTreeMap;
use std::fmt::Debug;

use super::*;
use crate::counters::Counters;
use crate::fabric::run_ranks;
use crate::instruction::CollectiveKind;

const GROUP_SIZES: [usize; 5] = [1, 2, 3, 5, 8];

/// What rank `rank` holds for member `part`: small integers, so that sums are exact in f32 in any order.
fn block<E: Element>(rank: usize, part: usize, len: usize) -> Vec<E> {
    (0..len).map(|k| integer(rank * 31 + part * 7 + k * 3 + 1)).collect()
}

fn integer<E: Element>(value: usize) -> E {
    (0..value).fold(E::zero(), |sum, _| sum + E::one())
}

fn sum_over_ranks<E: Element>(n: usize, part: usize, len: usize) -> Vec<E> {
    (0..len).map(|k| integer((0..n).map(|rank| rank * 31 + part * 7 + k * 3 + 1).sum())).collect()
}

/// Uneven, and empty for the first member and every third after it.
fn uneven(n: usize) -> Vec<usize> {
    (0..n).map(|i| (i * 2) % 3).collect()
}

fn tag(label: &str) -> Tag {
    Tag::new(label, 0)
}

/// Runs `body` on n ranks as one group; compares what each returns and the elements sent by all together.
fn check_all<E: Element, T: PartialEq + Debug + Send>(
    n: usize,
    elements_sent: usize,
    body: impl Fn(&mut RankComm<'_, E>, &[usize]) -> Result<T, ExecutorError> + Sync,
    expected: impl Fn(usize) -> T,
) {
    let group: Vec<usize> = (0..n).collect();
    let results = run_ranks(n, &|_, _| 0, |comm| body(comm, &group)).unwrap();
    let bytes: u64 = results.iter().map(|(_, counters)| counters.total()).sum();
    assert_eq!(bytes, (elements_sent * size_of::<E>()) as u64, "bytes of {n} ranks");
    for (rank, (value, _)) in results.into_iter().enumerate() {
        assert_eq!(value, expected(rank), "rank {rank} of {n}");
    }
}

fn check_all_gather<E: Element>(n: usize) {
    let lens = uneven(n);
    check_all::<E, _>(
        n,
        (n - 1) * lens.iter().sum::<usize>(),
        |comm, group| {
            let own = block(comm.rank(), 0, lens[comm.rank()]);
            comm.by(Algorithm::Ring).all_gather_blocks(group, tag("x"), own, &lens)
        },
        |_| (0..n).map(|rank| block(rank, 0, lens[rank])).collect::<Vec<_>>(),
    );
}

fn check_reduce_scatter<E: Element>(n: usize) {
    let lens = uneven(n);
    check_all::<E, _>(
        n,
        (n - 1) * lens.iter().sum::<usize>(),
        |comm, group| {
            let parts = (0..n).map(|part| block(comm.rank(), part, lens[part])).collect();
            comm.by(Algorithm::Ring).reduce_scatter_blocks(group, tag("x"), parts, Reduce::Sum)
        },
        |rank| sum_over_ranks(n, rank, lens[rank]),
    );
}

fn check_all_reduce<E: Element>(n: usize, len: usize) {
    let data = |rank| block::<E>(rank, 0, len);
    check_all(
        n,
        2 * (n - 1) * len,
        |comm, group| {
            let own = data(comm.rank());
            comm.by(Algorithm::Ring).all_reduce(group, tag("x"), own, Reduce::Sum)
        },
        |_| sum_over_ranks(n, 0, len),
    );
    check_all(
        n,
        2 * (n - 1) * len,
        |comm, group| {
            let own = data(comm.rank());
            comm.by(Algorithm::Ring).all_reduce(group, tag("x"), own, Reduce::Max)
        },
        |_| data(n - 1),
    );
}

fn check_all_to_all<E: Element>(n: usize) {
    let len = |from: usize, to: usize| (from + 2 * to) % 4;
    let parts = |rank: usize| -> Vec<Vec<E>> { (0..n).map(|to| block(rank, to, len(rank, to))).collect() };
    let blocks =
        |rank: usize| -> Vec<Vec<E>> { (0..n).map(|from| block(from, rank, len(from, rank))).collect() };
    let off_diagonal: usize = (0..n * n).filter(|i| i / n != i % n).map(|i| len(i / n, i % n)).sum();
    check_all(
        n,
        off_diagonal,
        |comm, group| {
            let own = parts(comm.rank());
            comm.by(Algorithm::Direct).all_to_all(group, tag("x"), own)
        },
        blocks,
    );
    check_all(
        n,
        2 * off_diagonal,
        |comm, group| {
            let me = comm.rank();
            let lens: Vec<usize> = (0..n).map(|from| len(from, me)).collect();
            let there =
                comm.by(Algorithm::Direct).all_to_all_blocks(group, tag("there"), parts(me), &lens)?;
            comm.by(Algorithm::Direct).all_to_all(group, tag("back"), there)
        },
        parts,
    );
}

fn check_broadcast<E: Element>(n: usize, root: usize) {
    check_all(
        n,
        (n - 1) * 3,
        |comm, group| {
            let data = if comm.rank() == root {
                Broadcast::Send(block(root, 0, 3))
            } else {
                Broadcast::Receive { root, len: 3 }
            };
            comm.by(Algorithm::Ring).broadcast(group, tag("x"), data)
        },
        |_| block::<E>(root, 0, 3),
    );
}

#[test]
fn all_gather_returns_every_block_and_sends_each_n_minus_1_times() {
    for n in GROUP_SIZES {
        check_all_gather::<f32>(n);
        check_all_gather::<f64>(n);
    }
}

#[test]
fn reduce_scatter_returns_the_sum_of_the_own_part_and_sends_each_n_minus_1_times() {
    for n in GROUP_SIZES {
        check_reduce_scatter::<f32>(n);
        check_reduce_scatter::<f64>(n);
    }
}

#[test]
fn all_reduce_returns_the_whole_and_sends_twice_n_minus_1_times_its_size() {
    for n in GROUP_SIZES {
        for len in [0, 1, 4, 16, 17] {
            check_all_reduce::<f32>(n, len);
            check_all_reduce::<f64>(n, len);
        }
    }
}

#[test]
fn all_to_all_transposes_the_parts_and_sends_what_is_off_the_diagonal() {
    for n in GROUP_SIZES {
        check_all_to_all::<f32>(n);
        check_all_to_all::<f64>(n);
    }
}

#[test]
fn broadcast_returns_the_data_of_any_root_and_sends_it_n_minus_1_times() {
    for n in GROUP_SIZES {
        for root in [0, n / 2, n - 1] {
            check_broadcast::<f32>(n, root);
            check_broadcast::<f64>(n, root);
        }
    }
}

#[test]
fn sums_run_in_ring_order_and_all_members_end_with_the_same_bits() {
    // Part c is summed from member c + 1 around to member c, in group order, which is not rank order here.
    let group = [2, 0, 1];
    let own = |rank: usize| [0.1, 1e16, -1e16][rank];
    let ring_sum = |c: usize| {
        let member = |steps: usize| own(group[(c + steps) % 3]);
        (member(1) + member(2)) + member(3)
    };
    let results = run_ranks::<f64, _, _>(3, &|_, _| 0, |comm| {
        let me = own(comm.rank());
        let scattered = comm.by(Algorithm::Ring).reduce_scatter_blocks(
            &group,
            tag("rs"),
            vec![vec![me]; 3],
            Reduce::Sum,
        )?;
        let reduced = comm.by(Algorithm::Ring).all_reduce(&group, tag("ar"), vec![me; 3], Reduce::Sum)?;
        Ok((scattered, reduced))
    })
    .unwrap();
    let whole: Vec<f64> = (0..3).map(ring_sum).collect();
    assert!(whole.windows(2).any(|pair| pair[0] != pair[1]), "the test must tell orders apart");
    for (position, rank) in group.into_iter().enumerate() {
        let (scattered, reduced) = &results[rank].0;
        assert_eq!(scattered, &[whole[position]]);
        assert_eq!(reduced, &whole);
    }
}

#[test]
fn rows_then_columns_of_a_grid_sum_over_all_and_count_on_their_own_tiers() {
    let (n_rows, n_columns) = (3, 2);
    let same_row = |a: usize, b: usize| usize::from(a / n_columns != b / n_columns);
    let results = run_ranks(n_rows * n_columns, &same_row, |comm| {
        let (row, column) = (comm.rank() / n_columns, comm.rank() % n_columns);
        let row_group: Vec<usize> = (0..n_columns).map(|c| row * n_columns + c).collect();
        let column_group: Vec<usize> = (0..n_rows).map(|r| r * n_columns + column).collect();
        let own = vec![10_f32.powi(comm.rank() as i32); 6];
        let of_row = comm.by(Algorithm::Ring).all_reduce(&row_group, tag("row"), own, Reduce::Sum)?;
        comm.by(Algorithm::Ring).all_reduce(&column_group, tag("column"), of_row, Reduce::Sum)
    })
    .unwrap();
    let mut all = Counters::default();
    for (sum, counters) in &results {
        assert_eq!(sum, &[111_111.0; 6]);
        all.merge(counters);
    }
    let kind = CollectiveKind::AllReduce;
    let (row_bytes, column_bytes) = (3 * 2 * 6 * 4, 2 * 2 * 2 * 6 * 4);
    assert_eq!(all.by_kind_and_tier(), BTreeMap::from([((kind, 0), row_bytes), ((kind, 1), column_bytes)]));
    assert_eq!(
        all.by_label(),
        BTreeMap::from([((kind, "row".into()), row_bytes), ((kind, "column".into()), column_bytes)])
    );
}

#[test]
fn send_receive_finds_messages_by_tag_and_keeps_equal_tags_in_order() {
    let results = run_ranks(2, &|_, _| 0, |comm| {
        if comm.rank() == 0 {
            for (label, value) in [("a", 1.0_f32), ("b", 10.0), ("a", 100.0)] {
                comm.send(1, tag(label), vec![value])?;
            }
            return Ok(Vec::new());
        }
        let order = ["b", "a", "a"];
        let received: Result<Vec<_>, _> = order.iter().map(|label| comm.recv(0, tag(label), 1)).collect();
        Ok(received?.concat())
    })
    .unwrap();
    assert_eq!(results[1].0, [10.0, 1.0, 100.0]);
    assert_eq!(results[0].1.by_kind(), BTreeMap::from([(CollectiveKind::SendReceive, 12)]));
}

#[test]
fn sixty_four_ranks_do_a_long_program_of_overlapping_groups() {
    let n = 64;
    let results = run_ranks(n, &|a, b| usize::from(a / 8 != b / 8), |comm| {
        let me = comm.rank();
        let all: Vec<usize> = (0..n).collect();
        let node: Vec<usize> = (me / 8 * 8..me / 8 * 8 + 8).collect();
        let across: Vec<usize> = (me % 8..n).step_by(8).collect();
        let mut x = vec![1.0_f64; 16];
        for step in 0..10 {
            x = comm.by(Algorithm::Ring).all_reduce(&node, Tag::new("node", step), x, Reduce::Sum)?;
            x = comm.by(Algorithm::Ring).all_reduce(&across, Tag::new("across", step), x, Reduce::Sum)?;
            let parts = x.chunks(2).map(<[f64]>::to_vec).collect();
            x = comm.by(Algorithm::Direct).all_to_all(&node, Tag::new("exchange", step), parts)?.concat();
            comm.send((me + 1) % n, Tag::new("shift", step), x)?;
            x = comm.recv((me + n - 1) % n, Tag::new("shift", step), 16)?;
            x.iter_mut().for_each(|value| *value /= 64.0);
        }
        comm.by(Algorithm::Ring).all_reduce(&all, tag("last"), x, Reduce::Max)
    })
    .unwrap();
    assert!(results.iter().all(|(x, _)| x == &[1.0; 16]));
}

/// Runs a program that must fail, several times: the text must not depend on timing.
fn check_fails(
    n: usize,
    body: impl Fn(&mut RankComm<'_, f64>) -> Result<(), ExecutorError> + Sync,
    text: &str,
) {
    for _ in 0..20 {
        assert_eq!(run_ranks(n, &|_, _| 0, &body).unwrap_err().to_string(), text);
    }
}

#[test]
fn different_tags_are_a_mismatch() {
    check_fails(
        2,
        |comm| {
            let label = if comm.rank() == 0 { "wq" } else { "wk" };
            comm.by(Algorithm::Ring)
                .all_reduce(&[0, 1], Tag::new(label, 7), vec![1.0; 4], Reduce::Sum)
                .map(drop)
        },
        "mismatched collective: rank 0 is in all-reduce (sum) `wq` #7 over ranks [0, 1] of lengths [4], \
         but rank 1 sent it all-reduce (sum) `wk` #7 over ranks [0, 1] of lengths [4]",
    );
}

#[test]
fn different_kinds_are_a_mismatch_that_every_rank_hears_of() {
    let heard = std::sync::Mutex::new(BTreeMap::new());
    check_fails(
        4,
        |comm| {
            let group = [0, 1, 2, 3];
            let result = if comm.rank() == 2 {
                comm.by(Algorithm::Direct).all_to_all(&group, tag("x"), vec![vec![1.0]; 4]).map(drop)
            } else {
                comm.by(Algorithm::Ring).all_gather_blocks(&group, tag("x"), vec![1.0], &[1; 4]).map(drop)
            };
            heard.lock().unwrap().insert(comm.rank(), result.clone().unwrap_err().to_string());
            result
        },
        "mismatched collective: rank 2 is in all-to-all `x` #0 over ranks [0, 1, 2, 3], \
         but rank 1 sent it all-gather `x` #0 over ranks [0, 1, 2, 3] of lengths [1, 1, 1, 1]",
    );
    let heard = heard.into_inner().unwrap();
    assert_eq!(heard.len(), 4);
    assert!(heard.values().all(|text| text.starts_with("mismatched collective: rank ")), "{heard:?}");
}

#[test]
fn different_groups_are_a_mismatch() {
    check_fails(
        3,
        |comm| {
            let group: &[usize] = if comm.rank() == 0 { &[0, 1] } else { &[0, 1, 2] };
            comm.by(Algorithm::Ring).all_reduce(group, tag("x"), vec![1.0], Reduce::Sum).map(drop)
        },
        "mismatched collective: rank 1 is in all-reduce (sum) `x` #0 over ranks [0, 1, 2] of lengths [1], \
         but rank 0 sent it all-reduce (sum) `x` #0 over ranks [0, 1] of lengths [1]",
    );
}

#[test]
fn different_lengths_and_different_reductions_are_mismatches() {
    check_fails(
        2,
        |comm| {
            let own = vec![1.0; 4 + comm.rank()];
            comm.by(Algorithm::Ring).all_reduce(&[0, 1], tag("x"), own, Reduce::Sum).map(drop)
        },
        "mismatched collective: rank 0 is in all-reduce (sum) `x` #0 over ranks [0, 1] of lengths [4], \
         but rank 1 sent it all-reduce (sum) `x` #0 over ranks [0, 1] of lengths [5]",
    );
    check_fails(
        2,
        |comm| {
            let reduce = if comm.rank() == 0 { Reduce::Sum } else { Reduce::Max };
            comm.by(Algorithm::Ring)
                .reduce_scatter_blocks(&[0, 1], tag("x"), vec![vec![1.0], vec![]], reduce)
                .map(drop)
        },
        "mismatched collective: rank 0 is in reduce-scatter (sum) `x` #0 over ranks [0, 1] of lengths [1, 0], \
         but rank 1 sent it reduce-scatter (max) `x` #0 over ranks [0, 1] of lengths [1, 0]",
    );
}

#[test]
fn a_length_that_is_not_the_announced_one_is_an_error() {
    check_fails(
        2,
        |comm| comm.by(Algorithm::Ring).all_gather_blocks(&[0, 1], tag("x"), vec![1.0; 3], &[3, 2]).map(drop),
        "rank 1 in all-gather `x` #0 over ranks [0, 1] of lengths [3, 2]: its own block has 3 elements, expected 2",
    );
    check_fails(
        2,
        |comm| {
            comm.by(Algorithm::Direct)
                .all_to_all_blocks(&[0, 1], tag("x"), vec![vec![1.0]; 2], &[1, 2])
                .map(drop)
        },
        "rank 0 in all-to-all `x` #0 over ranks [0, 1]: the block from rank 1 has 1 elements, expected 2",
    );
    check_fails(
        2,
        |comm| match comm.rank() {
            0 => comm.send(1, tag("x"), vec![1.0]),
            _ => comm.recv(0, tag("x"), 2).map(drop),
        },
        "rank 1 in send-receive `x` #0 over ranks [0, 1] of lengths [2]: \
         the message from rank 0 has 1 elements, expected 2",
    );
}

#[test]
fn calls_without_sense_are_errors() {
    let in_group = |group: &'static [usize]| {
        move |comm: &mut RankComm<'_, f64>| {
            comm.by(Algorithm::Direct).all_to_all(group, tag("x"), vec![vec![]; group.len()]).map(drop)
        }
    };
    check_fails(2, in_group(&[1]), "rank 0 in all-to-all `x` #0 over ranks [1]: it is not in the group");
    check_fails(2, in_group(&[]), "rank 0 in all-to-all `x` #0 over ranks []: it is not in the group");
    check_fails(
        2,
        in_group(&[0, 1, 1]),
        "rank 0 in all-to-all `x` #0 over ranks [0, 1, 1]: rank 1 takes part twice",
    );
    check_fails(
        2,
        in_group(&[0, 1, 2]),
        "rank 0 in all-to-all `x` #0 over ranks [0, 1, 2]: rank 2 does not exist; there are 2 ranks",
    );
    check_fails(
        2,
        |comm| comm.by(Algorithm::Ring).all_gather_blocks(&[0, 1], tag("x"), vec![], &[0]).map(drop),
        "rank 0 in all-gather `x` #0 over ranks [0, 1] of lengths [0]: 1 lengths for 2 members",
    );
    check_fails(
        2,
        |comm| {
            comm.by(Algorithm::Ring).reduce_scatter_blocks(&[0, 1], tag("x"), vec![], Reduce::Sum).map(drop)
        },
        "rank 0 in reduce-scatter (sum) `x` #0 over ranks [0, 1]: 0 parts for 2 members",
    );
    check_fails(
        1,
        |comm| comm.send(0, tag("x"), vec![]),
        "rank 0 in send-receive `x` #0 over ranks [0, 0] of lengths [0]: rank 0 takes part twice",
    );
    check_fails(
        2,
        |comm| {
            comm.by(Algorithm::Ring)
                .broadcast(&[0, 1], tag("x"), Broadcast::Receive { root: 0, len: 0 })
                .map(drop)
        },
        "rank 0 in broadcast (from rank 0) `x` #0 over ranks [0, 1] of lengths [0]: the root must send",
    );
    check_fails(
        2,
        |comm| {
            comm.by(Algorithm::Ring)
                .broadcast(&[0, 1], tag("x"), Broadcast::Receive { root: 2, len: 0 })
                .map(drop)
        },
        "rank 0 in broadcast (from rank 2) `x` #0 over ranks [0, 1] of lengths [0]: the root is not in the group",
    );
}
