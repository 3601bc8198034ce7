//! No text makes the readers panic: shipped descriptions with bytes or values changed at random are read or refused
//! with an error that has a place.

use crate::{read_cluster, read_model, shipped_clusters, shipped_models};
use proptest::prelude::*;
use serde_json::Value;

/// Values that are likely to be wrong wherever they stand.
fn bad_values() -> Vec<Value> {
    let numbers = [
        "0",
        "1",
        "2",
        "3",
        "-1",
        "7",
        "1.5",
        "-0.0",
        "1e300",
        "1e-300",
        "4294967296",
        "18446744073709551615",
        "9223372036854775808",
        "36893488147419103232",
        "1099511627776",
    ];
    let mut values: Vec<Value> = numbers.iter().map(|text| serde_json::from_str(text).unwrap()).collect();
    values.extend([Value::Null, true.into(), "".into(), "x".into(), "b s h".into(), "x".repeat(5000).into()]);
    values.extend([Value::Array(Vec::new()), serde_json::json!({}), serde_json::json!([1, "a", null])]);
    values
}

/// Number of values inside a value, itself included.
fn size(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(size).sum::<usize>(),
        Value::Object(map) => 1 + map.values().map(size).sum::<usize>(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 1,
    }
}

/// Applies `change` to the `at`-th value in reading order.
fn change_at(value: &mut Value, at: &mut usize, change: &mut impl FnMut(&mut Value)) {
    if *at == 0 {
        change(value);
        *at = usize::MAX;
        return;
    }
    *at -= 1;
    let children: Vec<&mut Value> = match value {
        Value::Array(items) => items.iter_mut().collect(),
        Value::Object(map) => map.values_mut().collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Vec::new(),
    };
    for child in children {
        if *at == usize::MAX {
            return;
        }
        change_at(child, at, change);
    }
}

fn mutate(text: &str, changes: &[(usize, usize)]) -> String {
    let mut value: Value = serde_json::from_str(text).unwrap();
    let bad = bad_values();
    for &(at, which) in changes {
        let mut at = at % size(&value);
        // One choice more than there are bad values: the list or object loses its first entry.
        change_at(&mut value, &mut at, &mut |here| match bad.get(which % (bad.len() + 2)) {
            Some(new) => *here = new.clone(),
            None => shorten(here),
        });
    }
    value.to_string()
}

/// Exchanges operands of two operators of a flat graph: cycles, shapes that do not fit, other graphs that do.
fn swap_operands(text: &str, swaps: &[(usize, usize)]) -> String {
    let mut value: Value = serde_json::from_str(text).unwrap();
    let ops = value["ops"].as_array_mut().unwrap();
    for &(a, b) in swaps {
        let (a, b) = (a % ops.len(), b % ops.len());
        let first = ops[a]["operands"][0].take();
        ops[a]["operands"][0] = ops[b]["operands"][0].take();
        ops[b]["operands"][0] = first;
    }
    value.to_string()
}

fn shorten(value: &mut Value) {
    match value {
        Value::Array(items) if !items.is_empty() => {
            items.remove(0);
        }
        Value::Object(map) => {
            if let Some(key) = map.keys().next().cloned() {
                map.remove(&key);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {}
    }
}

fn scramble(text: &str, changes: &[(usize, u8)]) -> String {
    let mut bytes = text.as_bytes().to_vec();
    for &(at, byte) in changes {
        let at = at % bytes.len();
        match byte % 4 {
            0 => bytes.truncate(at.max(1)),
            1 => {
                bytes.remove(at);
                bytes.push(b'}');
            }
            _ => bytes[at] = byte,
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn read_either(text: &str) {
    for error in [read_model("m.json", text).err(), read_cluster("c.json", text).err()].into_iter().flatten()
    {
        let shown = error.to_string();
        assert!(shown.len() < 2000, "an error of {} bytes", shown.len());
    }
}

fn native_texts() -> Vec<String> {
    let names = ["gpt2", "deepseek-v3", "gpt-oss-20b"];
    let native = |name: &&str| {
        let shipped = shipped_models().iter().find(|model| model.name == *name).unwrap();
        let model = read_model(name, shipped.text).unwrap();
        serde_json::to_string(&ir::native::write(&model)).unwrap()
    };
    names.iter().map(native).collect()
}

/// Models operator by operator: branches, an encoder that all decoder layers read, a tied table, patches.
const FLAT_TEXTS: [&str; 4] = [
    include_str!("../../tests/good/two-towers.json"),
    include_str!("../../tests/good/encoder-decoder.json"),
    include_str!("../../tests/good/unequal-layers.json"),
    include_str!("../../tests/good/vision-decoder.json"),
];

fn all_texts() -> Vec<String> {
    let shipped = shipped_models().iter().chain(shipped_clusters()).map(|shipped| shipped.text.to_owned());
    shipped.chain(native_texts()).chain(FLAT_TEXTS.map(str::to_owned)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn changed_values_never_panic(which in 0_usize..1000, changes in prop::collection::vec((any::<usize>(), any::<usize>()), 1..4)) {
        let texts = texts();
        read_either(&mutate(&texts[which % texts.len()], &changes));
    }

    #[test]
    fn changed_bytes_never_panic(which in 0_usize..1000, changes in prop::collection::vec((any::<usize>(), any::<u8>()), 1..6)) {
        let texts = texts();
        read_either(&scramble(&texts[which % texts.len()], &changes));
    }
}

proptest! {
    // Each case reads a whole graph.
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn changed_flat_graphs_never_panic(which in 0_usize..FLAT_TEXTS.len(), changes in prop::collection::vec((any::<usize>(), any::<usize>()), 1..4)) {
        read_either(&mutate(FLAT_TEXTS[which], &changes));
    }

    #[test]
    fn wires_that_are_swapped_never_panic(which in 0_usize..FLAT_TEXTS.len(), swaps in prop::collection::vec((any::<usize>(), any::<usize>()), 1..4)) {
        read_either(&swap_operands(FLAT_TEXTS[which], &swaps));
    }
}

fn texts() -> &'static [String] {
    static TEXTS: std::sync::OnceLock<Vec<String>> = std::sync::OnceLock::new();
    TEXTS.get_or_init(all_texts)
}
