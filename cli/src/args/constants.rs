//! Arguments of the commands that hold predictions to measurements.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

use crate::args::{JsonArgs, ThreadArgs, counts};

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    planner validate\n  \
    planner validate --source megatron-sc21 --rows\n  \
    planner validate --runs my-runs.csv --rows\n  \
    planner validate --events\n  \
    planner validate --measured\n\n\
    Every row of fixtures/published that the planner can express is priced as `planner estimate` would.\n\
    Constants are the same for all rows.")]
pub(crate) struct ValidateArgs {
    /// Only this source
    #[arg(long, value_name = "NAME")]
    pub(crate) source: Option<String>,
    /// Your own runs instead of the published ones: comma-separated values under a header
    #[arg(long, value_name = "CSV", conflicts_with_all = ["source", "components", "markdown"])]
    pub(crate) runs: Option<String>,
    /// List every row; with --json also what its prediction is made of
    #[arg(long)]
    pub(crate) rows: bool,
    /// Price single operators and collectives instead of runs
    #[arg(long, conflicts_with_all = ["rows", "omitted", "fit", "source", "markdown"])]
    pub(crate) components: bool,
    /// Price what the script of fixtures/measured measured on one device: steps, layers, operators
    #[arg(long, conflicts_with_all = ["runs", "source", "components", "memory", "events", "against_search", "omitted", "fit"])]
    pub(crate) measured: bool,
    /// Print the page of the documentation
    #[arg(long, conflicts_with_all = ["json", "rows", "omitted"])]
    pub(crate) markdown: bool,
    /// List every row that is not priced, with its reason
    #[arg(long)]
    pub(crate) omitted: bool,
    /// Peak memory instead of time
    #[arg(long, conflicts_with_all = ["fit", "omitted"])]
    pub(crate) memory: bool,
    /// Time layers as events too, beside the closed forms that prices are
    #[arg(long, conflicts_with_all = ["fit", "rows", "omitted", "memory", "components", "markdown", "against_search"])]
    pub(crate) events: bool,
    /// The published plans against those that are found for the same jobs, both by prediction
    #[arg(long, conflicts_with_all = ["fit", "omitted", "memory", "components"])]
    pub(crate) against_search: bool,
    /// Constants of a cluster of your own
    #[arg(long, value_name = "FILE")]
    pub(crate) calibration: Option<String>,
    /// Fit the constants to the rows first, and say how far a source is off whose rows were left out
    #[arg(long)]
    pub(crate) fit: bool,
    /// With --fit: also what the error becomes without each constant
    #[arg(long, requires = "fit")]
    pub(crate) ablate: bool,
    /// With --fit: write the fitted constants as a calibration
    #[arg(long, value_name = "FILE", requires = "fit")]
    pub(crate) write: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) threads: ThreadArgs,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    planner calibrate --runs my-runs.csv -o my-cluster.json\n  \
    planner calibrate --gemm gemm.csv --nccl all_reduce.log --nccl all_gather.log \\\n      \
    --cluster my-cluster-file.json -o calibration.json\n\n\
    The columns of runs are those of fixtures/published/training.csv; one to three runs are enough.\n\
    Those of products are precision, m, n, k, and time_us or tflops; device where the cluster has several.\n\
    Logs are what nccl-tests and rccl-tests print, with their list of ranks.\n\
    `planner optimize`, `estimate`, `sweep`, `pareto` and `validate` take the file with --calibration; plans keep it.")]
#[command(group(ArgGroup::new("measured").required(true).multiple(true).args(["runs", "gemm", "nccl"])))]
pub(crate) struct CalibrateArgs {
    /// Measured runs, comma-separated values under a header
    #[arg(long, value_name = "CSV")]
    pub(crate) runs: Option<String>,
    /// Measured matrix products, comma-separated values under a header
    #[arg(long, value_name = "CSV", requires = "cluster")]
    pub(crate) gemm: Option<String>,
    /// What nccl-tests printed; with its name in front, as all-gather=FILE, where the log does not say it. May be
    /// repeated
    #[arg(long, value_name = "[NAME=]LOG", requires = "cluster")]
    pub(crate) nccl: Vec<String>,
    /// File or name of the cluster that --gemm and --nccl measured
    #[arg(long, value_name = "CLUSTER")]
    pub(crate) cluster: Option<String>,
    /// Give the cluster so many nodes
    #[arg(long, value_name = "N", value_parser = counts(), requires = "cluster")]
    pub(crate) nodes: Option<u64>,
    /// Write the calibration to a file
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}
