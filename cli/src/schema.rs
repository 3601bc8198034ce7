//! `planner schema`: JSON Schemas of the documents, made from the types that read them.

use frontends::ClusterFile;
use ir::flat::FlatDocument;
use ir::native::ModelDocument;
use ir::plan::Plan;
use schemars::transform::{RecursiveTransform, Transform as _};
use schemars::{JsonSchema, Schema, schema_for};

use crate::args::{DocumentArg, SchemaArgs};
use crate::failure::Failure;
use crate::output::json;
use crate::terminal::Terminal;

/// A model, layer kind by layer kind or operator by operator.
#[derive(JsonSchema)]
#[schemars(untagged)]
#[expect(dead_code, reason = "only its schema is asked for")]
enum AnyModel {
    Layers(ModelDocument),
    Flat(FlatDocument),
}

/// Prints a schema.
pub(crate) fn run(args: &SchemaArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    write!(terminal.out, "{}", json(&schema(args.document))?)?;
    Ok(())
}

fn schema(document: DocumentArg) -> Schema {
    let mut schema = match document {
        DocumentArg::Plan => schema_for!(Plan),
        DocumentArg::Cluster => schema_for!(ClusterFile),
        DocumentArg::Model => schema_for!(AnyModel),
    };
    RecursiveTransform(unwrap_description).transform(&mut schema);
    schema
}

/// Puts the paragraphs of a description, whose lines are those of a comment, on a line each.
fn unwrap_description(schema: &mut Schema) {
    let Some(text) = schema.get("description").and_then(|text| text.as_str()) else { return };
    let paragraphs: Vec<String> = text.split("\n\n").map(|paragraph| paragraph.replace('\n', " ")).collect();
    schema.insert("description".to_owned(), paragraphs.join("\n\n").into());
}
