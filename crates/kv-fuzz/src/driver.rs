//! Runs a target on mutations of its corpus, without an instrumented build.
//!
//! | variable | says | default |
//! |---|---|---|
//! | `KV_FUZZ_CASES` | how many cases of each target | told by the test |
//! | `KV_FUZZ_SEED` | where the random numbers start | 24301 |

use std::fmt::Write;
use std::path::{Path, PathBuf};

use kv_core::random::SplitMix64;

/// A number from the environment.
pub fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// Seeded random numbers.
#[derive(Debug)]
struct Random(SplitMix64);

impl Random {
    /// The next number.
    fn number(&mut self) -> u64 {
        self.0.bits()
    }

    /// A number below `bound`, or 0.
    fn below(&mut self, bound: usize) -> usize {
        self.0.below(bound as u64) as usize
    }
}

/// The corpus of a target.
pub fn corpus(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus")).join(target);
    let mut paths: Vec<PathBuf> = match std::fs::read_dir(folder) {
        Ok(entries) => entries.filter_map(|entry| Some(entry.ok()?.path())).collect(),
        Err(_) => Vec::new(),
    };
    paths.sort();
    paths.iter().filter_map(|path| std::fs::read(path).ok()).collect()
}

/// Cases of one target: what is in its corpus, then mutations of that and of what was
/// [kept](Cases::keep).
#[derive(Debug)]
pub struct Cases {
    random: Random,
    pool: Vec<Vec<u8>>,
    /// How many of the pool came from the corpus.
    given: usize,
    longest: usize,
    next: usize,
}

/// Most cases that are kept beside the corpus.
const MAX_KEPT: usize = 4096;

impl Cases {
    /// Cases of at most `longest` bytes.
    pub fn new(corpus: Vec<Vec<u8>>, longest: usize, seed: u64) -> Cases {
        let given = corpus.len();
        Cases { random: Random(SplitMix64::new(seed)), pool: corpus, given, longest, next: 0 }
    }

    /// The next case.
    pub fn next_case(&mut self) -> Vec<u8> {
        let at = self.next;
        self.next += 1;
        match self.pool.get(at) {
            Some(case) if at < self.given => case.clone(),
            _ => self.mutated(),
        }
    }

    /// A case that is worth to be varied.
    pub fn keep(&mut self, case: &[u8]) {
        if self.pool.len() < self.given + MAX_KEPT {
            self.pool.push(case.to_vec());
        } else {
            let at = self.given + self.random.below(MAX_KEPT);
            if let Some(old) = self.pool.get_mut(at) {
                *old = case.to_vec();
            }
        }
    }

    fn mutated(&mut self) -> Vec<u8> {
        let random = &mut self.random;
        let mut bytes = match self.pool.get(random.below(self.pool.len())) {
            Some(case) if random.below(8) > 0 => case.clone(),
            _ => (0..random.below(200)).map(|_| random.number() as u8).collect(),
        };
        for _ in 0..=random.below(6) {
            let at = random.below(bytes.len() + 1);
            let end = (at + 1 + random.below(16)).min(bytes.len());
            match random.below(9) {
                0 | 1 => bytes.get_mut(at).into_iter().for_each(|byte| *byte = random.number() as u8),
                2 => bytes.get_mut(at).into_iter().for_each(|byte| *byte ^= 1 << random.below(8)),
                3 => drop(bytes.splice(at..at, (0..=random.below(24)).map(|_| random.number() as u8))),
                4 => drop(bytes.drain(at..end)),
                // The same again.
                5 => {
                    let piece = bytes.get(at..end).unwrap_or_default().repeat(1 + random.below(8));
                    drop(bytes.splice(at..at, piece));
                }
                6 => bytes.truncate(at),
                7 => {
                    let other = self.pool.get(random.below(self.pool.len())).map_or(&[][..], Vec::as_slice);
                    let from = random.below(other.len());
                    let piece = other.get(from..(from + random.below(64)).min(other.len()));
                    drop(bytes.splice(at..at, piece.unwrap_or_default().to_vec()));
                }
                _ => {
                    let word = [0, 1, 0x7f, 0xff, 0xffff, 0xffff_ffff, u64::MAX][random.below(7)];
                    drop(bytes.splice(at..end, word.to_be_bytes().into_iter().skip(random.below(8))));
                }
            }
        }
        bytes.truncate(self.longest);
        bytes
    }
}

/// Says on which bytes a test has panicked.
#[derive(Debug)]
pub struct Witness<'a> {
    /// The target.
    pub target: &'a str,
    /// The bytes.
    pub case: &'a [u8],
}

impl Drop for Witness<'_> {
    #[allow(clippy::print_stderr)]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{} panicked on {} bytes: {}", self.target, self.case.len(), hex(self.case));
        }
    }
}

/// Bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        // Writing to a string never fails.
        let _ = write!(text, "{byte:02x}");
    }
    text
}
