//! Every strategy and schedule of the space, each as a small plan that has it.

use ir::collective::Algorithm;
use ir::program::{Home, StateHome};
use ir::schedule::Schedule;
use ir::token_order::TokenOrder;

use super::wishes::{Again, AxisWish, Wishes};
use super::{Feature, Recipe};
use crate::fuzz::Family;

/// Loops of a list of operators.
type Cuts = &'static [(&'static str, &'static [&'static str])];

const fn axis(stream: Option<u8>, cuts: Cuts) -> AxisWish {
    AxisWish { size: 2, stream, cuts }
}

const DATA: AxisWish = axis(Some(0), &[("", &["b"])]);
const TENSOR: AxisWish = axis(None, &[("", &["k", "f", "v"])]);
const TENSOR_SEQUENCE: AxisWish = axis(Some(1), &[("", &["k", "f", "v", "s"])]);
const GATHERED: AxisWish = axis(Some(1), &[("", &["s"])]);
const RING: AxisWish = axis(Some(1), &[("core", &["ring"]), ("", &["s"])]);
const ULYSSES: AxisWish = axis(Some(1), &[("core", &["k"]), ("", &["s"])]);
const EXPERTS: AxisWish = axis(Some(0), &[("dispatch", &["b"]), ("combine", &["b"]), ("", &["e", "b"])]);
/// Tensor parallel outside experts, expert parallel inside them.
const FOLDED: AxisWish =
    axis(Some(1), &[("dispatch", &["s"]), ("combine", &["s"]), ("", &["e", "k", "v", "s"])]);
/// Key heads on one axis, the queries of each on another: the keys and values are the same along it.
const GROUPS: AxisWish = axis(None, &[("", &["r", "f", "v"])]);
/// The columns of a grid of devices: results cut along hidden.
const GRID: AxisWish = axis(
    Some(2),
    &[
        ("attention.out", &["h"]),
        ("down", &["h"]),
        ("lookup", &["h"]),
        ("logits", &["v"]),
        ("", &["k", "f", "v", "h", "s"]),
    ],
);
/// The axis of a cube along which inner sums of products run.
const CUBE_COLUMNS: AxisWish = axis(
    Some(0),
    &[
        ("attention.out", &["k"]),
        ("down", &["f"]),
        ("logits", &["v"]),
        ("lookup", &["b"]),
        ("", &["k", "f", "b"]),
    ],
);
const CUBE_INNER: AxisWish = axis(
    Some(2),
    &[
        ("attention.q", &["h"]),
        ("attention.k", &["h"]),
        ("attention.v", &["h"]),
        ("attention.out", &["h"]),
        ("gate", &["h"]),
        ("up", &["h"]),
        ("down", &["h"]),
        ("lookup", &["h"]),
        ("", &["b", "h"]),
    ],
);

const fn wide(wish: AxisWish, size: u64) -> AxisWish {
    AxisWish { size, ..wish }
}

fn plain(axes: &[AxisWish]) -> Recipe {
    Recipe::of(Wishes::of(axes))
}

/// The same plan for the dense and for the routed family.
fn both(name: &str, recipe: Recipe) -> Feature {
    Feature {
        name: name.into(),
        dense: Ok(recipe.clone().family(Family::Llama)),
        routed: Ok(recipe.family(Family::Mixtral)),
    }
}

/// Only where there are experts.
fn routed(name: &str, recipe: Recipe) -> Feature {
    Feature {
        name: name.into(),
        dense: Err("a dense model has no experts"),
        routed: Ok(recipe.family(Family::Mixtral)),
    }
}

fn stored(axes: &[AxisWish], storage: [&'static [usize]; 3]) -> Recipe {
    Recipe::of(Wishes { storage, ..Wishes::of(axes) })
}

/// Optimizer states in the host's memory.
fn offloaded(axes: &[AxisWish], storage: [&'static [usize]; 3]) -> Recipe {
    Recipe::of(Wishes { storage, home: StateHome::Host, ..Wishes::of(axes) })
}

/// Optimizer states on the host's drives.
fn on_nvme(axes: &[AxisWish], storage: [&'static [usize]; 3]) -> Recipe {
    Recipe::of(Wishes { storage, home: StateHome::Nvme, ..Wishes::of(axes) })
}

/// Parameters in the host's memory between uses, and optimizer states in one of the two.
fn infinity(axes: &[AxisWish], storage: [&'static [usize]; 3], home: StateHome) -> Recipe {
    Recipe::of(Wishes { storage, home, parameters: Home::Host, ..Wishes::of(axes) })
}

/// What layers keep in the host's memory, and what backward computes again.
fn kept_on_host(axes: &[AxisWish], again: Again) -> Recipe {
    Recipe::of(Wishes { again, kept: Home::Host, ..Wishes::of(axes) })
}

fn ordered(axes: &[AxisWish], order: TokenOrder) -> Recipe {
    Recipe::of(Wishes { order, ..Wishes::of(axes) })
}

fn again(again: Again) -> Recipe {
    Recipe::of(Wishes { again, ..Wishes::of(&[DATA, TENSOR]) })
}

/// The whole list.
pub(super) fn all() -> Vec<Feature> {
    let mut list = vec![both("one device", plain(&[]))];
    list.extend(storage());
    list.extend(tensors());
    list.extend(sequences());
    list.extend(experts());
    list.extend(models());
    list.extend(recomputation());
    list.extend(algorithms());
    list.extend(schedules());
    list.extend(unequal());
    list
}

/// Stages on meshes of other lengths.
fn unequal() -> Vec<Feature> {
    let data = stored(&[DATA], [&[0]; 3]).stages(2).wider();
    let both = stored(&[DATA, TENSOR_SEQUENCE], [&[0]; 3]).stages(2).wider();
    vec![
        self::both("stages of unequal width", data),
        self::both("stages of unequal width, tensor parallel", both),
    ]
}

fn storage() -> Vec<Feature> {
    let data = [wide(DATA, 4)];
    vec![
        both("data parallel (DDP)", plain(&data)),
        both("ZeRO-1", stored(&data, [&[], &[], &[0]])),
        both("ZeRO-2", stored(&data, [&[], &[0], &[0]])),
        both("ZeRO-3, FSDP", stored(&data, [&[0]; 3])),
        both("ZeRO-3, gradients whole until the step (no_sync)", stored(&data, [&[0], &[], &[0]])),
        both("optimizer on the host", offloaded(&data, [&[]; 3])),
        both("ZeRO-2, optimizer on the host (ZeRO-Offload)", offloaded(&data, [&[], &[0], &[0]])),
        both("ZeRO-3, optimizer on the host", offloaded(&data, [&[0]; 3])),
        both("parameters on the host", infinity(&data, [&[]; 3], StateHome::Device)),
        both(
            "ZeRO-3, optimizer and parameters on the host (ZeRO-Infinity)",
            infinity(&data, [&[0]; 3], StateHome::Host),
        ),
        both("optimizer on NVMe drives", on_nvme(&data, [&[]; 3])),
        both("ZeRO-3, optimizer on NVMe drives (ZeRO-Infinity)", on_nvme(&data, [&[0]; 3])),
        both(
            "ZeRO-3, optimizer on NVMe drives, parameters on the host",
            infinity(&data, [&[0]; 3], StateHome::Nvme),
        ),
        both("hybrid sharding (HSDP, MiCS)", stored(&[DATA, DATA], [&[1]; 3])),
        both("own factor for each state (AMSP)", stored(&[DATA, DATA, DATA], [&[2], &[1], &[0, 1, 2]])),
    ]
}

fn tensors() -> Vec<Feature> {
    vec![
        both("tensor parallel 1-D", plain(&[TENSOR])),
        both("tensor and sequence parallel", plain(&[TENSOR_SEQUENCE])),
        both("tensor parallel 2-D (SUMMA)", stored(&[DATA, GRID], [&[0]; 3])),
        both("tensor parallel 2.5-D", stored(&[DATA, DATA, GRID], [&[1]; 3])),
        both("tensor parallel 3-D", stored(&[DATA, CUBE_COLUMNS, CUBE_INNER], [&[0]; 3])),
        both("more devices than key heads", plain(&[TENSOR, GROUPS])),
        both(
            "three devices, odd sizes",
            plain(&[wide(TENSOR_SEQUENCE, 3)]).sizes(|sizes| sizes.vocabulary = 35).sequence(9),
        ),
    ]
}

fn sequences() -> Vec<Feature> {
    let cp = [wide(RING, 4)];
    vec![
        both("context parallel, keys gathered", plain(&[wide(GATHERED, 4)])),
        both("gathered, zig-zag order", ordered(&[wide(GATHERED, 4)], TokenOrder::ZigZag)),
        both("ring attention", plain(&cp)),
        both("ring attention, zig-zag order", ordered(&cp, TokenOrder::ZigZag)),
        both("ring attention, striped order", ordered(&cp, TokenOrder::Striped)),
        both("Ulysses", plain(&[ULYSSES])),
        both("Ulysses x ring, zig-zag order", ordered(&[ULYSSES, RING], TokenOrder::ZigZag)),
    ]
}

fn experts() -> Vec<Feature> {
    let folded = [DATA, EXPERTS, TENSOR];
    vec![
        routed("expert parallel", plain(&[wide(EXPERTS, 4)])),
        routed("expert and expert tensor parallel", plain(&[EXPERTS, TENSOR])),
        routed("EP x ETP x expert data parallel", stored(&folded, [&[], &[], &[0, 1]])),
        routed("experts folded over tensor parallel", plain(&[DATA, FOLDED])),
        routed("copies of experts", plain(&[DATA, EXPERTS])),
        routed("more copies than experts cut", plain(&[wide(DATA, 4), EXPERTS])),
        routed("capacity, drops counted", plain(&[EXPERTS]).capacity(1.0)),
        Feature {
            name: "shared experts".into(),
            dense: Err("a dense model has no experts"),
            routed: Ok(plain(&[EXPERTS, TENSOR]).family(Family::DeepSeekV2)),
        },
    ]
}

/// Of two families: what the first shows densely and the second with experts.
fn families(name: &str, recipe: Recipe, dense: Family, routed: Result<Family, &'static str>) -> Feature {
    let routed = routed.map(|family| recipe.clone().family(family));
    Feature { name: name.into(), dense: Ok(recipe.family(dense)), routed }
}

fn models() -> Vec<Feature> {
    let tp = || plain(&[DATA, TENSOR]);
    let tied = tp().stages(2).sizes(|sizes| sizes.tied = true);
    vec![
        both("vocabulary parallel, odd rows", plain(&[TENSOR_SEQUENCE]).sizes(|sizes| sizes.vocabulary = 17)),
        both("tied embedding across stages", tied),
        both("tied embedding held once", tp().sizes(|sizes| sizes.tied = true)),
        Feature {
            name: "latent attention (MLA)".into(),
            dense: Err("the families with latent attention have experts; their first layers are dense"),
            routed: Ok(tp().family(Family::DeepSeekV3)),
        },
        families("sliding window", tp(), Family::Gemma2, Ok(Family::GptOss)),
        families("learned positions, biases", tp(), Family::Gpt2, Err("no such family")),
        families("position bias by head", tp(), Family::Bloom, Err("no such family")),
        families("attention beside the MLP", tp(), Family::Falcon, Err("no such family")),
        families(
            "multi-token prediction: embedding and head on other stages than the module's",
            tp().stages(4).sizes(|sizes| (sizes.mtp, sizes.n_layers) = (1, 3)),
            Family::Llama,
            Ok(Family::DeepSeekV3),
        ),
        both(
            "two predictions further ahead, sequences cut",
            plain(&[RING, TENSOR_SEQUENCE]).sizes(|sizes| sizes.mtp = 2),
        ),
        routed(
            "predictions further ahead, expert parallel",
            stored(&[wide(EXPERTS, 4)], [&[0]; 3]).stages(2).sizes(|sizes| sizes.mtp = 1),
        ),
        both("gradient accumulation", tp().micro_batches(3)),
        both(
            "adapters beside frozen weights (LoRA)",
            stored(&[DATA, TENSOR], [&[0]; 3]).stages(2).sizes(|sizes| sizes.lora = 2),
        ),
    ]
}

fn recomputation() -> Vec<Feature> {
    vec![
        both("recompute everything", again(Again::Everything)),
        both("recompute attention and activations", again(Again::Cheap)),
        both("recompute every other operator", again(Again::EveryOther)),
        both("activations on the host (vDNN)", kept_on_host(&[DATA, TENSOR], Again::Nothing)),
        both(
            "activations on the host, sequences split among tensor parallel devices",
            kept_on_host(&[TENSOR_SEQUENCE], Again::Cheap),
        ),
        both("recompute everything, inputs on the host", kept_on_host(&[DATA, TENSOR], Again::Everything)),
        both(
            "activations on the host, backward in two parts",
            kept_on_host(&[TENSOR], Again::Nothing).stages(2).schedule(Schedule::ZbV).micro_batches(4),
        ),
        both("activations on the host, ring attention", kept_on_host(&[RING], Again::Nothing)),
    ]
}

/// Every collective that has the algorithm runs by it.
fn algorithms() -> Vec<Feature> {
    let named = [
        ("ring", Algorithm::Ring),
        ("tree", Algorithm::Tree),
        ("recursive", Algorithm::Recursive),
        ("two-level", Algorithm::TwoLevel),
        ("in-switch", Algorithm::InSwitch),
    ];
    let axes = [wide(DATA, 4), EXPERTS, TENSOR_SEQUENCE];
    let recipe = |algorithm| {
        Recipe::of(Wishes { algorithm: Some(algorithm), storage: [&[0]; 3], ..Wishes::of(&axes) })
            .small_nodes()
    };
    named
        .map(|(name, algorithm)| both(&format!("{name} collectives, nodes of four"), recipe(algorithm)))
        .into()
}

fn schedules() -> Vec<Feature> {
    let list = [
        (Schedule::GPipe, 3),
        (Schedule::OneFOneB, 4),
        (Schedule::Eager, 4),
        (Schedule::Dapple { warm_up: 3 }, 4),
        (Schedule::Interleaved { virtual_stages: 2 }, 4),
        (Schedule::BreadthFirst { virtual_stages: 2 }, 4),
        (Schedule::ZbH1, 4),
        (Schedule::ZbH2, 4),
        (Schedule::ZbV, 4),
        (Schedule::VHalf, 4),
        (Schedule::VMin, 4),
        (Schedule::Hanayo { waves: 1 }, 4),
        (Schedule::DualPipeV, 4),
        (Schedule::Chimera, 4),
        (Schedule::Seq1F1B { slices: 3 }, 4),
        (Schedule::TeraPipe { slices: 3 }, 4),
    ];
    let recipe = |schedule, m| plain(&[TENSOR]).stages(2).schedule(schedule).micro_batches(m);
    list.map(|(schedule, m)| both(&schedule.to_string(), recipe(schedule, m))).into()
}
