//! Foreign formats to the planner's own: `cluster.json` to a cluster, a model's configuration to a graph.
#![warn(missing_docs)]

mod input_error;
mod scan;
mod sentence;
mod document;
mod names;
mod cluster_file;
mod cluster_written;
mod cluster_check;
mod cluster;
mod shipped_clusters;
mod shipped_models;
mod rescale;
mod arch;
mod count;
mod hf;
mod graph_parts;
mod graph_attention;
mod graph_mlp;
mod graph_model;
mod native_roles;
mod flat;
mod native;
mod model;
pub mod capacity;
pub mod lora;
pub mod mtp;

#[cfg(test)]
mod bad_input_tests;
#[cfg(test)]
mod mutation_tests;

pub use cluster::{device_library, read_cluster};
pub use cluster_file::{ClusterFile, DeviceFile, DeviceLibraryFile, GroupFile, TierFile};
pub use document::{MAX_FILE_BYTES, key_twice};
pub use hf::families;
pub use input_error::{InputError, Position};
pub use model::read_model;
pub use rescale::{Size, rescale};
pub use sentence::plain_sentence;
pub use shipped_clusters::{Shipped, shipped_cluster, shipped_clusters};
pub use shipped_models::{shipped_model, shipped_models};
