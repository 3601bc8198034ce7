//! `cluster.json` to a cluster.

use std::sync::LazyLock;

use ir::cluster::Cluster;
use serde_json::Value;

use crate::cluster_check::{check_cluster, check_device, check_lists, check_version};
use crate::cluster_file::{ClusterFile, DeviceFile, DeviceLibraryFile};
use crate::document::{Document, key, kind};
use crate::input_error::InputError;
use crate::scan::{Step, clip};

const LIBRARY_TEXT: &str = include_str!("../../fixtures/devices.json");

static LIBRARY: LazyLock<Vec<DeviceFile>> = LazyLock::new(|| {
    let file: DeviceLibraryFile =
        serde_json::from_str(LIBRARY_TEXT).expect("the shipped device library is read by a test");
    file.devices
});

/// The device library.
pub fn device_library() -> &'static [DeviceFile] {
    &LIBRARY
}

/// Reads a cluster description.
///
/// # Errors
/// The first fault of the file, with its place.
pub fn read_cluster(file_name: &str, text: &str) -> Result<Cluster, InputError> {
    let document = Document::parse(file_name, text)?;
    check_version(&document)?;
    let file: ClusterFile = document.typed(&[], &document.value)?;
    check_lists(&document, &file)?;
    let mut devices = Vec::new();
    for (index, group) in file.groups.iter().enumerate() {
        let path = [key("groups"), Step::Index(index), key("device")];
        devices.push(resolve_device(&document, &path, &group.device)?);
    }
    check_cluster(&document, &file, &devices)?;
    Ok(file.to_cluster(file_name, &devices))
}

fn resolve_device(
    document: &Document<'_>,
    path: &[Step<'_>],
    value: &Value,
) -> Result<DeviceFile, InputError> {
    let known = || device_library().iter().map(|device| device.name.as_str()).collect::<Vec<_>>().join(", ");
    match value {
        Value::String(name) => {
            device_library().iter().find(|device| device.name == *name).cloned().ok_or_else(|| {
                document
                    .error(path, format!("no device of the library is named `{}`", clip(name)))
                    .with_hint(format!("known devices: {}; or give the figures themselves", known()))
            })
        }
        Value::Object(_) => {
            let device: DeviceFile = document.typed(path, value)?;
            check_device(document, path, &device)?;
            Ok(device)
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) => {
            let what = format!("expected the name of a device or its figures, found {}", kind(value));
            Err(document.error(path, what).with_hint(format!("known devices: {}", known())))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_of_the_library_is_in_range_and_has_a_source() {
        let document = Document::parse("devices.json", LIBRARY_TEXT).unwrap();
        let file: DeviceLibraryFile = document.typed(&[], &document.value).unwrap();
        assert_eq!(file.devices.len(), 24);
        for (index, device) in file.devices.iter().enumerate() {
            check_device(&document, &[key("devices"), Step::Index(index)], device).unwrap();
            let figures = document.value["devices"][index].as_object().unwrap();
            for figure in
                figures.keys().filter(|k| !["name", "architecture", "sources"].contains(&k.as_str()))
            {
                assert!(
                    device.sources.get(figure).is_some_and(|s| s.len() > 10),
                    "{}: {figure}",
                    device.name
                );
            }
        }
    }

    #[test]
    fn the_examples_of_the_documentation_can_be_read() {
        let page = include_str!("../../docs/cluster.md");
        let mut examples = page.split("```json").skip(1).map(|rest| rest.split("```").next().unwrap());
        let cluster = examples.next().unwrap();
        assert_eq!(
            read_cluster("c.json", cluster).unwrap_or_else(|error| panic!("{error}")).n_devices(),
            128
        );
        let with_figures = cluster.replace("\"device\": \"h100-sxm\"", examples.next().unwrap().trim());
        assert_eq!(read_cluster("c.json", &with_figures).unwrap().groups[0].device.name, "our-chip");
    }
}
