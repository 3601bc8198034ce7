//! Figures as people read them: a unit and three digits. Rounding happens here and nowhere else.

use ir::units::{Bytes, BytesPerSecond, Seconds};

/// Three significant digits, without a unit: `1.24`, `61.3`, `982`.
pub(crate) fn three(figure: f64) -> String {
    // Just below a power of ten, rounding adds a digit before the point; the limits are where it does.
    let decimals = match figure.abs() {
        size if size >= 99.95 => 0,
        size if size >= 9.995 => 1,
        _ => 2,
    };
    format!("{figure:.decimals$}")
}

/// Of the smallest unit, what two decimals show as nothing.
const LEAST_SHOWN: f64 = 0.005;

/// The figure in the largest unit in which it is at least one; `units` from the largest, each with its size.
fn scaled(figure: f64, units: &[(f64, &str)]) -> String {
    let fits = |(size, _): &&(f64, &str)| (figure / size).abs() >= 0.9995;
    let Some((size, unit)) = units.iter().find(fits).or(units.last()) else { return three(figure) };
    let text = if (figure / size).abs() < LEAST_SHOWN { "0".into() } else { three(figure / size) };
    format!("{text} {unit}")
}

/// A duration: `1.24 s`, `83.0 ms`.
pub(crate) fn seconds(time: Seconds) -> String {
    scaled(time.0, &[(1.0, "s"), (1e-3, "ms"), (1e-6, "us")])
}

/// A duration that may be long: `785 s`, `13.1 min`, `3.09 h`, `2.50 days`.
pub(crate) fn duration(time: Seconds) -> String {
    match time.0 {
        long if long >= 2.0 * 86_400.0 => format!("{} days", three(long / 86_400.0)),
        long if long >= 7200.0 => format!("{} h", three(long / 3600.0)),
        long if long >= 1000.0 => format!("{} min", three(long / 60.0)),
        _ => seconds(time),
    }
}

/// An amount of memory: `61.3 GiB`.
pub(crate) fn bytes(amount: Bytes) -> String {
    const KIB: f64 = 1024.0;
    let units = [
        (KIB * KIB * KIB * KIB, "TiB"),
        (KIB * KIB * KIB, "GiB"),
        (KIB * KIB, "MiB"),
        (KIB, "KiB"),
        (1.0, "B"),
    ];
    scaled(amount.0, &units)
}

/// A bandwidth, in decimal units as in data sheets: `450 GB/s`.
pub(crate) fn bandwidth(rate: BytesPerSecond) -> String {
    scaled(rate.0, &[(1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s")])
}

/// An energy: `9.00 MJ`.
pub(crate) fn energy(joules: f64) -> String {
    scaled(joules, &[(1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ")])
}

/// A price, in whatever the cluster's are in: three digits, however small: `12.3`, `0.316`, `0.000247`.
pub(crate) fn price(amount: f64) -> String {
    if amount == 0.0 || amount.abs() >= 0.9995 {
        return three(amount);
    }
    let decimals = 2 - amount.abs().log10().floor().max(-12.0) as i32;
    format!("{amount:.*}", decimals.max(2) as usize)
}

/// A large count: `8.03 B`, `124 M`.
pub(crate) fn count(n: f64) -> String {
    if n.abs() < 9999.5 {
        return format!("{n:.0}");
    }
    // Beyond a thousand times the largest unit, the power of ten says more.
    if n.abs() >= 1e15 {
        return format!("{n:.2e}");
    }
    scaled(n, &[(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")])
}

/// A share of one: `47.2 %`.
pub(crate) fn percent(share: f64) -> String {
    format!("{} %", three(100.0 * share))
}

/// A count with its digits in groups: `8,030,261,248`.
pub(crate) fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let first = digits.len() % 3;
    let (head, tail) = digits.split_at(first);
    let mut groups: Vec<&str> = if head.is_empty() { Vec::new() } else { vec![head] };
    let mut rest = tail;
    while !rest.is_empty() {
        let (group, more) = rest.split_at(3);
        groups.push(group);
        rest = more;
    }
    groups.join(",")
}

/// A count and its noun, with an `s` where there is not one: `1 node`, `4 nodes`.
pub(crate) fn counted(n: u64, noun: &str) -> String {
    let ending = match n {
        1 => "",
        _ if noun.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{} {noun}{ending}", grouped(n))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_has_three_digits_and_a_unit() {
        assert_eq!(seconds(Seconds(1.2449)), "1.24 s");
        assert_eq!(seconds(Seconds(0.99999)), "1.00 s");
        assert_eq!(seconds(Seconds(0.0829999)), "83.0 ms");
        assert_eq!(seconds(Seconds(0.0)), "0 us");
        assert_eq!(seconds(Seconds(9.996)), "10.0 s");
        assert_eq!(duration(Seconds(785.2)), "785 s");
        assert_eq!(duration(Seconds(11_137.0)), "3.09 h");
        assert_eq!(duration(Seconds(216_000.0)), "2.50 days");
        assert_eq!(bytes(Bytes(65.8e9)), "61.3 GiB");
        assert_eq!(bytes(Bytes(512.0)), "512 B");
        assert_eq!(bandwidth(BytesPerSecond(450e9)), "450 GB/s");
        assert_eq!((energy(9.0e6), energy(0.0768)), ("9.00 MJ".into(), "76.8 mJ".into()));
        assert_eq!(
            (price(12.345), price(0.3163), price(0.000_247_4)),
            ("12.3".into(), "0.316".into(), "0.000247".into())
        );
        assert_eq!(price(0.0), "0.00");
        assert_eq!(percent(0.47199), "47.2 %");
        assert_eq!(percent(0.0), "0.00 %");
        assert_eq!(count(8_030_261_248.0), "8.03 B");
        assert_eq!(count(9999.0), "9999");
        assert_eq!(count(3e21), "3.00e21");
    }

    #[test]
    fn digits_stand_in_groups_of_three() {
        assert_eq!(grouped(8_030_261_248), "8,030,261,248");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1000), "1,000");
        assert_eq!(counted(1, "node"), "1 node");
        assert_eq!(counted(0, "node"), "0 nodes");
    }
}
