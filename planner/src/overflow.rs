//! What a candidate that does not fit would need at least, and for what.

use cost_model::offload::{NodeMemory, OnNode, fullest_node};
use ir::schedule::Schedule;
use ir::units::Bytes;

use crate::arrange::Over;
use crate::bound::Bound;
use crate::by_device::Evened;
use crate::candidate::{Candidate, Dropped, Scope};
use crate::evaluate::DEAR_PRICES;
use crate::flights::Flight;
use crate::levels::{Chunk, LayerCost, Levels};
use crate::partition::{Place, Used};
use crate::priced_choices::{Choosers, Hides, Sum};
use crate::schedules::FamilyKind;
use crate::shelf::{Bench, Shelf};
use crate::work_out::nearer;

/// What needs more than so many times the memory at the dearest price is not asked at others: of 47 that fit at one, 40
/// need less.
const MISLED: f64 = 2.0;

impl Scope<'_> {
    /// Bytes of a device that no plan may use.
    pub fn reserve(&self) -> f64 {
        self.setting.reserve()
    }

    /// What overflows where memory is all that counts, if that is known: then so it does at lower prices, which need
    /// not be asked. The choices stay on the shelves, at no level.
    ///
    /// 1F1B keeps least of the schedules in which every micro-batch passes the ranks in turn, and shares no device
    /// among chunks, so that a cut is found where there is one. Others are cut each by itself, and nothing is known of
    /// what nearly fits: they hold other numbers of micro-batches than choices take them to (of 2,700 that overflow at
    /// the dearest price nine fit at some, and needed up to 1.45 times the memory).
    pub(crate) fn least_overflow<'s>(
        &'s self,
        (benches, shelves): (&[Bench<'s>], &mut [Shelf]),
        bound: &Bound,
        ready: &[Vec<Choosers<'_>>],
    ) -> Result<Option<Dropped>, Dropped> {
        let candidate = benches[0].candidate;
        let is_alike = |schedule: Schedule| FamilyKind::of(schedule).runs_forward_to_last();
        if self.pins().layers_per_stage.is_some() {
            return Ok(None);
        }
        let (alike, others): (Vec<_>, Vec<_>) =
            self.schedules(candidate).into_iter().partition(|one| is_alike(*one));
        let of_all = (!alike.is_empty()).then_some(Schedule::OneFOneB);
        let orders: Vec<Schedule> = of_all.into_iter().chain(others).collect();
        let (none, evened) = (Over::default(), Evened::default());
        let fits = |levels: &[Levels]| {
            let is_cut = |&schedule: &Schedule| {
                let mut cuttings = self.cuttings(candidate, schedule).iter();
                cuttings.any(|&cutting| {
                    !self.cuts(candidate, (schedule, cutting), (levels, &none, &evened)).is_empty()
                }) || self.cut_together(candidate, schedule, (levels, &none)).is_some()
            };
            orders.iter().any(is_cut)
        };
        let mut least: Option<Dropped> = None;
        for multiple in DEAR_PRICES {
            let smallest = self.levels_at((benches, &mut *shelves), bound, (ready, multiple));
            let smallest = smallest.ok_or(Dropped::NoStrategy)?;
            if fits(&smallest) {
                return Ok(None);
            }
            let own = self.overflow(candidate, &smallest);
            let needs = match &own {
                Dropped::Memory { needed, capacity, .. } => needed / capacity,
                Dropped::Host { .. } | Dropped::NoStrategy | Dropped::Slower => f64::INFINITY,
            };
            let is_near = needs < MISLED;
            if is_near && of_all.is_none() {
                return Ok(None);
            }
            least = least.into_iter().chain([own]).reduce(nearer);
            if !is_near {
                break;
            }
        }
        Ok(least)
    }

    /// Costs of every ground's layers at one price of memory, whose choices stay on the shelves at no level.
    fn levels_at<'s>(
        &'s self,
        (benches, shelves): (&[Bench<'s>], &mut [Shelf]),
        bound: &Bound,
        (ready, multiple): (&[Vec<Choosers<'_>>], f64),
    ) -> Option<Vec<Levels>> {
        let mut all = Vec::with_capacity(benches.len());
        for (ground, (bench, shelf)) in benches.iter().zip(shelves).enumerate() {
            let price = multiple * bound.on(ground).seconds_per_byte;
            let levels = std::mem::replace(&mut shelf.levels, vec![Vec::new(); self.forms.len()]);
            for (kind, ready) in ready[ground].iter().enumerate() {
                self.add((&mut *shelf, 0), bench, (kind, ready), Sum::at(price, Hides::BehindOperator))?;
            }
            all.push(self.levels(bench.candidate, shelf));
            shelf.levels = levels;
        }
        Some(all)
    }

    /// What the candidate would need at least, for the report; `levels` are those of its grounds.
    pub(crate) fn overflow(&self, candidate: &Candidate, levels: &[Levels]) -> Dropped {
        let Some(&schedule) = self.schedules(candidate).first() else { return Dropped::NoStrategy };
        let smallest = |levels: &Levels| {
            let last = levels.costs.len() - 1;
            let last = Levels::new(vec![levels.costs[last].clone()], levels.kinds.clone());
            last.of_slices(1.0 / f64::from(schedule.n_slices()))
        };
        let smallest: Vec<Levels> = levels.iter().map(smallest).collect();
        let (flights, grounds) = (self.in_flight(candidate, schedule), self.grounds(candidate));
        let ground = |chunk: usize| grounds.of_chunk(schedule.placement(), chunk);
        let place = |(chunk, &flight): (usize, &Flight)| smallest[ground(chunk)].place(flight, f64::INFINITY);
        let places: Vec<Place<'_>> = flights.iter().enumerate().map(place).collect();
        let Some(cuts) = self.cut_anywhere(&places) else { return Dropped::NoStrategy };
        let p = candidate.n_stages as u32;
        let chunks_of = |stage: usize| schedule.placement().chunks_of(p, stage as u32);
        let used = |stage: usize| {
            let own = chunks_of(stage).map(|chunk| &cuts[chunk as usize]);
            own.fold(Used::default(), |used, chunk| used.and(chunk))
        };
        let over = |stage: usize| used(stage).all() - grounds.at(stage).capacity;
        let stages = 0..candidate.n_stages as usize;
        let worst = stages.max_by(|a, b| over(*a).total_cmp(&over(*b)).then(b.cmp(a)));
        let Some(stage) = worst else { return Dropped::NoStrategy };
        let also = self.host_overflow(candidate, schedule, (&cuts, &smallest));
        if over(stage) <= 0.0
            && let Some(NodeMemory { store, stage, needed, capacity }) = also
        {
            return Dropped::Host { store, stage, needed: needed.0, capacity: capacity.0 };
        }
        let sum = |of: &dyn Fn(&LayerCost, Flight) -> f64| -> f64 {
            let of_chunk = |chunk: usize| -> f64 {
                let (cut, costs) = (&cuts[chunk], &smallest[ground(chunk)].costs[0]);
                smallest[0].kinds[cut.from..cut.to].iter().map(|&kind| of(&costs[kind], flights[chunk])).sum()
            };
            chunks_of(stage).map(|chunk| of_chunk(chunk as usize)).sum()
        };
        let (state, saved) = (sum(&|cost, _| cost.state), sum(&|cost, flight| cost.kept(flight)));
        let needed = used(stage).all();
        let working = needed - state - saved;
        let term = if state >= saved + working {
            "parameters, gradients and optimizer state"
        } else if saved >= working {
            "activations kept for backward"
        } else {
            "working tensors of one layer"
        };
        Dropped::Memory { stage, term, needed, capacity: grounds.at(stage).capacity, also }
    }

    /// The same where that fits by what cuts see of it: what the arrangement overflows that does so least.
    pub(crate) fn overflow_of(
        &self,
        (candidate, over): (&Candidate, Option<&Over>),
        levels: &[Levels],
    ) -> Dropped {
        match (self.overflow(candidate, levels), over) {
            (Dropped::Memory { term, needed, capacity, also, .. }, Some(over)) if needed <= capacity => {
                let (stage, bytes) = over.most();
                let capacity = self.grounds(candidate).at(stage).capacity;
                Dropped::Memory { stage, term, needed: capacity + bytes, capacity, also }
            }
            (dropped, _) => dropped,
        }
    }

    /// The node whose host or drives lack memory for what its devices cannot hold, if there is one.
    fn host_overflow(
        &self,
        candidate: &Candidate,
        schedule: Schedule,
        (cuts, levels): (&[Chunk], &[Levels]),
    ) -> Option<NodeMemory> {
        let (n_stages, grounds) = (candidate.n_stages as usize, self.grounds(candidate));
        let flights = self.in_flight(candidate, schedule);
        let devices = |stage: u64| candidate.meshes().of(stage).n_devices();
        let mut stages: Vec<(OnNode, u64)> =
            (0..candidate.n_stages).map(|stage| (OnNode::default(), devices(stage))).collect();
        for (chunk, cut) in cuts.iter().enumerate() {
            let costs = &levels[grounds.of_chunk(schedule.placement(), chunk)].costs[0];
            let kinds = &levels[0].kinds[cut.from..cut.to];
            let sum =
                |of: &dyn Fn(&LayerCost) -> f64| kinds.iter().map(|&kind| of(&costs[kind])).sum::<f64>();
            let passing = kinds.iter().map(|&kind| costs[kind].nvme_passing).fold(0.0, f64::max);
            let host = sum(&|cost| cost.host + cost.kept_on_host * flights[chunk].bytes(1.0, 1.0)) + passing;
            for rank in schedule.placement().ranks(n_stages as u32, chunk as u32) {
                stages[rank as usize].0.host += Bytes(host);
                stages[rank as usize].0.nvme += Bytes(sum(&|cost| cost.nvme));
            }
        }
        fullest_node((&self.request.cluster, self.constants), &stages).filter(|node| !node.fits())
    }
}
