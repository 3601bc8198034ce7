//! `model.json` to a graph: a Hugging Face configuration or the native form.

use ir::graph::{Model, check};

use crate::arch::Arch;
use crate::count::n_parameters;
use crate::document::{Document, file_stem};
use crate::graph_model::graph_of;
use crate::hf::{NATIVE_HINT, families, read_arch};
use crate::input_error::InputError;
use crate::native::read_native;

/// Reads a model description: the `config.json` of a supported Hugging Face family, or a native graph.
///
/// # Errors
/// The first fault of the file, with its place.
pub fn read_model(file_name: &str, text: &str) -> Result<Model, InputError> {
    let document = Document::parse(file_name, text)?;
    if document.value.get("model_type").is_some() {
        let arch = Arch { name: file_stem(file_name), ..read_arch(&document)? };
        return checked_graph(file_name, &arch);
    }
    if document.value.get("planner_model").is_some() {
        return read_native(&document);
    }
    Err(document.error(&[], "neither `model_type` nor `planner_model` is present".into()).with_hint(format!(
        "a Hugging Face config.json has `model_type`, one of {}; {NATIVE_HINT}",
        families().join(", ")
    )))
}

/// The graph of a description, once its invariants hold and its parameters are those of the formula.
fn checked_graph(file_name: &str, arch: &Arch) -> Result<Model, InputError> {
    let model = graph_of(arch);
    let bug = |what: String| {
        InputError::whole(file_name, what).with_hint("this is a fault of the planner: please report it")
    };
    check(&model).map_err(|error| bug(format!("the graph made of it is not valid: {error}")))?;
    let (found, expected) = (u128::from(model.n_parameters()), n_parameters(arch));
    if found != expected {
        return Err(bug(format!("its graph has {found} parameters, its formula gives {expected}")));
    }
    Ok(model)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shipped_models::{PUBLISHED_COUNTS, shipped_model, shipped_models};

    #[test]
    fn every_shipped_model_becomes_a_valid_graph() {
        for shipped in shipped_models() {
            let model = read_model(shipped.name, shipped.text).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(model.name, shipped.name);
        }
    }

    #[test]
    fn graphs_have_the_published_number_of_parameters() {
        for (name, published) in PUBLISHED_COUNTS {
            let model = read_model(name, shipped_model(name).unwrap().text).unwrap();
            assert_eq!(model.n_parameters(), *published, "{name}");
        }
    }
}
