//! What the user rules out: from `--forbid zero=3,pp` to the search's prohibitions.

use planner::forbid::contradiction;
use planner::request::{Degrees, Forbid, OffloadKind, Pins, RecomputeKind, SequenceParallel};

use crate::args::ForbidArgs;
use crate::failure::Failure;
use crate::pins;

/// Reads the values of all `--forbid`. A name and a value by the rules of `--pin`; a name by itself is every degree
/// above one, or all of what has stages. A piece that begins with a digit, or is a value of the name before it, is one
/// more of that.
pub(crate) fn read(texts: &[String]) -> Result<Forbid, Failure> {
    let mut forbid = Forbid::default();
    for text in texts {
        let mut last: Option<&str> = None;
        for piece in text.split(',').map(str::trim) {
            match (piece.split_once('='), last) {
                (Some((name, value)), _) => {
                    last = Some(name.trim());
                    one(&mut forbid, name.trim(), value.trim())?;
                }
                (None, Some(name)) if is_value_of(name, piece) => one(&mut forbid, name, piece)?,
                (None, _) => all_of(&mut forbid, piece)?,
            }
        }
    }
    Ok(forbid)
}

/// What the user chooses and rules out.
pub(crate) fn choices(pin: &[String], forbid: &ForbidArgs) -> Result<Pins, Failure> {
    Ok(Pins { forbid: read(&forbid.forbid)?, ..pins::read(pin)? })
}

/// Refuses a question whose pins and prohibitions contradict each other; `defaults` says what else is decided.
pub(crate) fn check(pins: &Pins, defaults: &str) -> Result<(), Failure> {
    let what = if pins.forbid.is_empty() { None } else { contradiction(pins) };
    what.map_or(Ok(()), |what| Err(Failure::argument_with_hint(format!("--forbid: {what}"), defaults)))
}

/// What can be chosen and not ruled out, by its name.
type Chosen = (&'static str, fn(&Pins) -> bool);

const CHOSEN_ALONE: [Chosen; 7] = [
    ("layers-per-stage", |pins| pins.layers_per_stage.is_some()),
    ("gradients", |pins| pins.gradients.is_some()),
    ("shares", |pins| pins.shares.is_some()),
    ("tensor-shares", |pins| pins.tensor_shares.is_some()),
    ("split-backward", |pins| pins.split_backward.is_some()),
    ("axes", |pins| pins.axes.is_some()),
    ("zero-group", |pins| pins.zero_group.is_some()),
];

fn chosen_alone(name: &str) -> Failure {
    Failure::argument(format!("--forbid: {name} can be chosen with --pin, but not forbidden"))
}

/// Whether a piece without a name is another value of the last one.
fn is_value_of(name: &str, piece: &str) -> bool {
    piece.starts_with(|c: char| c.is_ascii_digit())
        || pins::parse("--forbid", vec![format!("--{name}={piece}")]).is_ok()
}

/// Rules out one value of a name.
fn one(forbid: &mut Forbid, name: &str, value: &str) -> Result<(), Failure> {
    let read = pins::parse("--forbid", vec![format!("--{name}={value}")])?;
    if let Some((name, _)) = CHOSEN_ALONE.into_iter().find(|(_, is_read)| is_read(&read)) {
        return Err(chosen_alone(name));
    }
    let degrees = [
        (&mut forbid.tp, read.tp),
        (&mut forbid.pp, read.pp),
        (&mut forbid.dp, read.dp),
        (&mut forbid.cp, read.cp),
        (&mut forbid.ep, read.ep),
        (&mut forbid.etp, read.etp),
        (&mut forbid.vpp, read.vpp.map(u64::from)),
        (&mut forbid.micro_batch, read.micro_batch),
        (&mut forbid.slices, read.slices.map(u64::from)),
    ];
    for (degrees, value) in degrees {
        degrees.single.extend(value);
    }
    add(&mut forbid.schedule, read.schedule);
    add(&mut forbid.recompute, read.recompute);
    add(&mut forbid.zero, read.zero);
    add(&mut forbid.offload, read.offload);
    add(&mut forbid.sequence_parallel, read.sequence_parallel);
    add(&mut forbid.cp_kind, read.cp_kind);
    add(&mut forbid.token_order, read.token_order);
    Ok(())
}

fn add<T: PartialEq>(list: &mut Vec<T>, value: Option<T>) {
    let new = value.filter(|value| !list.contains(value));
    list.extend(new);
}

/// Rules out all of a name but its least.
fn all_of(forbid: &mut Forbid, name: &str) -> Result<(), Failure> {
    let degrees: &mut Degrees = match name {
        "tp" => &mut forbid.tp,
        "pp" => &mut forbid.pp,
        "dp" => &mut forbid.dp,
        "cp" => &mut forbid.cp,
        "ep" => &mut forbid.ep,
        "etp" => &mut forbid.etp,
        "vpp" => &mut forbid.vpp,
        "micro-batch" => &mut forbid.micro_batch,
        "slices" => &mut forbid.slices,
        "zero" => {
            (1..=3).for_each(|stage| add(&mut forbid.zero, Some(stage)));
            return Ok(());
        }
        "offload" => {
            let some = OffloadKind::ALL.into_iter().filter(|kind| *kind != OffloadKind::None);
            some.for_each(|kind| add(&mut forbid.offload, Some(kind)));
            return Ok(());
        }
        "recompute" => {
            add(&mut forbid.recompute, Some(RecomputeKind::Selective));
            add(&mut forbid.recompute, Some(RecomputeKind::Full));
            return Ok(());
        }
        "sequence-parallel" => {
            add(&mut forbid.sequence_parallel, Some(SequenceParallel::On));
            return Ok(());
        }
        _ if CHOSEN_ALONE.iter().any(|(known, _)| *known == name) => return Err(chosen_alone(name)),
        _ => {
            let what = format!("--forbid: expected `name` or `name=value`, found `{name}`");
            let hint = "names are tp, pp, dp, cp, ep, etp, vpp, micro-batch, slices, zero, offload, recompute, \
                        sequence-parallel, and with a value schedule, cp-kind and token-order: `--forbid pp,zero=3,tp=4,8`";
            return Err(Failure::argument_with_hint(what, hint));
        }
    };
    degrees.above_one = true;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_one(text: &str) -> Result<Forbid, String> {
        read(&[text.into()]).map_err(|error| error.to_string().lines().next().unwrap_or_default().to_owned())
    }

    #[test]
    fn names_values_and_lists_are_read() {
        let forbid = read_one("pp, tp=4,8,zero=3,zero=3,recompute").unwrap();
        assert!(forbid.pp.above_one && forbid.pp.single.is_empty() && !forbid.tp.above_one);
        assert_eq!(forbid.tp.single, [4, 8].into());
        assert_eq!(forbid.zero, [3]);
        assert_eq!(forbid.recompute, [RecomputeKind::Selective, RecomputeKind::Full]);
        let forbid = read_one("offload=optimizer,activations,schedule=zb-v,dualpipe-v,vpp").unwrap();
        assert_eq!(forbid.offload, [OffloadKind::Optimizer, OffloadKind::Activations]);
        assert_eq!((forbid.schedule.len(), forbid.vpp.above_one), (2, true));
    }

    #[test]
    fn what_cannot_be_forbidden_is_named() {
        assert_eq!(read_one("tpp"), Err("--forbid: expected `name` or `name=value`, found `tpp`".into()));
        assert_eq!(read_one("tpp=2"), Err("--forbid: unexpected argument 'tpp' found".into()));
        assert_eq!(
            read_one("zero=7"),
            Err("--forbid: invalid value '7' for 'zero <0..3>': expected a number from 0 to 3".into())
        );
        for chosen in ["layers-per-stage=4,4", "tensor-shares=equal", "axes=any", "zero-group=2", "shares"] {
            let why = read_one(chosen).unwrap_err();
            let name = chosen.split('=').next().unwrap_or_default();
            assert_eq!(why, format!("--forbid: {name} can be chosen with --pin, but not forbidden"));
        }
    }
}
