//! What nccl-tests and rccl-tests print: times of one collective by message size, and which ranks were where.
//!
//! A log may hold several runs, lines of launchers and of NCCL itself; only these lines are read:
//! ```text
//! # Collective test starting: all_reduce_perf                       the collective; a command line that is echoed says it too
//! #  Rank  8 Group  0 Pid   1885 on   worker-0 device  0 [0x8d] ..   a rank and its node
//! #       size         count      type   redop    root     time ..   which column the time is in
//!     8388608       2097152     float     sum      -1    91.10 ..   a size in bytes, and microseconds
//! ```
//! Form: NVIDIA/nccl-tests src/common.cu; sizes: its doc/PERFORMANCE.md (of gathers and scatters, the whole tensor).

use std::collections::{BTreeMap, BTreeSet};

use ir::collective::CollectiveKind;

/// One collective on one set of ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct CollectiveRun {
    /// Which.
    pub kind: CollectiveKind,
    /// Nodes with ranks.
    pub n_nodes: u64,
    /// Ranks of each of them.
    pub ranks_per_node: u64,
    /// Bytes of the whole tensor, and seconds.
    pub times: Vec<(f64, f64)>,
}

/// What is wrong with a log, at the line where it shows, from 1.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LogError {
    /// No line with a size and times.
    #[error("no line of nccl-tests with a size and times")]
    NoRows,
    /// Times stand under no line with the names of the columns.
    #[error("line {0}: no line `size count type … time` before these figures")]
    NoHeader(usize),
    /// Nobody says on how many ranks.
    #[error("line {0}: no line `Rank N … on HOST` before these figures")]
    NoRanks(usize),
    /// Nobody says which collective.
    #[error("line {0}: nothing before these figures says which collective they are of")]
    NoName(usize),
    /// A test that times no collective that is priced.
    #[error("line {line}: `{name}` is none of {}", names())]
    Unknown {
        /// Where.
        line: usize,
        /// What.
        name: String,
    },
    /// Somebody says that it is another collective.
    #[error("line {line}: figures of `{name}`, which is not the collective that was named")]
    Other {
        /// Where.
        line: usize,
        /// What it is.
        name: String,
    },
    /// Rates that are not those of the collective.
    #[error(
        "line {line}: `busbw` is {found:.3} of `algbw`, and of {name} on as many ranks it is {expected:.3}"
    )]
    Rates {
        /// Where.
        line: usize,
        /// What they are to each other.
        found: f64,
        /// What it is said to be.
        name: String,
        /// What they would be then.
        expected: f64,
    },
    /// Results that are not what they should be.
    #[error(
        "line {line}: {found} results are wrong: a run that computes something else says nothing of links"
    )]
    Wrong {
        /// Where.
        line: usize,
        /// How many.
        found: u64,
    },
    /// Some nodes have more ranks than others.
    #[error("line {0}: nodes have unequal numbers of ranks")]
    Uneven(usize),
    /// The list of ranks is not whole.
    #[error("line {line}: the list of ranks before these figures lacks rank {rank}")]
    Missing {
        /// Where the figures begin.
        line: usize,
        /// The first that is not named.
        rank: u64,
    },
    /// One that is named again.
    #[error("line {line}: rank {rank} is named a second time")]
    Twice {
        /// Where.
        line: usize,
        /// Which.
        rank: u64,
    },
    /// A time that is none.
    #[error("line {line}: expected microseconds above 0, found `{found}`")]
    Time {
        /// Where.
        line: usize,
        /// What.
        found: String,
    },
}

/// Programs of nccl-tests, without `_perf`, and what they time.
const TESTS: [(&str, CollectiveKind); 4] = [
    ("all_reduce", CollectiveKind::AllReduce),
    ("all_gather", CollectiveKind::AllGather),
    ("reduce_scatter", CollectiveKind::ReduceScatter),
    ("alltoall", CollectiveKind::AllToAll),
];

/// What a rank sends, in parts of the whole tensor: `busbw` over `algbw` (nccl-tests doc/PERFORMANCE.md).
fn sent(kind: CollectiveKind, ranks: u64) -> Option<f64> {
    let others = (ranks.saturating_sub(1)) as f64 / ranks as f64;
    match kind {
        CollectiveKind::AllReduce => Some(2.0 * others),
        CollectiveKind::AllGather | CollectiveKind::ReduceScatter | CollectiveKind::AllToAll => Some(others),
        CollectiveKind::SendRecv | CollectiveKind::Broadcast => None,
    }
}

/// Rates are printed to hundredths: below, they say little of each other.
const TOLD_GB_PER_S: f64 = 1.0;

/// They are those of a collective where they are to each other what they would be, but for so much.
const NEARLY: f64 = 0.05;

/// The kind of a collective by the name that a user may give: `all-reduce`, `all_reduce`, `alltoall`.
pub fn kind_of(name: &str) -> Option<CollectiveKind> {
    let plain = |name: &str| name.trim_end_matches("_perf").replace(['-', '_'], "");
    TESTS.iter().find(|(test, _)| plain(test) == plain(name)).map(|(_, kind)| *kind)
}

fn names() -> String {
    TESTS.map(|(name, _)| format!("{name}_perf")).join(", ")
}

/// Reads a log; `named` is the collective where the log does not say it.
///
/// # Errors
/// The first thing that is wrong with it.
pub fn read(text: &str, named: Option<CollectiveKind>) -> Result<Vec<CollectiveRun>, LogError> {
    let mut reader = Reader {
        name: None,
        hosts: BTreeMap::new(),
        ranks: BTreeSet::new(),
        is_over: false,
        time_at: None,
        wrong_at: None,
        runs: Vec::new(),
    };
    for (at, line) in text.lines().enumerate() {
        reader.read(at + 1, line, named)?;
    }
    if reader.runs.is_empty() { Err(LogError::NoRows) } else { Ok(reader.runs) }
}

/// What was read so far.
struct Reader<'a> {
    /// The test whose figures come next.
    name: Option<&'a str>,
    /// Ranks by node.
    hosts: BTreeMap<&'a str, u64>,
    /// Ranks that were named.
    ranks: BTreeSet<u64>,
    /// The figures of these ranks have begun: the next rank that is named belongs to another run.
    is_over: bool,
    /// Words from a size to its time.
    time_at: Option<usize>,
    /// Words from a size to the number of wrong results, where they are counted.
    wrong_at: Option<usize>,
    runs: Vec<CollectiveRun>,
}

impl<'a> Reader<'a> {
    fn read(&mut self, at: usize, line: &'a str, named: Option<CollectiveKind>) -> Result<(), LogError> {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let Some(name) = test_name(&words) {
            self.name = Some(name);
        }
        if let Some((rank, host)) = placed(&words) {
            // A list of a run that came to no figures is another's no more.
            if self.is_over || rank == 0 {
                self.hosts.clear();
                self.ranks.clear();
                self.is_over = false;
            }
            if !self.ranks.insert(rank) {
                return Err(LogError::Twice { line: at, rank });
            }
            *self.hosts.entry(host).or_default() += 1;
        }
        if let Some(columns) = words.iter().position(|word| *word == "size")
            && let Some(time) = words.iter().position(|word| *word == "time")
        {
            self.time_at = time.checked_sub(columns);
            let wrong = words.iter().position(|word| *word == "#wrong");
            self.wrong_at = wrong.and_then(|wrong| wrong.checked_sub(columns));
        }
        let Some((bytes, size_at)) = size(&words) else { return Ok(()) };
        let time_at = self.time_at.ok_or(LogError::NoHeader(at))?;
        let Some(&time) = words.get(size_at + time_at) else { return Ok(()) };
        let wrong = self.wrong_at.and_then(|wrong| words.get(size_at + wrong)?.parse::<u64>().ok());
        let run = self.run(at, named)?;
        if time == "N/A" || bytes == 0 {
            return Ok(());
        }
        if let Some(found) = wrong.filter(|&found| found > 0) {
            return Err(LogError::Wrong { line: at, found });
        }
        check_rates(run, at, &words[size_at + time_at + 1..])?;
        match time.parse::<f64>() {
            Ok(us) if us > 0.0 && us.is_finite() => run.times.push((bytes as f64, us * 1e-6)),
            _ => return Err(LogError::Time { line: at, found: time.into() }),
        }
        Ok(())
    }

    /// The run to which a line's figures belong.
    fn run(&mut self, at: usize, named: Option<CollectiveKind>) -> Result<&mut CollectiveRun, LogError> {
        let kind = match (named, self.name) {
            (Some(kind), Some(name)) if kind_of(name).is_some_and(|own| own != kind) => {
                return Err(LogError::Other { line: at, name: format!("{name}_perf") });
            }
            (Some(kind), _) => kind,
            (None, Some(name)) => {
                kind_of(name).ok_or_else(|| LogError::Unknown { line: at, name: format!("{name}_perf") })?
            }
            (None, None) => return Err(LogError::NoName(at)),
        };
        let counts: Vec<u64> = self.hosts.values().copied().collect();
        let ranks_per_node = *counts.first().ok_or(LogError::NoRanks(at))?;
        if let Some(rank) = (0..).zip(&self.ranks).find_map(|(rank, found)| (rank != *found).then_some(rank))
        {
            return Err(LogError::Missing { line: at, rank });
        }
        if counts.iter().any(|&count| count != ranks_per_node) {
            return Err(LogError::Uneven(at));
        }
        let n_nodes = counts.len() as u64;
        let is_new = !self.is_over || self.runs.last().is_none_or(|run| run.kind != kind);
        self.is_over = true;
        if is_new {
            self.runs.push(CollectiveRun { kind, n_nodes, ranks_per_node, times: Vec::new() });
        }
        self.runs.last_mut().ok_or(LogError::NoRows)
    }
}

/// Refuses rates behind a time that are not to each other as those of the run's collective are.
fn check_rates(run: &CollectiveRun, line: usize, rates: &[&str]) -> Result<(), LogError> {
    let rate = |at: usize| rates.get(at)?.parse::<f64>().ok().filter(|rate| *rate >= TOLD_GB_PER_S);
    let Some((whole, bus)) = rate(0).zip(rate(1)) else { return Ok(()) };
    let Some(expected) = sent(run.kind, run.n_nodes * run.ranks_per_node) else { return Ok(()) };
    let found = bus / whole;
    if (found / expected - 1.0).abs() <= NEARLY {
        return Ok(());
    }
    let test = TESTS.iter().find(|(_, kind)| *kind == run.kind);
    let name = test.map_or_else(String::new, |(name, _)| format!("{name}_perf"));
    Err(LogError::Rates { line, found, name, expected })
}

/// `./build/all_reduce_perf`, `all_reduce_perf_mpi`: the test's name without `_perf`.
fn test_name<'a>(words: &[&'a str]) -> Option<&'a str> {
    words.iter().find_map(|word| {
        let name = word.rsplit('/').next().unwrap_or(word);
        let (name, rest) = name.split_once("_perf")?;
        let is_name = !name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase() || c == '_');
        (is_name && !rest.starts_with('.')).then_some(name)
    })
}

/// A rank and its node, of a line that names one.
fn placed<'a>(words: &[&'a str]) -> Option<(u64, &'a str)> {
    let rank = words.iter().position(|word| *word == "Rank")?;
    let rank = words.get(rank + 1)?.parse::<u64>().ok()?;
    let on = words.iter().position(|word| *word == "on")?;
    Some((rank, words.get(on + 1).copied()?))
}

/// The size of a line of figures, and which word it is: two whole numbers and the name of a type.
fn size(words: &[&str]) -> Option<(u64, usize)> {
    let whole = |word: &str| word.parse::<u64>().ok();
    let at = words
        .windows(3)
        .position(|three| whole(three[0]).is_some() && whole(three[1]).is_some() && is_type(three[2]))?;
    Some((whole(words[at])?, at))
}

fn is_type(word: &str) -> bool {
    let begins = ["int", "uint", "half", "float", "double", "bfloat", "fp8", "f8"];
    begins.iter().any(|begin| word.starts_with(begin))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two nodes of two, as a launcher that tags lines prints them.
    const RANKS: &str = "\
        [1,0]<stdout>:# nThread 1 nGpus 1 minBytes 8 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 20\n\
        [1,0]<stdout>:#  Rank  0 Group  0 Pid   1887 on   worker-1 device  0 [0x8d] NVIDIA H100 80GB HBM3\n\
        [1,0]<stdout>:#  Rank  1 Group  0 Pid   1888 on   worker-1 device  1 [0x91] NVIDIA H100 80GB HBM3\n\
        [1,0]<stdout>:#  Rank  2 Group  0 Pid   1885 on   worker-0 device  0 [0x8d] NVIDIA H100 80GB HBM3\n\
        [1,0]<stdout>:#  Rank  3 Group  0 Pid   1886 on   worker-0 device  1 [0x91] NVIDIA H100 80GB HBM3\n";

    const COLUMNS: &str = "[1,0]<stdout>:#       size         count      type   redop    root     time   algbw   busbw #wrong\n";

    const ROW: &str = "[1,0]<stdout>:   536870912     134217728     float     sum      -1   2789.9  192.43  288.64      0\n";

    fn all(parts: &[&str]) -> Result<Vec<CollectiveRun>, LogError> {
        read(&parts.concat(), None)
    }

    #[test]
    fn a_log_says_what_ran_where_and_how_long() {
        let named = "srun all_reduce_perf_mpi -b 512M -e 8G -f 2 -g 1\n";
        let found =
            all(&[named, RANKS, COLUMNS, ROW, "NCCL INFO comm 0x55ba65abd9d0 rank 0 nranks 2\n", ROW])
                .unwrap();
        let times = vec![(536_870_912.0, 2789.9e-6); 2];
        let expected =
            CollectiveRun { kind: CollectiveKind::AllReduce, n_nodes: 2, ranks_per_node: 2, times };
        assert_eq!(found, [expected]);
    }

    #[test]
    fn several_runs_of_one_log_are_told_apart() {
        let gather = "# Collective test starting: all_gather_perf\n";
        // Older versions have no `redop` and no `root` where there is none.
        let columns = "# size count type time algbw busbw error time algbw busbw error\n";
        let row = "  1024  64  float  16  0.1  0.1  0e+00  N/A  N/A  N/A  N/A\n";
        let found =
            all(&["./build/all_reduce_perf -g 2\n", RANKS, COLUMNS, ROW, gather, RANKS, columns, row])
                .unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!((found[1].kind, found[1].n_nodes), (CollectiveKind::AllGather, 2));
        assert_eq!(found[1].times, [(1024.0, 16e-6)]);
    }

    #[test]
    fn what_a_log_lacks_is_said_with_its_line() {
        let name = "all_reduce_perf\n";
        assert_eq!(all(&[name, RANKS, COLUMNS]), Err(LogError::NoRows));
        assert_eq!(all(&[name, RANKS, ROW]), Err(LogError::NoHeader(7)));
        assert_eq!(all(&[name, COLUMNS, ROW]), Err(LogError::NoRanks(3)));
        assert_eq!(all(&[RANKS, COLUMNS, ROW]), Err(LogError::NoName(7)));
        let other = all(&["broadcast_perf\n", RANKS, COLUMNS, ROW]).unwrap_err().to_string();
        assert!(other.starts_with("line 8: `broadcast_perf` is none of all_reduce_perf, "), "{other}");
        let uneven = "#  Rank  4 Group  0 Pid 9 on worker-2 device 0 [0x1] NVIDIA H100\n";
        assert_eq!(all(&[name, RANKS, uneven, COLUMNS, ROW]), Err(LogError::Uneven(9)));
        let without_second = RANKS.replace("Rank  1", "Rank  4");
        assert_eq!(all(&[name, &without_second, COLUMNS, ROW]), Err(LogError::Missing { line: 8, rank: 1 }));
        let second_again = RANKS.replace("Rank  3", "Rank  1");
        assert_eq!(all(&[name, &second_again, COLUMNS, ROW]), Err(LogError::Twice { line: 6, rank: 1 }));
        // A run that ended before it had figures, and another.
        assert_eq!(all(&[name, RANKS, RANKS, COLUMNS, ROW]).unwrap()[0].n_nodes, 2);
        let broken = ROW.replace("2789.9", "nan");
        let error = LogError::Time { line: 8, found: "nan".into() };
        assert_eq!(all(&[name, RANKS, COLUMNS, &broken]), Err(error));
    }

    #[test]
    fn figures_of_another_collective_and_of_wrong_results_are_refused() {
        let said = |rows: &str| read(&[RANKS, COLUMNS, rows].concat(), kind_of("all-gather")).unwrap_err();
        assert_eq!(
            said(ROW).to_string(),
            "line 7: `busbw` is 1.500 of `algbw`, and of all_gather_perf on as many ranks it is 0.750"
        );
        let wrong = ROW.replace("288.64      0", "144.32      3");
        assert_eq!(said(&wrong), LogError::Wrong { line: 7, found: 3 });
    }

    #[test]
    fn a_name_from_outside_does_for_a_log_without_one() {
        let row = ROW.replace("288.64", "144.32");
        let found = read(&[RANKS, COLUMNS, &row].concat(), kind_of("reduce-scatter")).unwrap();
        assert_eq!(found[0].kind, CollectiveKind::ReduceScatter);
        assert_eq!(kind_of("all-to-all"), Some(CollectiveKind::AllToAll));
        assert_eq!(kind_of("broadcast"), None);
        let other = read(&["all_gather_perf\n", RANKS, COLUMNS, ROW].concat(), kind_of("all_reduce_perf"));
        assert_eq!(other, Err(LogError::Other { line: 8, name: "all_gather_perf".into() }));
    }
}
