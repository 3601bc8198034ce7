//! Cells of a run that mean nothing: a word that nobody knows would be priced as if it were not there.

use crate::row::Row;

/// A column of words.
struct Words {
    column: &'static str,
    of: fn(&Row) -> &str,
    /// Those that mean something there.
    known: &'static [&'static str],
}

/// All columns of one word.
const WORDS: [Words; 14] = [
    Words { column: "arch", of: |row| &row.arch, known: &["gpt", "llama", "moe", "moe-mla"] },
    Words { column: "activation", of: |row| &row.activation, known: &["gelu", "swiglu", "relu2"] },
    Words { column: "stack", of: |row| &row.stack, known: &STACKS },
    Words {
        column: "node_wiring",
        of: |row| &row.node_wiring,
        known: &["switch", "mesh", "torus", "torus-2d", "bus"],
    },
    Words { column: "network_routing", of: |row| &row.network_routing, known: &["balanced", "hashed"] },
    Words { column: "sequence_parallel", of: |row| &row.sequence_parallel, known: &["0", "1"] },
    Words {
        column: "precision",
        of: |row| &row.precision,
        known: &["bf16", "fp16", "fp8", "mxfp8", "nvfp4"],
    },
    Words { column: "reduce", of: |row| &row.reduce, known: &["half"] },
    Words { column: "attention", of: |row| &row.attention, known: &["flash", "flash-2", "flash-3", "eager"] },
    Words { column: "loss", of: |row| &row.loss, known: &["plain", "unfused", "fused"] },
    Words {
        column: "schedule",
        of: |row| &row.schedule,
        known: &["none", "1f1b", "interleaved", "zb-h1", "zb-h2", "balanced"],
    },
    Words { column: "dispatch", of: |row| &row.dispatch, known: &["per-node"] },
    Words { column: "expert_kernels", of: |row| &row.expert_kernels, known: &["together"] },
    Words { column: "launches", of: |row| &row.launches, known: &["graph"] },
];

/// Software whose kernels and habits are known.
const STACKS: [&str; 10] = [
    "megatron-lm",
    "megatron-deepspeed",
    "megatron-core",
    "megatron-core-deterministic",
    "fsdp",
    "fsdp-libraries",
    "fsdp-compiled",
    "internevo",
    "maxtext",
    "alpa",
];

/// What is computed again, in one word.
const RECOMPUTE: [&str; 8] = [
    "none",
    "selective",
    "full",
    "custom",
    "every-second-layer",
    "every-second-product",
    "products-kept",
    "qkv-kept",
];

/// Modules that are computed again, `+` between them.
const MODULES: [&str; 2] = ["mla-up", "mlp"];

/// What errors are summed up by.
const TIERS: [&str; 3] = ["core", "bulk", "unseen"];

/// What runs beside computation, `;` between it.
const OVERLAP: [&str; 3] = ["gradients", "tensor", "experts"];

/// ZeRO stages; `auto` begins what a framework chose.
const ZERO: [&str; 5] = ["0", "1", "2", "3", "3-whole-gradients"];

/// More of anything than a run has.
const MOST: u64 = 1 << 32;

/// Less and more than any run measures.
const LEAST_FIGURE: f64 = 1e-9;
const MOST_FIGURE: f64 = 1e9;

impl Row {
    /// The first cell that means nothing.
    ///
    /// # Errors
    /// `column recompute: expected ..., found ...`.
    pub(crate) fn check(&self) -> Result<(), String> {
        for Words { column, of, known: words } in &WORDS {
            known(column, of(self), words)?;
        }
        if !self.recompute.split('+').all(|part| MODULES.contains(&part)) {
            known("recompute", &self.recompute, &[&RECOMPUTE[..], &MODULES].concat())?;
        }
        for part in self.overlap.split(';') {
            known("overlap", part, &OVERLAP)?;
        }
        known("tier", &self.tier, &TIERS)?;
        if !self.zero.starts_with("auto") {
            known("zero", &self.zero, &[&ZERO[..], &["auto"]].concat())?;
        }
        if let Some(tied) = self.tied.filter(|tied| *tied > 1) {
            return Err(format!("column tied: expected 0 or 1, found {tied}"));
        }
        let of_experts = [
            ("experts", self.experts),
            ("topk", self.topk),
            ("expert_ffn", self.expert_ffn),
            ("shared_experts", self.shared_experts),
            ("dense_layers", self.dense_layers),
        ];
        if !self.arch.starts_with("moe")
            && let Some((column, Some(n))) = of_experts.into_iter().find(|(_, n)| n.is_some_and(|n| n > 0))
        {
            return Err(format!(
                "column {column}: {n} in arch `{}`, expected arch moe or moe-mla",
                self.arch
            ));
        }
        if !self.date.is_empty() && !self.date.starts_with(|first: char| first.is_ascii_digit()) {
            return Err(format!("column date: expected a year or a release first, found `{}`", self.date));
        }
        self.counts().into_iter().try_for_each(|(column, count)| match count {
            Some(0) => Err(format!("column {column}: expected a number from 1, or nothing, found 0")),
            Some(n) if n > MOST => Err(format!("column {column}: expected no more than {MOST}, found {n}")),
            Some(_) | None => Ok(()),
        })?;
        let figures = [
            ("capacity", "a factor", self.capacity),
            ("node_gb_per_s", "GB/s", self.node_gb_per_s),
            ("network_gb_per_s", "GB/s", self.network_gb_per_s),
            ("peak_memory_gb", "GB", self.peak_memory_gb),
            ("step_s", "seconds", self.step_s),
        ];
        let wrong = figures.into_iter().find_map(|(column, unit, figure)| {
            let figure = figure.filter(|figure| !(LEAST_FIGURE..=MOST_FIGURE).contains(figure))?;
            let what = format!("expected {unit} above 0, from {LEAST_FIGURE:e} to {MOST_FIGURE:e}");
            Some(format!("column {column}: {what}, found {figure:e}"))
        });
        wrong.map_or(Ok(()), Err)
    }

    /// Columns of what there is one of at least.
    fn counts(&self) -> [(&'static str, Option<u64>); 25] {
        [
            ("layers", Some(self.layers)),
            ("hidden", Some(self.hidden)),
            ("heads", Some(self.heads)),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("ffn", self.ffn),
            ("vocab", self.vocab),
            ("seq", Some(self.seq)),
            ("experts", self.experts),
            ("topk", self.topk),
            ("expert_ffn", self.expert_ffn),
            ("mtp_modules", self.mtp_modules),
            ("devices", Some(self.devices)),
            ("node", Some(self.node)),
            ("tp", self.tp),
            ("pp", self.pp),
            ("dp", self.dp),
            ("cp", self.cp),
            ("ep", self.ep),
            ("vpp", self.vpp.map(u64::from)),
            ("micro_batch", self.micro_batch),
            ("global_batch", self.global_batch),
            ("zero_group", self.zero_group),
            ("shared_experts", self.shared_experts.filter(|&n| n > 0)),
            ("dense_layers", self.dense_layers.filter(|&n| n > 0)),
        ]
    }
}

/// Refuses a word that is not in a list; nothing is what a source does not state.
fn known(column: &str, word: &str, words: &[&str]) -> Result<(), String> {
    if word.is_empty() || words.contains(&word) {
        return Ok(());
    }
    Err(format!("column {column}: expected {} or nothing, found `{word}`", words.join(", ")))
}
