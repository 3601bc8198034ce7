//! What stages are said to wait for, against the simulator.

use cost_model::{PipelineTimes, Transfers, simulate};
use ir::schedule::{Schedule, Seat, table};
use ir::units::Seconds;
use proptest::prelude::*;

use super::Sends;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn no_pipeline_ends_before_its_stages_have_computed_and_waited(
        p in 2..6_u32,
        groups in 1..4_u32,
        v in 1..5_u32,
        layers in proptest::collection::vec((0.0..3.0_f64, 0.0..3.0_f64), 20),
        borders in proptest::collection::vec(0.0..2.0_f64, 5),
    ) {
        let schedule = match v {
            1 => Schedule::OneFOneB,
            _ => Schedule::Interleaved { virtual_stages: v },
        };
        let (m, placement) = (p * groups, schedule.placement());
        let n_chunks = placement.n_chunks(p) as usize;
        let borders = &borders[..p as usize];
        let times = PipelineTimes {
            placement,
            n_slices: 1,
            parts: None,
            forward: layers[..n_chunks].iter().map(|time| Seconds(time.0)).collect(),
            backward: layers[..n_chunks].iter().map(|time| Seconds(time.1)).collect(),
            boundary: (1..n_chunks).map(|chunk| Seconds(borders[(chunk - 1) % borders.len()])).collect(),
            branches: None,
            transfers: if v == 1 { Transfers::Exposed } else { Transfers::Overlapped },
        };
        let time = simulate(&table(schedule, p, m).unwrap(), &times).unwrap().makespan_s.0;
        let sends = Sends::new(borders, schedule, f64::from(m));
        let work = |rank: u32| -> f64 {
            let chunk = |virtual_stage| placement.chunk(p, Seat { rank, virtual_stage }) as usize;
            (0..v).map(chunk).map(|chunk| layers[chunk].0 + layers[chunk].1).sum::<f64>() * f64::from(m)
        };
        let busy: Vec<f64> = (0..p).map(|rank| work(rank) + sends.of_stages[rank as usize]).collect();
        for own in &busy {
            prop_assert!(own <= &(time * (1.0 + 1e-12)));
        }
        // Of the average stage, however unequal they are.
        let average = busy.iter().sum::<f64>() / f64::from(p) + sends.rounds;
        prop_assert!(average <= time * (1.0 + 1e-12), "{average} of {time}");
    }

    /// Where chunks are alike, that and the bubble of chunks is all there is, while sends are short beside them.
    #[test]
    fn equal_chunks_take_their_bubble_and_all_their_sends(
        p in 2..6_u32,
        groups in 1..4_u32,
        v in 2..5_u32,
        [forward, backward] in proptest::array::uniform2(1.0..3.0_f64),
        border in 0.0..0.1_f64,
    ) {
        let schedule = Schedule::Interleaved { virtual_stages: v };
        let (m, placement) = (p * groups, schedule.placement());
        let n_chunks = placement.n_chunks(p) as usize;
        let times = PipelineTimes {
            placement,
            n_slices: 1,
            parts: None,
            forward: vec![Seconds(forward); n_chunks],
            backward: vec![Seconds(backward); n_chunks],
            boundary: vec![Seconds(border); n_chunks - 1],
            branches: None,
            transfers: Transfers::Overlapped,
        };
        let time = simulate(&table(schedule, p, m).unwrap(), &times).unwrap().makespan_s.0;
        let sends = Sends::new(&vec![border; p as usize], schedule, f64::from(m));
        let last = sends.of_stages[p as usize - 1];
        let known = (forward + backward) * f64::from(m * v + p - 1) + last + sends.rounds;
        prop_assert!(known <= time * (1.0 + 1e-12));
        if groups == 1 {
            prop_assert!(known >= time * (1.0 - 1e-12), "{known} of {time}");
        }
    }
}
