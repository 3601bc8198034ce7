//! Bytes that the devices of a stage send in a step, per tier: conversions, parameters, gradients, streams, shared
//! parameters.
//!
//! Bytes are those of the formats of the job, averaged over the members of a collective; expert slots count as filled.
//! In a job whose formats all have one width, with blocks that are equal and slots that are full, they add up to what
//! an executor counts.

use ir::units::Bytes;

use crate::price::setting::Setting;
use crate::price::staged::Staged;
use crate::price::step::takeovers;

/// Per stage, bytes that one of its devices sends in a step, per tier of the cluster.
pub fn bytes_sent(setting: &Setting<'_>, staged: &Staged<'_>) -> Vec<Vec<Bytes>> {
    let mut sent: Vec<Vec<Bytes>> =
        (0..staged.n_stages as usize).map(|stage| layers(setting, staged, stage)).collect();
    // What goes forward over a border comes back as its gradient, from the stage behind it.
    for copy in 0..staged.schedule.placement().n_copies() {
        for (crossing, border) in &staged.borders(setting, copy, setting.job.sequence) {
            let (behind, times) = (staged.stage_at(crossing.to, copy), staged.micro_batches_of(copy));
            add(&mut sent[border.from as usize], &border.bytes_per_tier, times);
            add(&mut sent[behind as usize], &border.back_per_tier, times);
        }
    }
    for (place, takeover) in takeovers(setting, staged).iter().enumerate() {
        for copy in 0..staged.schedule.placement().n_copies() {
            let stage = staged.stage_at(place / staged.slices.n() as usize, copy) as usize;
            add(&mut sent[stage], &takeover.bytes_per_tier, staged.micro_batches_of(copy));
        }
    }
    for (gradients, values) in [staged.shared_moves(setting), staged.twin_moves(setting)] {
        for one in gradients.iter().chain(&values) {
            add(&mut sent[one.from as usize], &one.bytes_per_tier, 1.0);
        }
    }
    sent
}

/// What the layers of a stage send for themselves.
fn layers(setting: &Setting<'_>, staged: &Staged<'_>, stage: usize) -> Vec<Bytes> {
    let mut sent = vec![Bytes::ZERO; setting.machine.cluster.tiers.len()];
    for (entry, count, times) in staged.passes(stage) {
        let price = &entry.price;
        add(&mut sent, &price.forward.bytes_per_tier, times * count as f64);
        for section in entry.backward() {
            add(&mut sent, &section.bytes_per_tier, times * count as f64);
        }
        add(&mut sent, &price.update.bytes_per_tier, count as f64);
    }
    sent
}

fn add(sum: &mut [Bytes], bytes: &[Bytes], times: f64) {
    for (sum, one) in sum.iter_mut().zip(bytes) {
        *sum += *one * times;
    }
}
