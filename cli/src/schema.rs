//! `planner schema`: JSON Schemas of the documents, made from the types that read them.

use frontends::ClusterFile;
use ir::native::ModelDocument;
use ir::plan::Plan;
use schemars::{Schema, schema_for};

use crate::args::{DocumentArg, SchemaArgs};
use crate::failure::Failure;
use crate::terminal::Terminal;

/// Prints a schema.
pub(crate) fn run(args: &SchemaArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(&schema(args.document))
        .map_err(|error| Failure::bug(format!("the schema has no JSON form: {error}")))?;
    writeln!(terminal.out, "{text}")?;
    Ok(())
}

fn schema(document: DocumentArg) -> Schema {
    match document {
        DocumentArg::Plan => schema_for!(Plan),
        DocumentArg::Cluster => schema_for!(ClusterFile),
        DocumentArg::Model => schema_for!(ModelDocument),
    }
}
