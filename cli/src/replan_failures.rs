//! `planner replan --failures K`: plans for one, two, … K lost nodes, made before they are lost, and how well the
//! training bears it.
//!
//! ```text
//! share_k    = tokens per second with k nodes lost / tokens per second with none; 0 where no plan fits
//! left_k     = devices left with k nodes lost / devices of the plan
//! resilience = mean over k = 1..K of share_k / left_k
//! ```
//! The global batch stays, so tokens per second go as one over the step time. A resilience of one: throughput falls
//! only as devices do. Two nodes at 8 s a step, one at 20 s: share 0.4 of half the devices, 0.8.

use std::path::{Path, PathBuf};

use ir::cluster::DeviceGroup;
use ir::plan::Plan;
use ir::plan::check::OpenPlan;
use ir::units::{Bytes, Seconds};
use planner::request::NoPlan;
use serde::Serialize;

use crate::args::ReplanArgs;
use crate::failure::Failure;
use crate::figures;
use crate::output::{json, write_and_say};
use crate::replan::{Answer, Now, replanned, several_ranks};
use crate::table::{Side, table};
use crate::terminal::Terminal;

/// Plans for all numbers of failures.
#[derive(Serialize)]
struct Templates {
    step_time_s: f64,
    resilience: f64,
    failures: Vec<Template>,
}

/// What becomes of the training when so many nodes are lost.
#[derive(Serialize)]
struct Template {
    n_lost_nodes: u64,
    n_devices: u64,
    share: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    answer: Option<Answer>,
    #[serde(skip_serializing_if = "Option::is_none")]
    no_plan: Option<String>,
}

/// Plans for every number of failures, writes the plans where asked, and reports.
pub(crate) fn run(
    args: &ReplanArgs,
    (plan, opened): (&Plan, &OpenPlan),
    failures: u64,
    terminal: &mut Terminal<'_>,
) -> Result<(), Failure> {
    if plan.cluster.shares_devices() {
        return Err(several_ranks());
    }
    let groups = &plan.cluster.groups;
    let nodes: u64 = groups.iter().map(DeviceGroup::n_nodes).sum();
    let all = plan.cluster.n_devices();
    if failures >= nodes {
        return Err(Failure::argument(format!("--failures: {failures} of {nodes} nodes leave none")));
    }
    let full = plan.predicted.as_ref().map_or(f64::NAN, |found| found.step_time_s.0);
    let mut list = Vec::new();
    for lost in 1..=failures {
        let n_devices = devices_of_first(groups, nodes - lost);
        let now = Now::first(&plan.cluster, n_devices);
        let (answer, no_plan) = match replanned(args, (plan, opened), &now) {
            Ok((answer, next)) => {
                if let Some(path) = &args.output {
                    write_and_say(&numbered(path, lost), &json(&next)?, terminal)?;
                }
                (Some(answer), None)
            }
            Err(Failure::NoPlan(no_plan @ (NoPlan::NothingFits { .. } | NoPlan::Impossible { .. }))) => {
                (None, Some(no_plan.to_string()))
            }
            Err(other) => return Err(other),
        };
        let share = answer.as_ref().map_or(0.0, |answer| full / answer.to.step_time_s);
        list.push(Template { n_lost_nodes: lost, n_devices, share, answer, no_plan });
    }
    let found = Templates { step_time_s: full, resilience: resilience(&list, all), failures: list };
    let text = if args.json.json { json(&found)? } else { found.text() };
    Ok(write!(terminal.out, "{text}")?)
}

/// Devices of so many nodes, the first ones.
fn devices_of_first(groups: &[DeviceGroup], mut n_nodes: u64) -> u64 {
    let of_group = |group: &DeviceGroup| {
        let taken = n_nodes.min(group.n_nodes());
        n_nodes -= taken;
        (taken * group.devices_per_node).min(group.count)
    };
    groups.iter().map(of_group).sum()
}

/// Mean share of throughput over share of devices.
fn resilience(list: &[Template], n_devices: u64) -> f64 {
    let one = |template: &Template| template.share * n_devices as f64 / template.n_devices as f64;
    list.iter().map(one).sum::<f64>() / list.len().max(1) as f64
}

/// `next.json` for two failures is `next-2.json`.
fn numbered(path: &Path, lost: u64) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let ending = path.extension().map_or(String::new(), |ending| format!(".{}", ending.to_string_lossy()));
    path.with_file_name(format!("{stem}-{lost}{ending}"))
}

impl Templates {
    fn text(&self) -> String {
        let columns = [
            ("lost nodes", Side::Right),
            ("devices left", Side::Right),
            ("used", Side::Right),
            ("step time", Side::Right),
            ("throughput", Side::Right),
            ("moves", Side::Right),
            ("from a checkpoint", Side::Right),
            ("moving", Side::Right),
            ("plan", Side::Left),
        ];
        let bytes = |n: u64| figures::bytes(Bytes(n as f64));
        let time = |seconds: f64| figures::seconds(Seconds(seconds));
        let row = |one: &Template| {
            let mut cells = vec![one.n_lost_nodes.to_string(), figures::grouped(one.n_devices)];
            cells.extend(match &one.answer {
                Some(answer) => vec![
                    figures::grouped(answer.to.n_devices),
                    time(answer.to.step_time_s),
                    figures::percent(one.share),
                    bytes(answer.moves_bytes),
                    bytes(answer.from_checkpoint_bytes),
                    time(answer.moving_s),
                    answer.to.roles.clone(),
                ],
                None => {
                    let mut cells = vec!["-".to_owned(); 6];
                    cells.push(one.no_plan.clone().unwrap_or_default());
                    cells
                }
            });
            cells
        };
        let rows: Vec<Vec<String>> = self.failures.iter().map(row).collect();
        format!(
            "{}\nresilience {:.3}: throughput kept over devices kept, mean over the failures; 1 where it falls only as they do\n",
            table(&columns, &rows),
            self.resilience
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(n_devices: u64, share: f64) -> Template {
        Template { n_lost_nodes: 1, n_devices, share, answer: None, no_plan: None }
    }

    #[test]
    fn resilience_is_throughput_kept_over_devices_kept() {
        assert_eq!(resilience(&[template(8, 0.4)], 16), 0.8);
        assert_eq!(resilience(&[template(8, 0.4), template(8, 0.0)], 16), 0.4);
        assert_eq!(resilience(&[template(12, 0.75), template(8, 0.5)], 16), 1.0);
    }

    #[test]
    fn plans_are_numbered_before_the_ending() {
        assert_eq!(numbered(Path::new("a/next.json"), 2), PathBuf::from("a/next-2.json"));
        assert_eq!(numbered(Path::new("next"), 1), PathBuf::from("next-1"));
    }
}
