//! What a communication is for: its class, and the layer, section and tensor it serves.
//!
//! The fabric counts bytes per label of a tag; a label begins with its class, so that counts can be grouped by it.

use std::fmt;

use crate::instruction::Tag;

/// What a communication is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// A value on its way from one operator to the next, in forward.
    Forward,
    /// The same, once more in backward, because it was not kept.
    Recompute,
    /// The gradient of a value on its way back.
    Gradient,
    /// A parameter that is stored in parts, before its use.
    ParameterGather,
    /// A parameter's gradient on its way into an accumulator that is stored in parts, every micro-batch.
    GradientAccumulate,
    /// A parameter's accumulated gradient on its way to the update, once per step.
    GradientReduce,
    /// A new parameter on its way from the update to its storage, once per step.
    Update,
    /// The stream, or its gradient, from stage to stage.
    Pipeline,
    /// A parameter that two layers share: gradient to the owner, new value back.
    Tie,
}

impl Class {
    /// Every class.
    pub const ALL: [Self; 9] = [
        Self::Forward,
        Self::Recompute,
        Self::Gradient,
        Self::ParameterGather,
        Self::GradientAccumulate,
        Self::GradientReduce,
        Self::Update,
        Self::Pipeline,
        Self::Tie,
    ];

    /// Name in reports, and the beginning of its labels.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward tensor",
            Self::Recompute => "recomputed tensor",
            Self::Gradient => "gradient",
            Self::ParameterGather => "parameter gather",
            Self::GradientAccumulate => "gradient accumulation",
            Self::GradientReduce => "gradient reduce",
            Self::Update => "update",
            Self::Pipeline => "pipeline",
            Self::Tie => "tie",
        }
    }

    /// The class of a label.
    pub fn of_label(label: &str) -> Option<Self> {
        let name = label.split(':').next()?;
        Self::ALL.into_iter().find(|class| class.name() == name)
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The part of a program or step in which something happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    Forward,
    Backward,
    Update,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Update => "update",
        })
    }
}

/// A place in the run, for labels and errors: ``layer 3 `block`, backward``.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    pub(crate) layer_idx: usize,
    pub(crate) kind: &'a str,
    pub(crate) phase: Phase,
    /// Which repetition: micro-batches count on from step to step.
    pub(crate) seq: u64,
}

impl Place<'_> {
    /// The tag of a communication about a tensor.
    pub(crate) fn tag(&self, class: Class, tensor: &str) -> Tag {
        Tag::new(format!("{class}: {self}, `{tensor}`"), self.seq)
    }
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {} `{}`, {}", self.layer_idx, self.kind, self.phase)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_class_of_a_label_is_found_again() {
        let place = Place { layer_idx: 3, kind: "a: b", phase: Phase::Update, seq: 1 };
        for class in Class::ALL {
            assert_eq!(Class::of_label(place.tag(class, "w").label()), Some(class));
        }
        assert_eq!(place.tag(Class::Tie, "w").to_string(), "`tie: layer 3 `a: b`, update, `w`` #1");
    }
}
