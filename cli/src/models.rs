//! `planner models`: the shipped models, or one model in detail.

use frontends::shipped_models;
use ir::graph::{Layer, Model, TensorId};
use ir::native;
use serde::Serialize;

use crate::args::ModelsArgs;
use crate::failure::Failure;
use crate::figures;
use crate::input;
use crate::output::{Form, json};
use crate::table::{Side, list, table};
use crate::terminal::Terminal;

/// A model without its layers.
#[derive(Serialize)]
struct ModelSummary {
    name: String,
    parameters: u64,
    /// Those that are learned.
    trained: u64,
    /// Layers, embedding and head included.
    n_layers: u64,
    default_sequence: u64,
}

/// A model with its layers.
#[derive(Serialize)]
struct ModelDetail {
    #[serde(flatten)]
    summary: ModelSummary,
    layers: Vec<LayerDetail>,
}

/// One layer kind. A kind that stands in several places has the counts of all of them.
#[derive(Serialize)]
struct LayerDetail {
    name: String,
    count: u64,
    parameters_each: u64,
    trained_each: u64,
    operators: Vec<OperatorDetail>,
    parameters: Vec<ParameterDetail>,
}

#[derive(Serialize)]
struct OperatorDetail {
    name: String,
    kind: &'static str,
}

#[derive(Serialize)]
struct ParameterDetail {
    name: String,
    dims: Vec<String>,
    shape: Vec<u64>,
    trained: bool,
}

/// Lists the shipped models, or describes the one that was asked for.
pub(crate) fn run(args: &ModelsArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    let text = match &args.model {
        None => all(Form::of(&args.json))?,
        Some(argument) => {
            let model = input::adapted(input::model(argument)?.value, &args.added)?;
            if args.native {
                json(&native::write(&model))?
            } else if args.json.json {
                json(&detail(&model))?
            } else {
                describe(&model)
            }
        }
    };
    write!(terminal.out, "{text}")?;
    Ok(())
}

fn all(form: Form) -> Result<String, Failure> {
    let mut summaries = Vec::new();
    for shipped in shipped_models() {
        summaries.push(summary(&input::model(shipped.name)?.value));
    }
    if form == Form::Json {
        return json(&summaries);
    }
    let columns = [
        ("model", Side::Left),
        ("parameters", Side::Right),
        ("layers", Side::Right),
        ("sequence", Side::Right),
    ];
    let row = |model: &ModelSummary| {
        let parameters = figures::count(model.parameters as f64);
        vec![model.name.clone(), parameters, model.n_layers.to_string(), model.default_sequence.to_string()]
    };
    let rows: Vec<Vec<String>> = summaries.iter().map(row).collect();
    Ok(table(&columns, &rows))
}

fn summary(model: &Model) -> ModelSummary {
    ModelSummary {
        name: model.name.clone(),
        parameters: model.n_parameters(),
        trained: model.n_trained(),
        n_layers: model.n_layers(),
        default_sequence: model.default_sequence,
    }
}

fn detail(model: &Model) -> ModelDetail {
    let layers = model.layers.iter().enumerate().map(|(kind, layer)| LayerDetail {
        name: layer.name.clone(),
        count: count(model, kind),
        parameters_each: layer.n_parameters(),
        trained_each: layer.n_trained(),
        operators: layer
            .ops
            .iter()
            .map(|op| OperatorDetail { name: op.name.clone(), kind: op.kind.line().name })
            .collect(),
        parameters: layer.parameters().map(|tensor| parameter(layer, tensor)).collect(),
    });
    ModelDetail { summary: summary(model), layers: layers.collect() }
}

fn count(model: &Model, kind: usize) -> u64 {
    model.sequence.iter().filter(|run| run.layer == kind).map(|run| run.count).sum()
}

fn parameter(layer: &Layer, tensor: TensorId) -> ParameterDetail {
    // A parameter's dims are fixed, whatever the job.
    let sizes = layer.sizes(1, 1);
    let labelled = layer.labelled_shape(tensor, &sizes);
    ParameterDetail {
        name: layer.tensors[tensor.0].name.clone(),
        dims: labelled.iter().map(|(name, _)| (*name).to_owned()).collect(),
        shape: labelled.iter().map(|(_, length)| *length).collect(),
        trained: layer.is_trained(tensor),
    }
}

fn describe(model: &Model) -> String {
    let mut head = vec![
        ("model", model.name.clone()),
        ("parameters", figures::grouped(model.n_parameters())),
        ("layers", model.n_layers().to_string()),
        ("sequence", model.default_sequence.to_string()),
    ];
    if model.n_trained() < model.n_parameters() {
        head.insert(2, ("trained", figures::grouped(model.n_trained())));
    }
    let head = list(&head);
    let mut rows = Vec::new();
    for layer in detail(model).layers {
        let operators: Vec<&str> = layer.operators.iter().map(|op| op.name.as_str()).collect();
        rows.push(vec![
            layer.name,
            layer.count.to_string(),
            figures::count(layer.parameters_each as f64),
            operators.join(" "),
        ]);
    }
    let columns = [
        ("layer", Side::Left),
        ("count", Side::Right),
        ("parameters", Side::Right),
        ("operators", Side::Left),
    ];
    format!("{head}\n{}", table(&columns, &rows))
}
