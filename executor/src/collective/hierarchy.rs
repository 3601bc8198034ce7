//! Tier by tier: within each node, then across nodes lane by lane, each lane by the same rule again.
//!
//! A node is what the innermost tier between members joins. Lane c is the c-th member of every node, as far as the
//! smallest node reaches; a member beyond the lanes works through the member of lane `its number mod lanes`. Where all
//! members are on one tier, a ring or the tier's switch does the rest.

use super::team::{Post, Team, chunks, pieces};
use super::{ring, switch};
use crate::element::{Element, Reduce};
use crate::error::ExecutorError;

/// What runs where one tier joins all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outermost {
    Ring,
    Switch,
}

/// The nodes of a team, and this member's place in its own.
struct Nodes {
    /// Positions in the team.
    nodes: Vec<Vec<usize>>,
    n_lanes: usize,
    own: usize,
    number: usize,
}

impl Nodes {
    /// Nothing where all members are on one tier.
    fn of<E: Element>(post: &Post<'_, '_, E>, team: &Team) -> Option<Self> {
        let all = &team.members;
        let tier = (0..all.len()).flat_map(|i| (0..i).map(move |j| (i, j)));
        let innermost = tier.map(|(i, j)| post.tier_of(all[i], all[j])).min()?;
        let joined = |i: usize, j: usize| i == j || post.tier_of(all[i], all[j]) == innermost;
        let mut nodes: Vec<Vec<usize>> = Vec::new();
        for i in (0..all.len()).filter(|&i| (0..i).all(|j| !joined(i, j))) {
            nodes.push((i..all.len()).filter(|&j| joined(i, j)).collect());
        }
        let n_lanes = nodes.iter().map(Vec::len).min()?;
        let own = nodes.iter().position(|node| node.contains(&team.position))?;
        let number = nodes[own].iter().position(|&at| at == team.position)?;
        (nodes.len() > 1).then_some(Self { nodes, n_lanes, own, number })
    }

    /// The own node as a team.
    fn inside(&self, team: &Team) -> Team {
        let members = self.nodes[self.own].iter().map(|&at| team.members[at]).collect();
        Team { members, position: self.number }
    }

    /// The own lane, if this member is in one.
    fn across(&self, team: &Team) -> Option<Team> {
        let members = || self.nodes.iter().map(|node| team.members[node[self.number]]).collect();
        (self.number < self.n_lanes).then(|| Team { members: members(), position: self.own })
    }

    /// Positions in a node that work through its member of a lane, which comes first.
    fn through(&self, node: usize, lane: usize) -> impl Iterator<Item = usize> + '_ {
        self.nodes[node][lane..].iter().step_by(self.n_lanes).copied()
    }

    /// Positions of all nodes that work through a lane.
    fn of_lane(&self, lane: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.nodes.len()).flat_map(move |node| self.through(node, lane))
    }
}

pub(super) fn all_gather<E: Element>(
    post: &mut Post<'_, '_, E>,
    team: &Team,
    (own, lens): (Vec<E>, &[usize]),
    outermost: Outermost,
) -> Result<Vec<Vec<E>>, ExecutorError> {
    let Some(nodes) = Nodes::of(post, team) else {
        return match outermost {
            Outermost::Ring => ring::all_gather(post, team, own),
            Outermost::Switch => switch::all_gather(post, team, own),
        };
    };
    let lane = nodes.number % nodes.n_lanes;
    let held = match nodes.across(team) {
        Some(across) => {
            let mut bundle = own;
            for at in nodes.through(nodes.own, lane).skip(1) {
                bundle.extend(post.take_len(team.members[at], lens[at])?);
            }
            let bundle_len = |node| nodes.through(node, lane).map(|at| lens[at]).sum();
            let lens: Vec<usize> = (0..nodes.nodes.len()).map(bundle_len).collect();
            all_gather(post, &across, (bundle, &lens), outermost)?.concat()
        }
        None => {
            post.send(team.members[nodes.nodes[nodes.own][lane]], own)?;
            Vec::new()
        }
    };
    let of_lanes = ring::all_gather(post, &nodes.inside(team), held)?;
    let mut blocks = vec![Vec::new(); team.n()];
    for (lane, held) in of_lanes.iter().take(nodes.n_lanes).enumerate() {
        let parts = pieces(held, nodes.of_lane(lane).map(|at| lens[at]));
        nodes.of_lane(lane).zip(parts).for_each(|(at, part)| blocks[at] = part);
    }
    Ok(blocks)
}

pub(super) fn reduce_scatter<E: Element>(
    post: &mut Post<'_, '_, E>,
    team: &Team,
    parts: Vec<Vec<E>>,
    (reduce, outermost): (Reduce, Outermost),
) -> Result<Vec<E>, ExecutorError> {
    let Some(nodes) = Nodes::of(post, team) else {
        return match outermost {
            Outermost::Ring => ring::reduce_scatter(post, team, parts, reduce),
            Outermost::Switch => switch::reduce_scatter(post, team, parts, reduce),
        };
    };
    let inside = nodes.inside(team);
    let mut of_lanes: Vec<Vec<E>> = vec![Vec::new(); inside.n()];
    for (lane, bundle) in of_lanes.iter_mut().take(nodes.n_lanes).enumerate() {
        *bundle = nodes.of_lane(lane).flat_map(|at| parts[at].iter().copied()).collect();
    }
    let held = ring::reduce_scatter(post, &inside, of_lanes, reduce)?;
    let lane = nodes.number % nodes.n_lanes;
    let Some(across) = nodes.across(team) else {
        return post.take_len(team.members[nodes.nodes[nodes.own][lane]], parts[team.position].len());
    };
    let bundle_len = |node| nodes.through(node, lane).map(|at| parts[at].len()).sum();
    let bundles = pieces(&held, (0..nodes.nodes.len()).map(bundle_len));
    let bundle = reduce_scatter(post, &across, bundles, (reduce, outermost))?;
    let own: Vec<usize> = nodes.through(nodes.own, lane).collect();
    let mut mine = pieces(&bundle, own.iter().map(|&at| parts[at].len())).into_iter();
    let first = mine.next().unwrap_or_default();
    own.iter().skip(1).zip(mine).try_for_each(|(&at, part)| post.send(team.members[at], part))?;
    Ok(first)
}

pub(super) fn all_reduce<E: Element>(
    post: &mut Post<'_, '_, E>,
    team: &Team,
    data: Vec<E>,
    (reduce, outermost): (Reduce, Outermost),
) -> Result<Vec<E>, ExecutorError> {
    let Some(nodes) = Nodes::of(post, team) else {
        return match outermost {
            Outermost::Ring => ring::all_reduce(post, team, data, reduce),
            Outermost::Switch => switch::all_reduce(post, team, data, reduce),
        };
    };
    let inside = nodes.inside(team);
    let mut of_lanes = chunks(&data, nodes.n_lanes);
    of_lanes.resize_with(inside.n(), Vec::new);
    let mut chunk = ring::reduce_scatter(post, &inside, of_lanes, reduce)?;
    if let Some(across) = nodes.across(team) {
        chunk = all_reduce(post, &across, chunk, (reduce, outermost))?;
    }
    Ok(ring::all_gather(post, &inside, chunk)?.concat())
}

/// The root's data goes to one member of each node, and from there around the node.
pub(super) fn broadcast<E: Element>(
    post: &mut Post<'_, '_, E>,
    team: &Team,
    (root, outermost): (usize, Outermost),
    own: Option<Vec<E>>,
) -> Result<Vec<E>, ExecutorError> {
    let Some(nodes) = Nodes::of(post, team) else {
        return match outermost {
            Outermost::Ring => ring::broadcast(post, team, root, own),
            Outermost::Switch => switch::broadcast(post, team, root, own),
        };
    };
    let leader = |node: &Vec<usize>| if node.contains(&root) { root } else { node[0] };
    let leaders: Vec<usize> = nodes.nodes.iter().map(|node| team.members[leader(node)]).collect();
    let mut held = own;
    if let Some(across) = Team::of(&leaders, post.rank()) {
        let root = across.position_of(team.members[root]).unwrap_or(0);
        held = Some(broadcast(post, &across, (root, outermost), held)?);
    }
    let inside = nodes.inside(team);
    let first = inside.position_of(leaders[nodes.own]).unwrap_or(0);
    ring::broadcast(post, &inside, first, held)
}

/// Parts for other nodes go to the own node's member of the receiver's lane, across, and on to the receiver.
///
/// In each phase every message travels alone, in the order of senders and receivers in the group.
pub(super) fn all_to_all<E: Element>(
    post: &mut Post<'_, '_, E>,
    team: &Team,
    mut parts: Vec<Vec<E>>,
) -> Result<Vec<Vec<E>>, ExecutorError> {
    let Some(nodes) = Nodes::of(post, team) else { return ring::exchange(post, team, parts) };
    let place: Vec<(usize, usize)> = (0..team.n()).map(|at| place(&nodes.nodes, at)).collect();
    let me = team.position;
    let pairs = || (0..team.n()).flat_map(|from| (0..team.n()).map(move |to| (from, to)));
    let mut carried: Carried<E> = pairs()
        .filter(|pair| pair.0 == me)
        .map(|(from, to)| ((from, to), std::mem::take(&mut parts[to])))
        .collect();
    // Where a part is before and after each phase.
    let at = |phase: usize, (from, to): (usize, usize)| {
        let home = place[from].0 == place[to].0;
        let through = |node: usize| if home { to } else { nodes.nodes[node][place[to].1 % nodes.n_lanes] };
        match phase {
            0 => from,
            1 => through(place[from].0),
            2 => through(place[to].0),
            _ => to,
        }
    };
    for phase in 0..3 {
        for pair in pairs().filter(|&pair| at(phase, pair) == me && at(phase + 1, pair) != me) {
            let part = carried.remove(&pair).unwrap_or_default();
            post.send(team.members[at(phase + 1, pair)], part)?;
        }
        for pair in pairs().filter(|&pair| at(phase, pair) != me && at(phase + 1, pair) == me) {
            carried.insert(pair, post.take(team.members[at(phase, pair)])?);
        }
    }
    Ok((0..team.n()).map(|from| carried.remove(&(from, me)).unwrap_or_default()).collect())
}

/// Parts that a member has, by the positions of their sender and receiver.
type Carried<E> = std::collections::BTreeMap<(usize, usize), Vec<E>>;

/// A position's node and its number there.
fn place(nodes: &[Vec<usize>], at: usize) -> (usize, usize) {
    let node = nodes.iter().position(|node| node.contains(&at)).unwrap_or(0);
    (node, nodes[node].iter().position(|&one| one == at).unwrap_or(0))
}
