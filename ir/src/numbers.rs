//! Sets of numbers as people write them: `0-3,7`. Of layers, of nodes.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Numbers in rising order, as runs of neighbours: `0-3,7`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String")]
pub struct Numbers(Vec<RangeInclusive<u64>>);

impl Numbers {
    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many there are: of `0-3,7` five.
    pub fn count(&self) -> u64 {
        let length = |run: &RangeInclusive<u64>| (run.end() - run.start()).saturating_add(1);
        self.0.iter().map(length).fold(0, u64::saturating_add)
    }

    /// The largest.
    pub fn last(&self) -> Option<u64> {
        self.0.last().map(|run| *run.end())
    }

    /// Whether a number is among them.
    pub fn contains(&self, number: u64) -> bool {
        self.0.iter().any(|run| run.contains(&number))
    }

    /// All of them. Look at [`Numbers::count`] first where a person wrote them.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.0.iter().cloned().flatten()
    }
}

/// Of numbers in rising order.
impl FromIterator<u64> for Numbers {
    fn from_iter<T: IntoIterator<Item = u64>>(numbers: T) -> Self {
        let mut runs: Vec<RangeInclusive<u64>> = Vec::new();
        for number in numbers {
            match runs.last_mut() {
                Some(run) if run.end().checked_add(1) == Some(number) => *run = *run.start()..=number,
                _ => runs.push(number..=number),
            }
        }
        Self(runs)
    }
}

impl FromStr for Numbers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |part: &str| format!("expected numbers such as `0-3,7`, found `{part}`");
        let mut runs: Vec<RangeInclusive<u64>> = Vec::new();
        for part in text.split(',').map(str::trim) {
            let number = |digits: &str| digits.trim().parse::<u64>().map_err(|_| wrong(part));
            let (from, to) = part.split_once('-').unwrap_or((part, part));
            let run = number(from)?..=number(to)?;
            if run.is_empty() {
                return Err(format!("`{part}` ends before it begins"));
            }
            if runs.last().is_some_and(|before| before.end() >= run.start()) {
                return Err(format!("`{part}` is out of order: each number stands once, in rising order"));
            }
            match runs.last_mut() {
                Some(before) if before.end() + 1 == *run.start() => *before = *before.start()..=*run.end(),
                _ => runs.push(run),
            }
        }
        Ok(Self(runs))
    }
}

impl TryFrom<String> for Numbers {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Numbers> for String {
    fn from(numbers: Numbers) -> Self {
        numbers.to_string()
    }
}

impl fmt::Display for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, run) in self.0.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            match (run.start(), run.end()) {
                (from, to) if from == to => write!(f, "{comma}{from}")?,
                (from, to) => write!(f, "{comma}{from}-{to}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_no_set_is_refused_with_the_part_that_is_wrong() {
        let said = |text: &str| text.parse::<Numbers>().unwrap_err();
        assert_eq!(said("0-3,x"), "expected numbers such as `0-3,7`, found `x`");
        assert_eq!(said(""), "expected numbers such as `0-3,7`, found ``");
        assert_eq!(said("5-3"), "`5-3` ends before it begins");
        assert_eq!(said("0-3,3"), "`3` is out of order: each number stands once, in rising order");
        let all: Numbers = format!("0-{}", u64::MAX).parse().unwrap();
        assert_eq!((all.count(), all.contains(17)), (u64::MAX, true));
        assert_eq!("0-3,4,7".parse::<Numbers>().unwrap().to_string(), "0-4,7");
    }

    proptest! {
        #[test]
        fn sets_come_back_from_their_text(numbers in proptest::collection::btree_set(0_u64..40, 1..20)) {
            let set: Numbers = numbers.iter().copied().collect();
            let read: Numbers = set.to_string().parse().unwrap();
            prop_assert_eq!(&read, &set);
            prop_assert_eq!(read.iter().collect::<BTreeSet<_>>(), numbers.clone());
            prop_assert_eq!((read.count(), read.last()), (numbers.len() as u64, numbers.last().copied()));
            for number in 0..45 {
                prop_assert_eq!(read.contains(number), numbers.contains(&number));
            }
        }
    }
}
