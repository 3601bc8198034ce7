//! What the price of a program is made of.

use std::collections::BTreeMap;

use ir::units::{Bytes, Seconds};
use ir::work::Work;

use crate::collective::CollectiveKind;
use crate::program_bytes::CommunicationClass;

/// Compute of one section by what bounds it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ComputePrice {
    /// Matrix products.
    pub gemm: Seconds,
    /// Attention cores.
    pub attention: Seconds,
    /// Operators bound by memory.
    pub stream: Seconds,
    /// Everything computed a second time.
    pub recompute: Seconds,
}

impl ComputePrice {
    /// All of it.
    pub fn total(&self) -> Seconds {
        self.gemm + self.attention + self.stream + self.recompute
    }

    pub(crate) fn add(&mut self, work: &Work, time: Seconds) {
        match work {
            Work::Gemm { .. } => self.gemm += time,
            Work::Attention { .. } => self.attention += time,
            Work::Composed { .. } | Work::Stream { .. } => self.stream += time,
        }
    }
}

/// Price of the communications of one class and kind.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CommunicationPrice {
    /// Collectives.
    pub count: u32,
    /// Their time.
    pub total: Seconds,
    /// The part of it that adds to the section.
    pub exposed: Seconds,
}

impl CommunicationPrice {
    pub(crate) fn add(&mut self, more: Self) {
        self.count += more.count;
        self.total += more.total;
        self.exposed += more.exposed;
    }
}

/// Communications by class and kind.
pub type Communication = BTreeMap<(CommunicationClass, CollectiveKind), CommunicationPrice>;

/// Price of one section for one micro-batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SectionPrice {
    /// Compute.
    pub compute: ComputePrice,
    /// The part of compute that yields gradients of parameters.
    pub weight_gradient: Seconds,
    /// Communications.
    pub communication: Communication,
    /// Host time to launch it all, beside what the device does.
    pub launch: Seconds,
    /// What the device waits while the host reads how many tokens its experts got, and launches again.
    pub counts: Seconds,
    /// Time on the link to the host, beside what the device does, of what the layer keeps there.
    pub moved: Seconds,
    /// Bytes a device sends per tier of the cluster.
    pub bytes_per_tier: Vec<Bytes>,
}

impl SectionPrice {
    /// Several, one after another.
    pub fn sum<'a>(sections: impl Iterator<Item = &'a Self>) -> Self {
        let (mut sum, mut seconds) = (Self::default(), Seconds::ZERO);
        for one in sections {
            sum.compute.gemm += one.compute.gemm;
            sum.compute.attention += one.compute.attention;
            sum.compute.stream += one.compute.stream;
            sum.compute.recompute += one.compute.recompute;
            seconds += one.seconds();
            sum.weight_gradient += one.weight_gradient;
            sum.counts += one.counts;
            for (key, price) in &one.communication {
                sum.communication.entry(*key).or_default().add(*price);
            }
            sum.bytes_per_tier.resize(one.bytes_per_tier.len(), Bytes::ZERO);
            sum.bytes_per_tier.iter_mut().zip(&one.bytes_per_tier).for_each(|(sum, own)| *sum += *own);
        }
        // Where launches take longer than a section, they do so section by section.
        sum.launch = seconds;
        sum
    }

    /// Wall time: compute and what shows of communication, or the launches or the link to the host if these take
    /// longer.
    pub fn seconds(&self) -> Seconds {
        self.launched().max(self.moved)
    }

    fn launched(&self) -> Seconds {
        (self.compute.total() + self.exposed() + self.counts).max(self.launch)
    }

    /// What the device waits for launches.
    pub fn waiting(&self) -> Seconds {
        self.launched() - self.compute.total() - self.exposed()
    }

    /// What it waits beyond that for the link to the host.
    pub fn waiting_for_host(&self) -> Seconds {
        self.seconds() - self.launched()
    }

    /// What shows of communication.
    pub fn exposed(&self) -> Seconds {
        self.communication.values().map(|price| price.exposed).sum()
    }
}

/// Price of what happens once per step; what the last backward and the next forward hide is the schedule's to say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UpdatePrice {
    /// Accumulators to the optimizer's cut.
    pub gradient_reduce: Seconds,
    /// The optimizer's pass over its states on the device.
    pub optimizer: Seconds,
    /// The host's, and what moves to it and back.
    pub host: Seconds,
    /// New parameters to their storage.
    pub parameter_gather: Seconds,
    /// Both communications by kind.
    pub communication: Communication,
    /// Bytes a device sends per tier of the cluster.
    pub bytes_per_tier: Vec<Bytes>,
}

/// Price of a layer's program.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProgramPrice {
    /// Forward, per micro-batch.
    pub forward: SectionPrice,
    /// Backward, per micro-batch.
    pub backward: SectionPrice,
    /// Update, per step.
    pub update: UpdatePrice,
}

/// Price of a backward in two parts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SplitPrice {
    /// As far as the stage before waits for it, per micro-batch.
    pub input: SectionPrice,
    /// The rest, per micro-batch.
    pub weight: SectionPrice,
}
