//! How fast a candidate could be: the fastest choice of each layer kind, whatever memory it takes.

use ir::sharding::Sharding;
use ir::units::Seconds;

use crate::candidate::{Candidate, Scope};
use crate::chooser::too_large;
use crate::layer_problem::LayerProblem;
use crate::prices::Prices;

/// What is known of a candidate before it is worked out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// It is not faster than this.
    pub time: Seconds,
    /// Time of the layers alone, were every stage busy all the time.
    pub work: f64,
    /// Bytes that the fastest choices take on a device, reserve apart, over what there is.
    pub crowding: f64,
    /// Sharding of the stream in the kind of layer that takes most of the time.
    pub stream: Sharding,
    /// What memory is worth there.
    pub seconds_per_byte: f64,
}

impl Scope<'_> {
    /// A time that the candidate cannot beat, but for what overlaps better between layers than inside them.
    pub fn bound(&self, candidate: &Candidate) -> Option<Bound> {
        let prices = Prices::new(self.machine.clone(), &candidate.shape.mesh, &candidate.shape.rules);
        let sizes = self.sizes(candidate);
        let clock = Self::clock(candidate);
        let layers = &self.model().layers;
        let (mut total, mut bytes) = (0.0, 0.0);
        let mut main: Option<(f64, Sharding, f64)> = None;
        for (kind, layer) in layers.iter().enumerate() {
            let problem = LayerProblem::new(layer, &sizes[kind], &prices, clock, &self.given_fastest())?;
            let (time, unit, choices) = self.chooser(&problem).fastest(&problem.problem)?;
            let weight = time * self.counts[kind] as f64;
            total += weight;
            bytes += problem.problem.total(&choices)?.memory * self.counts[kind] as f64;
            let passes_stream = layer.stream_in.is_some() && !layer.tensors[layer.out.0].dims.is_empty();
            // The kind that takes most of the time decides in which sharding the stream passes everywhere.
            if passes_stream && main.is_none_or(|(most, ..)| weight > most) {
                main = Some((weight, problem.choice(&choices).stream, unit));
            }
        }
        let (_, stream, seconds_per_byte) = main?;
        let p = candidate.n_stages as f64;
        let work = total / p;
        let time = self.with_bubble(candidate, work)?;
        Some(Bound { time, work, crowding: bytes / p / self.capacity, stream, seconds_per_byte })
    }

    /// What to say where the solver that is asked for cannot take the problem of some layer of a candidate.
    pub(crate) fn too_large(&self, candidate: &Candidate) -> Option<String> {
        let prices = Prices::new(self.machine.clone(), &candidate.shape.mesh, &candidate.shape.rules);
        let (sizes, clock, given) = (self.sizes(candidate), Self::clock(candidate), self.given());
        self.model().layers.iter().zip(&sizes).find_map(|(layer, sizes)| {
            let problem = LayerProblem::new(layer, sizes, &prices, clock, &given)?;
            too_large(self.request.solver, &problem, (&layer.name, &candidate.shape.mesh))
        })
    }

    /// Least time of a step whose layers take `work` on every stage: fill and drain of the most virtual stages.
    ///
    /// `None` where no number of virtual stages is allowed.
    pub fn with_bubble(&self, candidate: &Candidate, work: f64) -> Option<Seconds> {
        let (m, p) = (candidate.n_micro_batches as f64, candidate.n_stages as f64);
        let v = f64::from(self.virtual_stages(candidate).into_iter().max()?);
        Some(Seconds(work * (1.0 + (p - 1.0) / (m * v))))
    }
}
