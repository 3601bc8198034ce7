//! `planner reshard`: what moves between ranks when training goes over from one plan to another.

use std::collections::BTreeMap;

use ir::plan::Plan;
use ir::plan::check::OpenPlan;
use ir::units::Bytes;
use planner::reshard::{Amount, Givers, Name, Reshard, ReshardMap, State, StateSizes};
use serde::Serialize;

use crate::args::ReshardArgs;
use crate::failure::Failure;
use crate::figures;
use crate::input;
use crate::output::json;
use crate::table::{Side, list, table};
use crate::terminal::Terminal;

/// The command's answer.
#[derive(Serialize)]
struct Answer {
    from: Description,
    to: Description,
    bytes_per_parameter: f64,
    parameters: Moves,
    optimizer_states: Moves,
    /// Bytes that move, by link tier; nothing where the plans are of different clusters.
    #[serde(skip_serializing_if = "Option::is_none")]
    moves_per_tier: Option<BTreeMap<String, u64>>,
    /// The rank that takes most from others, and the one that gives most.
    #[serde(skip_serializing_if = "Option::is_none")]
    takes_most: Option<Busy>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gives_most: Option<Busy>,
    /// Pairs of ranks between which something moves.
    n_pairs: usize,
    pairs: Vec<Pair>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tensors: Option<Vec<TensorMoves>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    regions: Option<Vec<RegionMoves>>,
}

#[derive(Serialize)]
struct Description {
    file: String,
    roles: String,
    n_ranks: u64,
}

#[derive(Clone, Copy, Default, Serialize)]
struct Moves {
    stays_bytes: u64,
    moves_bytes: u64,
}

#[derive(Serialize)]
struct Busy {
    rank: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct Pair {
    from: u64,
    to: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct TensorMoves {
    tensor: String,
    state: &'static str,
    #[serde(flatten)]
    moves: Moves,
}

/// A plan that was read.
type Read = (Plan, OpenPlan);

/// Some rows of a parameter that a rank takes.
#[derive(Serialize)]
struct RegionMoves {
    state: &'static str,
    from: u64,
    to: u64,
    rows: Vec<(u64, u64)>,
    elements: u64,
}

/// Compares two plans of one model.
pub(crate) fn run(args: &ReshardArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    let (first, second) = (input::plan(&args.from)?, input::plan(&args.to)?);
    let both = Reshard::new((&first.0, &first.1), (&second.0, &second.1), Givers::Ranks);
    let both = both.map_err(|error| {
        let what = format!("{} and {}: {error}", args.from, args.to);
        Failure::argument_with_hint(what, "both plans must be of one model")
    })?;
    let sizes = StateSizes::of(&second.0);
    let map = both.map(sizes);
    let regions = args.tensor.as_ref().map(|text| regions(&both, text)).transpose()?;
    let answer = Answer::of((args, &first, &second), (&both, &map, sizes), regions);
    let text = if args.json.json { json(&answer)? } else { answer.text(&second.0) };
    write!(terminal.out, "{text}")?;
    Ok(())
}

fn regions(both: &Reshard<'_>, text: &str) -> Result<Vec<RegionMoves>, Failure> {
    let names = both.names();
    let name = names.iter().find(|name| label(name) == text).ok_or_else(|| {
        let example = names.first().map(label).unwrap_or_default();
        Failure::argument_with_hint(
            format!("--tensor: the model has no parameter `{text}`"),
            format!("give the position of a layer and a name, such as {example}; --tensors lists all"),
        )
    })?;
    let of = |state: State| {
        let word = word(state);
        both.taken(name, state).into_iter().map(move |taken| RegionMoves {
            state: word,
            from: taken.from,
            to: taken.to,
            elements: taken.region.volume(),
            rows: taken.region.0,
        })
    };
    Ok([State::Parameter, State::Optimizer].into_iter().flat_map(of).collect())
}

fn label((layer, name): &Name) -> String {
    format!("{layer}.{name}")
}

fn word(state: State) -> &'static str {
    match state {
        State::Parameter => "parameter",
        State::Optimizer => "optimizer state",
    }
}

impl Answer {
    fn of(
        (args, first, second): (&ReshardArgs, &Read, &Read),
        (both, map, sizes): (&Reshard<'_>, &ReshardMap, StateSizes),
        regions: Option<Vec<RegionMoves>>,
    ) -> Self {
        let describe = |file: &str, (plan, opened): &Read| Description {
            file: file.to_owned(),
            roles: opened.roles(plan).to_string(),
            n_ranks: plan.n_devices(),
        };
        let sum = |state: State| {
            let all = map.tensors.iter().filter(|((_, one), _)| *one == state);
            all.fold(Moves::default(), |sum, (_, amount)| Moves {
                stays_bytes: sum.stays_bytes + amount.stays,
                moves_bytes: sum.moves_bytes + amount.moves,
            })
        };
        let apart = || map.pairs.iter().filter(|((from, to), _)| from != to);
        let most = |rank: fn(&(u64, u64)) -> u64| {
            let mut sums: BTreeMap<u64, u64> = BTreeMap::new();
            apart().for_each(|(pair, bytes)| *sums.entry(rank(pair)).or_insert(0) += bytes);
            // Of equals the first.
            let busiest = sums.into_iter().rev().max_by_key(|(_, bytes)| *bytes);
            busiest.map(|(rank, bytes)| Busy { rank, bytes })
        };
        let mut tiers: Option<BTreeMap<String, u64>> = None;
        for (&(from, to), bytes) in apart() {
            if let Some(tier) = both.tier(from, to).and_then(|tier| second.0.cluster.tiers.get(tier)) {
                *tiers.get_or_insert_default().entry(tier.name.clone()).or_insert(0) += bytes;
            }
        }
        let tensor = |((name, state), amount): (&(Name, State), &Amount)| TensorMoves {
            tensor: label(name),
            state: word(*state),
            moves: Moves { stays_bytes: amount.stays, moves_bytes: amount.moves },
        };
        Self {
            from: describe(&args.from, first),
            to: describe(&args.to, second),
            bytes_per_parameter: (sizes.parameter + sizes.optimizer) as f64,
            parameters: sum(State::Parameter),
            optimizer_states: sum(State::Optimizer),
            moves_per_tier: tiers,
            takes_most: most(|pair| pair.1),
            gives_most: most(|pair| pair.0),
            n_pairs: apart().count(),
            pairs: apart().map(|(&(from, to), &bytes)| Pair { from, to, bytes }).collect(),
            tensors: args.tensors.then(|| map.tensors.iter().map(tensor).collect()),
            regions,
        }
    }

    fn text(&self, second: &Plan) -> String {
        let plan = |one: &Description| {
            format!("{}, {}, {}", one.file, figures::counted(one.n_ranks, "rank"), one.roles)
        };
        let mut parts = vec![list(&[
            ("from", plan(&self.from)),
            ("to", plan(&self.to)),
            ("model", second.model.name.clone()),
        ])];
        let columns = [("states", Side::Left), ("stay", Side::Right), ("move", Side::Right)];
        let row =
            |name: &str, moves: Moves| vec![name.into(), bytes(moves.stays_bytes), bytes(moves.moves_bytes)];
        let all = Moves {
            stays_bytes: self.parameters.stays_bytes + self.optimizer_states.stays_bytes,
            moves_bytes: self.parameters.moves_bytes + self.optimizer_states.moves_bytes,
        };
        parts.push(table(
            &columns,
            &[
                row("parameters", self.parameters),
                row("optimizer states", self.optimizer_states),
                row("all", all),
            ],
        ));
        if let Some(tiers) = &self.moves_per_tier {
            let in_order =
                second.cluster.tiers.iter().filter_map(|tier| Some((&tier.name, *tiers.get(&tier.name)?)));
            let rows: Vec<Vec<String>> = in_order.map(|(name, n)| vec![name.clone(), bytes(n)]).collect();
            parts.push(table(&[("over", Side::Left), ("move", Side::Right)], &rows));
        }
        let busy = |what: &str, busy: &Option<Busy>| {
            busy.as_ref().map(|busy| format!("rank {} {what} most: {}\n", busy.rank, bytes(busy.bytes)))
        };
        let lines: Vec<String> = [busy("takes", &self.takes_most), busy("gives", &self.gives_most)]
            .into_iter()
            .flatten()
            .collect();
        let pairs = if self.n_pairs == 1 { "pair of ranks exchanges" } else { "pairs of ranks exchange" };
        parts.push(format!(
            "{}{} {pairs} something\n",
            lines.concat(),
            figures::grouped(self.n_pairs as u64)
        ));
        parts.extend(self.tensors.as_ref().map(|tensors| tensor_table(tensors)));
        parts.extend(self.regions.as_ref().map(|regions| region_table(regions)));
        parts.join("\n")
    }
}

fn tensor_table(tensors: &[TensorMoves]) -> String {
    let columns =
        [("parameter", Side::Left), ("state", Side::Left), ("stay", Side::Right), ("move", Side::Right)];
    let row = |one: &TensorMoves| {
        vec![one.tensor.clone(), one.state.into(), bytes(one.moves.stays_bytes), bytes(one.moves.moves_bytes)]
    };
    table(&columns, &tensors.iter().map(row).collect::<Vec<_>>())
}

fn region_table(regions: &[RegionMoves]) -> String {
    let columns = [
        ("state", Side::Left),
        ("from rank", Side::Right),
        ("to rank", Side::Right),
        ("elements", Side::Right),
        ("rows", Side::Left),
    ];
    let row = |one: &RegionMoves| {
        let rows: Vec<String> = one.rows.iter().map(|(start, end)| format!("{start}:{end}")).collect();
        vec![
            one.state.into(),
            one.from.to_string(),
            one.to.to_string(),
            figures::grouped(one.elements),
            format!("[{}]", rows.join(", ")),
        ]
    };
    table(&columns, &regions.iter().map(row).collect::<Vec<_>>())
}

fn bytes(n: u64) -> String {
    figures::bytes(Bytes(n as f64))
}
