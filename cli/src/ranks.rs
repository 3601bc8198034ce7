//! `planner ranks`: which rank is which device, and what it does: the placement that a launcher must keep.

use ir::plan::{Plan, RankMap};
use serde::Serialize;

use crate::args::RanksArgs;
use crate::failure::Failure;
use crate::input;
use crate::output::{check_other, json, write_and_say};
use crate::terminal::Terminal;

/// A rank, where it is and what it is.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Rank {
    rank: u64,
    /// Among all nodes of the cluster, of which the plan may have a part, or the groups in another order.
    node: u64,
    /// Among the devices of its node, the local rank of launchers.
    slot: u64,
    /// Group of equal nodes.
    group: usize,
    device: String,
    /// Pipeline rank.
    stage: u64,
    /// Place on every axis of the stage's mesh, outermost first.
    coordinates: Vec<u64>,
    /// Micro-batches of a step, where ranks run unequal shares.
    #[serde(skip_serializing_if = "Option::is_none")]
    micro_batches: Option<u64>,
}

/// Lists the ranks of a plan.
pub(crate) fn run(args: &RanksArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    args.output.as_deref().map_or(Ok(()), |path| check_other(path, &[&args.plan]))?;
    let (plan, _) = input::plan_of_forms(&args.plan)?;
    let ranks = ranks(&plan);
    let text = if args.json.json { json(&ranks)? } else { csv(&plan, &ranks) };
    match &args.output {
        Some(path) => write_and_say(path, &text, terminal),
        None => Ok(write!(terminal.out, "{text}")?),
    }
}

fn ranks(plan: &Plan) -> Vec<Rank> {
    let RankMap::StageMajor = plan.rank_map;
    let groups = plan.cluster.groups.iter().enumerate();
    let group_of = groups.flat_map(|(at, group)| std::iter::repeat_n(at, group.count as usize));
    let n_ranks = plan.n_devices() as usize;
    let mut ranks = Vec::with_capacity(n_ranks);
    for ((node, slot), group) in plan.cluster.seats().into_iter().zip(group_of).take(n_ranks) {
        let (rank, own) = (ranks.len() as u64, &plan.cluster.groups[group]);
        // Ranks that share a device are at its place.
        let (slot, device) = (slot / own.ranks_per_device(), own.whole().device.name.clone());
        let (stage, at) = plan.seat(rank);
        let coordinates = plan.mesh_of(stage).coordinates(at);
        let micro_batches = (!plan.shares.is_empty()).then(|| plan.micro_batches_of(stage, at));
        ranks.push(Rank { rank, node, slot, group, device, stage, coordinates, micro_batches });
    }
    ranks
}

fn csv(plan: &Plan, ranks: &[Rank]) -> String {
    let axes: String = plan.mesh.axes.iter().map(|axis| format!(",{}", axis.name)).collect();
    let shares = if plan.shares.is_empty() { "" } else { ",micro_batches" };
    let mut text = format!("rank,node,slot,group,device,stage{axes}{shares}\n");
    for Rank { rank, node, slot, group, device, stage, coordinates, micro_batches } in ranks {
        let coordinates: String = coordinates.iter().map(|at| format!(",{at}")).collect();
        let share = micro_batches.map_or(String::new(), |n| format!(",{n}"));
        text.push_str(&format!("{rank},{node},{slot},{group},{device},{stage}{coordinates}{share}\n"));
    }
    text
}
