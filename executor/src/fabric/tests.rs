//! Deadlocks, panics and early ends: always an error, always the same one, never a hang.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::resume_unwind;

use ir::collective::Algorithm;
use proptest::prelude::*;

use super::*;
use crate::element::Reduce;

fn tag(label: &str) -> Tag {
    Tag::new(label, 0)
}

fn run(
    n: usize,
    body: impl Fn(&mut RankComm<'_, f64>) -> Result<(), ExecutorError> + Sync,
) -> Result<(), ExecutorError> {
    run_ranks(n, &|_, _| 0, body).map(drop)
}

/// Runs a program that must fail, several times: the text must not depend on timing.
fn check_fails(
    n: usize,
    body: impl Fn(&mut RankComm<'_, f64>) -> Result<(), ExecutorError> + Sync,
    text: &str,
) {
    for _ in 0..20 {
        assert_eq!(run(n, &body).unwrap_err().to_string(), text);
    }
}

/// A panic that the standard hook does not print.
fn quiet_panic(message: &'static str) -> ! {
    resume_unwind(Box::new(message))
}

#[test]
fn values_and_counts_come_back_in_rank_order() {
    let results = run_ranks::<f32, _, _>(3, &|a, b| a + b, |comm| Ok((comm.rank(), comm.n_ranks()))).unwrap();
    let values: Vec<_> = results.into_iter().map(|(value, _)| value).collect();
    assert_eq!(values, [(0, 3), (1, 3), (2, 3)]);
    assert_eq!(run_ranks::<f32, (), _>(0, &|_, _| 0, |_| Ok(())).unwrap(), []);
}

#[test]
fn ranks_that_wait_in_a_circle_are_a_deadlock_led_by_the_circle() {
    check_fails(
        4,
        |comm| {
            let from = [2, 2, 3, 1][comm.rank()];
            comm.recv(from, tag("x"), 1).map(drop)
        },
        "deadlock: rank 2 waits for rank 3 in send-receive `x` #0 over ranks [3, 2] of lengths [1]; \
         rank 3 waits for rank 1 in send-receive `x` #0 over ranks [1, 3] of lengths [1]; \
         rank 1 waits for rank 2 in send-receive `x` #0 over ranks [2, 1] of lengths [1]; \
         rank 0 waits for rank 2 in send-receive `x` #0 over ranks [2, 0] of lengths [1]",
    );
}

#[test]
fn a_rank_that_leaves_early_is_a_deadlock_led_by_who_waits_for_it() {
    check_fails(
        3,
        |comm| match comm.rank() {
            1 => Ok(()),
            _ => {
                comm.by(Algorithm::Ring).all_reduce(&[0, 1, 2], tag("x"), vec![1.0; 3], Reduce::Sum).map(drop)
            }
        },
        "deadlock: rank 2 waits for rank 1 in all-reduce (sum) `x` #0 over ranks [0, 1, 2] of lengths [3]; \
         rank 0 waits for rank 2 in all-reduce (sum) `x` #0 over ranks [0, 1, 2] of lengths [3]; \
         ranks [1] have finished",
    );
}

#[test]
fn a_receive_under_another_tag_is_a_deadlock_that_shows_what_was_sent() {
    check_fails(
        2,
        |comm| match comm.rank() {
            0 => comm.send(1, Tag::new("activation", 4), vec![1.0]),
            _ => comm.recv(0, Tag::new("activation", 5), 1).map(drop),
        },
        "deadlock: rank 1 waits for rank 0 in send-receive `activation` #5 over ranks [0, 1] of lengths [1] \
         (that rank sent it send-receive `activation` #4 over ranks [0, 1] of lengths [1] instead); \
         ranks [0] have finished",
    );
}

#[test]
fn a_collective_against_a_receive_is_a_deadlock_that_shows_both() {
    check_fails(
        2,
        |comm| match comm.rank() {
            0 => comm.by(Algorithm::Ring).all_reduce(&[0, 1], tag("x"), vec![1.0], Reduce::Sum).map(drop),
            _ => comm.recv(0, tag("y"), 1).map(drop),
        },
        "deadlock: rank 0 waits for rank 1 in all-reduce (sum) `x` #0 over ranks [0, 1] of lengths [1]; \
         rank 1 waits for rank 0 in send-receive `y` #0 over ranks [0, 1] of lengths [1] \
         (that rank sent it all-reduce (sum) `x` #0 over ranks [0, 1] of lengths [1] instead)",
    );
}

#[test]
fn a_deadlock_of_many_ranks_stays_readable() {
    let error = run(64, |comm| comm.recv((comm.rank() + 1) % 64, tag("x"), 1).map(drop)).unwrap_err();
    let text = error.to_string();
    assert!(text.ends_with("; 56 more ranks wait"), "{text}");
    assert!(matches!(error, ExecutorError::Deadlock { waiting, .. } if waiting.len() == 64));
}

#[test]
fn a_message_that_nobody_receives_is_an_error() {
    check_fails(
        2,
        |comm| if comm.rank() == 0 { comm.send(1, tag("x"), vec![1.0]) } else { Ok(()) },
        "rank 1 has finished without receiving what rank 0 sent it in \
         send-receive `x` #0 over ranks [0, 1] of lengths [1]",
    );
}

#[test]
fn a_panic_is_an_error_that_names_the_rank_and_frees_the_others() {
    check_fails(
        3,
        |comm| {
            comm.by(Algorithm::Ring).all_reduce(&[0, 1, 2], tag("x"), vec![1.0], Reduce::Sum)?;
            if comm.rank() == 1 {
                quiet_panic("boom");
            }
            comm.by(Algorithm::Ring).all_reduce(&[0, 1, 2], tag("y"), vec![1.0], Reduce::Sum).map(drop)
        },
        "rank 1 panicked after all-reduce (sum) `x` #0 over ranks [0, 1, 2] of lengths [1]: boom",
    );
    check_fails(1, |_| quiet_panic("at once"), "rank 0 panicked before its first communication: at once");
}

#[test]
fn an_error_of_one_rank_is_heard_by_all_that_wait() {
    let heard = Mutex::new(BTreeMap::new());
    let own_error = || ExecutorError::NoThread { rank: 7, n_ranks: 9, reason: "an example".to_owned() };
    let text = "rank 2 stopped before its first communication: no thread for rank 7 of 9: an example";
    check_fails(
        3,
        |comm| {
            if comm.rank() == 2 {
                return Err(own_error());
            }
            let result =
                comm.by(Algorithm::Ring).all_reduce(&[0, 1, 2], tag("x"), vec![1.0], Reduce::Sum).map(drop);
            heard.lock().unwrap().insert(comm.rank(), result.clone().unwrap_err().to_string());
            result
        },
        text,
    );
    assert_eq!(heard.into_inner().unwrap(), BTreeMap::from([(0, text.to_owned()), (1, text.to_owned())]));
}

#[test]
fn a_rank_that_ignores_its_error_fails_the_run_all_the_same() {
    check_fails(
        2,
        |comm| {
            if comm.rank() == 0 {
                let first = comm.send(0, tag("x"), vec![]).unwrap_err();
                let second = comm.send(1, tag("y"), vec![]).unwrap_err();
                assert_eq!(first, second);
            }
            Ok(())
        },
        "rank 0 in send-receive `x` #0 over ranks [0, 0] of lengths [0]: rank 0 takes part twice",
    );
}

#[test]
fn ranks_without_a_thread_fail_the_run() {
    let fabric = Fabric::<f64>::new(3, &|_, _| 0);
    fabric.fail_unstarted(1, "too many");
    assert_eq!(run_rank((&fabric, &Nobody), 0, &|comm| comm.recv(1, tag("x"), 1).map(drop)), None);
    assert_eq!(fabric.outcome().unwrap_err().to_string(), "no thread for rank 1 of 3: too many");
}

/// One step of a random program: (sends, peer, tag).
type Step = (bool, usize, u64);

/// Runs the same steps one at a time: the ranks still waiting at the end, and the messages never received.
fn simulate(programs: &[Vec<Step>]) -> (Vec<usize>, usize) {
    let mail: RefCell<BTreeMap<(usize, usize, u64), usize>> = RefCell::default();
    let mut next = vec![0; programs.len()];
    let step = |rank: usize, (sends, peer, seq): Step| {
        let mut mail = mail.borrow_mut();
        if sends {
            *mail.entry((rank, peer, seq)).or_insert(0) += 1;
            return true;
        }
        match mail.get_mut(&(peer, rank, seq)) {
            Some(count) if *count > 0 => {
                *count -= 1;
                true
            }
            Some(_) | None => false,
        }
    };
    let mut moved = true;
    while moved {
        moved = false;
        for (rank, program) in programs.iter().enumerate() {
            while next[rank] < program.len() && step(rank, program[next[rank]]) {
                next[rank] += 1;
                moved = true;
            }
        }
    }
    let waiting = (0..programs.len()).filter(|&rank| next[rank] < programs[rank].len()).collect();
    (waiting, mail.into_inner().values().sum())
}

fn run_steps(programs: &[Vec<Step>]) -> Result<(), ExecutorError> {
    run(programs.len(), |comm| {
        for &(sends, peer, seq) in &programs[comm.rank()] {
            if sends {
                comm.send(peer, Tag::new("x", seq), vec![])?;
            } else {
                comm.recv(peer, Tag::new("x", seq), 0)?;
            }
        }
        Ok(())
    })
}

fn programs() -> impl Strategy<Value = Vec<Vec<Step>>> {
    let step = |rank: usize| {
        (any::<bool>(), 0..3_usize, 0..2_u64)
            .prop_map(move |(sends, hop, seq)| (sends, (rank + 1 + hop) % 4, seq))
    };
    let program = move |rank| prop::collection::vec(step(rank), 0..6);
    (program(0), program(1), program(2), program(3)).prop_map(|(a, b, c, d)| vec![a, b, c, d])
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn random_programs_end_as_when_run_one_step_at_a_time(programs in programs()) {
        let (still_waiting, n_unread) = simulate(&programs);
        match run_steps(&programs) {
            Ok(()) => prop_assert!(still_waiting.is_empty() && n_unread == 0),
            Err(ExecutorError::Deadlock { waiting, .. }) => {
                let mut ranks: Vec<usize> = waiting.iter().map(|entry| entry.rank).collect();
                ranks.sort_unstable();
                prop_assert_eq!(ranks, still_waiting);
            }
            Err(ExecutorError::Unread { .. }) => prop_assert!(still_waiting.is_empty() && n_unread > 0),
            Err(other) => prop_assert!(false, "{}", other),
        }
        prop_assert_eq!(run_steps(&programs), run_steps(&programs));
    }
}
