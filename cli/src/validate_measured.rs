//! `planner validate --measured`: what the project's own script measured on one device, against its prices.

use cost_model::Constants;
use ir::units::Seconds;
use validate::measured::{LayerReport, Measured, StepReport, measured};
use validate::score::{Errors, Pair};

use crate::args::ValidateArgs;
use crate::failure::Failure;
use crate::figures::seconds;
use crate::output::json;
use crate::table::{Side, markdown, table};
use crate::terminal::Terminal;
use crate::validate::{COMPONENT_COLUMNS, component, percent, signed};

/// Prices the tables and prints the errors.
pub(crate) fn run(
    args: &ValidateArgs,
    constants: &Constants,
    terminal: &mut Terminal<'_>,
) -> Result<(), Failure> {
    let found = measured(constants).map_err(|reason| Failure::argument(reason.to_string()))?;
    let text = if args.json.json {
        json(&found)?
    } else if args.markdown {
        page(&found)
    } else {
        text(&found, args)
    };
    write!(terminal.out, "{text}")?;
    Ok(())
}

const GROUP_COLUMNS: [(&str, Side); 7] = [
    ("steps and layers", Side::Left),
    ("rows", Side::Right),
    ("mean", Side::Right),
    ("median", Side::Right),
    ("p90", Side::Right),
    ("max", Side::Right),
    ("bias", Side::Right),
];

const STEP_COLUMNS: [(&str, Side); 7] = [
    ("step", Side::Left),
    ("measured", Side::Right),
    ("predicted", Side::Right),
    ("error", Side::Right),
    ("GiB", Side::Right),
    ("predicted", Side::Right),
    ("error", Side::Right),
];

const LAYER_COLUMNS: [(&str, Side); 8] = [
    ("layer", Side::Left),
    ("forward", Side::Right),
    ("predicted", Side::Right),
    ("backward", Side::Right),
    ("predicted", Side::Right),
    ("both, launches waited for", Side::Right),
    ("error", Side::Right),
    ("kept, error", Side::Right),
];

/// A list of measured and predicted figures.
fn group(name: &str, pairs: &[Pair]) -> Vec<String> {
    let errors = Errors::of(pairs);
    let shares = [errors.mean, errors.median, errors.p90, errors.max].map(percent);
    let mut cells = vec![name.to_owned(), errors.rows.to_string()];
    cells.extend(shares);
    cells.push(signed(errors.bias));
    cells
}

/// Steps of which the device has so much to do that no launch is waited for.
fn is_busy(step: &StepReport) -> bool {
    const BUSY_S: f64 = 0.15;
    step.time.measured >= BUSY_S
}

fn groups(found: &Measured) -> Vec<Vec<String>> {
    let steps = |keep: &dyn Fn(&StepReport) -> bool, of: &dyn Fn(&StepReport) -> Pair| -> Vec<Pair> {
        found.steps.iter().filter(|step| keep(step)).map(of).collect()
    };
    // Of fewer tokens launches are waited for.
    const BUSY_TOKENS: u64 = 4096;
    let busy = |of: &dyn Fn(&LayerReport) -> Pair| -> Vec<Pair> {
        found.layers.iter().filter(|layer| layer.tokens >= BUSY_TOKENS).map(of).collect()
    };
    let few: Vec<Pair> =
        found.layers.iter().filter(|layer| layer.tokens < BUSY_TOKENS).map(|layer| layer.both).collect();
    let kept: Vec<Pair> = found.layers.iter().map(|layer| layer.kept).collect();
    vec![
        group("steps, held out", &steps(&|step| step.held_out, &|step| step.time)),
        group("other steps of 0.15 s and more", &steps(&|step| !step.held_out && is_busy(step), &|s| s.time)),
        group("shorter steps", &steps(&|step| !step.held_out && !is_busy(step), &|step| step.time)),
        group("peak memory, held out", &steps(&|step| step.held_out, &|step| step.memory)),
        group("peak memory, other steps", &steps(&|step| !step.held_out, &|step| step.memory)),
        group("layers of 4,096 tokens and more, forward", &busy(&|layer| layer.forward)),
        group("the same, backward", &busy(&|layer| layer.backward)),
        group("layers of fewer tokens, both", &few),
        group("layers, kept for backward", &kept),
    ]
}

fn step(one: &StepReport) -> Vec<String> {
    let mut cells = vec![if one.held_out { format!("{} *", one.id) } else { one.id.clone() }];
    cells.extend(times(one.time));
    cells.extend([
        format!("{:.2}", one.memory.measured),
        format!("{:.2}", one.memory.predicted),
        signed(one.memory.error()),
    ]);
    cells
}

fn times(pair: Pair) -> [String; 3] {
    [seconds(Seconds(pair.measured)), seconds(Seconds(pair.predicted)), signed(pair.error())]
}

fn layer(one: &LayerReport) -> Vec<String> {
    let [forward, backward, both] = [one.forward, one.backward, one.both].map(times);
    let mut cells = vec![one.id.clone()];
    cells.extend(forward.into_iter().take(2));
    cells.extend(backward.into_iter().take(2));
    cells.extend(both.into_iter().skip(1));
    cells.push(signed(one.kept.error()));
    cells
}

/// The three tables as `form` writes them.
type Form<'a> = &'a dyn Fn(&[(&str, Side)], &[Vec<String>]) -> String;

fn lists(found: &Measured, form: Form<'_>) -> [String; 4] {
    [
        form(&GROUP_COLUMNS, &groups(found)),
        form(&STEP_COLUMNS, &found.steps.iter().map(step).collect::<Vec<_>>()),
        form(&LAYER_COLUMNS, &found.layers.iter().map(layer).collect::<Vec<_>>()),
        form(&COMPONENT_COLUMNS, &found.operators.iter().map(component).collect::<Vec<_>>()),
    ]
}

fn text(found: &Measured, args: &ValidateArgs) -> String {
    let [groups, steps, layers, operators] = lists(found, &|columns, rows| table(columns, rows));
    let listed = if args.rows { format!("\n{steps}\n{layers}") } else { String::new() };
    format!("{groups}{listed}\n{operators}")
}

fn page(found: &Measured) -> String {
    let [groups, steps, layers, operators] = lists(found, &|columns, rows| markdown(columns, rows));
    format!("{START}\n{groups}\n{READING}\n{steps}\n{LAYERS}\n{layers}\n{OPERATORS}\n{operators}")
}

const START: &str = "# Predictions against measurements of our own

Written by `UPDATE_DOCS=1 cargo test -p tests validation::`; the same test fails where the page is not current. The tables, and the script that
made them, are in [fixtures/measured](../fixtures/measured/README.md): one H200 of 700 W, PyTorch 2.11 on CUDA 13.0, a decoder as it
is commonly written. `planner validate --measured --rows` prints what is below.

Before anything was changed, the 25 steps that were measured first were priced 29.5 % too long on average, the 22 of them that no host
holds up 10 to 40 % each, with a median of 16 %, and their peaks of memory were 5.5 % off. From them came the rates of Hopper's libraries of 2025 and after (products in 16 bits, both attention
kernels; [cost-model.md](cost-model.md) says where else they were looked for), what norms and gates keep that are put together from several
kernels, what a loss costs by its kernel, and that clipping reads and writes gradients once more. No constant was fitted to the tables.
Twelve more steps, of other lengths, batches and models, were measured after that: `held out`, with a star below.
";

const READING: &str = "\
Steps below 0.15 s wait for the host, which here launches a layer in half the time that the shipped constant says: that is one of
older machines, under frameworks that do more per module (`planner calibrate` sets `launch_s` from one such run). What a step has besides,
18 ms for data and logs, this loop has not: it shows in the next larger ones.

## Steps

Model, kernels, attention, recomputation, tokens of a sequence by sequences of a micro-batch by micro-batches. Memory is
`max_memory_allocated`, against the predicted peak without its reserve.
";

const LAYERS: &str = "\
## Layers

One layer with its weight gradients added up in fp32, by itself and with nothing to wait for: devices are cooler than in a step. Predicted is
what a step of two layers takes, keeps and computes over that of one.
";

const OPERATORS: &str = "\
## Operators

Isolated and repeated, over operands that no cache holds. Prices are those of whole steps, in which clocks are lower: `bias` above zero
is what a step loses. What PyTorch puts together from several kernels is priced in the layers above.
";
