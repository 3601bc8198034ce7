//! The table of what runs: every strategy and schedule, dense and with experts, in double, single and bf16 precision.

use std::collections::BTreeMap;

use ir::mesh::Mesh;
use ir::plan::Plan;
use ir::schedule::Schedule;
use serde_json::Value;

use crate::fuzz::{Case, Devices, Family, MAX_RANKS, ModelSizes, Shares, model};
use crate::planner;

mod features;
mod wishes;

use wishes::Wishes;

/// A small plan to be made.
#[derive(Clone, Debug)]
pub struct Recipe {
    case: Case,
    schedule: Schedule,
    wishes: Wishes,
    capacity: Option<f64>,
    n_nodes: u64,
    last_stage: Width,
}

/// Devices of the last stage along the outermost axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    /// As many as the others have.
    Alike,
    /// Twice as many.
    Double,
}

impl Recipe {
    fn of(wishes: Wishes) -> Self {
        let sizes = ModelSizes {
            n_layers: 2,
            kv_heads: 2,
            group: 2,
            half_dim: 2,
            mlp: 12,
            expert_pairs: 2,
            top_k: 2,
            vocabulary: 12,
            tied: false,
            lora: 0,
            mtp: 0,
            tower: 0,
        };
        let over_batch = wishes.axes.iter().filter(|axis| axis.stream == Some(0)).map(|axis| axis.size);
        let case = Case {
            family: Family::Llama,
            sizes,
            axes: wishes.axes.iter().map(|axis| axis.size).collect(),
            n_stages: 1,
            schedule: 0,
            n_micro_batches: 2,
            micro_batch: over_batch.product(),
            sequence: 8,
            shares: Shares::Equal,
            devices: Devices::Alone,
            decisions: Vec::new(),
        };
        Self {
            case,
            schedule: Schedule::OneFOneB,
            wishes,
            capacity: None,
            n_nodes: 1,
            last_stage: Width::Alike,
        }
    }

    fn family(mut self, family: Family) -> Self {
        self.case.family = family;
        self
    }

    fn sizes(mut self, change: fn(&mut ModelSizes)) -> Self {
        change(&mut self.case.sizes);
        self
    }

    fn sequence(mut self, tokens: u64) -> Self {
        self.case.sequence = tokens;
        self
    }

    fn stages(mut self, n_stages: u32) -> Self {
        self.case.n_stages = n_stages;
        self
    }

    fn schedule(mut self, schedule: Schedule) -> Self {
        self.schedule = schedule;
        self
    }

    fn micro_batches(mut self, n: u32) -> Self {
        self.case.n_micro_batches = n;
        self
    }

    fn capacity(mut self, factor: f64) -> Self {
        self.capacity = Some(factor);
        self
    }

    /// Four devices in a node.
    fn small_nodes(mut self) -> Self {
        self.n_nodes = MAX_RANKS / 4;
        self
    }

    /// A last stage that is twice as wide.
    fn wider(mut self) -> Self {
        self.case.micro_batch *= 2;
        self.last_stage = Width::Double;
        self
    }

    /// The plan; `None` where something that is wished is not legal.
    pub fn plan(&self) -> Option<Plan> {
        let mut model = model(self.case.family, &self.case.sizes)?;
        if let Some(factor) = self.capacity {
            frontends::capacity::limit_experts(&mut model, factor);
        }
        let mesh = Mesh::of_sizes(&self.case.axes)?;
        let order = (self.schedule, self.case.n_micro_batches);
        let plan = self.case.on_nodes(self.n_nodes, (&model, mesh), order, &mut self.wishes.clone())?;
        Some(match self.last_stage {
            Width::Alike => plan,
            Width::Double => widened(plan),
        })
    }
}

/// A plan in as many chunks as stages, the last of them on twice as many devices, with entries of its own.
fn widened(mut plan: Plan) -> Plan {
    plan.stage_meshes = vec![plan.mesh.clone(); plan.n_stages as usize];
    for mesh in plan.stage_meshes.iter_mut().rev().take(1) {
        mesh.axes[0].size *= 2;
    }
    let (mut entries, mut number) = (Vec::new(), BTreeMap::new());
    let last = plan.chunks.len().saturating_sub(1);
    for (chunk, runs) in plan.chunks.iter_mut().enumerate() {
        for run in runs {
            let of = (run.entry, chunk == last);
            run.entry = *number.entry(of).or_insert_with(|| {
                entries.push(plan.entries[of.0].clone());
                entries.len() - 1
            });
        }
    }
    plan.entries = entries;
    plan
}

/// One row of the table.
#[derive(Clone, Debug)]
pub struct Feature {
    /// As the literature calls it.
    pub name: String,
    /// The plan for a dense model, or why there is none.
    pub dense: Result<Recipe, &'static str>,
    /// The plan for a model with experts, or why there is none.
    pub routed: Result<Recipe, &'static str>,
}

/// Every row.
pub fn features() -> Vec<Feature> {
    features::all()
}

/// What a run showed: what the planner calls the plan, and what was counted in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
    /// Roles as `planner` derives them from the plan: another witness that it is what its row says.
    pub roles: String,
    /// Ranks that ran.
    pub n_ranks: u64,
    /// Bytes sent by all ranks in double precision, predicted and counted.
    pub sent: u64,
    /// Largest arena of a rank in double precision, planned and used.
    pub peak: u64,
    /// Number formats in which all of it was equal.
    pub formats: Vec<String>,
}

/// Verifies the plan in a file, as it is, in double, single and bf16 precision. An error is what the command said.
pub fn show(file: &std::path::Path) -> Result<Shown, String> {
    let (name, ranks) = (file.to_string_lossy(), MAX_RANKS.to_string());
    let said = planner(&["verify", &name, "--whole", "--precision", "all", "--ranks", &ranks, "--json"]);
    let verdict: Value = serde_json::from_str(&said.out).map_err(|_| said.to_string())?;
    let runs = verdict["runs"].as_array().ok_or("no runs")?;
    if said.code != 0 {
        return Err(said.err);
    }
    let checks = |list: &str| -> Vec<u64> {
        let rows = runs[0][list].as_array().map(Vec::as_slice).unwrap_or_default();
        rows.iter().filter_map(|row| row["counted"].as_u64()).collect()
    };
    Ok(Shown {
        roles: verdict["roles"].as_str().unwrap_or_default().into(),
        n_ranks: verdict["n_ranks"].as_u64().unwrap_or(0),
        sent: checks("bytes").iter().sum(),
        peak: checks("arena").into_iter().max().unwrap_or(0),
        formats: runs.iter().filter_map(|run| run["precision"].as_str()).map(str::to_owned).collect(),
    })
}
