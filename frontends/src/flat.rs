//! A flat graph to a model: operators in order, places to cut, what repeats, layers, kinds.

mod order;
mod flow;
mod cut;
mod repeat;
mod layers;
mod build;
mod names;
mod kinds;

use ir::graph::{Layer, Model, check};
use ir::native::DocumentError;

pub(crate) use kinds::Heading;

use cut::Cuts;
use flow::{Flow, fault};

/// Clusters the operators of a whole model, given as one layer, into layers of at most `most` operators.
///
/// # Errors
/// What cannot be a model, with its place in the document.
pub(crate) fn cluster(whole: &Layer, heading: Heading, most: usize) -> Result<Model, DocumentError> {
    let flow = Flow::new(whole)?;
    let cuts = Cuts::new(&flow, heading.default_sequence);
    let layers = layers::layers(&flow, &cuts, most)?;
    let model = kinds::model(&flow, &cuts, &layers, heading)?;
    check(&model).map_err(|broken| fault("ops".into(), broken.to_string()))?;
    Ok(model)
}

#[cfg(test)]
mod tests;
