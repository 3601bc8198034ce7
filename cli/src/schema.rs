//! `planner schema`: JSON Schemas of the documents, made from the types that read them.

use frontends::ClusterFile;
use ir::flat::FlatDocument;
use ir::native::ModelDocument;
use ir::plan::Plan;
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
    match document {
        DocumentArg::Plan => schema_for!(Plan),
        DocumentArg::Cluster => schema_for!(ClusterFile),
        DocumentArg::Model => schema_for!(AnyModel),
    }
}
