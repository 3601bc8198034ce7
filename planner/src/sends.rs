//! What whole stages wait for their sends at least.
//!
//! ```text
//! waits(s) = m (c(s - 1, s) + c(s, s + 1))        c: what a device has at least of the stream, over the link between the two
//! ```
//! In 1F1B and GPipe a stage goes on when it has sent (`cost_model::Transfers::Exposed`): the stream forward to the one behind it,
//! its gradient back to the one before. No sharding leaves a device less of the stream than an equal part.

use ir::graph::Layer;
use ir::schedule::Schedule;
use ir::slices::Slices;

use crate::arrange::staged;
use crate::candidate::{Candidate, Scope};

impl Scope<'_> {
    /// Per stage of a candidate on one ground, least seconds of a step that it waits for its sends where stages are whole;
    /// nothing of models that branch, for what then crosses depends on where they are cut, nor where stages differ in width.
    pub(crate) fn least_sends(&self, candidate: &Candidate) -> Vec<f64> {
        let p = candidate.n_stages;
        if p == 1 || !self.bends.is_empty() || !candidate.meshes.is_empty() {
            return Vec::new();
        }
        let sequence = self.request.job.sequence;
        let elements = |layer: &Layer| -> u64 {
            let sizes = layer.sizes(candidate.micro_batch, sequence);
            let of_stream = |&stream| layer.shape(stream, &sizes).iter().product::<u64>();
            layer.stream_in.iter().map(of_stream).sum()
        };
        let layers = self.model().layers.iter().filter(|layer| !layer.stream_in.is_empty());
        let least = layers.map(elements).min().unwrap_or(0) as f64;
        let bytes = self.setting.activation(least / candidate.shape.mesh.n_devices() as f64);
        let slices = Slices::whole(sequence);
        let staged = staged(self.model(), candidate, Schedule::OneFOneB, (&[], &[]), &slices);
        let border = |from: u64| staged.transfer(&self.setting, (from, from + 1), bytes).time.0;
        let borders: Vec<f64> = (0..p - 1).map(border).collect();
        let of_stage = |stage: usize| {
            let before = stage.checked_sub(1).map_or(0.0, |before| borders[before]);
            let behind = borders.get(stage).copied().unwrap_or(0.0);
            (before + behind) * candidate.n_micro_batches as f64
        };
        (0..p as usize).map(of_stage).collect()
    }
}
