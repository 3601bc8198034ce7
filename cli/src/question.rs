//! The question that the arguments ask: model, cluster and job, with the defaults that were filled in.

use frontends::capacity::limit_experts;
use frontends::{Size, rescale};
use ir::cluster::{Cluster, DeviceGroup, Precision};
use ir::cluster_part::{Piece, part, pieces, whole};
use ir::engine::Engine;
use ir::plan::{InputDigests, Plan};
use ir::positions::{TooShort, lengthen};
use ir::vocabulary::{Padded, pad};
use ir::work::AttentionKernel;
use planner::request::{Job, Pins, Request, Solver};

use crate::args::{AttentionArg, JobArgs, OptimizerArg, PrecisionArg, SizeArgs};
use crate::clusters::device_names;
use crate::failure::Failure;
use crate::input;
use crate::pins::without_effect;

/// A question and where its parts came from.
#[derive(Clone, Debug)]
pub(crate) struct Question {
    /// For the search.
    pub(crate) request: Request,
    /// Of the files it came from.
    pub(crate) digests: InputDigests,
    /// Settings of the job that nobody gave: `sequence`, `global batch`, …
    pub(crate) defaults: Vec<&'static str>,
    /// What was done to the model for it to be trained so.
    warnings: Vec<String>,
}

impl Question {
    /// Reads the files and fills in defaults; nothing is pinned.
    pub(crate) fn read(model: &str, cluster: &str, args: &JobArgs) -> Result<Self, Failure> {
        let mut model = input::model(model)?;
        if let Some(factor) = args.capacity_factor
            && !limit_experts(&mut model.value, factor)
        {
            let what =
                format!("--capacity-factor: {factor} is no factor, or the model has no routed experts");
            return Err(Failure::argument_with_hint(
                what,
                "give a mixture of experts a factor above 0, such as 1.25",
            ));
        }
        model.value = input::adapted(model.value, &args.added)?;
        let described = input::cluster(cluster)?;
        let mut cluster = resized(described.value, &args.size)?;
        if let Some(file) = &args.measured.calibration {
            cluster.calibration = Some(input::calibration(file)?.of_cluster());
        }
        let defaults = Job::defaults(&model.value, &cluster);
        let sequence = args.seq_len.unwrap_or(defaults.sequence);
        if let Some(n_modules) = args.added.mtp.filter(|n_modules| *n_modules >= sequence) {
            let tokens = crate::figures::counted(sequence, "token");
            return Err(Failure::argument_with_hint(
                format!("--mtp: module {n_modules} has no token to predict in a sequence of {tokens}"),
                "take fewer modules, or a longer --seq-len",
            ));
        }
        let mut warnings: Vec<String> =
            pad(&mut model.value, args.vocabulary_multiple).iter().map(padded).collect();
        warnings.extend(lengthen(&mut model.value, sequence).iter().map(lengthened));
        let job = Job {
            sequence,
            global_batch: args
                .global_batch
                .unwrap_or_else(|| Job::default_batch(sequence, cluster.n_devices())),
            precision: args.precision.map_or(defaults.precision, precision),
            attention: args.attention.map_or(defaults.attention, attention),
            token_order: Job::default_order(sequence, cluster.n_devices()),
            engine: engine(args.engine.as_deref())?,
        };
        // There is one update rule; the match will ask for more when there are more.
        match args.optimizer {
            Some(OptimizerArg::AdamW) | None => {}
        }
        let given = [
            ("sequence", args.seq_len.is_some()),
            ("global batch", args.global_batch.is_some()),
            ("precision", args.precision.is_some()),
            ("optimizer", args.optimizer.is_some()),
            ("attention", args.attention.is_some()),
        ];
        Ok(Self {
            request: Request {
                model: model.value,
                cluster,
                job,
                pins: Pins::default(),
                solver: Solver::Structured,
            },
            digests: InputDigests { model: model.digest, cluster: described.digest },
            defaults: given.into_iter().filter(|(_, given)| !given).map(|(name, _)| name).collect(),
            warnings,
        })
    }

    /// Signs a plan that answers the question; `said` is what the user chose of it.
    pub(crate) fn sign(&self, mut plan: Plan, said: &Pins) -> Plan {
        plan.warnings.extend(self.warnings.iter().cloned());
        plan.warnings.extend(without_effect(said, &plan.roles));
        Plan { tool_version: env!("CARGO_PKG_VERSION").into(), inputs: self.digests.clone(), ..plan }
    }
}

fn padded(padded: &Padded) -> String {
    format!("{padded}, as engines do for aligned products and equal blocks; --vocabulary-multiple 1 keeps it")
}

fn lengthened(short: &TooShort) -> String {
    format!("{short}: planned with {} rows", short.needed)
}

/// The part of the cluster that was asked for, in the size that was asked for.
pub(crate) fn resized(cluster: Cluster, size: &SizeArgs) -> Result<Cluster, Failure> {
    let cluster = selected(cluster, size)?;
    let size = match (size.nodes, size.devices) {
        (Some(nodes), _) => Size::Nodes(nodes),
        (None, Some(devices)) => Size::Devices(devices),
        (None, None) => return Ok(cluster),
    };
    Ok(rescale(&cluster, size)?)
}

/// The groups or the nodes that were asked for.
fn selected(cluster: Cluster, size: &SizeArgs) -> Result<Cluster, Failure> {
    if let Some(nodes) = &size.on_nodes {
        let n_nodes: u64 = cluster.groups.iter().map(DeviceGroup::n_nodes).sum();
        let last = n_nodes.saturating_sub(1);
        if let Some(missing) = nodes.last().filter(|node| *node > last) {
            let what = format!("--on-nodes: `{}` has no node {missing}", cluster.name);
            return Err(Failure::argument_with_hint(what, format!("its nodes are 0 to {last}")));
        }
        let part = part(&cluster, &pieces(&cluster, |node| nodes.contains(node)));
        return part.map_err(|error| Failure::argument(format!("--on-nodes: {error}")));
    }
    if size.groups.is_empty() {
        return Ok(cluster);
    }
    let is_of = |group: &DeviceGroup, word: &str| {
        let rest = group.device.name.strip_prefix(word);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    };
    if let Some(word) = size.groups.iter().find(|word| !cluster.groups.iter().any(|group| is_of(group, word)))
    {
        let what = format!("--groups: `{}` has no group of `{word}`", cluster.name);
        return Err(Failure::argument_with_hint(what, format!("it has {}", device_names(&cluster))));
    }
    let is_wanted = |at: &usize| size.groups.iter().any(|word| is_of(&cluster.groups[*at], word));
    let wanted: Vec<Piece> =
        (0..cluster.groups.len()).filter(is_wanted).map(|group| whole(&cluster, group)).collect();
    if wanted.len() == cluster.groups.len() {
        return Ok(cluster);
    }
    part(&cluster, &wanted).map_err(|error| Failure::argument(format!("--groups: {error}")))
}

fn engine(text: Option<&str>) -> Result<Engine, Failure> {
    text.map_or(Ok(Engine::default()), Engine::read).map_err(|error| {
        let hint = format!("features are {}", Engine::features().join(", "));
        Failure::argument_with_hint(format!("--engine: {error}"), hint)
    })
}

fn precision(arg: PrecisionArg) -> Precision {
    match arg {
        PrecisionArg::Bf16 => Precision::Bf16,
        PrecisionArg::Fp16 => Precision::Fp16,
        PrecisionArg::Fp32 => Precision::Fp32,
        PrecisionArg::Fp8 => Precision::Fp8,
    }
}

fn attention(arg: AttentionArg) -> AttentionKernel {
    match arg {
        AttentionArg::Flash => AttentionKernel::Flash,
        AttentionArg::Eager => AttentionKernel::Eager,
    }
}
