//! `planner ranks`: which rank is which device, and what it does: the placement that a launcher must keep.

use ir::plan::{Plan, RankMap};
use serde::Serialize;

use crate::failure::Failure;
use crate::input;
use crate::output::{json, write_and_say};
use crate::question_args::RanksArgs;
use crate::terminal::Terminal;

/// A rank, where it is and what it is.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Rank {
    rank: u64,
    /// Among all nodes, in the order of the plan's groups.
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
}

/// Lists the ranks of a plan.
pub(crate) fn run(args: &RanksArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    let (plan, _) = input::plan(&args.plan)?;
    let ranks = ranks(&plan);
    let text = if args.json.json { json(&ranks)? } else { csv(&plan, &ranks) };
    match &args.output {
        Some(path) => write_and_say(path, &text, terminal),
        None => Ok(write!(terminal.out, "{text}")?),
    }
}

fn ranks(plan: &Plan) -> Vec<Rank> {
    let RankMap::StageMajor = plan.rank_map;
    let n_mesh = plan.mesh.n_devices();
    let mut ranks = Vec::new();
    let mut first_node = 0;
    for (group, devices) in plan.cluster.groups.iter().enumerate() {
        let per_node = devices.devices_per_node.max(1);
        for at in 0..devices.count {
            let rank = ranks.len() as u64;
            ranks.push(Rank {
                rank,
                node: first_node + at / per_node,
                slot: at % per_node,
                group,
                device: devices.device.name.clone(),
                stage: rank / n_mesh,
                coordinates: plan.mesh.coordinates(rank % n_mesh),
            });
        }
        first_node += devices.count.div_ceil(per_node);
    }
    ranks.truncate((plan.n_stages * n_mesh) as usize);
    ranks
}

fn csv(plan: &Plan, ranks: &[Rank]) -> String {
    let axes: String = plan.mesh.axes.iter().map(|axis| format!(",{}", axis.name)).collect();
    let mut text = format!("rank,node,slot,group,device,stage{axes}\n");
    for Rank { rank, node, slot, group, device, stage, coordinates } in ranks {
        let coordinates: String = coordinates.iter().map(|at| format!(",{at}")).collect();
        text.push_str(&format!("{rank},{node},{slot},{group},{device},{stage}{coordinates}\n"));
    }
    text
}
