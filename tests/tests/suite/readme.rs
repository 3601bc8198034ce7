//! The example of the README is what the program prints.
//!
//! `UPDATE_DOCS=1 cargo test -p tests readme::` writes it anew.

#![expect(clippy::disallowed_methods, reason = "the README is a file")]

use tests::{done, hold_current, scratch};

/// The file that the commands of the example write and read.
const PLAN: &str = "plan.json";

#[test]
fn the_example_is_what_the_program_prints() {
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md")).unwrap();
    let plan = scratch!(PLAN);
    let mut should = String::new();
    let mut n_commands = 0;
    for block in readme.split("```\n") {
        match block.strip_prefix("$ planner ").and_then(|text| text.split_once('\n')) {
            Some((command, _)) => {
                let file = |word| if word == PLAN { plan.as_str() } else { word };
                let words: Vec<&str> = command.split(' ').map(file).collect();
                should += &format!("$ planner {command}\n{}", done(&words).out);
                n_commands += 1;
            }
            None => should += block,
        }
        should += "```\n";
    }
    assert_eq!(n_commands, 2);
    hold_current("../README.md", should.strip_suffix("```\n").unwrap());
}
