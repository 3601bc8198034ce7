//! Arguments of the commands that list what is shipped and describe documents.

use clap::{Args, ValueEnum};

use crate::args::{AddedArgs, JsonArgs, SizeArgs};

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    planner models\n  \
    planner models llama-3-8b --json\n  \
    planner models llama-3-8b --native > my-model.json\n  \
    planner models llama-3-8b --lora 16\n  \
    planner models deepseek-v3 --mtp 1")]
pub(crate) struct ModelsArgs {
    /// File or name of a model
    pub(crate) model: Option<String>,
    #[command(flatten)]
    pub(crate) added: AddedArgs,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
    /// Print the model in the native form, to be changed and planned for
    #[arg(long, requires = "model", conflicts_with = "json")]
    pub(crate) native: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    planner clusters\n  \
    planner clusters dgx-h100 --nodes 16 --json\n  \
    planner clusters dgx-h100 --native > my-cluster.json")]
pub(crate) struct ClustersArgs {
    /// File or name of a cluster
    pub(crate) cluster: Option<String>,
    #[command(flatten)]
    pub(crate) size: SizeArgs,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
    /// Print the cluster as a file, to be changed and planned for
    #[arg(long, requires = "cluster", conflicts_with = "json")]
    pub(crate) native: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  planner schema plan > plan.schema.json")]
pub(crate) struct SchemaArgs {
    /// The document
    #[arg(value_enum)]
    pub(crate) document: DocumentArg,
    /// Accepted for uniformity: a schema is JSON
    #[arg(long, hide = true)]
    pub(crate) json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum DocumentArg {
    /// plan.json
    Plan,
    /// cluster.json
    Cluster,
    /// The native form of a model
    Model,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  planner completions bash > ~/.local/share/bash-completion/completions/planner"
)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}
