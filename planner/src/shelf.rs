//! The choices tried so far for every layer kind of a candidate, each lowered and priced from its program.
//!
//! A level is a price of memory: at each the choice problem of every form of a kind is solved once more, and the best
//! of them is taken. What an entry costs is read off its program, not off the problem.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use ir::engine::GradientOverlap;
use ir::graph::{Sizes, TensorId};
use ir::lower::{LayerChoice, lower};
use ir::mesh::Mesh;

use crate::candidate::{Candidate, Scope};
use crate::forms::Forms;
use crate::given::Given;
use crate::layer_problem::LayerProblem;
use crate::levels::{LayerCost, Levels, Once};
use crate::memos::{Memos, lock};
use crate::price::grounds::Grounds;
use crate::price::setting::{Entry, Setting};
use crate::prices::Prices;
use crate::rewrite::Variant;

/// The choices tried so far for every layer kind, with their figures.
#[derive(Clone)]
pub(crate) struct Shelf {
    /// Per kind, distinct choices.
    pub(crate) entries: Vec<Vec<Entry>>,
    /// Per kind and price of memory, which choice.
    pub(crate) levels: Vec<Vec<usize>>,
}

/// A candidate with its prices on one ground and the lengths of every form of every layer kind.
pub(crate) struct Bench<'s> {
    pub(crate) candidate: &'s Candidate,
    pub(crate) setting: Setting<'s>,
    pub(crate) prices: Prices<'s>,
    pub(crate) sizes: Vec<Vec<Sizes>>,
    /// What choices of layer kinds of the wide model come to, nothing where they have no program: ways to work a
    /// candidate out come to the same ones.
    priced: Mutex<BTreeMap<(usize, LayerChoice), Option<Entry>>>,
    memos: &'s Memos,
}

impl Drop for Bench<'_> {
    fn drop(&mut self) {
        self.memos.give(self.candidate, self.setting.ground, std::mem::take(&mut self.prices.memo));
    }
}

/// The forms of a layer kind that are asked, each with its choice problem.
pub(crate) type Asked<'s> = Vec<(usize, LayerProblem<'s>)>;

impl Shelf {
    pub(crate) fn new(n_kinds: usize) -> Self {
        Self { entries: vec![Vec::new(); n_kinds], levels: vec![Vec::new(); n_kinds] }
    }
}

impl<'a> Scope<'a> {
    /// A candidate as it is priced on its first ground.
    pub(crate) fn bench<'s>(&'s self, candidate: &'s Candidate) -> Bench<'s> {
        let grounds = self.grounds(candidate);
        self.bench_on(candidate, (&grounds.settings[0], grounds.mesh(candidate.meshes(), 0)))
    }

    /// A candidate as it is priced on every ground of its stages.
    pub(crate) fn benches<'s>(&'s self, candidate: &'s Candidate, grounds: &Grounds<'s>) -> Vec<Bench<'s>> {
        let mesh = |ground: usize| grounds.mesh(candidate.meshes(), ground);
        let on = |(ground, setting)| self.bench_on(candidate, (setting, mesh(ground)));
        grounds.settings.iter().enumerate().map(on).collect()
    }

    /// A candidate as it is priced on one ground.
    fn bench_on<'s>(
        &'s self,
        candidate: &'s Candidate,
        (setting, mesh): (&Setting<'s>, &'s Mesh),
    ) -> Bench<'s> {
        let sizes = |form: &Variant| form.layer.sizes(candidate.micro_batch, self.request.job.sequence);
        let sizes: Vec<Vec<Sizes>> =
            self.forms.iter().map(|forms| forms.iter().map(sizes).collect()).collect();
        let passed = self.forms.iter().zip(&sizes).flat_map(|(forms, sizes)| {
            let layer = &forms[0].layer;
            layer.stream_in.iter().map(|&tensor| layer.shape(tensor, &sizes[0]))
        });
        let passed: BTreeSet<Vec<u64>> = passed.collect();
        let mut prices = Prices::new(setting.machine.clone(), mesh, &candidate.shape.rules)
            .barred(&candidate.shape.barred)
            .keeping(self.pins().gradients)
            .passing(passed.into_iter().collect());
        prices.memo = self.memos.take(candidate, setting.ground);
        let (setting, priced) = (setting.clone(), Mutex::default());
        Bench { candidate, setting, prices, sizes, priced, memos: &self.memos }
    }

    /// The choice problems of the forms of a layer kind; forms without a legal strategy are left out.
    pub(crate) fn asked<'s>(
        &'s self,
        bench: &Bench<'s>,
        kind: usize,
        given: &Given,
        forms: Forms<'_>,
    ) -> Asked<'s> {
        let clock = self.clock(bench.candidate, given.covers);
        let shared = self.shared(bench.candidate, kind, given);
        let with_shared = (!shared.is_empty()).then(|| Given { shared, ..given.clone() });
        let given = with_shared.as_ref().unwrap_or(given);
        let of = |form: usize| {
            let layer = &self.forms[kind][form].layer;
            let sizes = &bench.sizes[kind][form];
            Some((form, LayerProblem::new(layer, sizes, &bench.prices, clock, given)?))
        };
        match forms {
            // A fused form may have no strategy where its parts have.
            Forms::Leading => of(self.leading[kind]).or_else(|| of(0)).into_iter().collect(),
            Forms::Chosen(chosen) => of(chosen[kind]).or_else(|| of(0)).into_iter().collect(),
            Forms::All => (0..self.forms[kind].len()).filter_map(of).collect(),
        }
    }

    /// Parameters of a layer kind that other layers of its stage hold, unless what is given says that they do not.
    fn shared(&self, candidate: &Candidate, kind: usize, given: &Given) -> BTreeSet<TensorId> {
        if !candidate.holds_ties_once() {
            return BTreeSet::new();
        }
        let copies = self.model().ties.iter().map(|tie| tie.copy).filter(|copy| copy.layer == kind);
        let is_shared = |tensor: &TensorId| given.tied.get(tensor).is_none_or(|tied| tied.summed.is_some());
        copies.map(|copy| copy.tensor).filter(is_shared).collect()
    }

    /// Puts a choice on the shelf as a level of its kind, before those that are there at it and behind.
    pub(crate) fn put(
        &self,
        (shelf, level): (&mut Shelf, usize),
        bench: &Bench<'_>,
        form: (usize, usize),
        choice: LayerChoice,
    ) -> Option<()> {
        let at = self.on_shelf(shelf, bench, form, choice)?;
        shelf.levels[form.0].insert(level, at);
        Some(())
    }

    /// The place of a choice among those of its kind that have a price; it gets one if it is new.
    pub(crate) fn on_shelf(
        &self,
        shelf: &mut Shelf,
        bench: &Bench<'_>,
        (kind, form): (usize, usize),
        choice: LayerChoice,
    ) -> Option<usize> {
        let wide = self.wide_kind(kind, form);
        let known = shelf.entries[kind].iter().position(|entry| entry.kind == wide && entry.choice == choice);
        Some(match known {
            Some(at) => at,
            None => {
                let entry = self.entry_of(bench, &bench.sizes[kind][form], (wide, choice))?;
                shelf.entries[kind].push(entry);
                shelf.entries[kind].len() - 1
            }
        })
    }

    /// What a choice of a layer kind of the wide model comes to by its program; nothing where it has none.
    pub(crate) fn entry_of(
        &self,
        bench: &Bench<'_>,
        sizes: &Sizes,
        chosen: (usize, LayerChoice),
    ) -> Option<Entry> {
        if let Some(known) = lock(&bench.priced).get(&chosen) {
            return known.clone();
        }
        let mesh = bench.prices.mesh();
        let program = lower(&self.wide.layers[chosen.0], mesh, sizes, &chosen.1).ok();
        let price = |program| bench.setting.entry(&self.wide, chosen.clone(), (mesh, sizes), &program);
        let entry = program.map(price);
        lock(&bench.priced).insert(chosen, entry.clone());
        entry
    }

    pub(crate) fn levels(&self, candidate: &Candidate, shelf: &Shelf) -> Levels {
        let slack = self.constants.fragmentation_factor;
        let cost = |entry: &Entry| LayerCost {
            time: (entry.forward_seconds() + entry.backward_seconds()).0,
            forward: entry.forward_seconds().0,
            reduce: entry.price.update.gradient_reduce.0,
            spread: entry.price.update.parameter_gather.0,
            update: (entry.price.update.optimizer + entry.price.update.host).0,
            state: (entry.memory.states() + self.setting.copied_gradients(entry)).0,
            host: (entry.memory.host + entry.memory.parameters_on_host).0,
            nvme: entry.memory.nvme.0,
            nvme_passing: entry.memory.nvme_passing.0,
            kept_on_host: entry.memory.kept_on_host.0,
            saved: entry.memory.saved_total().0 * slack,
            carried: entry.carried().0 * slack,
            working: entry.memory.working().0 * slack,
            logits: entry.memory.logits.0 * slack,
            once: entry.memory.stand_ins.0,
            copied: self.setting.copied_tensors(entry).0,
            gathered: entry.memory.gathered.0 * slack,
            unreduced: entry.memory.unreduced.0 * slack,
        };
        let depth = shelf.levels.first().map_or(0, Vec::len);
        let at = |level: usize| {
            shelf.levels.iter().zip(&shelf.entries).map(|(levels, list)| cost(&list[levels[level]])).collect()
        };
        let costs: Vec<Vec<LayerCost>> = (0..depth).map(at).collect();
        let in_flight = candidate.n_stages.min(candidate.n_micro_batches) as f64;
        let slowdown = match self.setting.job.engine.gradient_overlap {
            GradientOverlap::Beside => Some(self.constants.overlap_slowdown_fraction),
            GradientOverlap::Absent => None,
        };
        let once = Once { micro_batches: candidate.n_micro_batches, slowdown };
        Levels::in_steps(&costs, self.model().kinds_in_order(), (in_flight, once))
    }
}
