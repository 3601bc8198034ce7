//! What a command reads: models, clusters and plans, each a file, or the name of one that comes with the program.

use std::cmp::Reverse;
use std::fs;
use std::io::Read;
use std::path::Path;

use frontends::lora::{Lora, adapt};
use frontends::mtp::predict_ahead;
use frontends::{InputError, Position, Shipped, read_cluster, read_model, shipped_clusters, shipped_models};
use ir::cluster::Cluster;
use ir::graph::Model;
use ir::plan::Plan;
use ir::plan::check::{OpenPlan, open};
use ir::text::read_plan;
use planner::rewrite::parts::{Stands, parts};
use validate::calibration::{Calibration, CalibrationError};

use crate::args::AddedArgs;
use crate::failure::Failure;
use crate::json_input;

/// Largest plan that is read: the plan of a large model has well below a megabyte.
pub(crate) const MAX_PLAN_BYTES: usize = 64 << 20;

/// What to do without a plan.
const WRITE_ONE: &str =
    "`planner schema plan` describes the form; `planner optimize MODEL CLUSTER -o plan.json` writes one";

/// Something that was read, and the digest of the text it was read from.
#[derive(Clone, Debug)]
pub(crate) struct Described<T> {
    /// What it says.
    pub(crate) value: T,
    /// `sha256:` and the digest of its text, as `sha256sum` prints it.
    pub(crate) digest: String,
}

/// Reads a model from a file, a folder with a `config.json`, or by name.
pub(crate) fn model(argument: &str) -> Result<Described<Model>, Failure> {
    let source = source(argument, "model", shipped_models())?;
    let mut model = read_model(&source.file, &source.text)?;
    if let Some(folder) = source.folder {
        model.name = folder;
    }
    Ok(Described { value: model, digest: digest(&source.text) })
}

/// The model with modules that predict ahead and with adapters beside its products, where they are asked for.
pub(crate) fn adapted(mut model: Model, args: &AddedArgs) -> Result<Model, Failure> {
    if let Some(n_modules) = args.mtp {
        predict_ahead(&mut model, n_modules).map_err(|what| Failure::argument(format!("--mtp: {what}")))?;
    }
    let Some(rank) = args.lora else { return Ok(model) };
    let lora = Lora { rank, alpha: args.lora_alpha, targets: args.lora_targets.clone() };
    adapt(&mut model, &lora).map_err(|what| Failure::argument(format!("--lora: {what}")))?;
    Ok(model)
}

/// Reads a cluster from a file or by name.
pub(crate) fn cluster(argument: &str) -> Result<Described<Cluster>, Failure> {
    let source = source(argument, "cluster", shipped_clusters())?;
    let cluster = read_cluster(&source.file, &source.text)?;
    Ok(Described { value: cluster, digest: digest(&source.text) })
}

/// Reads a plan, a JSON document or its text form, and checks every invariant of it.
pub(crate) fn plan(argument: &str) -> Result<(Plan, OpenPlan), Failure> {
    let text = read_file(Path::new(argument), argument, MAX_PLAN_BYTES)?;
    if text.trim().is_empty() {
        return Err(InputError::whole(argument, "the file is empty, expected a plan").into());
    }
    let plan = match text.trim_start() {
        start if start.starts_with('{') => json_input::parse(argument, &text, WRITE_ONE)?,
        start if start.starts_with("plan ") || start.starts_with('#') => plan_text(argument, &text)?,
        _ => return Err(InputError::whole(argument, "expected a JSON object").with_hint(WRITE_ONE).into()),
    };
    let open = open(&plan).map_err(|error| fault_of_plan(argument, error.place, error.what))?;
    Ok((plan, open))
}

/// The same, whose layers are forms of those that they stand for: then their parameters can be told in each other's.
pub(crate) fn plan_of_forms(argument: &str) -> Result<(Plan, OpenPlan), Failure> {
    let (plan, opened) = plan(argument)?;
    for (&kind, original) in &opened.originals {
        let form = &opened.model.layers[kind];
        if parts(form, Some(Stands { form, original })).is_none() {
            let place = plan.forms.iter().position(|entry| entry.layer == form.name);
            let place = place.map_or_else(|| "forms".into(), |at| format!("forms[{at}].original"));
            let what = format!("layer `{}` is no form of this layer", form.name);
            return Err(fault_of_plan(argument, place, what));
        }
    }
    Ok((plan, opened))
}

/// Reads a calibration and checks its names and values.
pub(crate) fn calibration(file: &str) -> Result<Calibration, Failure> {
    let text = read_file(Path::new(file), file, frontends::MAX_FILE_BYTES)?;
    let hint = "`planner calibrate` writes such a file";
    let found: Calibration = json_input::parse(file, &text, hint)?;
    let fault = |error: CalibrationError| Failure::argument_with_hint(format!("{file}: {error}"), hint);
    found.check().map_err(fault)?;
    Ok(found)
}

/// What is wrong with a plan that could be read.
pub(crate) fn fault_of_plan(file: &str, place: String, what: String) -> Failure {
    InputError { file: file.into(), position: None, place, what, hint: None }.into()
}

/// A plan as `planner show` writes it.
fn plan_text(file: &str, text: &str) -> Result<Plan, InputError> {
    read_plan(text).map_err(|error| InputError {
        file: file.into(),
        position: Some(Position { line: error.line, column: 1 }),
        place: String::new(),
        what: error.what,
        hint: Some("`planner show` writes the text form of a plan".into()),
    })
}

/// A text and where it came from.
struct Source {
    file: String,
    text: String,
    /// Name of the folder, where the file bears a name that all such files bear.
    folder: Option<String>,
}

/// Finds what an argument means: a shipped description by name, else a file.
fn source(argument: &str, what: &str, shipped: &[Shipped]) -> Result<Source, Failure> {
    if let Some(found) = shipped.iter().find(|one| one.name == argument) {
        return Ok(Source { file: argument.into(), text: found.text.into(), folder: None });
    }
    let given = Path::new(argument);
    if given.is_dir() && !given.join("config.json").exists() {
        let missing = "the folder has no `config.json`".to_owned();
        return Err(InputError::whole(argument, missing)
            .with_hint(format!("give the file that describes the {what}, or a name of `planner {what}s`"))
            .into());
    }
    let path = if given.is_dir() { given.join("config.json") } else { given.to_owned() };
    if !path.exists() && !looks_like_path(argument) {
        return Err(unknown(argument, what, shipped));
    }
    let file = path.to_string_lossy().into_owned();
    let text = read_file(&path, &file, frontends::MAX_FILE_BYTES)?;
    Ok(Source { folder: folder_name(&path), file, text })
}

fn looks_like_path(argument: &str) -> bool {
    argument.contains(['/', '\\']) || argument.ends_with(".json")
}

/// `llama` of `models/llama/config.json`: every model of Hugging Face is in a file of this name.
fn folder_name(path: &Path) -> Option<String> {
    let folder = path.parent()?.file_name()?.to_string_lossy().into_owned();
    (path.file_name()? == "config.json").then_some(folder)
}

fn unknown(argument: &str, what: &str, shipped: &[Shipped]) -> Failure {
    let near = nearest(argument, shipped);
    let guess = near.map_or(String::new(), |name| format!("did you mean `{name}`? "));
    Failure::argument_with_hint(
        format!("`{argument}` is neither a file nor the name of a shipped {what}"),
        format!("{guess}`planner {what}s` lists the shipped ones"),
    )
}

/// The shipped name with the fewest differences, if these are fewer than half its letters; of equals the one that
/// begins alike.
fn nearest(argument: &str, shipped: &[Shipped]) -> Option<&'static str> {
    /// Longer arguments are no slips of the finger.
    const LONGEST: usize = 40;
    if argument.len() > LONGEST {
        return None;
    }
    let argument = argument.to_lowercase();
    let beginning = |name: &str| name.chars().zip(argument.chars()).take_while(|(a, b)| a == b).count();
    let known =
        shipped.iter().map(|one| (edits(&argument, one.name), Reverse(beginning(one.name)), one.name));
    known.min().filter(|(distance, _, name)| 2 * distance < name.len()).map(|(_, _, name)| name)
}

/// Levenshtein distance: insertions, deletions and replacements that make one word of the other.
fn edits(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, letter) in from.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, other) in to.iter().enumerate() {
            let replaced = diagonal + usize::from(letter != *other);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(row[j + 1] + 1);
        }
    }
    row[to.len()]
}

/// Reads a table of lines: spreadsheets put a byte order mark in front, which is no part of it.
pub(crate) fn read_lines(file: &str, limit: usize) -> Result<String, Failure> {
    let text = read_text(Path::new(file), file, limit)?;
    Ok(match text.strip_prefix(BYTE_ORDER_MARK) {
        Some(rest) => rest.to_owned(),
        None => text,
    })
}

/// Reads a text file up to a limit, whatever it says of its own length.
pub(crate) fn read_file(path: &Path, shown: &str, limit: usize) -> Result<String, InputError> {
    let text = read_text(path, shown, limit)?;
    if text.starts_with(BYTE_ORDER_MARK) {
        let what = "the file starts with a byte order mark".to_owned();
        return Err(InputError::whole(shown, what).with_hint("save it as UTF-8 without byte order mark"));
    }
    Ok(text)
}

/// What some editors put in front of a text.
const BYTE_ORDER_MARK: char = '\u{feff}';

fn read_text(path: &Path, shown: &str, limit: usize) -> Result<String, InputError> {
    #[expect(clippy::disallowed_methods, reason = "the command line is where files are read")]
    let file = fs::File::open(path);
    let cannot =
        |error: std::io::Error| InputError::whole(shown, format!("cannot be read: {}", plain(&error)));
    let mut text = Vec::new();
    let length = file.and_then(|file| file.take(limit as u64 + 1).read_to_end(&mut text)).map_err(cannot)?;
    if length > limit {
        return Err(InputError::whole(
            shown,
            format!("the file is longer than the {limit} bytes that are read"),
        ));
    }
    String::from_utf8(text).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        InputError::whole(shown, format!("byte {at} is not UTF-8 text")).with_hint("save the file as UTF-8")
    })
}

/// Reads a file of any kind up to a limit.
pub(crate) fn read_bytes(path: &Path, limit: u64) -> Result<Vec<u8>, InputError> {
    let shown = path.to_string_lossy().into_owned();
    #[expect(clippy::disallowed_methods, reason = "the command line is where files are read")]
    let file = fs::File::open(path);
    let cannot =
        |error: std::io::Error| InputError::whole(&shown, format!("cannot be read: {}", plain(&error)));
    let mut bytes = Vec::new();
    file.and_then(|file| file.take(limit + 1).read_to_end(&mut bytes)).map_err(cannot)?;
    if bytes.len() as u64 > limit {
        return Err(InputError::whole(
            &shown,
            format!("the file is longer than the {limit} bytes that are read"),
        ));
    }
    Ok(bytes)
}

/// The system's sentence in our style: lower case, without its number.
fn plain(error: &std::io::Error) -> String {
    let text = error.to_string().to_lowercase();
    text.split(" (os error").next().unwrap_or(&text).to_owned()
}

/// `sha256:` and the digest of a text, as `sha256sum` prints it.
pub(crate) fn digest(text: &str) -> String {
    format!("sha256:{}", executor::checkpoint::digest(text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_the_finger_is_understood() {
        assert_eq!(nearest("llama3-8b", shipped_models()), Some("llama-3-8b"));
        assert_eq!(nearest("DGX-H10", shipped_clusters()), Some("dgx-h100"));
        assert_eq!(nearest("qqqqqqqqqqqq", shipped_models()), None);
        assert_eq!(edits("kitten", "sitting"), 3);
    }

    #[test]
    fn the_digest_is_that_of_sha256sum() {
        assert_eq!(digest(""), "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    }
}
