//! The ranges in which the attributes of operators make sense. A model's file and the model in a plan are held to the
//! same.

use crate::op::OpKind;

/// Longest dim that is read.
pub const MAX_LENGTH: u64 = 1 << 40;

/// Most parts of a split, and most dims of a tensor.
pub const MAX_PARTS: usize = 64;

/// Checks the attributes that no rule about shapes covers.
///
/// # Errors
/// The attribute, its value and what was expected.
pub fn check(kind: &OpKind) -> Result<(), String> {
    let told = |x: f64| if x.abs() < 1e12 { format!("{x}") } else { format!("{x:e}") };
    let positive = |name: &str, x: f64| {
        let what = || format!("{name} is {}, expected a positive number below 1e12", told(x));
        if x > 0.0 && x < 1e12 { Ok(()) } else { Err(what()) }
    };
    let bounded = |name: &str, x: f64| {
        let what = || format!("{name} is {}, expected a number below 1e12", told(x));
        if x.is_finite() && x.abs() < 1e12 { Ok(()) } else { Err(what()) }
    };
    match kind {
        OpKind::RmsNorm { eps, .. } | OpKind::LayerNorm { eps } => positive("eps", *eps),
        OpKind::Rope { theta, dims, .. } => {
            positive("theta", *theta)?;
            let even = *dims > 0 && dims % 2 == 0 && *dims <= MAX_LENGTH;
            if even { Ok(()) } else { Err(format!("dims is {dims}, expected a positive even number")) }
        }
        OpKind::Attention { scale, window, softcap, .. } => {
            scale.map_or(Ok(()), |x| positive("scale", x))?;
            softcap.map_or(Ok(()), |x| positive("softcap", x))?;
            if *window == Some(0) { Err("window is 0, expected at least 1".into()) } else { Ok(()) }
        }
        OpKind::Scale { by } => bounded("by", *by),
        OpKind::Softcap { cap } => positive("cap", *cap),
        OpKind::Weigh { by } => {
            let fits = by.len() <= MAX_PARTS && by.iter().all(|x| x.is_finite() && x.abs() < 1e12);
            if fits { Ok(()) } else { Err(format!("by must be 1 to {MAX_PARTS} numbers")) }
        }
        OpKind::Split { sizes } | OpKind::Concat { sizes } => {
            let fits = sizes.len() <= MAX_PARTS && sizes.iter().all(|&n| n > 0 && n <= MAX_LENGTH);
            if fits { Ok(()) } else { Err(format!("sizes must be 1 to {MAX_PARTS} lengths of at least 1")) }
        }
        OpKind::Route { top_k, groups, top_groups, .. } => {
            let fits = *top_k >= 1 && *groups >= 1 && *top_groups >= 1 && top_groups <= groups;
            if fits {
                Ok(())
            } else {
                Err("expected top_k and groups of at least 1, top_groups from 1 to groups".into())
            }
        }
        OpKind::AddPosition { offset } => {
            if *offset <= MAX_LENGTH {
                Ok(())
            } else {
                Err(format!("offset is {offset}, at most {MAX_LENGTH} is read"))
            }
        }
        OpKind::Embed
        | OpKind::Linear
        | OpKind::Bias
        | OpKind::Glu { .. }
        | OpKind::Act { .. }
        | OpKind::Gate
        | OpKind::Add
        | OpKind::Fork
        | OpKind::Extend
        | OpKind::AppendShared
        | OpKind::Dispatch
        | OpKind::Combine
        | OpKind::RowMax
        | OpKind::SumExp
        | OpKind::Pick
        | OpKind::CrossEntropy
        | OpKind::SumLoss => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::RotarySide;

    #[test]
    fn what_no_kernel_takes_is_refused() {
        let rope = |theta, dims| OpKind::Rope { theta, dims, side: RotarySide::First };
        assert!(check(&rope(1e4, 64)).is_ok());
        assert!(check(&rope(-1.0, 64)).unwrap_err().contains("theta is -1"));
        assert!(check(&rope(1e4, 65)).unwrap_err().contains("dims is 65"));
        assert!(check(&OpKind::Scale { by: -0.5 }).is_ok());
        assert!(check(&OpKind::Scale { by: 1e308 }).is_err());
        assert!(check(&OpKind::Scale { by: f64::NAN }).is_err());
    }
}
