//! The page of the documentation on predictions against published runs.

use validate::few_runs::FewRuns;
use validate::memory::MemorySource;
use validate::report::{RowReport, Validation};

use crate::table::markdown;
use crate::validate::{
    FEW_RUNS_COLUMNS, N_WORST, OMITTED_COLUMNS, ROW_COLUMNS, SOURCE_COLUMNS, errors_of, few_runs_headline,
    few_runs_row, headline, of_experts, of_unseen, of_unseen_experts, reasons, rows_of, source,
};
use crate::validate_memory;

/// Rows that no fit has seen in the list of those that are farthest off.
const N_WORST_UNSEEN: usize = 25;

/// The page of the documentation.
pub(crate) fn page(found: &Validation, few: &[FewRuns], memory: &[MemorySource]) -> String {
    let sources: Vec<Vec<String>> = found.sources.iter().map(source).collect();
    let worst = errors_of(&found.worst(N_WORST));
    let experts: Vec<(&str, &RowReport)> = rows_of(&found.experts.by_release);
    let unseen = found.worst_unseen(N_WORST_UNSEEN);
    let unseen_experts: Vec<Vec<String>> = found.unseen_experts.iter().map(source).collect();
    format!(
        "{PAGE_START}\n{}.\n\n{PAGE_SOURCES}\n{}\n{PAGE_UNSEEN}\n{}.\n\n{}\n{}.\n\n{}\nThose that are farthest off:\n\n{}\n{PAGE_FEW_RUNS}\n{}.\n\n{}\n{PAGE_EXPERTS}\n{}.\n\n{}\n{}\n{}\n{PAGE_MEMORY}\n{}\n## Farthest off\n\n{}\n## Not priced\n\n{}",
        headline(found),
        markdown(&SOURCE_COLUMNS, &sources),
        of_unseen(found),
        markdown(&SOURCE_COLUMNS, &found.unseen.iter().map(source).collect::<Vec<_>>()),
        of_unseen_experts(found),
        markdown(&SOURCE_COLUMNS, &unseen_experts),
        markdown(&ROW_COLUMNS, &errors_of(&unseen)),
        few_runs_headline(few),
        markdown(&FEW_RUNS_COLUMNS, &few.iter().map(few_runs_row).collect::<Vec<_>>()),
        of_experts(found),
        markdown(&SOURCE_COLUMNS, &found.experts.by_release.iter().map(source).collect::<Vec<_>>()),
        markdown(&SOURCE_COLUMNS, &found.experts.by_model.iter().map(source).collect::<Vec<_>>()),
        markdown(&ROW_COLUMNS, &errors_of(&experts)),
        markdown(&validate_memory::COLUMNS, &memory.iter().map(validate_memory::row).collect::<Vec<_>>()),
        markdown(&ROW_COLUMNS, &worst),
        markdown(&OMITTED_COLUMNS, &reasons(found)),
    )
}

const PAGE_START: &str = "# Predictions against published training runs

Written by `UPDATE_DOCS=1 cargo test -p tests validation::`; the same test fails where the page is not current. Rows and
sources are those of [fixtures/published](../fixtures/published/README.md). Every row is priced by the code that `planner
estimate` runs, with one set of constants; [fit.md](fit.md) says how they were found and how they hold on sources that were
left out.

## Errors
";

const PAGE_SOURCES: &str = "\
Where recomputation is not stated, nothing is computed again if that fits, else what the search chooses. An error is predicted over measured step time, less one. `scaled`: mean error after one factor per source, the median: what a
calibration of its software and cluster by one figure would leave. `sweeps`: jobs that a source ran under three and more
plans; the rank correlation inside them, and what is lost by taking the plan that is predicted to be fastest. Sources of
which something is not stated, and the bulk sweep, do not count in the mean.
";

const PAGE_EXPERTS: &str = "\
## Mixtures of experts

None of these counts above or had a part in the fit, and no constant was fitted to them: how far the same prices are off where layers choose
among experts, under the dispatcher that each row's software has by its recipes
([fixtures/published](../fixtures/published/README.md) says where they stand; [cost-model.md](cost-model.md) how each is priced):

| dispatcher | of the rows |
| --- | --- |
| token-drop: a capacity of 1, all slots sent to the devices of their experts | megatron-bridge 25.09 but DeepSeek-V3 on H100 |
| dropless, every copy of a token sent, by `alltoall` | simumax-b200, Qwen3-30B on H100 and all on B200 in 25.11, 26.02.01 |
| dropless, a token once to a node and once to a device (`--engine dispatch=per-node`): DeepEP, HybridEP | the others |
| the same, beside another micro-batch (`exchange-overlap=beside`) | DeepSeek-V3 on H100 in 25.09, on B200 in 26.04.01, on GB300 in 26.06; Qwen3-30B on B300 in 26.06 |
| host-bound: dropless experts launched one by one, whose host waits for their counts (`experts=each`) | all dropless ones but the two with fused expert kernels in 26.06 |
| graph: the device launches the whole step (`launches=graph`) | Qwen3-30B on GB200 and B200 in 25.09; DeepSeek-V3 on GB300 and Qwen3-30B on B300 in 26.06 |

That experts run one after another, that their tokens are sorted twice and that the host waits for their number was found by looking at these rows;
which of them have which dispatcher was not. All runs of DeepSeek-V3 by megatron-bridge but four of 25.11 have a module for multi-token prediction, and are priced
with it. Attention in eight bits (26.06) is not priced, nor a shared expert beside the exchange. The same plan takes up to twice as long under one release as
under the next, so `scaled` is after one factor per release.
";

const PAGE_UNSEEN: &str = "\
## Sources that no fit has seen

Looked for when the constants were long fitted, in what teams publish of their own software on their own machines, and priced as they stand: none of
them counts above or has a part in any fit. What they are about, and what of them is not stated, is said beside the table of
[fixtures/published](../fixtures/published/README.md). The first six (torchtitan, fms-fsdp, tinyllama) were looked at before the others were found, and two terms of the model came of them, both from facts and
neither with a constant fitted to them: the clock of devices whose power is limited (without it torchtitan-h100 is 5.7 % too short on average), and
what PyTorch puts together from several kernels where nothing is compiled (its runs without compilation were 13 % too short, those with it 2 %).
Before both their equal-weight mean was 7.9 %, with them 6.6 %. The others are priced by the model as it stood when they were found, but what is not stated of them was in part settled with their figures
in view: zero-bubble-a100's recomputation by its peaks (3.6 % before), automodel-moe-h100's kernels by its software (33 % before), dgxc-nemo-h100's recomputation by its launcher (6.9 %). Four schedules of
zero-bubble-a100, of which no fit had seen two, and slices of TPUs, whose rates were never fitted to anything, are among the nearest.

Until then H200, and H100 in 16 bits with software of late 2024 and after, were a tenth faster than priced, and all 17 were 7.8 % off. What closed it is measured on a device of our own ([measured.md](measured.md)), not fitted to these rows: the rates of
libraries of 2025 and after on Hopper, which rows have by their date. What is left of the largest: kempnerforge-h200 on one device runs at 68 % of the peak, what is computed again
included, which no layer measured on such a device does (so it may not compute all again); its 70B waits for a network that is not stated, and on eight devices for memory; torchtitan's
CP 2 at 65,536 tokens is faster per token than its own CP 4 and 8 allow for (its attention runs at twice the rate there), its asynchronous tensor parallelism hides less than Megatron-Core's chunks do, and at 500 W its attention is not as fast as at 700. No claim is
made of mixtures of experts.
";

const PAGE_MEMORY: &str = "\
## Peak memory

Predicted against measured, on the device with most of those that the source looked at. *Allocated* is what frameworks count:
tensors alive; *reserved* what their allocator holds, 1.05 times that. *Taken* is what `nvidia-smi` shows: also what the allocator loses to fragments, the context, libraries and the
buffers of communicators, the reserve. Nothing of it is fitted: 5 % of what is allocated and freed, 0.6 GiB of context, and four
communicators whose buffers grow with the link (0.57 GiB each at 300 GB/s); a cluster file's `reserve_gib` and calibrations set it
otherwise. DeepSpeed copies more than Megatron-LM (`copies`, `stage-outputs` of `--engine`), and its versions differ: the engine of a
row is that of its date. Rows whose planner does not tell how it cut states over replicas (Alpa's `auto`) are left out, and so are
korthikanti-2022's, whose peaks are the formulas of the paper. Of runs that died of memory the last column says how many are predicted
to need more than a device has.
";

const PAGE_FEW_RUNS: &str = "\
## After a calibration by a few runs

One row of a source, or three that lie evenly in its table, go to the code behind `planner calibrate`; the other rows are
predicted with the shipped constants (`before`) and with the calibration. Rows are drawn eight times; errors are of all draws.
";
