//! A measured training run as the tables of `fixtures/published` have it, and nothing of what it means.

use csv::StringRecord;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// One run. An empty cell is what the source does not state.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Name of the row.
    pub id: String,
    /// Name of the source; `fixtures/published/README.md` says where it is.
    pub source: String,
    /// `core`; `bulk` for one large sweep that would drown everything else; `unseen` where it came after the constants
    /// were fitted, and no fit has seen it.
    pub tier: String,
    /// 2: everything that a price needs is stated; 1: one thing is not; 0: more.
    pub complete: u8,
    /// Software.
    pub stack: String,
    /// When it was published.
    pub date: String,
    /// `gpt` (two-matrix MLP), `llama` (gated), `moe`, `moe-mla`.
    pub arch: String,
    /// Decoder layers.
    pub layers: u64,
    /// Width of the stream.
    pub hidden: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: Option<u64>,
    /// Length of a head.
    pub head_dim: Option<u64>,
    /// Inner width of the MLP.
    pub ffn: Option<u64>,
    /// Function between its products.
    pub activation: String,
    /// Vocabulary as trained, padding included.
    pub vocab: Option<u64>,
    /// 1 where the embedding's table is the head's too; GPT-2's always is.
    #[serde(default)]
    pub tied: Option<u8>,
    /// Tokens of a sequence.
    pub seq: u64,
    /// Experts.
    pub experts: Option<u64>,
    /// Experts of a token.
    pub topk: Option<u64>,
    /// Inner width of an expert.
    pub expert_ffn: Option<u64>,
    /// Experts of every token.
    pub shared_experts: Option<u64>,
    /// Layers with a dense MLP among those with experts.
    pub dense_layers: Option<u64>,
    /// Modules for multi-token prediction behind the decoder, each with a layer of its last kind.
    #[serde(default)]
    pub mtp_modules: Option<u64>,
    /// Tokens that an expert takes over those that it gets on average, where the rest is dropped.
    #[serde(default)]
    pub capacity: Option<f64>,
    /// Device, by its name in `fixtures/devices.json`.
    pub device: String,
    /// Devices of the run.
    pub devices: u64,
    /// Devices of a node.
    pub node: u64,
    /// How the devices of a node are wired, where not by switches: `mesh`, `torus`, `torus-2d`.
    #[serde(default)]
    pub node_wiring: String,
    /// Link inside the node, per device and direction.
    pub node_gb_per_s: Option<f64>,
    /// Network, per device and direction.
    pub network_gb_per_s: Option<f64>,
    /// How flows find their way through it, where by chance: `hashed`.
    #[serde(default)]
    pub network_routing: String,
    /// Tensor-parallel degree.
    pub tp: Option<u64>,
    /// Pipeline stages.
    pub pp: Option<u64>,
    /// Data-parallel degree.
    pub dp: Option<u64>,
    /// Context-parallel degree.
    pub cp: Option<u64>,
    /// Expert-parallel degree.
    pub ep: Option<u64>,
    /// Virtual stages of a rank.
    pub vpp: Option<u32>,
    /// Sequences of a micro-batch on a replica.
    pub micro_batch: Option<u64>,
    /// Sequences of a step.
    pub global_batch: Option<u64>,
    /// `1` where the stream is cut along the sequence between tensor-parallel products.
    pub sequence_parallel: String,
    /// `none`, `selective`, `full`, `custom`, `every-second-layer`, `every-second-product` (and all that is no product
    /// nor the attention core), `products-kept` (all but products with weights), `qkv-kept` (all but queries, keys and
    /// values), or what is computed again, `+` between it: `mla-up` (latent attention's projections up), `mlp` (of
    /// dense layers among those with experts).
    pub recompute: String,
    /// ZeRO stage, `3-whole-gradients` where gradients are summed whole over micro-batches, or words where the
    /// framework chose.
    pub zero: String,
    /// Ranks over which ZeRO cuts, where these are not all that are data parallel.
    #[serde(default)]
    pub zero_group: Option<u64>,
    /// Number format.
    pub precision: String,
    /// `half` where gradients are reduced in the job's format.
    pub reduce: String,
    /// `flash`, `flash-2`, `flash-3` (the device's own, whatever the software has by default), `eager`.
    pub attention: String,
    /// How the loss over the vocabulary is computed, where not as the software has it by default: `plain`, `unfused`,
    /// `fused`.
    #[serde(default)]
    pub loss: String,
    /// `none`, `1f1b`, `interleaved`, `zb-h1`, `zb-h2`, `balanced` (1F1B with layers cut to even out the vocabulary).
    pub schedule: String,
    /// Decoder layers of each chunk in turn, a space between them, where they are known and uneven; modules stand with
    /// the head.
    #[serde(default)]
    pub layers_per_stage: String,
    /// What runs beside computation, separated by `;`: `gradients`, `tensor`, `experts` (tokens to experts, beside
    /// another micro-batch).
    pub overlap: String,
    /// `per-node` where a token crosses to a node and to a device once, however many experts it has there.
    #[serde(default)]
    pub dispatch: String,
    /// `together` where one kernel runs all experts of a device.
    #[serde(default)]
    pub expert_kernels: String,
    /// `graph` where the device launches a whole step by itself.
    #[serde(default)]
    pub launches: String,
    /// Measured time of a step.
    pub step_s: Option<f64>,
    /// Measured peak of device memory.
    pub peak_memory_gb: Option<f64>,
    /// What that peak is.
    pub memory_kind: String,
    /// 1 where the run died of memory.
    pub oom: u8,
    /// Cells that were computed from others, `;` between them.
    pub derived: String,
}

impl Row {
    /// Whether the row came after the constants were fitted.
    pub fn is_unseen(&self) -> bool {
        self.tier == "unseen"
    }

    /// Seconds of a step, where some were measured.
    pub fn measured(&self) -> Option<f64> {
        self.step_s.filter(|time| *time > 0.0 && time.is_finite())
    }

    /// Whether layers of the model choose among experts.
    pub fn is_mixture(&self) -> bool {
        self.experts.is_some()
    }
}

/// Rows of a text with comma-separated values under a header.
///
/// # Errors
/// Line and column of what cannot be read.
pub fn read(text: &str) -> Result<Vec<Row>, RowError> {
    let rows: Vec<Row> = read_as(text)?;
    for (at, row) in rows.iter().enumerate() {
        let named = |what: String| RowError(format!("row {} ({}), {what}", at + 1, row.id));
        row.check().map_err(named)?;
    }
    Ok(rows)
}

/// What is wrong with a table: `line 3, column time_us: invalid float literal`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RowError(String);

/// Rows of any form; `T` says which columns there are.
///
/// # Errors
/// Line and column of what cannot be read.
pub fn read_as<T: DeserializeOwned>(text: &str) -> Result<Vec<T>, RowError> {
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let header = reader.headers().map_err(|error| fault(&error, &StringRecord::new()))?.clone();
    reader.deserialize().collect::<Result<_, _>>().map_err(|error| fault(&error, &header))
}

/// csv names a column by its number.
fn fault(error: &csv::Error, header: &StringRecord) -> RowError {
    let csv::ErrorKind::Deserialize { pos, err } = error.kind() else {
        return RowError(error.to_string());
    };
    let what = err.kind().to_string();
    if let Some(column) = what.strip_prefix("missing field ") {
        return RowError(format!("the header has no column {column}"));
    }
    // Where lines end in two characters the position is that of the line before.
    let line = pos.as_ref().map_or(0, |pos| pos.line().max(pos.record() + 1));
    let column = err.field().and_then(|at| header.get(usize::try_from(at).ok()?));
    let column = column.map_or(String::new(), |name| format!(", column {name}"));
    RowError(format!("line {line}{column}: {what}"))
}

/// The rows that are shipped.
pub fn shipped() -> Vec<Row> {
    let tables = [
        include_str!("../../fixtures/published/training.csv"),
        include_str!("../../fixtures/published/single-node.csv"),
        include_str!("../../fixtures/published/unseen.csv"),
    ];
    tables.iter().flat_map(|table| read(table).expect("a test reads the embedded tables")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_tables_are_whole() {
        let rows = shipped();
        assert_eq!(rows.iter().filter(|row| row.tier == "bulk").count(), 1440);
        let mut ids: Vec<&str> = rows.iter().map(|row| row.id.as_str()).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), rows.len(), "names are unique");
        let degrees = |row: &Row| Some(row.tp? * row.pp? * row.dp? * row.cp?);
        assert!(rows.iter().all(|row| degrees(row).is_none_or(|n| n == row.devices)));
    }

    #[test]
    fn a_broken_cell_is_named() {
        let header = include_str!("../../fixtures/published/training.csv").lines().next().unwrap();
        let cells = vec!["x"; header.split(',').count()].join(",");
        let error = read(&format!("{header}\n{cells}\n")).unwrap_err().to_string();
        assert_eq!(error, "line 2, column complete: invalid digit found in string");
        let error = read(&format!("{header}\r\n{cells}\r\n")).unwrap_err().to_string();
        assert_eq!(error, "line 2, column complete: invalid digit found in string");
    }

    #[test]
    fn a_cell_that_means_nothing_is_named() {
        let table = include_str!("../../fixtures/published/training.csv");
        let lines: Vec<&str> = table.lines().take(2).collect();
        let columns: Vec<&str> = lines[0].split(',').collect();
        let with = |column: &str, cell: &str| {
            let at = columns.iter().position(|name| *name == column).unwrap();
            let mut cells: Vec<&str> = lines[1].split(',').collect();
            cells[at] = cell;
            read(&format!("{}\n{}\n", lines[0], cells.join(","))).map_err(|error| error.to_string())
        };
        assert!(with("recompute", "full").is_ok() && with("overlap", "gradients;tensor").is_ok());
        for (column, cell) in [
            ("recompute", "Full"),
            ("recompute", "mlp+zzz"),
            ("stack", "zzz"),
            ("attention", "Flash"),
            ("date", "zzz"),
            ("zero", "7"),
            ("zero", "-1"),
            ("schedule", "GPipe"),
            ("overlap", "all"),
            ("sequence_parallel", "yes"),
            ("capacity", "-1"),
            ("step_s", "-14"),
            ("step_s", "1e-300"),
            ("peak_memory_gb", "1e308"),
            ("tier", "zzz"),
            ("tp", "0"),
            ("micro_batch", "0"),
        ] {
            let error = with(column, cell).unwrap_err();
            assert!(error.starts_with("row 1 (") && error.contains(&format!("column {column}: ")), "{error}");
        }
    }
}
