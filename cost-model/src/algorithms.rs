//! Which algorithm the price of every collective of a program is of, as rules for the plan.
//!
//! Tensors of a layer are priced one by one, parameters and their gradients in buckets, as in `program_price`.

use ir::collective::{CollectiveKind, CommunicationClass, Rule};
use ir::conversion::Step;
use ir::graph::{Layer, Sizes, TensorId};
use ir::mesh::{AxisId, Mesh};
use ir::program::{Instruction, Program};
use ir::units::Bytes;
use ir::work::Pass;

use crate::dispatch::Routing;
use crate::program_price::{Buckets, Pricing};
use crate::step_price::{PriceContext, price_full, price_step};

/// The algorithm of every collective of a program, one rule per purpose, kind, axes and (but for buckets) tensor.
pub fn algorithms(
    context: &PriceContext<'_>,
    layer: &Layer,
    mesh: &Mesh,
    sizes: &Sizes,
    program: &Program,
) -> Vec<Rule> {
    let pricing = Pricing::new(context, layer, mesh, sizes, program);
    let mut rules: Vec<Rule> = Vec::new();
    let mut put = |rule: Rule| {
        let same = |known: &Rule| Rule { algorithm: rule.algorithm, ..known.clone() } == rule;
        if !rules.iter().any(same) {
            rules.push(rule);
        }
    };
    for (pass, code) in [(Pass::Forward, &program.forward), (Pass::Backward, &program.backward)] {
        for instruction in code {
            let Instruction::Convert { input, steps, .. } = instruction else { continue };
            let value = program.value(*input);
            let class = CommunicationClass::of_conversion(value.side, pass);
            of_tensor(&pricing, (class, value.tensor), steps).into_iter().for_each(&mut put);
        }
        of_buckets(&pricing, pricing.section_buckets(code)).into_iter().for_each(&mut put);
    }
    of_buckets(&pricing, pricing.update_buckets()).into_iter().for_each(&mut put);
    rules.sort();
    rules
}

fn of_tensor(
    pricing: &Pricing<'_>,
    (class, tensor): (CommunicationClass, TensorId),
    steps: &[Step],
) -> Vec<Rule> {
    let shape = pricing.layer.shape(tensor, pricing.sizes);
    let (element, routing) = (pricing.element(tensor), Routing::of(pricing.layer, tensor));
    let rule = |step: &Step| {
        let price = price_step(pricing.context, pricing.mesh, step, (&shape, element), routing)?;
        let (axes, algorithm) = (step.axes.clone(), price.choice.algorithm);
        Some(Rule { class, kind: price.kind, axes, tensor: Some(tensor), algorithm })
    };
    steps.iter().filter_map(rule).collect()
}

fn of_buckets(pricing: &Pricing<'_>, buckets: Buckets) -> Vec<Rule> {
    let rule = |((class, kind, axes), full): ((CommunicationClass, CollectiveKind, Vec<AxisId>), Bytes)| {
        let algorithm = price_full(pricing.context, pricing.mesh, (kind, &axes), full).choice.algorithm;
        Rule { class, kind, axes, tensor: None, algorithm }
    };
    buckets.into_iter().map(rule).collect()
}
