//! Names of layer kinds, after those of their operators: the beginning that all share, without numbers.
//! `encoder.3.attention.q`, `encoder.3.mlp.up` -> kind `encoder` with `attention.q` and `mlp.up`.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use ir::graph::{Data, Layer, Op, Role, Tensor};

/// How many names of layers that are equal a kind bears.
const SHOWN_NAMES: usize = 3;

/// What a kind may be called.
#[derive(Clone, Debug)]
pub(crate) struct Naming<'a> {
    /// What the names of the operators begin with, word by word.
    pub(crate) words: Vec<&'a str>,
    /// What its layers are called by these words.
    layers: Vec<String>,
    /// What a single operator is called by its own name.
    alone: Option<String>,
}

impl<'a> Naming<'a> {
    /// Of a layer with operators of these names, `otherwise` where they share nothing.
    pub(crate) fn new(names: impl Iterator<Item = &'a str>, otherwise: &str) -> Self {
        let names: Vec<&str> = names.collect();
        let words = shared_words(&names);
        let alone = match names[..] {
            [name] => Some(kind_name(&name.split('.').collect::<Vec<_>>(), otherwise)),
            _ => None,
        };
        Self { layers: vec![kind_name(&words, otherwise)], words, alone }
    }

    /// Takes in an equal layer.
    pub(crate) fn join(&mut self, other: Self) {
        let new = other.layers.into_iter().filter(|name| !self.layers.contains(name));
        let new: Vec<String> = new.take(SHOWN_NAMES - self.layers.len()).collect();
        self.layers.extend(new);
    }
}

/// A name of its own for every kind. Kinds with more operators choose first; a single operator whose name is taken is
/// called by all of its words, others are numbered.
pub(crate) fn chosen(kinds: &[Naming<'_>], sizes: &[usize]) -> Vec<String> {
    let mut order: Vec<usize> = (0..kinds.len()).collect();
    order.sort_by_key(|&kind| (Reverse(sizes[kind]), kind));
    let mut taken = BTreeSet::new();
    let mut names = vec![String::new(); kinds.len()];
    for kind in order {
        let name = kinds[kind].layers.join("-");
        let alone = kinds[kind].alone.clone().filter(|_| taken.contains(&name));
        names[kind] = unique(alone.unwrap_or(name), &mut taken);
    }
    names
}

/// What all names of operators begin with, word by word; an operator keeps its last word.
fn shared_words<'a>(names: &[&'a str]) -> Vec<&'a str> {
    let words = |name: &&'a str| {
        let mut words: Vec<&str> = name.split('.').collect();
        words.pop();
        words
    };
    let Some((first, rest)) = names.split_first() else { return Vec::new() };
    let mut shared = words(first);
    for name in rest {
        let same = shared.iter().zip(words(name)).take_while(|(a, b)| **a == *b).count();
        shared.truncate(same);
    }
    shared
}

/// The name of a kind: those words without their numbers, or what else it is called.
fn kind_name(words: &[&str], otherwise: &str) -> String {
    let bare = |word: &&str| {
        let word = word.trim_end_matches(|c: char| c.is_ascii_digit());
        // Brackets and the like mean something in what is said of single layers.
        let plain = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' };
        word.chars().map(plain).collect::<String>().trim_matches(['_', '-']).to_owned()
    };
    let words: Vec<String> = words.iter().map(bare).filter(|word| !word.is_empty()).collect();
    if words.is_empty() { otherwise.to_owned() } else { words.join("-") }
}

/// Takes the words off the names of a layer's tensors and operators, and makes these unique. What is given
/// with the batch keeps its name, by which layers know that they read the same.
pub(crate) fn shortened(mut layer: Layer, words: &[&str]) -> Layer {
    let prefix: String = words.iter().map(|word| format!("{word}.")).collect();
    let short = |name: &str| name.strip_prefix(&prefix).unwrap_or(name).to_owned();
    let given = layer.tensors.iter().filter(|tensor| is_of_batch(tensor));
    let mut taken: BTreeSet<String> = given.map(|tensor| tensor.name.clone()).collect();
    for tensor in layer.tensors.iter_mut().filter(|tensor| !is_of_batch(tensor)) {
        tensor.name = unique(short(&tensor.name), &mut taken);
    }
    taken.clear();
    for Op { name, .. } in &mut layer.ops {
        *name = unique(short(name), &mut taken);
    }
    layer
}

/// Whether a tensor is given with the batch.
pub(crate) fn is_of_batch(tensor: &Tensor) -> bool {
    matches!(tensor.role, Role::Data(Data::Tokens | Data::Labels | Data::Features))
}

/// The name itself, or with the first number that makes it new.
fn unique(name: String, taken: &mut BTreeSet<String>) -> String {
    let numbered = (2..).map(|n: usize| format!("{name}-{n}"));
    let free = std::iter::once(name.clone()).chain(numbered).find(|name| !taken.contains(name));
    let free = free.unwrap_or(name);
    taken.insert(free.clone());
    free
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(names: &[&str], expected: &str) {
        let naming = Naming::new(names.iter().copied(), "layer");
        assert_eq!(chosen(&[naming], &[names.len()]), [expected]);
    }

    #[test]
    fn a_kind_is_named_after_what_its_operators_share() {
        check(&["encoder.3.attention.q", "encoder.3.mlp.up"], "encoder");
        check(&["model.layers.0.norm", "model.layers.0.mlp.up"], "model-layers");
        check(&["block_12.up", "block_12.down"], "block");
        check(&["7.up", "7.down"], "layer");
        check(&["3.attention.q", "4.mlp.up"], "layer");
        check(&["lookup"], "layer");
        check(&["layers[3].up", "layers[3].down"], "layers-3");
        check(&[], "layer");
    }

    #[test]
    fn kinds_have_names_of_their_own() {
        let naming = |names: &[&'static str]| Naming::new(names.iter().copied(), "layer");
        let mut block = naming(&["left.0.up", "left.0.down"]);
        block.join(naming(&["left.1.up", "left.1.down"]));
        block.join(naming(&["right.0.up", "right.0.down"]));
        let kinds = [
            naming(&["left.table"]),
            block,
            naming(&["up", "down"]),
            naming(&["left.norm"]),
            naming(&["left.table"]),
        ];
        assert_eq!(
            chosen(&kinds, &[1, 2, 2, 1, 1]),
            ["left", "left-right", "layer", "left-norm", "left-table"]
        );
    }
}
