//! What a command gives out: text or JSON, and files, whole or not at all.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

use crate::failure::Failure;
use crate::terminal::Terminal;

/// In which form a command answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// For people.
    Text,
    /// For programs.
    Json,
}

impl Form {
    /// The form that a `--json` flag asks for.
    pub(crate) fn of(flag: &crate::args::JsonArgs) -> Self {
        if flag.json { Self::Json } else { Self::Text }
    }
}

/// JSON text of a document.
pub(crate) fn json(document: &impl Serialize) -> Result<String, Failure> {
    serde_json::to_string_pretty(document)
        .map(|text| text + "\n")
        .map_err(|error| Failure::bug(format!("no JSON form: {error}")))
}

/// Writes a file through a temporary neighbour, so that nobody ever sees a part of it.
pub(crate) fn write_whole(path: &Path, text: &str) -> Result<(), Failure> {
    let target = target(path);
    if is_device(&target) {
        return write_device(&target, text).map_err(unwritten(path));
    }
    let neighbour = file_beside(path, &target)?;
    let written = write_new(&neighbour, text)
        .and_then(|()| allow_the_same(&neighbour, &target))
        .and_then(|()| fs::rename(&neighbour, &target));
    if written.is_err() {
        // It may not exist; the first error is the one to tell.
        let _ = fs::remove_file(&neighbour);
    }
    written.map_err(unwritten(path))
}

/// Whether a file can be written, before the work whose result it is to hold.
///
/// # Errors
/// Where it is a folder, or its folder is missing or takes no files.
pub(crate) fn check_writable(path: &Path) -> Result<(), Failure> {
    let target = target(path);
    if is_device(&target) {
        return Ok(());
    }
    let neighbour = file_beside(path, &target)?;
    write_new(&neighbour, "").and_then(|()| fs::remove_file(&neighbour)).map_err(unwritten(path))
}

/// Lets those read and write a file who may another, where that is there.
fn allow_the_same(file: &Path, other: &Path) -> std::io::Result<()> {
    match fs::metadata(other) {
        Ok(found) => fs::set_permissions(file, found.permissions()),
        Err(_) => Ok(()),
    }
}

/// Whether a file is none of those that are read for it: it would replace that one.
///
/// # Errors
/// Where it is.
pub(crate) fn check_other(path: &Path, read: &[&str]) -> Result<(), Failure> {
    let Ok(own) = fs::canonicalize(path) else { return Ok(()) };
    // Devices may be read and written.
    if is_device(&own) || !read.iter().any(|one| fs::canonicalize(one).is_ok_and(|other| other == own)) {
        return Ok(());
    }
    let what = format!("{}: is read for what would be written there", path.display());
    Err(Failure::argument_with_hint(what, "give another file"))
}

/// What to say of a file or folder that cannot be written.
fn unwritten(path: &Path) -> impl Fn(std::io::Error) -> Failure {
    move |error| Failure::argument(format!("{}: cannot be written: {error}", path.display()))
}

/// What is replaced: a link stays a link.
fn target(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

fn is_device(target: &Path) -> bool {
    fs::metadata(target).is_ok_and(|found| !found.is_file() && !found.is_dir())
}

/// A new file in the folder of what is replaced.
fn file_beside(path: &Path, target: &Path) -> Result<PathBuf, Failure> {
    if path.as_os_str() == "-" {
        let hint = "to have it on standard output give /dev/stdout; a file of this name is ./-";
        return Err(Failure::argument_with_hint("-: expected a file", hint));
    }
    neighbour(target).filter(|_| !target.is_dir()).ok_or_else(|| {
        let what = format!("{}: this is no name of a file", path.display());
        Failure::argument_with_hint(what, "give a file, not a folder")
    })
}

/// Writes a file whole, and says so on standard error.
pub(crate) fn write_and_say(path: &Path, text: &str, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    write_whole(path, text)?;
    Ok(writeln!(terminal.err, "wrote {}", path.display())?)
}

/// Characters of a name that its neighbour has too.
const MOST_OF_A_NAME: usize = 32;

/// A name in the same folder that nobody else uses, no other thread either.
fn neighbour(target: &Path) -> Option<PathBuf> {
    static USED: AtomicU64 = AtomicU64::new(0);
    // A name may be as long as folders take them.
    let name: String = target.file_name()?.to_string_lossy().chars().take(MOST_OF_A_NAME).collect();
    let nth = USED.fetch_add(1, Ordering::Relaxed);
    Some(target.with_file_name(format!(".{name}.{}-{nth}.part", std::process::id())))
}

fn write_new(path: &Path, text: &str) -> std::io::Result<()> {
    write_bytes(path, text.as_bytes())
}

fn write_bytes(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Writes files into a new folder, through a temporary neighbour of it, so that nobody ever sees some of them. An empty
/// folder may be there already.
pub(crate) fn write_folder(path: &Path, files: &[(String, Vec<u8>)]) -> Result<(), Failure> {
    let neighbour = neighbour_of_folder(path)?;
    let fill = || {
        fs::create_dir(&neighbour)?;
        files.iter().try_for_each(|(name, bytes)| write_bytes(&neighbour.join(name), bytes))?;
        fs::rename(&neighbour, path)
    };
    let written = fill();
    if written.is_err() {
        // It may not exist; the first error is the one to tell.
        let _ = fs::remove_dir_all(&neighbour);
    }
    written.map_err(unwritten(path))
}

/// Whether a folder can be made there, before the work whose result it is to hold.
///
/// # Errors
/// Where its own folder is missing or takes none.
pub(crate) fn check_folder(path: &Path) -> Result<(), Failure> {
    let neighbour = neighbour_of_folder(path)?;
    fs::create_dir(&neighbour).and_then(|()| fs::remove_dir(&neighbour)).map_err(unwritten(path))
}

fn neighbour_of_folder(path: &Path) -> Result<PathBuf, Failure> {
    neighbour(path)
        .ok_or_else(|| Failure::argument(format!("{}: this is no name of a folder", path.display())))
}

/// Whether files can be written there as a new folder: nothing is there, or an empty folder.
pub(crate) fn is_free(path: &Path) -> bool {
    fs::read_dir(path).map_or_else(|_| !path.exists(), |mut entries| entries.next().is_none())
}

/// Writes to what is no file: a pipe, `/dev/stdout`.
fn write_device(path: &Path, text: &str) -> std::io::Result<()> {
    fs::OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("planner-output-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        path
    }

    fn names(path: &Path) -> Vec<String> {
        fs::read_dir(path)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect()
    }

    #[test]
    fn a_file_is_replaced_and_nothing_else_is_left() {
        let folder = folder("replaced");
        let path = folder.join("plan.json");
        write_whole(&path, "old").unwrap();
        write_whole(&path, "newer").unwrap();
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        assert_eq!(fs::metadata(&path).unwrap().len(), 5);
        fs::remove_dir_all(folder).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn a_file_that_is_replaced_is_read_by_no_more_than_before() {
        use std::os::unix::fs::PermissionsExt;
        let folder = folder("permissions");
        // As long a name as folders take.
        let path = folder.join("p".repeat(255));
        write_whole(&path, "old").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        write_whole(&path, "newer").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn what_is_read_is_not_replaced_by_what_comes_of_it() {
        let folder = folder("other");
        let [model, plan] = ["model.json", "plan.json"].map(|name| folder.join(name));
        write_whole(&model, "read").unwrap();
        let read = [model.to_str().unwrap(), "dgx-h100"];
        check_other(&plan, &read).unwrap();
        let error = check_other(&folder.join("./model.json"), &read).unwrap_err().to_string();
        assert!(error.contains("model.json: is read for what would be written there"), "{error}");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn what_cannot_be_written_is_known_before_the_work() {
        let folder = folder("writable");
        check_writable(&folder.join("plan.json")).unwrap();
        assert!(names(&folder).is_empty());
        let error = check_writable(&folder).unwrap_err().to_string();
        assert!(error.contains("not a folder"), "{error}");
        assert!(check_writable(&folder.join("no/plan.json")).is_err());
        check_folder(&folder.join("checkpoint")).unwrap();
        assert!(names(&folder).is_empty() && check_folder(&folder.join("no/checkpoint")).is_err());
        assert!(check_writable(Path::new("-")).unwrap_err().to_string().contains("/dev/stdout"));
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_folder_that_is_not_there_is_named() {
        let folder = folder("absent");
        let error = write_whole(&folder.join("no/plan.json"), "text").unwrap_err().to_string();
        assert!(error.contains("no/plan.json: cannot be written"), "{error}");
        assert!(names(&folder).is_empty());
        fs::remove_dir_all(folder).unwrap();
    }
}
