//! The models that come with the program: the published configurations, facts only.

use crate::shipped_clusters::Shipped;

macro_rules! models {
    ($($name:literal)*) => {
        &[$(Shipped { name: $name, text: include_str!(concat!("../../fixtures/models/", $name, ".json")) }),*]
    };
}

/// Every shipped model, in the order in which they are listed.
pub fn shipped_models() -> &'static [Shipped] {
    const ALL: &[Shipped] = models!(
        "llama-2-7b" "llama-2-13b" "llama-2-70b" "llama-3-8b" "llama-3-70b" "llama-3.1-8b" "llama-3.1-405b"
        "mistral-7b" "qwen2.5-7b" "qwen2.5-72b" "qwen3-8b" "qwen3-30b-a3b" "qwen3-235b-a22b" "gemma-2-9b"
        "gpt2" "gpt2-xl" "gpt3-175b" "gpt-neox-20b" "opt-13b" "bloom-176b" "falcon-7b" "falcon-40b" "phi-3-mini"
        "mixtral-8x7b" "mixtral-8x22b" "deepseek-v2" "deepseek-v3" "gpt-oss-20b" "gpt-oss-120b"
        "megatron-1.7b" "megatron-3.6b" "megatron-7.5b" "megatron-18.4b" "megatron-39.1b" "megatron-76.1b"
        "megatron-145.6b" "megatron-310.1b" "megatron-529.6b" "megatron-1008b"
    );
    ALL
}

/// The shipped model of a name.
pub fn shipped_model(name: &str) -> Option<Shipped> {
    shipped_models().iter().find(|model| model.name == name).copied()
}

/// Parameters as published with the weights (model cards, safetensors indices), tied matrices once.
///
/// DeepSeek-V3 without the multi-token prediction module and without the 58 x 256 correction biases of its routers,
/// which are buffers: with them it is 671,026,419,200.
#[cfg(test)]
#[rustfmt::skip]
pub(crate) const PUBLISHED_COUNTS: &[(&str, u64)] = &[
    ("llama-2-7b",        6_738_415_616),
    ("llama-2-13b",       13_015_864_320),
    ("llama-2-70b",       68_976_648_192),
    ("llama-3-8b",        8_030_261_248),
    ("llama-3-70b",       70_553_706_496),
    ("llama-3.1-8b",      8_030_261_248),
    ("llama-3.1-405b",    405_853_388_800),
    ("mistral-7b",        7_241_732_096),
    ("qwen2.5-7b",        7_615_616_512),
    ("qwen2.5-72b",       72_706_203_648),
    ("qwen3-8b",          8_190_735_360),
    ("qwen3-30b-a3b",     30_532_122_624),
    ("qwen3-235b-a22b",   235_093_634_560),
    ("gemma-2-9b",        9_241_705_984),
    ("gpt2",              124_439_808),
    ("gpt2-xl",           1_557_611_200),
    ("gpt-neox-20b",      20_554_567_680),
    ("opt-13b",           12_853_473_280),
    ("bloom-176b",        176_247_271_424),
    ("falcon-7b",         6_921_720_704),
    ("phi-3-mini",        3_821_079_552),
    ("mixtral-8x7b",      46_702_792_704),
    ("mixtral-8x22b",     140_620_634_112),
    ("deepseek-v2",       235_741_434_880),
    ("deepseek-v3",       671_026_404_352),
    ("gpt-oss-20b",       20_914_757_184),
    ("gpt-oss-120b",      116_829_156_672),
];
