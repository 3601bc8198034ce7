//! What a user reads when a file is wrong: one change to a shipped description, and the error.

use ir::op::OpKind;
use serde_json::{Value, json};

use crate::{read_cluster, read_model, shipped_cluster, shipped_model};

/// The error, without file and position, after setting the value at a JSON pointer (or removing it, for null).
fn model_fault(name: &str, pointer: &str, value: Value) -> String {
    let text = changed(shipped_model(name).unwrap().text, pointer, value);
    short(read_model("model.json", &text).map(|_| ()).unwrap_err().to_string())
}

fn cluster_fault(name: &str, pointer: &str, value: Value) -> String {
    let text = changed(shipped_cluster(name).unwrap().text, pointer, value);
    short(read_cluster("cluster.json", &text).map(|_| ()).unwrap_err().to_string())
}

fn changed(text: &str, pointer: &str, new: Value) -> String {
    let mut value: Value = serde_json::from_str(text).unwrap();
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    let parent = value.pointer_mut(parent).unwrap();
    if new.is_null() {
        parent.as_object_mut().unwrap().remove(key);
    } else {
        match parent {
            Value::Array(items) => items[key.parse::<usize>().unwrap()] = new,
            Value::Object(map) => drop(map.insert(key.to_owned(), new)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => panic!("{pointer}"),
        }
    }
    value.to_string()
}

/// Drops file and position, which shift with the text.
fn short(error: String) -> String {
    error.split_once(": ").unwrap().1.to_owned()
}

#[test]
fn the_place_is_that_of_the_value() {
    let text = "{\n  \"model_type\": \"mixtral\",\n  \"vocab_size\": 32000, \"hidden_size\": 64,\n  \"num_hidden_layers\": 2, \
                \"num_attention_heads\": 4, \"num_key_value_heads\": 4,\n  \"num_local_experts\": 8, \"intermediate_size\": 64,\n  \
                \"num_experts_per_tok\": 9\n}";
    assert_eq!(
        read_model("dir/model.json", text).unwrap_err().to_string(),
        "dir/model.json:6:26: num_experts_per_tok: 9 of 8 experts cannot be chosen\n\
         hint: num_experts_per_tok must be at most the number of experts"
    );
}

#[test]
fn an_unknown_family_is_told_what_is_supported() {
    let fault = model_fault("llama-3-8b", "/model_type", "mamba".into());
    assert!(
        fault
            .starts_with("model_type: family `mamba` is not supported\nhint: supported: bloom, deepseek_v2,")
    );
    assert!(fault.ends_with("see docs/models.md"), "{fault}");
    assert!(
        model_fault("llama-3-8b", "/model_type", json!(7))
            .starts_with("model_type: family 7 is not supported")
    );
    let absent = model_fault("llama-3-8b", "/model_type", Value::Null);
    assert!(absent.starts_with("neither `model_type` nor `planner_model` is present\nhint: "), "{absent}");
}

#[test]
#[rustfmt::skip]
fn absurd_fields_of_a_model_are_refused() {
    let cases = [
        ("llama-3-8b", "/hidden_size", Value::Null, "`hidden_size` or `n_embd` or `n_embed` is missing\nhint: a configuration of family `llama` must have it"),
        ("llama-3-8b", "/hidden_size", json!(0), "hidden_size: expected a whole number from 1 to 1048576, found 0"),
        ("llama-3-8b", "/hidden_size", json!("4096"), "hidden_size: expected a whole number from 1 to 1048576, found \"4096\""),
        ("llama-3-8b", "/hidden_size", json!(-5), "hidden_size: expected a whole number from 1 to 1048576, found -5"),
        ("llama-3-8b", "/num_hidden_layers", json!(1_000_000), "num_hidden_layers: expected a whole number from 1 to 10000, found 1000000"),
        ("llama-3-8b", "/num_attention_heads", json!(33), "num_key_value_heads: 33 query heads cannot share 8 key/value heads evenly\nhint: num_attention_heads must be a multiple of num_key_value_heads"),
        ("llama-3-8b", "/num_attention_heads", json!(24), "num_attention_heads: 24 heads do not divide a hidden size of 4096\nhint: the hidden size must be a multiple of the number of heads, unless `head_dim` is given"),
        ("llama-3-8b", "/rms_norm_eps", json!(0), "rms_norm_eps: expected a positive number, found 0"),
        ("llama-3-8b", "/hidden_act", json!("softsign"), "hidden_act: activation \"softsign\" is not known\nhint: known: silu, gelu, gelu_new, gelu_fast, gelu_pytorch_tanh, relu, relu2"),
        ("llama-3-8b", "/tie_word_embeddings", json!("no"), "tie_word_embeddings: expected true or false, found \"no\""),
        ("llama-3-8b", "/head_dim", json!(7), "head_dim: a head of 7 elements cannot be rotated, which takes pairs of them\nhint: expected an even number"),
        ("gpt-neox-20b", "/rotary_pct", json!(0.001), "rotary_pct: 0.001 of a head of 96 is 0 rotated elements, expected an even part of it"),
        ("opt-13b", "/word_embed_proj_dim", json!(512), "word_embed_proj_dim: 512 differs from a hidden size of 5120, which is not supported\nhint: describe the model natively instead: layers of operators with named dims, see docs/models.md"),
        ("opt-13b", "/do_layer_norm_before", json!(false), "do_layer_norm_before: only true is supported for family `opt`\nhint: describe the model natively instead: layers of operators with named dims, see docs/models.md"),
        ("gpt-oss-20b", "/layer_types/3", json!("linear_attention"), "layer_types: layer type \"linear_attention\" is not supported\nhint: known: full_attention, sliding_attention"),
        ("gpt-oss-20b", "/num_hidden_layers", json!(25), "layer_types: 24 entries for 25 layers"),
        ("deepseek-v3", "/n_group", json!(7), "n_group: 7 groups do not divide 256 experts"),
        ("deepseek-v3", "/topk_group", json!(9), "topk_group: 9 of 8 groups cannot be chosen"),
        ("deepseek-v3", "/num_experts_per_tok", json!(200), "topk_group: the best 4 groups hold 128 experts, of which 200 cannot be chosen"),
        ("deepseek-v3", "/qk_rope_head_dim", json!(63), "qk_rope_head_dim: 63 is odd, elements are rotated in pairs"),
        ("deepseek-v2", "/topk_method", json!("best"), "topk_method: method \"best\" is not known\nhint: known for deepseek_v2: greedy, group_limited_greedy"),
    ];
    for (name, pointer, value, expected) in cases {
        assert_eq!(model_fault(name, pointer, value), expected);
    }
}

#[test]
#[rustfmt::skip]
fn absurd_fields_of_a_cluster_are_refused() {
    let cases = [
        ("dgx-h100", "/schema_version", json!(2), "schema_version: version 2 cannot be read, expected 1"),
        ("dgx-h100", "/schema_version", Value::Null, "`schema_version` is missing\nhint: a cluster description starts with \"schema_version\": 1; see docs/cluster.md"),
        ("dgx-h100", "/groups", json!([]), "groups: 0 entries, expected 1 to 16"),
        ("dgx-h100", "/groups/0/count", json!(0), "groups[0].count: a group of 0 devices"),
        ("dgx-h100", "/groups/0/count", json!(12), "groups[0].devices_per_node: 12 devices do not fill nodes of 8\nhint: `count` must be a multiple of `devices_per_node`"),
        ("dgx-h100", "/groups/0/count", json!(80_000_000), "groups: 80000000 devices in all, at most 10000000 are planned for"),
        ("dgx-h100", "/groups/0/devices_per_node", json!(-8), "groups[0].devices_per_node: expected a whole number from 0, found `-8`"),
        ("dgx-h100", "/groups/0/host_memory_gib", Value::Null, "groups[0]: missing field `host_memory_gib`"),
        ("dgx-h100", "/groups/0/nvme", json!(30), "groups[0].nvme: expected an object, found `30`"),
        ("dgx-h100", "/groups/0/nvme", json!({"capacity_tb": 30, "read_gb_per_s": 50}), "groups[0].nvme: missing field `write_gb_per_s`"),
        ("dgx-h100", "/groups/0/nvme", json!({"capacity_tb": 30, "read_gb_per_s": 50, "write_gb_per_s": 0}), "groups[0].nvme.write_gb_per_s: 0 is out of range, expected 0.01 to 1000000"),
        ("dgx-h100", "/groups/0/nvme", json!({"capacity_tb": 3e13, "read_gb_per_s": 50, "write_gb_per_s": 25}), "groups[0].nvme.capacity_tb: 30000000000000 is out of range, expected 0.001 to 1000000"),
        ("dgx-h100", "/groups/0/colour", json!("red"), "groups[0].colour: unknown field `colour`, expected one of `device`, `count`, `devices_per_node`, `host_memory_gib`, `nvme`, `watts_per_device`, `price_per_device_hour`, `failures_per_million_device_hours`, `links`, `sources`"),
        ("dgx-h100", "/tiers/0/devices", json!(3), "tiers[1].devices: domains of 8 devices are not made of whole domains of 3\nhint: tiers go from the innermost out; each holds a multiple of the one before"),
        ("dgx-h100", "/tiers/1/devices", json!(16), "tiers[1].devices: the last tier joins 16 devices of 8\nhint: the last tier must span all devices of all groups"),
        ("dgx-h100", "/tiers/1/bandwidth_gb_per_s", json!(0), "tiers[1].bandwidth_gb_per_s: 0 is out of range, expected 0.01 to 1000000"),
        ("dgx-h100", "/tiers/1/bandwidth_gb_per_s", json!(1e-300), "tiers[1].bandwidth_gb_per_s: 1e-300 is out of range, expected 0.01 to 1000000"),
        ("dgx-h100", "/tiers/1/latency_us", json!(-4), "tiers[1].latency_us: -4 is out of range, expected 0.001 to 1000000"),
        ("mixed-a100-v100", "/groups/0/links/0/tier", json!("xgmi"), "groups[0].links[0].tier: no tier of the cluster is named `xgmi`\nhint: its tiers: nvlink, infiniband"),
        ("mixed-a100-v100", "/groups/0/links/1/tier", json!("nvlink"), "groups[0].links[1].tier: the group has two links named `nvlink`"),
        ("mixed-a100-v100", "/groups/0/links/1/latency_us", json!(0), "groups[0].links[1].latency_us: 0 is out of range, expected 0.001 to 1000000"),
        ("dgx-h100", "/tiers/1/oversubscription", json!(0.5), "tiers[1].oversubscription: 0.5 is out of range, expected 1 to 1000"),
        ("dgx-h100", "/tiers/1/wiring", json!("ring"), "tiers[1].wiring: unknown value `ring`, expected one of `switch`, `mesh`, `torus`, `torus-2d`, `bus`"),
        ("dgx-h100", "/tiers/1/name", json!("nvlink"), "tiers[1].name: two tiers are named `nvlink`"),
        ("dgx-h100", "/reserve_gib", json!(80), "reserve_gib: a reserve of 80 GiB leaves nothing of a device of 80 GiB\nhint: set `reserve_gib` from 0 to less than the memory of the smallest device"),
        ("dgx-h100", "/groups/0/device", json!([1]), "groups[0].device: expected the name of a device or its figures, found an array"),
        ("dgx-h100", "/groups/0/device", json!({"name": "x"}), "groups[0].device: missing field `architecture`"),
    ];
    for (name, pointer, value, expected) in cases {
        let fault = cluster_fault(name, pointer, value);
        assert_eq!(fault.split("\nhint: known devices").next().unwrap(), expected);
    }
    let fault = cluster_fault("dgx-h100", "/groups/0/device", "h100-sxm5".into());
    assert!(fault.starts_with("groups[0].device: no device of the library is named `h100-sxm5`\nhint: known devices: v100-sxm2-16,"), "{fault}");
}

#[test]
fn inline_figures_are_checked_like_those_of_the_library() {
    let device = |memory: f64| {
        json!({
            "name": "mine", "architecture": "other", "peak_tflops": {"bf16": 100}, "memory_gib": memory,
            "memory_bandwidth_gb_per_s": 1000, "compute_units": 64, "host_link_gb_per_s": 32
        })
    };
    let text = changed(shipped_cluster("dgx-h100").unwrap().text, "/groups/0/device", device(48.0));
    assert_eq!(read_cluster("c.json", &text).unwrap().groups[0].device.name, "mine");
    let fault = cluster_fault("dgx-h100", "/groups/0/device", device(0.0));
    assert_eq!(fault, "groups[0].device.memory_gib: 0 is out of range, expected 0.1 to 100000");
    let mut other = device(48.0);
    other["peak_tflops"] = json!({});
    let fault = cluster_fault("dgx-h100", "/groups/0/device", other.clone());
    assert!(fault.starts_with("groups[0].device.peak_tflops: no precision is given"), "{fault}");
    other["peak_tflops"] = json!({"fp8": 100});
    let fault = cluster_fault("dgx-h100", "/groups/0/device", other.clone());
    assert!(fault.starts_with("groups[0].device.peak_tflops: only fp8 is given"), "{fault}");
    other["peak_tflops"] = json!({"int8": 4});
    let fault = cluster_fault("dgx-h100", "/groups/0/device", other);
    assert!(fault.contains("unknown value `int8`"), "{fault}");
}

#[test]
fn old_and_new_field_names_mean_the_same() {
    let old = shipped_model("mixtral-8x7b").unwrap().text;
    let new = old
        .replace("\"num_local_experts\": 8", "\"num_experts\": 8")
        .replace("\"torch_dtype\"", "\"dtype\"")
        .replace(
            "\"rope_theta\": 1000000.0",
            "\"rope_parameters\": {\"rope_theta\": 1000000.0, \"rope_type\": \"default\"}",
        );
    assert_ne!(old, new);
    assert_eq!(read_model("m", old).unwrap(), read_model("m", &new).unwrap());
}

#[test]
fn smaller_members_of_a_family_have_the_published_counts() {
    let opt = changed(shipped_model("opt-13b").unwrap().text, "/hidden_size", json!(2048));
    let opt = ["/num_hidden_layers", "/num_attention_heads", "/ffn_dim", "/word_embed_proj_dim"]
        .iter()
        .zip([24, 32, 8192, 2048])
        .fold(opt, |text, (pointer, n)| changed(&text, pointer, json!(n)));
    assert_eq!(read_model("opt-1.3b", &opt).unwrap().n_parameters(), 1_315_758_080);
    let bloom = changed(shipped_model("bloom-176b").unwrap().text, "/n_embed", json!(4096));
    let bloom = changed(&changed(&bloom, "/n_layer", json!(30)), "/num_attention_heads", json!(32));
    assert_eq!(read_model("bloom-7b1", &bloom).unwrap().n_parameters(), 7_069_016_064);
}

#[test]
fn families_without_a_shipped_model_have_the_published_counts() {
    let qwen = json!({
        "model_type": "qwen2_moe", "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
        "norm_topk_prob": false, "max_position_embeddings": 8192
    });
    let model = read_model("qwen1.5-moe-a2.7b", &qwen.to_string()).unwrap();
    assert_eq!(model.n_parameters(), 14_315_784_192);
    let lite = json!({
        "model_type": "deepseek_v2", "vocab_size": 102_400, "hidden_size": 2048, "intermediate_size": 10_944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "q_lora_rank": null,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
        "topk_method": "greedy"
    });
    let model = read_model("deepseek-v2-lite", &lite.to_string()).unwrap();
    assert_eq!(model.n_parameters(), 15_706_484_224);
}

#[test]
fn what_changes_the_model_and_is_not_read_is_refused() {
    let all = [
        ("llama-3-8b", "num_local_experts", json!(8), "8"),
        ("llama-3-8b", "vision_config", json!({}), "an object"),
        ("llama-3-8b", "is_encoder_decoder", json!(true), "true"),
        ("llama-3-8b", "residual_multiplier", json!(0.22), "0.22"),
        ("llama-3-8b", "pruned_heads", json!({"0": [1]}), "an object"),
        (
            "llama-3-8b",
            "architectures",
            json!(["LlamaForSequenceClassification"]),
            "\"LlamaForSequenceClassification\"",
        ),
        ("llama-3-8b", "layer_types", json!(["full_attention", "linear_attention"]), "\"linear_attention\""),
        ("llama-3-8b", "architectures", json!(["LlamaForRewardModel"]), "\"LlamaForRewardModel\""),
        ("mistral-7b", "architectures", json!(["MistralModel"]), "\"MistralModel\""),
        ("llama-3-8b", "mm_vision_tower", json!("clip"), "\"clip\""),
        ("llama-3-8b", "n_shared_experts", json!(2), "2"),
        ("llama-3-8b", "attn_logit_softcapping", json!(50.0), "50.0"),
        ("llama-3-8b", "alibi", json!(true), "true"),
        ("qwen2.5-7b", "is_causal", json!(false), "false"),
        ("deepseek-v3", "index_topk", json!(2048), "2048"),
        ("llama-3-8b", "architectures", json!(["BitnetForCausalLM"]), "\"BitnetForCausalLM\""),
        ("mixtral-8x7b", "first_k_dense_replace", json!(1), "1"),
        ("qwen3-30b-a3b", "shared_expert_intermediate_size", json!(768), "768"),
        ("llama-3-8b", "num_kv_heads", json!(4), "4"),
    ];
    for (model, field, value, said) in all {
        let fault = model_fault(model, &format!("/{field}"), value);
        assert!(fault.starts_with(&format!("{field}: {said} changes the model")), "{fault}");
    }
    let layers = json!(vec!["full_attention"; 10]);
    assert_eq!(model_fault("qwen3-8b", "/layer_types", layers), "layer_types: 10 entries for 36 layers");
}

#[test]
fn what_is_said_twice_or_otherwise_than_it_is_used_to_be_is_refused() {
    for (name, pointer, value, what) in [
        (
            "qwen3-30b-a3b",
            "/num_local_experts",
            json!(64),
            "num_experts: 128, and `num_local_experts`, which is the same, is 64",
        ),
        ("gpt2", "/hidden_size", json!(3200), "which is the same, is"),
        ("llama-3-8b", "/architectures", json!("LlamaForSequenceClassification"), "architectures: "),
        (
            "llama-3-8b",
            "/layer_types",
            json!(["full_attention", "full_attention", "full_attention"]),
            "layer_types: 3 entries for 32 layers",
        ),
        ("llama-3-8b", "/quantization_config", json!({"quant_method": "bitnet"}), "quantization_config: "),
        ("deepseek-v3", "/topk_method", json!("foo"), "topk_method: method \"foo\" is not known"),
        ("deepseek-v3", "/n_group", Value::Null, "`n_group` is missing"),
    ] {
        let fault = model_fault(name, pointer, value);
        assert!(fault.contains(what), "{name}: {fault}");
    }
    // Of several limits of a sequence the first is the model's.
    let limits = changed(shipped_model("llama-3-8b").unwrap().text, "/seq_length", json!(2048));
    assert_eq!(read_model("model.json", &limits).unwrap().default_sequence, 8192);
    let fp8 = changed(
        shipped_model("llama-3-8b").unwrap().text,
        "/quantization_config",
        json!({"quant_method": "fp8"}),
    );
    assert!(read_model("model.json", &fp8).is_ok());
}

/// A window or a cap without a word is the family's own, and `null` is none.
#[test]
fn null_is_none_and_no_word_is_the_family_s_own() {
    let kinds = |name: &str, fields: &[(&str, Value)], without: &[&str]| {
        let mut value: Value = serde_json::from_str(shipped_model(name).unwrap().text).unwrap();
        let map = value.as_object_mut().unwrap();
        without.iter().for_each(|field| drop(map.remove(*field)));
        map.extend(fields.iter().map(|(field, value)| ((*field).to_owned(), value.clone())));
        let model = read_model("model.json", &value.to_string()).unwrap();
        let windows = model
            .layers
            .iter()
            .flat_map(|layer| &layer.ops)
            .any(|op| matches!(op.kind, OpKind::Attention { window: Some(_), .. }));
        let caps = model
            .layers
            .iter()
            .flat_map(|layer| &layer.ops)
            .any(|op| matches!(op.kind, OpKind::Attention { softcap: Some(_), .. }));
        (windows, caps)
    };
    let on = ("use_sliding_window", json!(true));
    let none = ("sliding_window", Value::Null);
    let first = ("max_window_layers", json!(0));
    assert!(kinds("qwen2.5-7b", &[on.clone(), first.clone()], &["sliding_window"]).0);
    assert!(!kinds("qwen2.5-7b", &[on, first, none.clone()], &[]).0);
    assert!(
        kinds("gpt-oss-20b", &[], &["sliding_window"]).0
            && !kinds("gpt-oss-20b", std::slice::from_ref(&none), &[]).0
    );
    let caps = ["attn_logit_softcapping", "final_logit_softcapping"];
    assert_eq!(kinds("gemma-2-9b", &[], &caps), (true, true));
    assert_eq!(kinds("gemma-2-9b", &[(caps[0], Value::Null), none], &[]), (false, false));
}

#[test]
fn names_are_lines_of_a_table() {
    let name = "a\u{1b}[31mRED\nb";
    assert_eq!(
        cluster_fault("dgx-h100", "/name", json!(name)),
        "name: `a\\u{1b}[31mRED\\nb` has characters that are no text\nhint: expected a name of one line"
    );
    assert_eq!(
        cluster_fault("dgx-h100", "/tiers/0/name", json!("n".repeat(300))),
        format!("tiers[0].name: `{}…` has 300 characters, at most 200 are shown in reports", "n".repeat(60))
    );
    let native = |layers: Value| {
        let text = json!({ "planner_model": 1, "layers": layers }).to_string();
        short(read_model("model.json", &text).map(|_| ()).unwrap_err().to_string())
    };
    assert_eq!(
        native(json!([{ "name": "whole" }, { "tensors": [{ "name": name }] }])),
        "layers[1].tensors[0].name: `a\\u{1b}[31mRED\\nb` has characters that are no text\nhint: expected a name of one line"
    );
    let family = model_fault("llama-3-8b", "/model_type", json!(name));
    assert!(family.contains("a\\u{1b}[31mRED\\nb") && !family.contains('\u{1b}'), "{family}");
}

#[test]
fn what_a_family_has_of_one_of_its_models_is_not_guessed_for_others() {
    let said = |model: &str, field: &str| model_fault(model, &format!("/{field}"), Value::Null);
    for (model, field) in [
        ("mistral-7b", "num_key_value_heads"),
        ("mixtral-8x7b", "num_key_value_heads"),
        ("gemma-2-9b", "num_key_value_heads"),
        ("gemma-2-9b", "head_dim"),
        ("qwen3-8b", "head_dim"),
        ("gpt-oss-20b", "head_dim"),
        ("deepseek-v3", "first_k_dense_replace"),
        ("deepseek-v3", "q_lora_rank"),
        ("deepseek-v3", "n_shared_experts"),
    ] {
        assert!(said(model, field).starts_with(&format!("`{field}` is missing\n")), "{}", said(model, field));
    }
    // `null` is a word for none.
    let shipped = shipped_model("deepseek-v3").unwrap().text;
    for said in ["\"q_lora_rank\": 1536", "\"n_shared_experts\": 1"] {
        assert!(shipped.contains(said), "{said}");
        let (field, _) = said.split_once(':').unwrap();
        let none = shipped.replacen(said, &format!("{field}: null"), 1);
        assert!(read_model("model.json", &none).is_ok(), "{field}");
    }
    // Without a word Mistral's layers see a window, with `null` none.
    let window =
        |text: &str| {
            let model = read_model("model.json", text).unwrap();
            let ops = model.layers.iter().flat_map(|layer| &layer.ops);
            let mut windows = ops.filter_map(|op| {
                if let OpKind::Attention { window, .. } = op.kind { Some(window) } else { None }
            });
            windows.next().unwrap()
        };
    let shipped = shipped_model("mistral-7b").unwrap().text;
    let absent = shipped.lines().filter(|line| !line.contains("\"sliding_window\"")).collect::<String>();
    assert_eq!(window(&absent), Some(4096));
    let none = shipped.replacen("\"sliding_window\": 4096", "\"sliding_window\": null", 1);
    assert_eq!(window(&none), None);
}

#[test]
fn no_more_of_a_head_is_rotated_than_there_is() {
    let model = read_model("llama", shipped_model("llama-3-8b").unwrap().text).unwrap();
    let mut native = serde_json::to_value(ir::native::write(&model)).unwrap();
    let ops = native["layers"][1]["ops"].as_array_mut().unwrap();
    let rotates = |op: &&mut Value| op["kind"]["op"] == "rope" || op["kind"].get("theta").is_some();
    ops.iter_mut().find(rotates).unwrap()["kind"]["dims"] = json!(256);
    let fault = read_model("model.json", &native.to_string()).unwrap_err().to_string();
    assert!(fault.contains("dims is 256, more than the 128 of the last dim of what it rotates"), "{fault}");
}

#[test]
fn what_says_that_nothing_changes_is_read() {
    for (field, value) in [
        ("is_encoder_decoder", json!(false)),
        ("num_local_experts", json!(1)),
        ("layer_types", json!(vec!["full_attention"; 32])),
        ("architectures", json!(["LlamaForCausalLM"])),
        ("is_causal", json!(true)),
        ("architectures", json!(["LLaMAForCausalLM"])),
        ("mlp_only_layers", json!([])),
        ("pruned_heads", json!({})),
        ("first_k_dense_replace", json!(0)),
    ] {
        let text = changed(shipped_model("llama-3-8b").unwrap().text, &format!("/{field}"), value);
        assert!(read_model("model.json", &text).is_ok(), "{field}");
    }
}

#[test]
fn the_same_model_may_have_two_names() {
    let shipped = shipped_model("deepseek-v3").unwrap().text;
    let read = |text: &str| read_model("model.json", text).map(|model| model.n_parameters());
    let kimi = changed(shipped, "/model_type", json!("kimi_k2"));
    assert_eq!(read(&kimi).unwrap(), read(shipped).unwrap());
    // QK norms are what these layers have; a switch that says so says nothing new.
    let qwen = |on: bool| changed(shipped_model("qwen3-30b-a3b").unwrap().text, "/use_qk_norm", json!(on));
    assert!(read(&qwen(true)).is_ok());
    let fault = read(&qwen(false)).unwrap_err().to_string();
    assert!(fault.contains("use_qk_norm: only true is supported"), "{fault}");
}

#[test]
fn a_decoder_beside_other_models_is_pointed_to() {
    let llava = json!({ "model_type": "llava", "text_config": { "model_type": "llama" } });
    let fault = read_model("model.json", &llava.to_string()).unwrap_err().to_string();
    assert!(fault.contains("its `text_config` is of family `llama`"), "{fault}");
}
