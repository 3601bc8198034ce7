//! The model in the forms that an arrangement uses: a layer kind per form in use, in the order of the model.

use ir::graph::{Model, ParameterRef, Segment, Tie};
use ir::native::{self, LayerDocument};
use ir::plan::LayerForm;
use ir::plan::check::OpenPlan;

use crate::arrange::Arranged;
use crate::candidate::Scope;

/// A model made of chosen forms.
pub struct Chosen {
    /// The model.
    pub model: Model,
    /// Per entry of the arrangement, its layer kind there.
    pub kinds: Vec<usize>,
    /// What the layers stand for that are not as they were read.
    pub forms: Vec<LayerForm>,
}

/// The model as an arrangement has it. Kinds that no layer has stay as they are.
pub fn chosen(scope: &Scope<'_>, arranged: &Arranged) -> Chosen {
    let original = &scope.request.model;
    let documents = native::write(original).layers;
    let mut made = Chosen {
        model: Model { layers: Vec::new(), sequence: Vec::new(), ties: Vec::new(), ..original.clone() },
        kinds: vec![0; arranged.entries.len()],
        forms: Vec::new(),
    };
    let mut first_of = Vec::with_capacity(documents.len());
    for (kind, document) in documents.iter().enumerate() {
        let forms = 0..scope.forms[kind].len();
        let is_used =
            |form: &usize| arranged.entries.iter().any(|entry| entry.kind == scope.wide_kind(kind, *form));
        let mut used: Vec<usize> = forms.filter(is_used).collect();
        if used.is_empty() {
            used.push(0);
        }
        first_of.push(made.model.layers.len());
        for (nth, &form) in used.iter().enumerate() {
            made.add(scope, (kind, form), (nth, document));
            for (at, entry) in arranged.entries.iter().enumerate() {
                if entry.kind == scope.wide_kind(kind, form) {
                    made.kinds[at] = made.model.layers.len() - 1;
                }
            }
        }
    }
    for &(entry, count) in arranged.chunks.iter().flatten() {
        let layer = made.kinds[entry];
        match made.model.sequence.last_mut() {
            Some(run) if run.layer == layer => run.count += count,
            _ => made.model.sequence.push(Segment { layer, count }),
        }
    }
    // A kind with a tied parameter has one form only.
    let side = |side: ParameterRef| ParameterRef { layer: first_of[side.layer], ..side };
    let tie = |tie: &Tie| Tie { owner: side(tie.owner), copy: side(tie.copy) };
    made.model.ties = original.ties.iter().map(tie).collect();
    made
}

/// The model that was asked for, of a plan whose model has chosen forms.
pub fn asked(opened: &OpenPlan) -> Model {
    let made = &opened.model;
    let mut asked = Model { layers: Vec::new(), sequence: Vec::new(), ..made.clone() };
    let mut kinds = Vec::with_capacity(made.layers.len());
    for (kind, layer) in made.layers.iter().enumerate() {
        let original = opened.originals.get(&kind).unwrap_or(layer);
        let known = asked.layers.iter().position(|other| other == original);
        kinds.push(known.unwrap_or(asked.layers.len()));
        if known.is_none() {
            asked.layers.push(original.clone());
        }
    }
    for run in &made.sequence {
        match asked.sequence.last_mut() {
            Some(last) if last.layer == kinds[run.layer] => last.count += run.count,
            _ => asked.sequence.push(Segment { layer: kinds[run.layer], count: run.count }),
        }
    }
    // A kind with a tied parameter has one form only.
    let side = |side: ParameterRef| ParameterRef { layer: kinds[side.layer], ..side };
    asked.ties = made.ties.iter().map(|tie| Tie { owner: side(tie.owner), copy: side(tie.copy) }).collect();
    asked
}

impl Chosen {
    /// Adds a form of a kind; the first in use keeps the kind's name.
    fn add(
        &mut self,
        scope: &Scope<'_>,
        (kind, form): (usize, usize),
        (nth, document): (usize, &LayerDocument),
    ) {
        let form = &scope.forms[kind][form];
        let mut layer = form.layer.clone();
        if nth > 0 {
            layer.name = format!("{}-{}", layer.name, nth + 1);
            let is_taken = |name: &str| scope.request.model.layers.iter().any(|other| other.name == name);
            while is_taken(&layer.name) {
                layer.name.push('\'');
            }
        }
        if !form.fused.is_empty() {
            let name = |fused: &crate::rewrite::FusedParameter| layer.tensors[fused.tensor.0].name.clone();
            let fused = form.fused.iter().map(name).collect();
            self.forms.push(LayerForm { layer: layer.name.clone(), fused, original: document.clone() });
        }
        self.model.layers.push(layer);
    }
}
