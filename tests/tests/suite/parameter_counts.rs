//! Parameters of the shipped models as the search sees them, against what was published with the models.
//!
//! The front ends hold more counts to a formula beside their code; here the graph is counted, and counted again after
//! a plan has carried it.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use frontends::{read_model, shipped_model, shipped_models};
use ir::graph::Model;
use ir::native;

fn model(name: &str) -> Model {
    let shipped = shipped_model(name).unwrap_or_else(|| panic!("no model {name}"));
    read_model(name, shipped.text).unwrap()
}

/// Model cards and indices of the weights on Hugging Face.
const PUBLISHED: [(&str, u64); 14] = [
    ("llama-2-7b", 6_738_415_616),
    ("llama-2-70b", 68_976_648_192),
    ("llama-3-8b", 8_030_261_248),
    ("llama-3-70b", 70_553_706_496),
    ("llama-3.1-405b", 405_853_388_800),
    ("mistral-7b", 7_241_732_096),
    ("mixtral-8x7b", 46_702_792_704),
    ("mixtral-8x22b", 140_620_634_112),
    ("qwen2.5-7b", 7_615_616_512),
    ("qwen3-30b-a3b", 30_532_122_624),
    ("gemma-2-9b", 9_241_705_984),
    ("gpt2", 124_439_808),
    ("phi-3-mini", 3_821_079_552),
    ("bloom-176b", 176_247_271_424),
];

#[test]
fn the_graph_has_the_published_parameters() {
    for (name, published) in PUBLISHED {
        assert_eq!(model(name).n_parameters(), published, "{name}");
    }
}

/// The name of each is its number of parameters in 10^9, rounded to a tenth: table 1 of Narayanan et al. 2021
/// (arXiv 2104.04473), whose formula gives 530 and 1008 for the last two.
#[test]
fn the_megatron_family_has_the_parameters_of_its_table() {
    let mut n_members = 0;
    for shipped in shipped_models() {
        let Some(size) = shipped.name.strip_prefix("megatron-").and_then(|size| size.strip_suffix('b'))
        else {
            continue;
        };
        let (found, published) =
            (model(shipped.name).n_parameters() as f64 / 1e9, size.parse::<f64>().unwrap());
        assert!((found - published).abs() <= 0.051, "{}: {found}", shipped.name);
        n_members += 1;
    }
    assert_eq!(n_members, 10);
}

#[test]
fn a_plan_carries_every_parameter() {
    for shipped in shipped_models() {
        let model = model(shipped.name);
        let carried = native::read(&native::write(&model)).unwrap();
        assert_eq!(carried.n_parameters(), model.n_parameters(), "{}", shipped.name);
        assert_eq!(carried.n_layers(), model.n_layers(), "{}", shipped.name);
    }
}
