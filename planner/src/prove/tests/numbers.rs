//! The rules, checked with numbers: after a proof every class of equal terms is evaluated at every mesh coordinate, and
//! all its terms must give the same blocks.
//!
//! Operators are stand-ins: arbitrary functions, nonlinear where the operator is, that depend on the global position of
//! every element and obey their factor signature and nothing more. What holds for them holds for every operator that
//! obeys its line.

use std::collections::BTreeMap;
use std::ops::Range;

use egg::{Id, Language};
use ir::builder::LayerBuilder;
use ir::graph::{Data, Extent, Init, Layer, OpId, Role, TensorId};
use ir::mesh::{AxisId, Mesh};
use ir::op::{Linear, Missing, OpKind};
use ir::program::AxisSet;
use ir::signature::FactorId;

use super::super::reference::reference;
use super::super::term::{Child, FLAT, Facts, Graph, Term, roles};
use super::super::translate::claims;
use super::super::{apply_rules, saturate};
use super::{Picker, Proof, layers, random_program};

/// What one device holds: rows of every dim, cut further where it is flat; with the lengths before every cut.
#[derive(Clone, Debug, PartialEq)]
struct Local {
    rows: Vec<Cut>,
    flat: Option<Cut>,
    data: Vec<f64>,
}

#[derive(Clone, Debug, PartialEq)]
struct Cut {
    range: Range<usize>,
    nominal: Vec<usize>,
}

impl Cut {
    fn whole(n: usize) -> Self {
        Self { range: 0..n, nominal: vec![n] }
    }

    fn slice(&self, i: usize, parts: usize) -> Self {
        let step = self.nominal.last().unwrap().div_ceil(parts);
        let start = (self.range.start + i * step).min(self.range.end);
        let nominal = [self.nominal.clone(), vec![step]].concat();
        Self { range: start..(start + step).min(self.range.end), nominal }
    }

    fn joined(&self, last: &Self) -> Self {
        let nominal = self.nominal[..self.nominal.len() - 1].to_vec();
        Self { range: self.range.start..last.range.end, nominal }
    }
}

fn product(lengths: impl Iterator<Item = usize>) -> usize {
    lengths.product()
}

/// All index tuples of a list of ranges, row-major.
fn indices(ranges: &[Range<usize>]) -> Vec<Vec<usize>> {
    ranges.iter().fold(vec![Vec::new()], |list, range| {
        let with =
            |head: &Vec<usize>| range.clone().map(|i| [head.clone(), vec![i]].concat()).collect::<Vec<_>>();
        list.iter().flat_map(with).collect()
    })
}

impl Local {
    /// Lengths before, at and behind a dim.
    fn around(&self, dim: usize) -> (usize, usize, usize) {
        let len = |cut: &Cut| cut.range.len();
        let (before, rest) = self.rows.split_at(dim);
        (product(before.iter().map(len)), len(&rest[0]), product(rest[1..].iter().map(len)))
    }

    fn slice(&self, dim: u8, i: usize, parts: usize) -> Self {
        if dim == FLAT {
            let old = self.flat.clone().unwrap_or_else(|| Cut::whole(self.data.len()));
            let new = old.slice(i, parts);
            let data = self.data[new.range.start - old.range.start..new.range.end - old.range.start].to_vec();
            return Self { rows: self.rows.clone(), flat: Some(new), data };
        }
        let dim = dim as usize;
        let (n_before, n, n_behind) = self.around(dim);
        let new = self.rows[dim].slice(i, parts);
        let from = new.range.start - self.rows[dim].range.start;
        let rows = |b: usize| (b * n + from) * n_behind..(b * n + from + new.range.len()) * n_behind;
        let data = (0..n_before).flat_map(|b| self.data[rows(b)].to_vec()).collect();
        let mut cuts = self.rows.clone();
        cuts[dim] = new;
        Self { rows: cuts, flat: None, data }
    }

    fn gather(blocks: &[&Self], dim: u8) -> Self {
        let (first, last) = (blocks[0], blocks[blocks.len() - 1]);
        if dim == FLAT {
            let (from, to) = (first.flat.as_ref().unwrap(), last.flat.as_ref().unwrap());
            let flat = Some(from.joined(to)).filter(|cut| cut.nominal.len() > 1);
            let data = blocks.iter().flat_map(|block| block.data.clone()).collect();
            return Self { rows: first.rows.clone(), flat, data };
        }
        let dim = dim as usize;
        let n_before = first.around(dim).0;
        let part = |b: usize, block: &Self| {
            let (_, n, n_behind) = block.around(dim);
            block.data[b * n * n_behind..(b + 1) * n * n_behind].to_vec()
        };
        let data = (0..n_before).flat_map(|b| blocks.iter().flat_map(move |block| part(b, block))).collect();
        let mut rows = first.rows.clone();
        rows[dim] = rows[dim].joined(&last.rows[dim]);
        Self { rows, flat: None, data }
    }

    fn reduce(blocks: &[&Self], with: fn(f64, f64) -> f64) -> Self {
        let mut sum = blocks[0].clone();
        for block in &blocks[1..] {
            sum.data.iter_mut().zip(&block.data).for_each(|(a, b)| *a = with(*a, *b));
        }
        sum
    }
}

/// A number in (-1, 1) that looks random and depends on all of the words.
fn noise(words: &[usize]) -> f64 {
    let mixed = words.iter().fold(0x9e37_79b9_7f4a_7c15_u64, |hash, &word| {
        (hash ^ word as u64).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(31)
    });
    (mixed >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
}

/// Every coordinate's block of a class.
type Blocks = Vec<Local>;

struct Evaluation<'a, 'b> {
    graph: &'a Graph<'b>,
    values: BTreeMap<Id, Blocks>,
}

impl Evaluation<'_, '_> {
    fn mesh(&self) -> &Mesh {
        self.graph.analysis.mesh
    }

    fn whole(&self, tensor: TensorId, seed: usize) -> Local {
        let shape = self.graph.analysis.layer.shape(tensor, self.graph.analysis.sizes);
        let rows: Vec<Cut> = shape.iter().map(|&n| Cut::whole(n as usize)).collect();
        let n = product(rows.iter().map(|cut| cut.range.len()));
        Local { rows, flat: None, data: (0..n).map(|i| noise(&[tensor.0, i, seed])).collect() }
    }

    fn group<'c>(&self, blocks: &'c Blocks, rank: usize, axis: AxisId) -> Vec<&'c Local> {
        self.mesh().group(rank as u64, &[axis]).into_iter().map(|rank| &blocks[rank as usize]).collect()
    }

    fn at(&self, rank: usize, axis: AxisId) -> (usize, usize) {
        (self.mesh().coordinates(rank as u64)[axis.0] as usize, self.mesh().size(axis) as usize)
    }

    fn evaluate(&self, term: &Term) -> Option<Blocks> {
        let children: Vec<&Blocks> =
            term.children().iter().map(|id| self.values.get(&self.graph.find(*id))).collect::<Option<_>>()?;
        let n = self.mesh().n_devices() as usize;
        Some((0..n).map(|rank| self.local(term, &children, rank)).collect())
    }

    fn local(&self, term: &Term, children: &[&Blocks], rank: usize) -> Local {
        match term {
            Term::Whole(tensor) => self.whole(*tensor, 0),
            Term::OutGradient(out) => self.whole(*out, 1),
            Term::Terms(tensor, axes) => self.term_of(*tensor, &axes.axes(), rank),
            Term::Apply { .. } | Term::Pullback { .. } => self.kernel(term, children, rank),
            Term::Update(..) => {
                let (old, gradient) = (&children[0][rank], &children[1][rank]);
                let new = old.data.iter().zip(&gradient.data).map(|(p, g)| p - 0.1 * g.tanh() * (1.0 + p));
                Local { data: new.collect(), ..old.clone() }
            }
            Term::Slice(axis, dim, _) => {
                let (i, parts) = self.at(rank, *axis);
                children[0][rank].slice(*dim, i, parts)
            }
            Term::AllGather(axis, dim, _) => Local::gather(&self.group(children[0], rank, *axis), *dim),
            Term::AllReduce(axis, _) => Local::reduce(&self.group(children[0], rank, *axis), |a, b| a + b),
            Term::AllReduceMax(axis, _) => Local::reduce(&self.group(children[0], rank, *axis), f64::max),
            Term::ReduceScatter(axis, dim, _) => {
                let (i, parts) = self.at(rank, *axis);
                Local::reduce(&self.group(children[0], rank, *axis), |a, b| a + b).slice(*dim, i, parts)
            }
            Term::AllToAll(axis, from, to, _) => {
                let (i, parts) = self.at(rank, *axis);
                Local::gather(&self.group(children[0], rank, *axis), *from).slice(*to, i, parts)
            }
            Term::Zero(axis, _) => {
                let mut block = children[0][rank].clone();
                if self.at(rank, *axis).0 != 0 {
                    block.data.fill(0.0);
                }
                block
            }
        }
    }

    /// Random terms; that at the origin makes up the rest.
    fn term_of(&self, tensor: TensorId, axes: &[AxisId], rank: usize) -> Local {
        let group = self.mesh().group(rank as u64, axes);
        let own = group.iter().position(|&other| other == rank as u64).unwrap_or(0);
        if own != 0 {
            return self.whole(tensor, 100 + own);
        }
        let mut rest = self.whole(tensor, 0);
        for other in 1..group.len() {
            let term = self.whole(tensor, 100 + other);
            rest.data.iter_mut().zip(&term.data).for_each(|(a, b)| *a -= b);
        }
        rest
    }

    /// A stand-in kernel: over every loop that the outcome lacks it adds up (or takes the maximum of) a function of
    /// the arguments and of the global position.
    fn kernel(&self, term: &Term, children: &[&Blocks], rank: usize) -> Local {
        let facts = &self.graph.analysis;
        let (op, roles, outcome) = roles(facts.layer, term).unwrap();
        let kind = &facts.layer.ops[op.0].kind;
        if *kind == OpKind::Fork && matches!(outcome, Child::Result(_)) {
            return children[0][rank].clone();
        }
        let sig = &facts.signatures[op.0];
        let walks = |child: Child| match child {
            Child::Operand(k) => &sig.operands[k],
            Child::Result(i) => &sig.results[i],
        };
        let whole = |f: usize| Cut::whole(facts.sizes.dims[sig.factors[f].dim.0] as usize);
        let mut loops: Vec<Option<Cut>> = vec![None; sig.factors.len()];
        for (&child, blocks) in roles.iter().zip(children) {
            for (factor, cut) in walks(child).iter().zip(&blocks[rank].rows) {
                loops[factor.0 as usize] = Some(cut.clone());
            }
        }
        for factor in walks(outcome) {
            loops[factor.0 as usize].get_or_insert_with(|| whole(factor.0 as usize));
        }
        let rows: Vec<Cut> = walks(outcome).iter().map(|f| loops[f.0 as usize].clone().unwrap()).collect();
        let arguments: Vec<(Child, &[FactorId], &Local)> = roles
            .iter()
            .zip(children)
            .map(|(&child, b)| (child, walks(child).as_slice(), &b[rank]))
            .collect();
        let data = Stand { op, linear: kind.line().linear, missing: sig.missing, outcome, arguments };
        let n = product(rows.iter().map(|cut| cut.range.len()));
        let data = data.run(&loops, walks(outcome), n);
        Local { rows, flat: None, data }
    }
}

/// The function that stands for an operator.
struct Stand<'a> {
    op: OpId,
    linear: Linear,
    missing: Missing,
    outcome: Child,
    arguments: Vec<(Child, &'a [FactorId], &'a Local)>,
}

impl Stand<'_> {
    fn run(&self, loops: &[Option<Cut>], walks: &[FactorId], n: usize) -> Vec<f64> {
        let ranges: Vec<Range<usize>> =
            loops.iter().map(|cut| cut.as_ref().map_or(0..1, |cut| cut.range.clone())).collect();
        let is_max = matches!(self.outcome, Child::Result(_)) && self.missing == Missing::Max;
        let mut data = vec![if is_max { f64::NEG_INFINITY } else { 0.0 }; n];
        for index in indices(&ranges) {
            let at = position(walks, loops, &index);
            let value = self.value(loops, &index);
            data[at] = if is_max { data[at].max(value) } else { data[at] + value };
        }
        let squashed = matches!(self.outcome, Child::Result(_)) && self.missing == Missing::Whole;
        if squashed && self.linear == Linear::No {
            data.iter_mut().for_each(|y| *y = y.tanh());
        }
        data
    }

    fn value(&self, loops: &[Option<Cut>], index: &[usize]) -> f64 {
        let role = |child: Child| match child {
            Child::Operand(k) => k,
            Child::Result(i) => 100 + i,
        };
        let (mut operands, mut gradients) = (0.0, 0.0);
        for (child, walks, block) in &self.arguments {
            let words = [[self.op.0, role(*child), role(self.outcome)].as_slice(), index].concat();
            let x = block.data[position(walks, loops, index)] * (1.5 + noise(&words));
            match child {
                Child::Operand(_) => operands += x,
                Child::Result(_) => gradients += x,
            }
        }
        match (self.outcome, self.linear) {
            (Child::Operand(_), _) => (1.5 + operands.tanh()) * gradients,
            (Child::Result(_), Linear::Yes) => operands,
            (Child::Result(_), Linear::No) => (2.0 * operands).tanh(),
        }
    }
}

/// Where an element lies in a local block.
fn position(walks: &[FactorId], loops: &[Option<Cut>], index: &[usize]) -> usize {
    walks.iter().fold(0, |at, factor| {
        let range = &loops[factor.0 as usize].as_ref().unwrap().range;
        at * range.len() + index[factor.0 as usize] - range.start
    })
}

fn differ(a: &Blocks, b: &Blocks) -> bool {
    let close = |(x, y): (&f64, &f64)| (x - y).abs() <= 1e-9 * (1.0 + x.abs().max(y.abs()));
    a.iter().zip(b).any(|(a, b)| {
        a.rows != b.rows || a.data.len() != b.data.len() || !a.data.iter().zip(&b.data).all(close)
    })
}

/// Evaluates every term of every class that makes sense, and compares the terms of each; the number compared.
fn check_classes(graph: &Graph<'_>) -> usize {
    let mut evaluation = Evaluation { graph, values: BTreeMap::new() };
    let mut open: Vec<(Id, Term)> = graph
        .classes()
        .filter(|class| class.data.shape.is_some())
        .flat_map(|class| class.nodes.iter().map(|term| (class.id, term.clone())))
        .collect();
    let mut n_compared = 0;
    loop {
        let n_open = open.len();
        open.retain(|(class, term)| {
            let Some(blocks) = evaluation.evaluate(term) else { return true };
            match evaluation.values.get(class) {
                Some(known) => {
                    assert!(!differ(known, &blocks), "{term:?} differs from {:?}", graph[*class].nodes);
                    n_compared += 1;
                }
                None => drop(evaluation.values.insert(*class, blocks)),
            }
            false
        });
        if open.len() == n_open {
            return n_compared;
        }
    }
}

/// Saturates the claims of a random program and evaluates everything that was concluded.
fn check_numbers(which: usize, sizes: &[u64], seed: u64) -> usize {
    let (layer, mesh) = (&layers::all()[which], Mesh::of_sizes(sizes).unwrap());
    let Some((_, program)) = random_program(layer, &mesh, seed) else { return 0 };
    let small = layer.sizes(4, 4);
    let mut graph = Graph::new(Facts::new(layer, &mesh, &small));
    let reference = reference(&mut graph);
    let Ok(claims) = claims(&mut graph, (&program, None), &reference) else { return 0 };
    assert!(matches!(saturate(&mut graph, &claims, &reference), Proof::Proven { .. }));
    while apply_rules(&mut graph) && graph.nodes().len() < 20_000 {
        graph.rebuild();
    }
    graph.rebuild();
    check_classes(&graph)
}

/// A layer of few elements whose operators are of every sort: linear, nonlinear, with a sum, with a maximum, whole.
fn tiny() -> Layer {
    let mut b = LayerBuilder::new("tiny");
    b.fixed("h", 4);
    b.dim("v", Extent::Uneven(17));
    let x = b.stream();
    let g = b.parameter("g", "h", Init::One);
    let n = b.op("norm", OpKind::RmsNorm { eps: 0.0, shift: 0.0 }, &[x, g], "b s h");
    let c = b.parameter("c", "h", Init::Zero);
    let n = b.op("bias", OpKind::Bias, &[n, c], "b s h");
    let x = b.op("add", OpKind::Add, &[x, n], "b s h");
    let x = b.op("scale", OpKind::Scale { by: 2.0 }, &[x], "b s h");
    let w = b.parameter("w", "h v", Init::Normal);
    let z = b.op("scores", OpKind::Linear, &[x, w], "b s v");
    let m = b.op("max", OpKind::RowMax, &[z], "b s");
    let e = b.op("sum_exp", OpKind::SumExp, &[z, m], "b s");
    let labels = b.tensor("labels", "b s", Role::Data(Data::Labels));
    let t = b.op("pick", OpKind::Pick, &[z, labels], "b s");
    let l = b.op("entropy", OpKind::CrossEntropy, &[e, m, t], "b s");
    let out = b.op("loss", OpKind::SumLoss, &[l], "");
    b.finish(out)
}

/// A random term over what is in the pool: most make no sense in any program.
fn random_term(graph: &Graph<'_>, pool: &[Id], pick: &mut Picker) -> Option<Term> {
    let (layer, mesh) = (graph.analysis.layer, graph.analysis.mesh);
    let axis = AxisId(pick.below(mesh.n_axes()));
    let any = |pick: &mut Picker| pick.of(pool);
    let dim = |pick: &mut Picker| [0, 1, 2, FLAT][pick.below(4)];
    let op = OpId(pick.below(layer.ops.len()));
    let (operands, results) = (&layer.ops[op.0].operands, &layer.ops[op.0].results);
    // A block with the dims of a tensor.
    let like = |tensor: TensorId, pick: &mut Picker| {
        let dims = &layer.tensors[tensor.0].dims;
        let shape = |id: &&Id| graph[**id].data.shape.as_ref();
        let fits = |id: &&Id| shape(id).is_some_and(|shape| shape.dims.iter().map(|(dim, _)| dim).eq(dims));
        let list: Vec<Id> = pool.iter().filter(fits).copied().collect();
        (!list.is_empty()).then(|| pick.of(&list))
    };
    Some(match pick.below(20) {
        0..=2 => Term::Slice(axis, dim(pick), [any(pick)]),
        3 => Term::AllGather(axis, dim(pick), [any(pick)]),
        4 => Term::AllReduce(axis, [any(pick)]),
        5 => Term::AllReduceMax(axis, [any(pick)]),
        6 => Term::ReduceScatter(axis, dim(pick), [any(pick)]),
        7 => Term::AllToAll(axis, dim(pick), dim(pick), [any(pick)]),
        8 => Term::Zero(axis, [any(pick)]),
        9 => Term::Update(TensorId(1), [any(pick), any(pick)]),
        10..=14 => {
            let operands = operands.iter().map(|&tensor| like(tensor, pick)).collect::<Option<_>>()?;
            Term::Apply { op, result: pick.below(results.len()), operands }
        }
        _ => {
            let all: Vec<TensorId> = operands.iter().chain(results).copied().collect();
            let given = pick.below(1 << all.len()) as u128;
            let children = all.iter().enumerate().filter(|(i, _)| given >> i & 1 == 1);
            let children = children.map(|(_, &tensor)| like(tensor, pick)).collect::<Option<_>>()?;
            Term::Pullback { op, operand: pick.below(operands.len()), given, children }
        }
    })
}

/// Adds random terms that fit together, applies the rules, and evaluates everything that was concluded.
fn check_random_terms(sizes: &[u64], seed: u64) -> usize {
    let (layer, mesh) = (tiny(), Mesh::of_sizes(sizes).unwrap());
    let lengths = layer.sizes(4, 4);
    let mut pick = Picker(seed);
    let mut graph = Graph::new(Facts::new(&layer, &mesh, &lengths));
    let mut pool: Vec<Id> = layer
        .tensor_ids()
        .filter(|&t| layer.is_parameter(t) || layer.is_data(t) || layer.stream_in.contains(&t))
        .map(|t| graph.add(Term::Whole(t)))
        .collect();
    pool.extend(layer.out.iter().map(|&out| graph.add(Term::OutGradient(out))));
    for &stream in &layer.stream_in {
        let terms = graph.add(Term::Terms(stream, AxisSet::of(&[AxisId(0)])));
        let sum = graph.add(Term::AllReduce(AxisId(0), [terms]));
        graph.union(sum, pool[0]);
        pool.push(terms);
    }
    for _ in 0..20_000 {
        if pool.len() >= 150 {
            break;
        }
        let Some(term) = random_term(&graph, &pool, &mut pick) else { continue };
        let id = graph.add(term);
        if graph[id].data.shape.is_some() && !pool.contains(&id) {
            pool.push(id);
        }
    }
    graph.rebuild();
    for _ in 0..3 {
        apply_rules(&mut graph);
        graph.rebuild();
    }
    assert!(!graph.analysis.clash, "seed {seed}: two shapes clash");
    check_classes(&graph)
}

#[test]
fn rules_hold_for_terms_of_no_program() {
    let one: usize = (0..150).map(|seed| check_random_terms(&[2], seed)).sum();
    let two: usize = (0..150).map(|seed| check_random_terms(&[2, 2], seed)).sum();
    assert!(one > 1000 && two > 1000, "only {one} and {two} terms were compared");
}

#[test]
fn terms_that_rules_make_equal_have_equal_numbers_on_one_axis() {
    let n: usize = (0..layers::COUNT).map(|which| check_numbers(which, &[2], 3)).sum();
    assert!(n > 300, "only {n} terms were compared");
}

#[test]
fn terms_that_rules_make_equal_have_equal_numbers_on_two_axes() {
    let n: usize = (0..layers::COUNT).map(|which| check_numbers(which, &[2, 2], 5)).sum();
    assert!(n > 1000, "only {n} terms were compared");
}
