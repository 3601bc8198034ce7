//! A section as events, in a row of equal layers: the second witness of what its communication shows.
//!
//! The closed forms of `exposure.rs` and `overlap.rs` say what shows of one collective beside the products next to it,
//! and of a layer's parameters beside all its compute. Here nothing is said of what shows; only what waits for what:
//!
//! ```text
//! instruction            computation, in the program's order; gradients of weights after those of tensors
//! conversion             a transfer that all later computation waits for, but where the engine launches it beside:
//!   gather, scatter        in chunks, each waited for by, or waiting for, a chunk of its products
//!   gradient of a tensor   beside the product that yields the gradient of the weight
//!   gathered again         awaited by that product alone
//! hop of a ring          beside the attention of the block before
//! parameters of a layer  gathered while the layer before runs; gradients sent while the next one does, and the layer
//!                        after that waits for them
//! kept on the host       leaves behind forward, and comes for backward while the layer before runs; two layers at a time
//! parameters there       come for every pass while the layer before runs, and are gathered beside it
//! ```
//! A layer takes what those in the middle of the row add to it.

use std::collections::BTreeMap;
use std::ops::Range;

use ir::conversion::Step;
use ir::engine::{GradientOverlap, TensorOverlap};
use ir::mesh::AxisId;
use ir::program::{Instruction, Side, ValueId};
use ir::units::Seconds;
use ir::work::Pass;

use super::{Pricing, op_seconds};
use crate::collective::CollectiveKind;
use crate::dispatch::{Routing, shown};
use crate::events::{Event, Lane, Urgency, ends};
use crate::exposure::{Beside, Neighbours, OpSeconds};
use crate::links::{Reach, reach};
use crate::program_bytes::CommunicationClass;
use crate::ring::ring_time;
use crate::step_price::{group_of, price_full, price_step};

/// Layers in the row.
const ROW: usize = 16;

/// Those of them that are measured: before, the row begins; behind, nothing is fetched any more. An even number, for
/// what is two layers ahead may come in pairs.
const MEASURED: Range<usize> = 4..12;

/// Where a value comes from.
#[derive(Clone, Debug, Default)]
struct Made {
    /// Events that must have ended.
    needs: Vec<usize>,
    /// The same chunk by chunk, where it comes in chunks.
    chunks: Vec<usize>,
    /// Whether only products that yield gradients of weights wait for it.
    late: bool,
}

impl Made {
    fn chunk(&self, at: usize) -> Vec<usize> {
        self.chunks.get(at).map_or_else(|| self.needs.clone(), |&one| vec![one])
    }
}

/// Times of what an instruction computes.
#[derive(Clone, Copy, Debug, Default)]
struct Computed {
    /// Gradients of weights.
    weights: Seconds,
    /// All else.
    rest: Seconds,
    /// Matrix products of both.
    products: Seconds,
}

/// What a section of a layer takes in a row of equal layers, as events.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RowPrice {
    /// Wall time of a layer, or its launches if these take longer.
    pub seconds: Seconds,
    /// What the layer keeps the processors busy with.
    pub compute: Seconds,
    /// The same of the links inside the node.
    pub node: Seconds,
    /// The same of the links across nodes.
    pub network: Seconds,
    /// The same of the link to the host.
    pub host: Seconds,
    /// Host time to launch it all.
    pub launch: Seconds,
}

/// What a section keeps busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// The processors of the device.
    Compute,
    /// Links inside the node.
    Node,
    /// Links across nodes.
    Network,
    /// The link to the host.
    Host,
    /// The host that launches kernels.
    Launch,
}

impl RowPrice {
    /// The stream that is busy for longest, and for what share of the time; ties to the first.
    pub fn bottleneck(&self) -> (Stream, f64) {
        let busy = [
            (Stream::Compute, self.compute),
            (Stream::Node, self.node),
            (Stream::Network, self.network),
            (Stream::Host, self.host),
            (Stream::Launch, self.launch),
        ];
        let longest =
            |most: (Stream, Seconds), one: (Stream, Seconds)| if one.1 > most.1 { one } else { most };
        let (stream, time) = busy.into_iter().fold(busy[0], longest);
        (stream, if self.seconds > Seconds::ZERO { time / self.seconds } else { 0.0 })
    }
}

impl Pricing<'_> {
    /// A layer's section in a row of such layers.
    pub(super) fn in_a_row(&self, code: &[Instruction], pass: Pass) -> RowPrice {
        let computed: Vec<Computed> = code.iter().map(|one| self.computed(one, pass)).collect();
        let times: Vec<OpSeconds> = code.iter().map(|one| self.products(one, pass)).collect();
        let neighbours = Neighbours::new(self.layer, code, &times);
        let mut row = Row::new(self, &neighbours, pass);
        for _ in 0..ROW {
            row.layer(code, &computed);
        }
        let all = ends(&row.events);
        let until = |n: usize| match row.layers[n] {
            Passed { computed: Some(at), .. } => all[at],
            // A layer that computes nothing is what it sends.
            Passed { n_events, .. } => all[..n_events].iter().copied().fold(Seconds::ZERO, Seconds::max),
        };
        let seconds = (until(MEASURED.end) - until(MEASURED.start)) / MEASURED.len() as f64;
        let section = self.section(code, pass);
        let launch = section.launch;
        let busy = |lane: Lane| -> Seconds {
            let all = row.events.iter().filter(|event| event.lane == lane);
            all.map(|event| event.alone).sum::<Seconds>() / ROW as f64
        };
        RowPrice {
            seconds: (seconds + section.counts).max(launch),
            compute: busy(Lane::Compute),
            node: busy(Lane::Node),
            network: busy(Lane::Network),
            host: busy(Lane::ToHost).max(busy(Lane::FromHost)),
            launch,
        }
    }

    /// Kernels' time of an instruction, merging of blocks on a ring apart.
    fn computed(&self, instruction: &Instruction, pass: Pass) -> Computed {
        let works = self.works(instruction, pass).0;
        let products = self.products(instruction, pass);
        let weights = products.weight_products;
        Computed { weights, rest: op_seconds(self.context, &works) - weights, products: products.both() }
    }

    fn products(&self, instruction: &Instruction, pass: Pass) -> OpSeconds {
        let mut seconds = OpSeconds::default();
        for work in self.works(instruction, pass).0 {
            seconds.add(&work, op_seconds(self.context, std::slice::from_ref(&work)));
        }
        seconds
    }

    fn lane(&self, axes: &[AxisId]) -> Lane {
        let group = group_of(self.context, self.mesh, axes);
        match group.spanning_tier().map(|tier| reach(tier, self.context.cluster)) {
            Some(Reach::Network) => Lane::Network,
            Some(Reach::Node) | None => Lane::Node,
        }
    }
}

/// A layer of the row whose events are all in the list.
#[derive(Clone, Debug, Default)]
struct Passed {
    /// Its last computation.
    computed: Option<usize>,
    /// Its gradients on their way.
    reduced: Vec<usize>,
    /// What it keeps on its way to the host.
    stowed: Option<usize>,
    /// How many events there are with it.
    n_events: usize,
}

/// A row of layers under way.
struct Row<'r> {
    pricing: &'r Pricing<'r>,
    pass: Pass,
    neighbours: &'r Neighbours<'r>,
    n_chunks: usize,
    events: Vec<Event>,
    made: BTreeMap<ValueId, Made>,
    /// What all computation from here on waits for.
    barrier: Vec<usize>,
    /// What the layer's first computation waits for: its parameters.
    gathered: Vec<usize>,
    /// The last computation so far.
    last: Option<usize>,
    /// The layers so far.
    layers: Vec<Passed>,
}

impl<'r> Row<'r> {
    fn new(pricing: &'r Pricing<'r>, neighbours: &'r Neighbours<'r>, pass: Pass) -> Self {
        let constants = pricing.context.constants;
        // The first chunk of a gather has nothing to hide behind: that is what is left of it.
        let n_chunks = (1.0 / constants.tensor_overlap_residual_fraction.clamp(0.01, 1.0)).round() as usize;
        let (made, barrier) = (BTreeMap::new(), Vec::new());
        let (events, gathered, layers) = (Vec::new(), Vec::new(), Vec::new());
        Self { pricing, pass, neighbours, n_chunks, events, made, barrier, gathered, last: None, layers }
    }

    fn layer(&mut self, code: &[Instruction], computed: &[Computed]) {
        self.gather_parameters(code);
        self.fetch(code);
        for (instruction, own) in code.iter().zip(computed) {
            match instruction {
                Instruction::Convert { input, output, steps } => self.convert((*input, *output), steps),
                Instruction::Forward { .. }
                | Instruction::Backward { .. }
                | Instruction::Accumulate { .. } => {
                    self.kernel(instruction, *own);
                }
                Instruction::Load { .. } | Instruction::Parameter { .. } | Instruction::Free { .. } => {}
            }
        }
        let program = self.pricing.program;
        let [from, to] = match self.pass {
            Pass::Forward => [&program.out, &program.stream],
            Pass::Backward => [&program.stream_gradient, &program.out_gradient],
        };
        let handed = from.iter().zip(to).filter_map(|(from, &to)| Some((to, self.made.get(from)?.clone())));
        self.made = handed.collect();
        let reduced =
            self.buckets(code, CommunicationClass::GradientAccumulate, self.last.into_iter().collect());
        if self.pricing.context.constants.engine.gradient_overlap == GradientOverlap::Absent {
            self.barrier.extend(&reduced);
        }
        let stowed = self.moved((Lane::ToHost, self.pricing.moved(code, self.pass).down), self.last);
        self.layers.push(Passed { computed: self.last, reduced, stowed, n_events: self.events.len() });
    }

    /// What the layer two before has sent to the host has left its place; what this one has from there comes into the
    /// place of that one's.
    fn fetch(&mut self, code: &[Instruction]) {
        let earlier = self.layers.len().checked_sub(2).and_then(|at| self.layers.get(at)).cloned();
        let earlier = earlier.unwrap_or_default();
        self.gathered.extend(earlier.stowed);
        let fetched = self.moved((Lane::FromHost, self.pricing.moved(code, self.pass).up), earlier.computed);
        self.gathered.extend(fetched);
    }

    /// What goes one way over the link to the host, once something is done.
    fn moved(&mut self, (lane, alone): (Lane, Seconds), after: Option<usize>) -> Option<usize> {
        if alone <= Seconds::ZERO {
            return None;
        }
        let needs = after.into_iter().collect();
        self.events.push(Event { lane, alone, needs, slowdown: 0.0, urgency: Urgency::Ahead });
        Some(self.events.len() - 1)
    }

    /// The layer's parameters on their way while the layer before runs; what was sent two layers before has arrived.
    fn gather_parameters(&mut self, code: &[Instruction]) {
        let ago = |n: usize| self.layers.len().checked_sub(n).and_then(|at| self.layers.get(at)).cloned();
        let (before, earlier) = (ago(1).unwrap_or_default(), ago(2).unwrap_or_default());
        let released = match self.pricing.context.constants.engine.gradient_overlap {
            GradientOverlap::Beside => earlier.computed,
            GradientOverlap::Absent => before.computed,
        };
        let gathered =
            self.buckets(code, CommunicationClass::ParameterGather, released.into_iter().collect());
        self.gathered.extend(gathered);
        self.gathered.extend(earlier.reduced);
    }

    fn buckets(&mut self, code: &[Instruction], of: CommunicationClass, needs: Vec<usize>) -> Vec<usize> {
        let (pricing, context) = (self.pricing, self.pricing.context);
        let all = pricing.section_buckets(code).into_iter().filter(|((class, ..), _)| *class == of);
        let mut sent = Vec::new();
        for ((_, kind, axes), full) in all {
            let alone = price_full(context, pricing.mesh, (kind, &axes), full).choice.time;
            let slowdown = context.constants.gathered_overlap_slowdown_fraction;
            let needs = needs.clone();
            let lane = pricing.lane(&axes);
            self.events.push(Event { lane, alone, needs, slowdown, urgency: Urgency::Ahead });
            sent.push(self.events.len() - 1);
        }
        sent
    }

    fn compute(&mut self, alone: Seconds, mut needs: Vec<usize>) -> usize {
        needs.append(&mut self.barrier);
        needs.append(&mut self.gathered);
        self.events.push(Event {
            lane: Lane::Compute,
            alone,
            needs,
            slowdown: 0.0,
            urgency: Urgency::Awaited,
        });
        self.last = Some(self.events.len() - 1);
        self.events.len() - 1
    }

    /// A kernel: gradients of weights last, products in as many chunks as what comes and goes in chunks.
    fn kernel(&mut self, instruction: &Instruction, own: Computed) {
        let read: Vec<Made> =
            instruction.read().iter().filter_map(|value| self.made.get(value)).cloned().collect();
        let defers = own.weights > Seconds::ZERO;
        let soon: Vec<&Made> = read.iter().filter(|made| !(defers && made.late)).collect();
        let mut made = Made::default();
        if own.rest > Seconds::ZERO {
            let chunked = self.pricing.context.tensor_overlap == TensorOverlap::Chunked;
            let n = if own.products > Seconds::ZERO && chunked { self.n_chunks } else { 1 };
            let mut chunks = Vec::with_capacity(n);
            for at in 0..n {
                let needs = soon.iter().flat_map(|made| made.chunk(at)).collect();
                chunks.push(self.compute(own.rest / n as f64, needs));
            }
            made = Made { needs: chunks.last().copied().into_iter().collect(), chunks, late: false };
            if n == 1 {
                made.chunks.clear();
            }
            self.ring(instruction, &mut made);
        } else {
            // What takes no time hands on what it reads.
            match soon.as_slice() {
                [one] => made = (*one).clone(),
                several => made.needs = several.iter().flat_map(|one| one.needs.clone()).collect(),
            }
            made.late = read.iter().any(|one| one.late) && !defers;
            if made.late {
                made.needs = read.iter().flat_map(|one| one.needs.clone()).collect();
            }
        }
        let mut weights = made.clone();
        if defers {
            let mut needs: Vec<usize> = read.iter().flat_map(|one| one.needs.clone()).collect();
            needs.extend(&made.needs);
            weights = Made { needs: vec![self.compute(own.weights, needs)], ..Made::default() };
        }
        let (layer, program) = (self.pricing.layer, self.pricing.program);
        for value in instruction.written() {
            let of = program.value(value);
            let is_weight = of.side == Side::Gradient && layer.is_parameter(of.tensor);
            self.made.insert(value, if is_weight { weights.clone() } else { made.clone() });
        }
    }

    /// Attention on a ring: every hop runs beside a block, and the next block waits for it.
    fn ring(&mut self, instruction: &Instruction, made: &mut Made) {
        let pricing = self.pricing;
        let Some((op, pass)) = instruction.kernel() else { return };
        let context = pricing.context;
        let Some((axes, sizes)) = pricing.work.ring(op, context.kernels.element_bytes) else { return };
        let attention = op_seconds(context, &pricing.work.of(op, pass, &context.kernels));
        let merge = op_seconds(context, &[sizes.merge(pass)]);
        let group = group_of(context, pricing.mesh, &axes);
        let time = ring_time(sizes, pass, (attention, merge), &group, (context.cluster, context.constants));
        let Some(whole) = made.needs.pop() else { return };
        // The block at hand first; every other beside the hop of the one after it.
        let blocks = f64::from(time.n_hops + 1);
        let block = (attention + time.merging) / blocks;
        let all = self.events[whole].alone;
        self.events[whole].alone = all - attention;
        let (mut done, mut hop_needs) = (whole, self.events[whole].needs.clone());
        hop_needs.push(whole);
        for _ in 0..time.n_hops {
            let slowdown = context.constants.gathered_overlap_slowdown_fraction;
            let alone = time.communication / f64::from(time.n_hops.max(1));
            let (lane, needs) = (pricing.lane(&axes), hop_needs.clone());
            self.events.push(Event { lane, alone, needs, slowdown, urgency: Urgency::Awaited });
            let hop = self.events.len() - 1;
            done = self.compute(block, vec![done]);
            hop_needs = vec![hop, done];
            self.barrier.push(hop);
        }
        done = self.compute(block, vec![done]);
        made.needs.push(done);
    }

    fn convert(&mut self, (input, output): (ValueId, ValueId), steps: &[Step]) {
        let (pricing, context) = (self.pricing, self.pricing.context);
        let value = pricing.program.value(input);
        let shape = pricing.layer.shape(value.tensor, pricing.sizes);
        let element = pricing.element(value.tensor);
        let beside = Beside { before: self.neighbours.before(input), after: self.neighbours.after(output) };
        let mut made = self.made.get(&input).cloned().unwrap_or_default();
        let routing = Routing::of(pricing.layer, value.tensor);
        let mut cover = pricing.cover(routing);
        for step in steps {
            let priced = price_step(context, pricing.mesh, step, (&shape, element), routing);
            let Some(one) = priced else { continue };
            let way = way(one.kind, value.side, beside, context.tensor_overlap);
            let lane = pricing.lane(&step.axes);
            // In a row of layers of one micro-batch there is no other: of what hides behind it, only what shows is
            // waited for.
            let time = match (one.kind, routing) {
                (CollectiveKind::AllToAll, Some(_)) => {
                    let (shows, left) = shown(one.choice.time, cover, context.constants);
                    cover = left;
                    shows
                }
                _ => one.choice.time,
            };
            made = self.send((lane, one.kind, time), way, &made);
        }
        self.made.insert(output, made);
    }

    fn send(&mut self, (lane, kind, alone): (Lane, CollectiveKind, Seconds), way: Way, from: &Made) -> Made {
        let urgency = match kind {
            CollectiveKind::AllToAll => Urgency::Exchange,
            CollectiveKind::AllReduce
            | CollectiveKind::AllGather
            | CollectiveKind::ReduceScatter
            | CollectiveKind::SendRecv
            | CollectiveKind::Broadcast => Urgency::Awaited,
        };
        let slowdown = match way {
            Way::Waited | Way::Chunks => 0.0,
            Way::Beside | Way::Late => self.pricing.context.constants.overlap_slowdown_fraction,
        };
        let n = if way == Way::Chunks { self.n_chunks } else { 1 };
        let mut chunks = Vec::with_capacity(n);
        for at in 0..n {
            let mut needs = if n > 1 { from.chunk(at) } else { from.needs.clone() };
            if way == Way::Waited {
                needs.extend(self.last);
                needs.extend(&self.barrier);
            }
            let alone = alone / n as f64;
            self.events.push(Event { lane, alone, needs, slowdown, urgency });
            chunks.push(self.events.len() - 1);
        }
        let needs: Vec<usize> = chunks.last().copied().into_iter().collect();
        if way == Way::Waited {
            self.barrier.extend(&needs);
        }
        if n == 1 {
            chunks.clear();
        }
        Made { needs, chunks, late: way == Way::Late }
    }
}

/// How an engine runs a conversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// All that comes after waits for it.
    Waited,
    /// In chunks beside products.
    Chunks,
    /// Only what reads it waits.
    Beside,
    /// Only gradients of weights wait.
    Late,
}

fn way(kind: CollectiveKind, side: Side, Beside { before, after }: Beside, overlap: TensorOverlap) -> Way {
    let is_chunked =
        |products: OpSeconds| overlap == TensorOverlap::Chunked && products.both() > Seconds::ZERO;
    let finishes = matches!(kind, CollectiveKind::AllReduce | CollectiveKind::ReduceScatter);
    match (kind, side) {
        (CollectiveKind::ReduceScatter, _) if is_chunked(before) => Way::Chunks,
        _ if finishes
            && side == Side::Gradient
            && overlap != TensorOverlap::Absent
            && before.weight_products > Seconds::ZERO =>
        {
            Way::Beside
        }
        (CollectiveKind::AllGather, Side::Primal) if after.weight_products > Seconds::ZERO => Way::Late,
        (CollectiveKind::AllGather, _) if is_chunked(after) => Way::Chunks,
        _ => Way::Waited,
    }
}
