//! What the literature calls each axis of a mesh, and where it was described.

use crate::mesh::AxisId;
use crate::names::Arrangement;
use crate::names::votes::{DenseRole, Loop, cuts_vocabulary, dense_role, expert_loop, speakers, stream_cut};

/// A name and its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Named {
    /// As engineers say it.
    pub name: &'static str,
    /// Who described it.
    pub source: &'static str,
}

const fn named(name: &'static str, source: &'static str) -> Named {
    Named { name, source }
}

const DATA: Named = named("data parallel", "Li et al. 2020, arXiv 2006.15704");
const GATHER: Named = named("context parallel, keys gathered", "Dubey et al. 2024, arXiv 2407.21783");
const RING: Named = named("ring attention", "Liu et al. 2023, arXiv 2310.01889");
const ULYSSES: Named = named("Ulysses", "Jacobs et al. 2023, arXiv 2309.14509");
const TENSOR: Named = named("tensor parallel", "Shoeybi et al. 2019, arXiv 1909.08053");
const SEQUENCE: Named = named("sequence parallel", "Korthikanti et al. 2022, arXiv 2205.05198");
const EXPERT: Named = named("expert parallel", "Lepikhin et al. 2020, arXiv 2006.16668");
const EXPERT_TENSOR: Named = named("expert tensor parallel", "Singh et al. 2023, arXiv 2303.06318");
const VOCABULARY: Named = named("vocabulary parallel", "Shoeybi et al. 2019, arXiv 1909.08053");
const SAME: Named = named("the same on every device", "");

/// Names of everything that an axis of more than one device does, the dense layers' first.
pub fn axis_names(arrangement: &Arrangement, axis: AxisId) -> Vec<Named> {
    let layers = &arrangement.layers;
    let dense = dense_role(&speakers(layers), axis);
    let mut names = vec![match dense {
        DenseRole::Data => DATA,
        DenseRole::Gather => GATHER,
        DenseRole::Ring => RING,
        DenseRole::Ulysses => ULYSSES,
        DenseRole::Tensor => TENSOR,
        DenseRole::Same => SAME,
    }];
    if dense == DenseRole::Tensor && stream_cut(layers, axis) {
        names.push(SEQUENCE);
    }
    match expert_loop(layers, axis) {
        Some(Loop::Expert) => names.push(EXPERT),
        Some(Loop::Weight) => names.push(EXPERT_TENSOR),
        Some(Loop::Batch | Loop::Sequence | Loop::Slots) | None => {}
    }
    if cuts_vocabulary(layers, axis) {
        names.push(VOCABULARY);
    }
    names
}
