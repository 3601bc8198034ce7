//! Models that are no stack of decoders, as native graphs: an encoder-decoder, and a vision tower to whose output every
//! fifth layer of a decoder attends. They are planned on eight H100 and what is found is proven, shrunk and run.

use std::path::PathBuf;

use tests::planner;

const ENCODER_DECODER: &str = "encoder-decoder-11b";
const VISION_LANGUAGE: &str = "vision-language-11b";

fn model(name: &str) -> String {
    format!("{}/../fixtures/models-native/{name}.json", env!("CARGO_MANIFEST_DIR"))
}

/// Plans with these pins, and verifies the plan in all precisions.
#[track_caller]
fn assert_verified(name: &str, pins: &str, role: &str) {
    let file = format!("native-{name}-{}.json", pins.replace([',', '='], "-"));
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(file).to_string_lossy().into_owned();
    let pins: &[&str] = if pins.is_empty() { &[] } else { &["--pin", pins] };
    let found = planner(&[&["optimize", &model(name), "dgx-h100", "-o", &path], pins].concat());
    assert_eq!(found.code, 0, "{found}");
    assert!(found.out.contains("programs are proven equal to their layers"), "{found}");
    assert!(found.out.contains(role), "no `{role}` in {found}");
    let verified = planner(&["verify", &path, "--precision", "all"]);
    assert_eq!(verified.code, 0, "{verified}");
    assert!(verified.out.ends_with("verified\n") && !verified.out.contains("DIFFERENT"), "{verified}");
}

macro_rules! verified {
    ($($name:ident: $model:expr, $pins:literal, $role:literal;)*) => {
        $(#[test]
        fn $name() {
            assert_verified($model, $pins, $role);
        })*
    };
}

verified! {
    an_encoder_decoder_has_a_plan: ENCODER_DECODER, "", "fastest";
    an_encoder_decoder_is_cut_into_stages: ENCODER_DECODER, "pp=4", "pp 4";
    an_encoder_decoder_is_cut_inside_products_and_along_tokens: ENCODER_DECODER, "tp=4,sequence-parallel=on", "tp 4 sp";
    an_encoder_decoder_is_cut_along_both_sequences: ENCODER_DECODER, "cp=2,cp-kind=ring", "cp 2 ring";
    an_encoder_decoder_exchanges_heads: ENCODER_DECODER, "cp=2,cp-kind=ulysses", "cp 2 ulysses";
    a_tower_and_a_decoder_have_a_plan: VISION_LANGUAGE, "", "fastest";
    a_tower_and_a_decoder_are_cut_into_stages: VISION_LANGUAGE, "pp=4", "pp 4";
    a_tower_and_a_decoder_are_cut_inside_products: VISION_LANGUAGE, "tp=4", "tp 4";
    tokens_are_cut_beside_places_that_cannot_be: VISION_LANGUAGE, "cp=2", "cp 2 ring";
}

#[test]
fn what_has_no_tokens_of_the_sequence_is_not_cut_into_slices() {
    let refused =
        planner(&["optimize", &model(ENCODER_DECODER), "dgx-h100", "--pin", "pp=4,schedule=seq1f1b"]);
    assert_ne!(refused.code, 0, "{refused}");
    let why = "layer `source`: `source` is of no token of the sequence";
    assert!(refused.err.contains(why), "{refused}");
}

/// T5 v1.1 XXL has 11,135,332,352 parameters (config.json and weights of google/t5-v1_1-xxl), of which its relative
/// position biases, two tables of 32 buckets for 64 heads, are left out here.
#[test]
fn an_encoder_decoder_of_the_sizes_of_t5_has_its_parameters() {
    let described = planner(&["models", &model(ENCODER_DECODER)]);
    assert_eq!(11_135_332_352_u64 - 2 * 32 * 64, 11_135_328_256);
    assert!(described.out.contains("parameters  11,135,328,256"), "{described}");
}
