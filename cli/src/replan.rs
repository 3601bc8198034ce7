//! `planner replan`: another plan for the same training when devices are lost or gained, and what must move to go over.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet};

use cost_model::Constants;
use frontends::{Size, rescale};
use ir::cluster::{Cluster, DeviceGroup};
use ir::cluster_limits::MAX_DEVICES;
use ir::cluster_part::{largest_part, part, pieces};
use ir::numbers::Numbers;
use ir::plan::Plan;
use ir::plan::check::{OpenPlan, open};
use ir::units::{Bytes, Seconds};
use planner::moving::moving;
use planner::near::{Near, Outcome, optimize_near};
use planner::request::{NoPlan, Pins, Request, Stop};
use planner::reshard::{Givers, Reshard, ReshardMap, StateSizes, is_numbered, larger};
use planner::target::optimize_for;
use serde::Serialize;

use crate::args::{ReplanArgs, SizeArgs};
use crate::failure::Failure;
use crate::figures;
use crate::forbid;
use crate::input;
use crate::output::{check_writable, json, write_and_say};
use crate::pins;
use crate::priced;
use crate::proof::proven;
use crate::question;
use crate::replan_failures;
use crate::replan_kept;
use crate::restricted::{self, Restricted};
use crate::search::pool;
use crate::table::{Side, list, table};
use crate::terminal::Terminal;

/// Sizes of the cluster that are thought of, from the largest: one that uses all devices may divide badly.
const MOST_SIZES: usize = 4096;

/// Where what is near leaves more than the rest of the devices that make a cluster idle, everything is looked at: few
/// numbers divide the batch, and other degrees use more of them.
const MOST_OF: f64 = 0.75;

/// Of these, the largest for which everything is looked at, where it is.
const SIZES_ANEW: usize = 3;

/// The command's answer.
#[derive(Serialize)]
pub(crate) struct Answer {
    from: Described,
    pub(crate) to: Described,
    global_batch: u64,
    /// Devices that are there and that the new plan leaves out.
    n_spare: u64,
    /// What became of each size that was tried.
    tried: Vec<Tried>,
    stays_bytes: u64,
    pub(crate) moves_bytes: u64,
    /// Nobody who is left has them.
    pub(crate) from_checkpoint_bytes: u64,
    moves_per_tier: BTreeMap<String, u64>,
    pub(crate) moving_s: f64,
    /// How ranks of both plans are the same devices, in words.
    #[serde(skip)]
    kept: &'static str,
}

#[derive(Serialize)]
pub(crate) struct Described {
    pub(crate) roles: String,
    pub(crate) n_devices: u64,
    pub(crate) step_time_s: f64,
}

#[derive(Serialize)]
struct Tried {
    n_devices: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    step_time_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    no_plan: Option<String>,
}

impl Tried {
    fn of(n_devices: u64, outcome: Outcome) -> Self {
        let (step_time_s, no_plan) = match outcome {
            Outcome::Found(time) => (Some(time.0), None),
            Outcome::NoFaster => (None, Some("none near the old plan is faster".into())),
            Outcome::NoPlan(why) => (None, Some(why)),
        };
        Self { n_devices, step_time_s, no_plan }
    }

    /// Takes in what a plan takes on its number of devices.
    fn learn(tried: &mut Vec<Self>, plan: &Plan) {
        let n_devices = plan.n_devices();
        tried.retain(|one| one.n_devices != n_devices);
        let step_time_s = replan_kept::time(plan).map(|time| time.0);
        tried.push(Self { n_devices, step_time_s, no_plan: None });
        tried.sort_by_key(|one| Reverse(one.n_devices));
    }
}

/// What there is now.
pub(crate) struct Now {
    /// The cluster to take sizes of.
    pub(crate) cluster: Cluster,
    /// Devices that can be used.
    pub(crate) n_devices: u64,
    /// Devices that are there besides, and make no cluster with these: their domain of a link tier is smaller than the
    /// others.
    n_left_out: u64,
    /// Ranks of the old plan that still have what they held.
    pub(crate) survivors: Numbers,
}

impl Now {
    /// So many devices of a plan's cluster, the first ones.
    pub(crate) fn first(cluster: &Cluster, n_devices: u64) -> Self {
        let survivors = (0..n_devices.min(cluster.n_devices())).collect();
        Self { cluster: cluster.clone(), n_devices, n_left_out: 0, survivors }
    }
}

/// Replans.
pub(crate) fn run(args: &ReplanArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    args.output.as_deref().map_or(Ok(()), check_writable)?;
    let (plan, opened) = priced::plan(&args.plan, terminal)?;
    if let Some(failures) = args.failures {
        return replan_failures::run(args, (&plan, &opened), failures, terminal);
    }
    let now = now(args, &plan)?;
    let (answer, next) = replanned(args, (&plan, &opened), &now)?;
    if let Some(path) = &args.output {
        write_and_say(path, &json(&next)?, terminal)?;
    }
    let text = if args.json.json { json(&answer)? } else { answer.text() };
    Ok(write!(terminal.out, "{text}")?)
}

/// The answer for what there is now, and the proven plan.
pub(crate) fn replanned(
    args: &ReplanArgs,
    (plan, opened): (&Plan, &OpenPlan),
    now: &Now,
) -> Result<(Answer, Plan), Failure> {
    pool(&args.threads)?.install(|| {
        let (mut tried, mut next) = next(args, (plan, opened), now)?;
        // What is chosen or forbidden now need not be what it has.
        let is_free = args.pin.is_empty() && args.forbid.forbid.is_empty();
        let may_stay = is_free && plan.n_devices() <= now.n_devices;
        let there = if may_stay { sized(&now.cluster, plan.n_devices()) } else { None };
        let kept = there.and_then(|cluster| replan_kept::kept(plan, &cluster));
        if let Some(kept) = kept.and_then(|kept| replan_kept::faster(kept, &next)) {
            Tried::learn(&mut tried, &kept);
            next = kept;
        }
        let (tool_version, inputs) = (plan.tool_version.clone(), plan.inputs.clone());
        let next = restricted::like(plan, &args.forbid.forbid, Plan { tool_version, inputs, ..next });
        let next = proven(next)?;
        Ok((answer((plan, opened), &next, now, tried)?, next))
    })
}

/// Why a plan whose devices run several ranks is not planned anew here.
pub(crate) fn several_ranks() -> Failure {
    let hint = "ask `planner optimize` for the devices that are left, and `planner reshard` what must move";
    Failure::argument_with_hint(
        "the plan's ranks share devices: which of them a lost device takes is not worked out",
        hint,
    )
}

fn now(args: &ReplanArgs, plan: &Plan) -> Result<Now, Failure> {
    if plan.cluster.shares_devices() {
        return Err(several_ranks());
    }
    let (old, cluster) = (plan.cluster.n_devices(), plan.cluster.clone());
    match (args.lost, args.gained, &args.cluster) {
        (Some(lost), _, _) if lost >= old => {
            Err(Failure::argument(format!("--lost: {lost} of the plan's {old} devices leave none")))
        }
        (Some(lost), _, _) => Ok(Now::first(&cluster, old - lost)),
        (_, Some(_), _) if cluster.groups.len() > 1 => {
            let what = "--gained: the plan's cluster has several groups, and nothing says to which of them these devices come";
            let hint = "give the cluster as it is now, in a file, with --cluster FILE (`planner clusters NAME --native` prints one to edit)";
            Err(Failure::argument_with_hint(what, hint))
        }
        (_, Some(gained), _) if gained > MAX_DEVICES.saturating_sub(old) => Err(Failure::argument(format!(
            "--gained: {gained} more than the plan's {old} devices, at most {MAX_DEVICES} in all are planned for"
        ))),
        (_, Some(gained), _) => Ok(Now::first(&cluster, old + gained)),
        (_, _, Some(file)) => {
            let size = SizeArgs { nodes: args.nodes, ..SizeArgs::default() };
            let next = question::resized(input::cluster(file)?.value, &size)?;
            let n_devices = next.n_devices();
            let survivors = if is_numbered(&cluster) || is_numbered(&next) {
                let there: BTreeSet<(u64, u64)> = next.seats().into_iter().collect();
                ranks(&cluster, |seat| there.contains(&seat))
            } else {
                // Where other devices have come, nothing can have stayed.
                let is_same = |rank: &u64| device_name(&cluster, *rank) == device_name(&next, *rank);
                (0..old.min(n_devices)).filter(is_same).collect()
            };
            Ok(Now { cluster: next, n_devices, n_left_out: 0, survivors })
        }
        (None, None, None) => match &args.lost_nodes {
            Some(lost) => without(&cluster, lost),
            None => Err(Failure::bug("nothing has changed")),
        },
    }
}

fn device_name(cluster: &Cluster, rank: u64) -> Option<&str> {
    cluster.group_of(rank).map(|group| group.device.name.as_str())
}

/// Ranks of a cluster by where they are.
fn ranks(cluster: &Cluster, wanted: impl Fn((u64, u64)) -> bool) -> Numbers {
    (0..).zip(cluster.seats()).filter(|(_, seat)| wanted(*seat)).map(|(rank, _)| rank).collect()
}

/// What is left of a cluster without some of its nodes, by the numbers that `planner ranks` gives them.
fn without(cluster: &Cluster, lost: &Numbers) -> Result<Now, Failure> {
    let numbers: Vec<u64> = cluster.nodes().iter().flat_map(Numbers::iter).collect();
    let refused = |what: String| Failure::argument(format!("--lost-nodes: {what}"));
    if lost.count() > numbers.len() as u64 || lost.iter().any(|node| !numbers.contains(&node)) {
        let known: Vec<String> = cluster.nodes().iter().map(Numbers::to_string).collect();
        let what = format!("expected nodes of the plan, {}, found {lost}", known.join(" and "));
        return Err(refused(what));
    }
    let is_left = |at: &u64| numbers.get(*at as usize).is_some_and(|node| !lost.contains(*node));
    let left: BTreeSet<u64> = (0..numbers.len() as u64).filter(is_left).collect();
    let left = largest_part(cluster, &left).map_err(|error| refused(error.to_string()))?;
    let survivors = ranks(cluster, |(node, _)| !lost.contains(node));
    let n_devices = left.n_devices();
    Ok(Now { n_devices, n_left_out: survivors.count() - n_devices, cluster: left, survivors })
}

/// The largest clusters that the devices make, of at least half of them. Where nodes are told apart, fewer devices are
/// the first nodes, and more have new nodes behind those of their group.
pub(crate) fn sizes(now: &Now) -> Vec<Cluster> {
    let of = |n: u64| sized(&now.cluster, n);
    // With fewer than half of the devices hardly anything is as fast.
    (now.n_devices.div_ceil(2)..=now.n_devices).rev().filter_map(of).take(MOST_SIZES).collect()
}

/// A cluster's first devices, or as many of the same and more, if whole nodes have so many.
fn sized(cluster: &Cluster, n_devices: u64) -> Option<Cluster> {
    let told_apart = cluster.groups.len() > 1 || is_numbered(cluster);
    match n_devices.cmp(&cluster.n_devices()) {
        Ordering::Equal => Some(cluster.clone()),
        Ordering::Less if told_apart => first_nodes(cluster, n_devices),
        Ordering::Greater if told_apart => {
            rescale(cluster, Size::Devices(n_devices)).ok().map(|grown| grown_from(cluster, grown))
        }
        Ordering::Less | Ordering::Greater => rescale(cluster, Size::Devices(n_devices)).ok(),
    }
}

/// The first nodes of a cluster with so many devices, if whole nodes have.
fn first_nodes(cluster: &Cluster, n_devices: u64) -> Option<Cluster> {
    let (mut left, mut n_nodes) = (n_devices, 0);
    for group in &cluster.groups {
        let taken = left.min(group.count);
        n_nodes += taken / group.devices_per_node;
        left -= taken - taken % group.devices_per_node;
        if taken < group.count {
            break;
        }
    }
    (left == 0).then(|| part(cluster, &pieces(cluster, |node| node < n_nodes)).ok()).flatten()
}

/// A cluster whose groups have become larger: the nodes that they had, then new ones.
fn grown_from(before: &Cluster, grown: Cluster) -> Cluster {
    let known = before.nodes();
    let mut next = known.iter().filter_map(Numbers::last).max().map_or(0, |last| last + 1);
    let numbered = |(group, known): (DeviceGroup, &Numbers)| {
        let first = next;
        next += group.n_nodes().saturating_sub(known.count());
        DeviceGroup { nodes: Some(known.iter().chain(first..next).collect()), ..group }
    };
    let groups = grown.groups.into_iter().zip(&known).map(numbered).collect();
    Cluster { groups, ..grown }
}

/// The fastest plan over the sizes, for the job that the plan has.
fn next(
    args: &ReplanArgs,
    (plan, opened): (&Plan, &OpenPlan),
    now: &Now,
) -> Result<(Vec<Tried>, Plan), Failure> {
    let Restricted { target, forbid } = Restricted::of(&args.plan, plan, &args.forbid.forbid)?;
    let pins = Pins { forbid, ..pins::read(&args.pin)? };
    forbid::check(&pins, "take back one of --pin and --forbid, which hold besides those of the plan")?;
    let asked = Request { pins, ..priced::request(plan, opened) };
    let clusters = sizes(now);
    let largest = clusters.first().map_or(0, Cluster::n_devices);
    // What an engine can run is a union of spaces: none of them is looked at near a plan.
    let near = if target.is_some() { None } else { optimize_near(&asked, &clusters, plan)? };
    let n_near = match near {
        Some(Near { plan, outcomes })
            if !args.anew && plan.n_devices() as f64 >= MOST_OF * largest as f64 =>
        {
            let tried = outcomes.into_iter();
            let tried = tried.map(|(at, outcome)| Tried::of(clusters[at].n_devices(), outcome));
            return Ok((tried.collect(), plan));
        }
        // Where everything is looked at, that number of devices is, too.
        Some(Near { plan, .. }) => Some(plan.n_devices()),
        None => None,
    };
    let is_asked = |(at, cluster): &(usize, Cluster)| *at < SIZES_ANEW || Some(cluster.n_devices()) == n_near;
    let (mut tried, mut best, mut trouble) = (Vec::new(), None::<(f64, Plan)>, None);
    for (_, cluster) in clusters.into_iter().enumerate().filter(is_asked) {
        let n_devices = cluster.n_devices();
        let request = Request { cluster, ..asked.clone() };
        let constants = Constants::load();
        let found = match target {
            Some(_) if request.cluster.is_mixed() => {
                let hint = "ask `planner optimize` for the devices that are left, and `planner reshard` what must move";
                let what =
                    "a plan for one engine is not planned anew here where devices are of several kinds";
                return Err(Failure::argument_with_hint(what, hint));
            }
            Some(target) => optimize_for(&request, target, (Stop::never(), &|_| ())),
            // Ranks are devices that hold states: groups of a mixed cluster stay where they are.
            None => planner::optimize_in_order(&request, &constants, &|_| ()),
        };
        let (step_time_s, no_plan) = match found {
            Err(broken @ NoPlan::Broken { .. }) => return Err(broken.into()),
            Err(other) => {
                let words = other.to_string();
                trouble.get_or_insert(other);
                (None, Some(words))
            }
            Ok(found) => {
                let time =
                    found.predicted.as_ref().map_or(f64::INFINITY, |predicted| predicted.step_time_s.0);
                if best.as_ref().is_none_or(|(least, _)| time < *least) {
                    best = Some((time, found));
                }
                (Some(time), None)
            }
        };
        tried.push(Tried { n_devices, step_time_s, no_plan });
    }
    match (best, trouble) {
        (Some((_, plan)), _) => Ok((tried, plan)),
        (None, Some(trouble)) => Err(trouble.into()),
        (None, None) => Err(Failure::argument("the devices that are left make no cluster of whole nodes")),
    }
}

fn answer(
    (plan, opened): (&Plan, &OpenPlan),
    next: &Plan,
    now: &Now,
    tried: Vec<Tried>,
) -> Result<Answer, Failure> {
    let wrong = |what: String| Failure::bug(format!("the new plan: {what}"));
    let other = open(next).map_err(|error| wrong(format!("{}: {}", error.place, error.what)))?;
    let both = Reshard::new((plan, opened), (next, &other), Givers::Survivors(now.survivors.clone()));
    let both = both.map_err(|error| wrong(error.to_string()))?;
    let map: ReshardMap = both.map(StateSizes::of(next));
    let larger = larger(&plan.cluster, &next.cluster);
    let (total, moved) = (map.total(), moving(&map, larger));
    let side = |plan: &Plan| Described {
        roles: plan.roles.to_string(),
        n_devices: plan.n_devices(),
        step_time_s: plan.predicted.as_ref().map_or(f64::NAN, |predicted| predicted.step_time_s.0),
    };
    let tiers = larger.tiers.iter().zip(&moved.per_tier).filter(|(_, bytes)| **bytes > 0);
    Ok(Answer {
        from: side(plan),
        to: side(next),
        global_batch: next.job.global_batch,
        n_spare: now.n_left_out + now.n_devices.saturating_sub(next.n_devices()),
        tried,
        stays_bytes: total.stays,
        moves_bytes: total.moves,
        from_checkpoint_bytes: map.missing,
        moves_per_tier: tiers.map(|(tier, bytes)| (tier.name.clone(), *bytes)).collect(),
        moving_s: moved.time.0,
        kept: match is_numbered(&next.cluster) {
            _ if now.survivors.count() == 0 => {
                "no device of the old plan is there, so that a checkpoint has all states"
            }
            true => "states stay on their nodes, and `planner ranks` says which rank is where",
            false => "ranks keep their numbers: lost and gained ones are the last",
        },
    })
}

impl Answer {
    fn text(&self) -> String {
        let bytes = |n: u64| figures::bytes(Bytes(n as f64));
        let side = |side: &Described| {
            let devices = figures::counted(side.n_devices, "device");
            format!("{devices}, {}, {} per step", side.roles, figures::seconds(Seconds(side.step_time_s)))
        };
        let mut parts = vec![list(&[
            ("from", side(&self.from)),
            ("to", side(&self.to)),
            ("batch", format!("{} sequences a step, as before", self.global_batch)),
            ("spare", figures::counted(self.n_spare, "device")),
        ])];
        let row = |tried: &Tried| {
            let time = tried.step_time_s.map_or("-".into(), |time| figures::seconds(Seconds(time)));
            vec![figures::grouped(tried.n_devices), time, tried.no_plan.clone().unwrap_or_default()]
        };
        let columns = [("devices tried", Side::Right), ("step time", Side::Right), ("", Side::Left)];
        parts.push(table(&columns, &self.tried.iter().map(row).collect::<Vec<_>>()));
        let mut rows = vec![vec!["stay on their rank".into(), bytes(self.stays_bytes)]];
        rows.extend(self.moves_per_tier.iter().map(|(tier, n)| vec![format!("move over {tier}"), bytes(*n)]));
        rows.push(vec!["come from a checkpoint".into(), bytes(self.from_checkpoint_bytes)]);
        parts.push(table(&[("parameters and optimizer states", Side::Left), ("bytes", Side::Right)], &rows));
        let moving = match self.moves_bytes {
            0 => "nothing moves between devices".into(),
            _ => format!(
                "moving takes at least {}, all ranks at once",
                figures::seconds(Seconds(self.moving_s))
            ),
        };
        let reading = if self.from_checkpoint_bytes > 0 { ", reading the checkpoint apart" } else { "" };
        parts.push(format!("{moving}{reading}; {}\n", self.kept));
        parts.join("\n")
    }
}
