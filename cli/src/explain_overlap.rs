//! What a layer shows of its communication, by closed form and by events, and why the two part where they do.

use cost_model::{Constants, RowPrice, Stream};
use ir::plan::check::OpenPlan;
use ir::plan::{Plan, PlanError};
use ir::units::Seconds;
use planner::price::{Witnessed, both_witnesses};
use serde::Serialize;

use crate::failure::Failure;
use crate::figures;
use crate::input;
use crate::table::{Side, table};

/// Relative difference from which it is said why there is one.
const TOLD_FROM: f64 = 0.03;

/// A forward or backward of a layer by both witnesses.
#[derive(Serialize)]
pub(crate) struct Overlap {
    layer: String,
    n_layers: u64,
    section: &'static str,
    /// What the price is.
    closed_form_s: Seconds,
    events_s: Seconds,
    /// What the layer keeps busy, as events.
    compute_s: Seconds,
    node_links_s: Seconds,
    network_links_s: Seconds,
    launch_s: Seconds,
    /// What is busy for longest, and for what share of the time.
    bottleneck: &'static str,
    busy: f64,
    /// Why events take another time than the closed form, where they do.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

/// Every choice of a plan; nothing where backward runs in parts or sequences are cut.
///
/// # Errors
/// What cannot be priced.
pub(crate) fn overlaps(file: &str, (plan, opened): (&Plan, &OpenPlan)) -> Result<Vec<Overlap>, Failure> {
    let found = both_witnesses(plan, opened, &Constants::load())
        .map_err(|PlanError { place, what }| input::fault_of_plan(file, place, what))?;
    let of = |one: Witnessed| {
        let layer = &opened.model.layers[one.kind].name;
        ["forward", "backward"]
            .into_iter()
            .zip(one.closed.into_iter().zip(one.events))
            .map(|(section, times)| overlap((layer, one.n_layers, section), times))
            .collect::<Vec<_>>()
    };
    Ok(found.into_iter().flat_map(of).collect())
}

fn overlap(
    (layer, n_layers, section): (&str, u64, &'static str),
    (closed, events): (Seconds, RowPrice),
) -> Overlap {
    let (stream, busy) = events.bottleneck();
    Overlap {
        layer: layer.to_owned(),
        n_layers,
        section,
        closed_form_s: closed,
        events_s: events.seconds,
        compute_s: events.compute,
        node_links_s: events.node,
        network_links_s: events.network,
        launch_s: events.launch,
        bottleneck: word(stream),
        busy,
        why: why(closed, &events),
    }
}

fn word(stream: Stream) -> &'static str {
    match stream {
        Stream::Compute => "computation",
        Stream::Node => "links in the node",
        Stream::Network => "network",
        Stream::Host => "link to the host",
        Stream::Launch => "launches",
    }
}

/// Only events know that two links carry at once, in which order kernels run and how far ahead parameters are fetched.
fn why(closed: Seconds, events: &RowPrice) -> Option<String> {
    if (events.seconds / closed - 1.0).abs() < TOLD_FROM {
        return None;
    }
    let (stream, _) = events.bottleneck();
    let [node, network] = [events.node, events.network].map(|time| time > Seconds::ZERO);
    Some(match (events.seconds < closed, stream) {
        (true, _) if node && network => {
            "links in the node and the network carry at once; the closed form adds them".into()
        }
        (true, _) => format!("more of it hides beside the {}", word(stream)),
        (false, Stream::Compute) => {
            "what is sent waits for the kernels before it, and less computation is left to hide it".into()
        }
        (false, _) => format!(
            "computation waits for the {}, where one layer's transfers follow another's",
            word(stream)
        ),
    })
}

/// The same for people.
pub(crate) fn text(overlaps: &[Overlap]) -> String {
    if overlaps.is_empty() {
        return String::new();
    }
    let columns = [
        ("a layer's overlap", Side::Left),
        ("", Side::Left),
        ("layers", Side::Right),
        ("closed form", Side::Right),
        ("as events", Side::Right),
        ("differs by", Side::Right),
        ("busiest", Side::Left),
        ("of the time", Side::Right),
    ];
    let row = |one: &Overlap| {
        // Nothing of a frozen layer may be left to do.
        let of_work = |share: String| if one.closed_form_s.0 > 0.0 { share } else { "-".into() };
        let percent = (one.events_s / one.closed_form_s - 1.0) * 100.0;
        let differs = if percent.abs() < 0.05 { "0.0 %".into() } else { format!("{percent:+.1} %") };
        vec![
            one.layer.clone(),
            one.section.to_owned(),
            one.n_layers.to_string(),
            figures::seconds(one.closed_form_s),
            figures::seconds(one.events_s),
            of_work(differs),
            one.bottleneck.to_owned(),
            of_work(figures::percent(one.busy)),
        ]
    };
    let mut text = table(&columns, &overlaps.iter().map(row).collect::<Vec<_>>());
    for one in overlaps {
        if let Some(why) = &one.why {
            text.push_str(&format!("{} of `{}` as events: {why}\n", one.section, one.layer));
        }
    }
    text
}
