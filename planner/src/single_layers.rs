//! Layers that a user names one by one: `decoder[0-3,17]`. They become a kind of their own.
//!
//! A search chooses per layer kind. A model in which the named layers are another kind is the same model, and what
//! holds of kinds holds of them: menus, bounds, proof. Layers are counted within their kind, from 0.

use std::collections::BTreeMap;

use ir::graph::{Layer, Model, ParameterRef, Segment, Tie};
use ir::numbers::Numbers;

use crate::constraints::{ALL, Constraints, named};

/// The model with the layers that constraints name by position as kinds of their own. Numbers of layers and what they
/// compute stay.
///
/// # Errors
/// A name, and what there is instead.
pub fn single_layers(model: &Model, constraints: &Constraints) -> Result<Model, String> {
    let taken = taken(model, constraints)?;
    if taken.is_empty() {
        return Ok(model.clone());
    }
    // What every layer is called afterwards, in the order of the model.
    let mut seen = vec![0_u64; model.layers.len()];
    let names = model.kinds_in_order().into_iter().map(|kind| {
        let at = seen[kind];
        seen[kind] += 1;
        let own = taken.iter().find(|(_, (of, numbers))| *of == kind && numbers.contains(at));
        (kind, own.map_or(model.layers[kind].name.as_str(), |(name, _)| *name))
    });
    let order: Vec<(usize, &str)> = names.collect();
    let mut kinds: Vec<(usize, &str)> = order.clone();
    kinds.sort_by_key(|(kind, name)| (*kind, named(name).is_some(), *name));
    kinds.dedup();
    let place = |one: &(usize, &str)| kinds.iter().position(|kind| kind == one).unwrap_or(0);
    let mut sequence: Vec<Segment> = Vec::new();
    for layer in order.iter().map(place) {
        match sequence.last_mut() {
            Some(run) if run.layer == layer => run.count += 1,
            _ => sequence.push(Segment { layer, count: 1 }),
        }
    }
    // A kind with a tied parameter occurs once, so it is one kind afterwards too.
    let of_kind = |kind: usize| kinds.iter().position(|(of, _)| *of == kind).unwrap_or(0);
    let side = |side: ParameterRef| ParameterRef { layer: of_kind(side.layer), ..side };
    let layer = |&(kind, name): &(usize, &str)| Layer { name: name.into(), ..model.layers[kind].clone() };
    Ok(Model {
        layers: kinds.iter().map(layer).collect(),
        sequence,
        ties: model.ties.iter().map(|tie| Tie { owner: side(tie.owner), copy: side(tie.copy) }).collect(),
        ..model.clone()
    })
}

/// By name, the kind and the positions that are named.
fn taken<'a>(
    model: &Model,
    constraints: &'a Constraints,
) -> Result<BTreeMap<&'a str, (usize, Numbers)>, String> {
    let mut taken: BTreeMap<&str, (usize, Numbers)> = BTreeMap::new();
    for name in constraints.layers.keys().filter(|name| model.layers.iter().all(|layer| layer.name != **name))
    {
        let Some((kind_name, numbers)) = named(name) else { continue };
        let place = |what: String| format!("layer `{name}`: {what}");
        let kind = model.layers.iter().position(|layer| layer.name == kind_name).ok_or_else(|| {
            let known: Vec<&str> = model.layers.iter().map(|layer| layer.name.as_str()).collect();
            let what = match kind_name {
                ALL => "layers are counted within their kind, `*` is all kinds".to_owned(),
                _ => format!("no layer is called `{kind_name}`"),
            };
            place(format!("{what}: the model has {}", known.join(", ")))
        })?;
        let numbers: Numbers = numbers.parse().map_err(place)?;
        let of_kind = |run: &&Segment| run.layer == kind;
        let n_layers: u64 = model.sequence.iter().filter(of_kind).map(|run| run.count).sum();
        if let Some(last) = numbers.last().filter(|last| *last >= n_layers) {
            let last_layer = n_layers.saturating_sub(1);
            return Err(place(format!(
                "there is no layer {last}: `{kind_name}` has layers 0 to {last_layer}"
            )));
        }
        for (other, (of, known)) in &taken {
            if let Some(twice) = numbers.iter().find(|at| *of == kind && known.contains(*at)) {
                return Err(place(format!("layer {twice} is named by `{other}` too: name each layer once")));
            }
        }
        taken.insert(name, (kind, numbers));
    }
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::constraints::{LayerConstraints, kind_name};

    fn model() -> Model {
        let text = frontends::shipped_model("gpt2").unwrap().text;
        frontends::read_model("gpt2", text).unwrap()
    }

    fn split(names: &[&str]) -> Result<Model, String> {
        let layers = names.iter().map(|name| ((*name).to_owned(), LayerConstraints::default()));
        single_layers(&model(), &Constraints { layers: layers.collect() })
    }

    /// The sequence in words.
    fn check(names: &[&str], expected: &str) {
        let found = split(names).map(|model| {
            let run = |run: &Segment| format!("{}*{}", model.layers[run.layer].name, run.count);
            ir::graph::check(&model).unwrap();
            model.sequence.iter().map(run).collect::<Vec<_>>().join(" ")
        });
        assert_eq!(found.unwrap_or_else(|error| error), expected);
    }

    #[test]
    fn named_layers_are_a_kind_of_their_own() {
        check(&["decoder"], "embedding*1 decoder*12 head*1");
        check(
            &["decoder[0-1,5]", "decoder[11]"],
            "embedding*1 decoder[0-1,5]*2 decoder*3 decoder[0-1,5]*1 decoder*5 decoder[11]*1 head*1",
        );
        check(&["decoder[0-11]", "head[0]"], "embedding*1 decoder[0-11]*12 head[0]*1");
        assert_eq!(kind_name("decoder[0-1,5]"), "decoder");
    }

    #[test]
    fn what_names_no_layer_is_refused() {
        check(&["decoder[12]"], "layer `decoder[12]`: there is no layer 12: `decoder` has layers 0 to 11");
        check(
            &["decodr[0]"],
            "layer `decodr[0]`: no layer is called `decodr`: the model has embedding, decoder, head",
        );
        check(
            &["*[0]"],
            "layer `*[0]`: layers are counted within their kind, `*` is all kinds: the model has embedding, decoder, head",
        );
        check(&["decoder[a]"], "layer `decoder[a]`: expected numbers such as `0-3,7`, found `a`");
        check(
            &["decoder[0-3]", "decoder[3]"],
            "layer `decoder[3]`: layer 3 is named by `decoder[0-3]` too: name each layer once",
        );
    }

    #[test]
    fn tied_parameters_stay_tied() {
        let (before, after) = (model(), split(&["decoder[0]", "embedding[0]"]).unwrap());
        assert!(!before.ties.is_empty(), "the model ties its head to its embedding");
        for (old, new) in before.ties.iter().zip(&after.ties) {
            for (old, new) in [(old.owner, new.owner), (old.copy, new.copy)] {
                let name = |model: &Model, side: ParameterRef| {
                    let layer = &model.layers[side.layer];
                    (kind_name(&layer.name).to_owned(), layer.tensors[side.tensor.0].name.clone())
                };
                assert_eq!(name(&before, old), name(&after, new));
            }
        }
    }
}
