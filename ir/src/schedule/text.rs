//! A row of a table as people write it: `F0 F1 B0 F2 I1 W1`, `F0.1` on virtual stage 1, `F0/2` for slice 2.
//!
//! The letters are F forward, B full backward, I backward to the input, W backward to the weights, as in the tables of
//! PyTorch's `torch.distributed.pipelining`; the number is the micro-batch.

use super::{Action, MAX_ACTIONS, Section};

/// What is wrong with a row's text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableTextError {
    /// A word is no action.
    #[error(
        "rank {rank}, action {at}: expected a letter of F, B, I and W and a micro-batch, and perhaps a slice or a virtual \
         stage, such as `F0`, `F0/2` or `B3.1`; found `{found}`"
    )]
    Word {
        /// The row.
        rank: u32,
        /// Which of its words, from 0.
        at: usize,
        /// The word.
        found: String,
    },
    /// The row is longer than any table may be.
    #[error("rank {rank}: more than {MAX_ACTIONS} actions")]
    TooLong {
        /// The row.
        rank: u32,
    },
}

/// Reads a rank's row.
///
/// # Errors
/// The first word that is no action.
pub fn parse_row(rank: u32, text: &str) -> Result<Vec<Action>, TableTextError> {
    let words = text.split_whitespace();
    if words.clone().nth(MAX_ACTIONS as usize).is_some() {
        return Err(TableTextError::TooLong { rank });
    }
    let read = |(at, word): (usize, &str)| {
        parse_action(rank, word).ok_or_else(|| TableTextError::Word { rank, at, found: word.to_owned() })
    };
    words.enumerate().map(read).collect()
}

fn parse_action(rank: u32, word: &str) -> Option<Action> {
    let mut letters = word.chars();
    let section = match letters.next()? {
        'F' => Section::Forward,
        'B' => Section::Backward,
        'I' => Section::BackwardInput,
        'W' => Section::BackwardWeight,
        _ => return None,
    };
    let number =
        |text: &str| text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse::<u32>().ok()).flatten();
    let (unit, virtual_stage) = letters.as_str().split_once('.').unwrap_or((letters.as_str(), "0"));
    let (micro_batch, slice) = unit.split_once('/').unwrap_or((unit, "0"));
    Some(Action {
        rank,
        section,
        virtual_stage: number(virtual_stage)?,
        micro_batch: number(micro_batch)?,
        slice: number(slice)?,
    })
}

/// Writes a row; virtual stages are named where the rank has several, slices where sequences are cut.
pub fn row_text(row: &[Action]) -> String {
    let several = row.iter().any(|action| action.virtual_stage > 0);
    let sliced = row.iter().any(|action| action.slice > 0);
    let word = |action: &Action| {
        let letter = match action.section {
            Section::Forward => 'F',
            Section::Backward => 'B',
            Section::BackwardInput => 'I',
            Section::BackwardWeight => 'W',
        };
        let Action { micro_batch, virtual_stage, slice, .. } = action;
        let slice = if sliced { format!("/{slice}") } else { String::new() };
        let virtual_stage = if several { format!(".{virtual_stage}") } else { String::new() };
        format!("{letter}{micro_batch}{slice}{virtual_stage}")
    };
    row.iter().map(word).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_read_as_it_is_written() {
        for text in ["F0 F1 B0 B1", "F0.0 F0.1 I0.1 W0.1 B0.0", "F0/0 F0/1 B0/1 B0/0", "F0/0.0 F0/1.1", ""] {
            assert_eq!(row_text(&parse_row(3, text).unwrap()), text);
        }
    }

    #[test]
    fn a_word_that_is_no_action_is_named() {
        for word in ["X0", "F", "F1.", "F-1", "F+1", "F0.1.2", "F0/", "F0/1/2", "F0.1/2", "F99999999999"] {
            let error = parse_row(2, &format!("F0 {word}")).unwrap_err();
            assert_eq!(error, TableTextError::Word { rank: 2, at: 1, found: word.into() });
        }
    }
}
