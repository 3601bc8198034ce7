//! The flat model document: a whole model operator by operator, without a word of layers.
//!
//! Dims, tensors and operators are those of a layer of the native document. What clusters them into layers is not
//! known here (`frontends::read_model`).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::native::{DimDocument, LayerDocument, OpDocument, Streams, TensorDocument};

/// A model as one list of operators.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FlatDocument {
    /// Version of this form: 1.
    pub planner_model: u32,
    /// Name shown in reports.
    pub name: String,
    /// Sequence length a job gets without a word of the user.
    pub default_sequence: u64,
    /// Dims; those with one name have one length.
    pub dims: Vec<DimDocument>,
    /// Tensors. An activation may have several readers, a parameter may be used by several operators.
    pub tensors: Vec<TensorDocument>,
    /// Operators in any order.
    pub ops: Vec<OpDocument>,
    /// The tensor that is the loss.
    pub out: String,
}

impl FlatDocument {
    /// The same as one layer that reads no stream and ends in the loss.
    pub fn into_layer(self) -> LayerDocument {
        let Self { name, dims, tensors, ops, out, .. } = self;
        LayerDocument { name, dims, tensors, ops, stream_in: None, out: Streams::One(out) }
    }
}
