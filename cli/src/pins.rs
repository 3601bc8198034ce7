//! What the user decided: from `--pin tp=8,pp=4` and the options of `estimate` to the search's pins.

use clap::{Arg, CommandFactory, Parser};
use ir::graph::{Extent, Model};
use ir::names::Roles;
use ir::token_order::TokenOrder;
use planner::constraints::Constraints;
use planner::request::{
    AxesKind, ContextKind, Forbid, GradientsKind, OffloadKind, Pins, RecomputeKind, ScheduleKind,
    SequenceParallel, SharesKind, SplitKind,
};

use crate::args::{
    AxesArg, ContextArg, GradientsArg, OffloadArg, PinArgs, RecomputeArg, ScheduleArg, SharesArg, SplitArg,
    SwitchArg, TensorSharesArg, TokenOrderArg,
};
use crate::failure::{Failure, plain};

/// Reads the values of all `--pin`, by the same rules as the options of `estimate`.
pub(crate) fn read(texts: &[String]) -> Result<Pins, Failure> {
    let mut words = Vec::new();
    for text in texts {
        for (name, value) in pairs("--pin", text)? {
            words.push(format!("--{name}={value}"));
        }
    }
    parse("--pin", words)
}

/// Reads the value of another option by the same rules.
pub(crate) fn read_of(option: &str, text: &str) -> Result<Pins, Failure> {
    let words = pairs(option, text)?.into_iter().map(|(name, value)| format!("--{name}={value}"));
    parse(option, words.collect())
}

/// The choices as a command line of their own.
#[derive(Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
struct Line {
    #[command(flatten)]
    pins: PinArgs,
}

/// Whether it is the name of a choice that can be kept.
pub(crate) fn is_name(name: &str) -> bool {
    Line::command().get_arguments().any(|arg| arg.get_long() == Some(name))
}

/// Reads words such as `--tp=8` that stand in the value of an option.
pub(crate) fn parse(option: &str, words: Vec<String>) -> Result<Pins, Failure> {
    let line = Line::try_parse_from(words).map_err(|error| {
        let text = plain(&error.to_string());
        let what = text.lines().next().unwrap_or_default().trim_start_matches("error: ").replace("--", "");
        let values = text.lines().find_map(|line| line.trim().strip_prefix("[possible values: "));
        let hint = match values {
            Some(values) => format!("values are {}", values.trim_end_matches(']')),
            None => {
                let command = Line::command();
                let names: Vec<&str> = command.get_arguments().filter_map(Arg::get_long).collect();
                format!("names are {}; `planner estimate --help` says what each takes", names.join(", "))
            }
        };
        Failure::argument_with_hint(format!("{option}: {what}"), hint)
    })?;
    Ok(of(&line.pins))
}

/// `tp=8,layers-per-stage=4,5,pp=2`: a piece without `=` continues the list before it.
fn pairs<'a>(option: &str, text: &'a str) -> Result<Vec<(&'a str, String)>, Failure> {
    let mut pairs: Vec<(&str, String)> = Vec::new();
    for piece in text.split(',') {
        match (piece.split_once('='), pairs.last_mut()) {
            (Some((name, value)), _) => pairs.push((name.trim(), value.trim().to_owned())),
            (None, Some((_, list))) => {
                list.push(',');
                list.push_str(piece.trim());
            }
            (None, None) => {
                let what = format!("{option}: expected `name=value`, found `{piece}`");
                return Err(Failure::argument_with_hint(what, format!("for example `{option} tp=8,pp=4`")));
            }
        }
    }
    Ok(pairs)
}

/// The search's form of what was written.
pub(crate) fn of(args: &PinArgs) -> Pins {
    Pins {
        tp: args.tp,
        pp: args.pp,
        dp: args.dp,
        cp: args.cp,
        ep: args.ep,
        etp: args.etp,
        vpp: args.vpp,
        micro_batch: args.micro_batch,
        schedule: args.schedule.map(schedule),
        slices: args.slices,
        recompute: args.recompute.map(|recompute| match recompute {
            RecomputeArg::None => RecomputeKind::None,
            RecomputeArg::Selective => RecomputeKind::Selective,
            RecomputeArg::Full => RecomputeKind::Full,
        }),
        zero: args.zero,
        gradients: args.gradients.map(|kind| match kind {
            GradientsArg::Cut => GradientsKind::Cut,
            GradientsArg::Whole => GradientsKind::Whole,
        }),
        split_backward: args.split_backward.map(|kind| match kind {
            SplitArg::None => SplitKind::None,
            SplitArg::Any => SplitKind::Any,
        }),
        zero_group: args.zero_group,
        offload: args.offload.map(|offload| match offload {
            OffloadArg::None => OffloadKind::None,
            OffloadArg::Allowed => OffloadKind::Allowed,
            OffloadArg::Optimizer => OffloadKind::Optimizer,
            OffloadArg::Activations => OffloadKind::Activations,
            OffloadArg::Both => OffloadKind::Both,
            OffloadArg::States => OffloadKind::States,
            OffloadArg::All => OffloadKind::All,
            OffloadArg::Nvme => OffloadKind::Nvme,
        }),
        sequence_parallel: args.sequence_parallel.map(|switch| match switch {
            SwitchArg::On => SequenceParallel::On,
            SwitchArg::Off => SequenceParallel::Off,
        }),
        cp_kind: args.cp_kind.map(|kind| match kind {
            ContextArg::Gather => ContextKind::Gather,
            ContextArg::Ring => ContextKind::Ring,
            ContextArg::Ulysses => ContextKind::Ulysses,
        }),
        token_order: args.token_order.map(|order| match order {
            TokenOrderArg::Natural => TokenOrder::Natural,
            TokenOrderArg::ZigZag => TokenOrder::ZigZag,
            TokenOrderArg::Striped => TokenOrder::Striped,
        }),
        shares: args.shares.map(|shares| match shares {
            SharesArg::Equal => SharesKind::Equal,
            SharesArg::Unequal => SharesKind::Unequal,
        }),
        tensor_shares: args.tensor_shares.map(|shares| match shares {
            TensorSharesArg::Equal => SharesKind::Equal,
            TensorSharesArg::Unequal => SharesKind::Unequal,
        }),
        axes: args.axes.map(|axes| match axes {
            AxesArg::Named => AxesKind::Named,
            AxesArg::Any => AxesKind::Any,
        }),
        layers_per_stage: args.layers_per_stage.clone(),
        forbid: Forbid::default(),
        constraints: Constraints::default(),
    }
}

/// A schedule by its name.
fn schedule(name: ScheduleArg) -> ScheduleKind {
    match name {
        ScheduleArg::GPipe => ScheduleKind::GPipe,
        ScheduleArg::OneFOneB => ScheduleKind::OneFOneB,
        ScheduleArg::Eager => ScheduleKind::Eager,
        ScheduleArg::Dapple => ScheduleKind::Dapple,
        ScheduleArg::Interleaved => ScheduleKind::Interleaved,
        ScheduleArg::BreadthFirst => ScheduleKind::BreadthFirst,
        ScheduleArg::ZbH1 => ScheduleKind::ZbH1,
        ScheduleArg::ZbH2 => ScheduleKind::ZbH2,
        ScheduleArg::ZbV => ScheduleKind::ZbV,
        ScheduleArg::VHalf => ScheduleKind::VHalf,
        ScheduleArg::VMin => ScheduleKind::VMin,
        ScheduleArg::Hanayo => ScheduleKind::Hanayo,
        ScheduleArg::DualPipeV => ScheduleKind::DualPipeV,
        ScheduleArg::Chimera => ScheduleKind::Chimera,
        ScheduleArg::Seq1F1B => ScheduleKind::Seq1F1B,
        ScheduleArg::TeraPipe => ScheduleKind::TeraPipe,
    }
}

/// Everything decided, as someone expects who names a plan: what is not said is 1, off, or follows from the rest.
pub(crate) fn complete(
    pins: &Pins,
    model: &Model,
    (n_devices, sequence): (u64, u64),
) -> Result<Pins, Failure> {
    let (tp, pp, cp) = (pins.tp.unwrap_or(1), pins.pp.unwrap_or(1), pins.cp.unwrap_or(1));
    let vpp = pins.vpp.unwrap_or(pins.schedule.map_or(1, ScheduleKind::default_virtual_stages));
    if pins.tensor_shares == Some(SharesKind::Unequal) {
        let what =
            "--tensor-shares unequal: how many ranks a device runs, which degrees then count, is searched";
        return Err(Failure::argument_with_hint(
            what,
            "ask `planner optimize` with --pin tensor-shares=unequal",
        ));
    }
    let others = u128::from(tp) * u128::from(pp) * u128::from(cp);
    let all = u128::from(n_devices);
    let used = others.saturating_mul(u128::from(pins.dp.unwrap_or(1)));
    if used > all || all % used != 0 || (pins.dp.is_some() && used != all) {
        let what = match pins.dp {
            Some(dp) => format!(
                "tp {tp} x cp {cp} x pp {pp} x dp {dp} are {used} devices, the cluster has {n_devices}"
            ),
            None => format!(
                "tp {tp} x cp {cp} x pp {pp} are {used} devices, which do not divide the cluster's {n_devices}"
            ),
        };
        return Err(Failure::argument_with_hint(what, "choose other degrees, or other --nodes or --devices"));
    }
    let rest = u64::try_from(all / others).unwrap_or(n_devices);
    // As engines have it beside tensor parallelism, where sequences can be cut so.
    let cuts_tokens = tp > 1 && tp.checked_mul(cp).is_some_and(|parts| sequence.is_multiple_of(parts));
    let between_products = if cuts_tokens { SequenceParallel::On } else { SequenceParallel::Off };
    Ok(Pins {
        tp: Some(tp),
        pp: Some(pp),
        cp: Some(cp),
        dp: Some(pins.dp.unwrap_or(rest)),
        ep: Some(pins.ep.unwrap_or(1)),
        // As Megatron does, experts are cut like the rest unless told otherwise.
        etp: pins.etp.or(Some(if has_experts(model) { tp } else { 1 })),
        vpp: Some(vpp),
        micro_batch: Some(pins.micro_batch.unwrap_or(1)),
        schedule: pins.schedule.or(Some(if vpp > 1 {
            ScheduleKind::Interleaved
        } else {
            ScheduleKind::OneFOneB
        })),
        slices: pins.slices,
        recompute: pins.recompute.or(Some(RecomputeKind::None)),
        zero: pins.zero.or(Some(1)),
        gradients: pins.gradients,
        split_backward: pins.split_backward,
        zero_group: pins.zero_group,
        offload: pins.offload.or(Some(OffloadKind::None)),
        sequence_parallel: pins.sequence_parallel.or((tp > 1).then_some(between_products)),
        cp_kind: pins.cp_kind,
        token_order: pins.token_order,
        shares: pins.shares.or(Some(SharesKind::Equal)),
        tensor_shares: Some(SharesKind::Equal),
        axes: pins.axes.or(Some(AxesKind::Named)),
        layers_per_stage: pins.layers_per_stage.clone(),
        forbid: pins.forbid.clone(),
        constraints: pins.constraints.clone(),
    })
}

/// Choices that were kept and change nothing, because the plan has not what they are of.
pub(crate) fn without_effect(pins: &Pins, roles: &Roles) -> Vec<String> {
    // Of a plan with data parallelism in some of its layers, the states of these may be cut.
    let no_states = roles.zero.stage == 0 && pins.zero != Some(0) && roles.dp * roles.cp == 1;
    let idle = [
        (
            "zero",
            pins.zero.is_some_and(|stage| stage > 0) && no_states,
            "no two devices hold the same parameters",
        ),
        ("zero-group", pins.zero_group.is_some() && no_states, "no two devices hold the same parameters"),
        ("gradients", pins.gradients.is_some() && roles.zero.stage < 3, "parameters are not cut"),
        (
            "sequence-parallel",
            pins.sequence_parallel == Some(SequenceParallel::On) && roles.tp == 1,
            "there is no tensor parallelism",
        ),
        ("cp-kind", pins.cp_kind.is_some() && roles.cp == 1, "there is no context parallelism"),
        ("token-order", pins.token_order.is_some() && roles.cp == 1, "there is no context parallelism"),
    ];
    let said = |(name, _, why): &(&str, bool, &str)| format!("the choice of {name} changes nothing: {why}");
    idle.iter().filter(|(_, is_idle, _)| *is_idle).map(said).collect()
}

/// True where some dim counts slots of experts.
fn has_experts(model: &Model) -> bool {
    model.layers.iter().flat_map(|layer| &layer.dims).any(|dim| matches!(dim.extent, Extent::Slots { .. }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_one(text: &str) -> Result<Pins, String> {
        read(&[text.into()]).map_err(|error| error.to_string().lines().next().unwrap_or_default().to_owned())
    }

    #[test]
    fn pins_are_read_by_the_names_of_the_options() {
        let pins = read_one("tp=8, pp=4,schedule=1f1b,layers-per-stage=9,8,8,7,zero=0").unwrap();
        assert_eq!((pins.tp, pins.pp, pins.dp, pins.zero), (Some(8), Some(4), None, Some(0)));
        assert_eq!(pins.schedule, Some(ScheduleKind::OneFOneB));
        assert_eq!(pins.layers_per_stage, Some(vec![9, 8, 8, 7]));
    }

    #[test]
    fn choices_of_what_a_plan_has_not_are_told() {
        let plan = |zero: u8, dp: u64, cp: u64| {
            let roles = serde_json::json!({
                "dp": dp, "tp": 1, "sequence_parallel": false, "cp": cp, "ep": 1, "etp": 1, "pp": 1, "vpp": 1,
                "zero": { "stage": zero }, "recompute": "none", "micro_batch": 1, "accumulation": 1,
                "vocabulary_parallel": 1,
            });
            serde_json::from_value::<Roles>(roles).unwrap()
        };
        let pins = read_one("zero=3,cp-kind=ring").unwrap();
        assert_eq!(without_effect(&pins, &plan(3, 1, 2)), [""; 0]);
        assert_eq!(
            without_effect(&pins, &plan(0, 1, 1)),
            [
                "the choice of zero changes nothing: no two devices hold the same parameters",
                "the choice of cp-kind changes nothing: there is no context parallelism"
            ]
        );
        let of_zero = |pin: &str, dp| without_effect(&read_one(pin).unwrap(), &plan(0, dp, 1));
        assert_eq!(of_zero("zero=0", 1), [""; 0]);
        assert_eq!(of_zero("zero=1", 2), [""; 0]);
    }

    #[test]
    fn a_pin_that_is_wrong_is_named() {
        assert_eq!(read_one("8"), Err("--pin: expected `name=value`, found `8`".into()));
        assert_eq!(read_one("tpp=8"), Err("--pin: unexpected argument 'tpp' found".into()));
        assert_eq!(
            read_one("tp=0"),
            Err("--pin: invalid value '0' for 'tp <N>': expected a number from 1 to 4294967296".into())
        );
        assert_eq!(
            read_one("tp=2,tp=4"),
            Err("--pin: the argument 'tp <N>' cannot be used multiple times".into())
        );
    }
}
