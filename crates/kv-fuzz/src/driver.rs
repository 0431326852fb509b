//! Runs a target on mutations of its corpus, without an instrumented build.
//!
//! | variable | says | default |
//! |---|---|---|
//! | `KV_FUZZ_CASES` | how many cases of each target | told by the test |
//! | `KV_FUZZ_SEED` | where the random numbers start | 24301 |

use std::fmt::Write;
use std::path::{Path, PathBuf};

use kv_core::random::SplitMix64;

/// A number from an environment variable, or the default.
pub fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// Random numbers from a seed.
#[derive(Debug)]
struct Random(SplitMix64);

impl Random {
    /// The next random number.
    fn number(&mut self) -> u64 {
        self.0.bits()
    }

    /// A number below `bound`, or 0.
    fn below(&mut self, bound: usize) -> usize {
        self.0.below(bound as u64) as usize
    }
}

/// The inputs in the corpus of a target.
pub fn corpus(target: &str) -> Vec<Vec<u8>> {
    named_corpus(target).into_iter().map(|(_, input)| input).collect()
}

/// The inputs in the corpus of a target with the names of their files, ordered by name.
pub fn named_corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus")).join(target);
    let mut paths: Vec<PathBuf> = match std::fs::read_dir(folder) {
        Ok(entries) => entries.filter_map(|entry| Some(entry.ok()?.path())).collect(),
        Err(_) => Vec::new(),
    };
    paths.sort();
    let named = |path: &PathBuf| Some((path.file_name()?.to_str()?.to_owned(), std::fs::read(path).ok()?));
    paths.iter().filter_map(named).collect()
}

/// A case that may be varied.
#[derive(Debug, Clone, Default)]
struct Kept {
    bytes: Vec<u8>,
    /// The offsets at which the steps of a script begin; empty if the input has no steps.
    steps: Vec<usize>,
}

impl Kept {
    /// A random offset at which a step begins or the last step ends; any offset if the input has no steps.
    fn a_step(&self, random: &mut Random) -> usize {
        if self.steps.is_empty() {
            return random.below(self.bytes.len() + 1);
        }
        let step = self.steps.get(random.below(self.steps.len() + 1));
        step.map_or(self.bytes.len(), |&at| at.min(self.bytes.len()))
    }

    /// This input with steps of another input inserted between its own.
    fn with_steps_of(&self, other: &Kept, random: &mut Random) -> Vec<u8> {
        let (at, ends) = (self.a_step(random), [other.a_step(random), other.a_step(random)]);
        let piece = other.bytes.get(ends[0].min(ends[1])..ends[0].max(ends[1])).unwrap_or_default();
        let mut bytes = self.bytes.clone();
        drop(bytes.splice(at..at, piece.iter().copied()));
        bytes
    }
}

/// An endless series of cases for one target: the corpus, and then mutations of the corpus and of cases that
/// were [kept](Cases::keep).
#[derive(Debug)]
pub struct Cases {
    random: Random,
    pool: Vec<Kept>,
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
        let pool = corpus.into_iter().map(|bytes| Kept { bytes, steps: Vec::new() }).collect();
        Cases { random: Random(SplitMix64::new(seed)), pool, given, longest, next: 0 }
    }

    /// The next case to run.
    pub fn next_case(&mut self) -> Vec<u8> {
        let at = self.next;
        self.next += 1;
        match self.pool.get(at) {
            Some(case) if at < self.given => case.bytes.clone(),
            _ => self.mutated(),
        }
    }

    /// Keeps a case to mutate it later. The mutations cut the case, and insert other steps, at the offsets
    /// `steps`.
    pub fn keep(&mut self, case: &[u8], steps: Vec<usize>) {
        let kept = Kept { bytes: case.to_vec(), steps };
        if self.pool.len() < self.given + MAX_KEPT {
            self.pool.push(kept);
        } else {
            let at = self.given + self.random.below(MAX_KEPT);
            if let Some(old) = self.pool.get_mut(at) {
                *old = kept;
            }
        }
    }

    fn mutated(&mut self) -> Vec<u8> {
        let random = &mut self.random;
        let [case, other] = [(); 2].map(|()| self.pool.get(random.below(self.pool.len())));
        let (mut bytes, changes) = match case.zip(other) {
            Some(_) if random.below(8) == 0 => (Vec::new(), 1 + random.below(6)),
            Some((case, other)) if !case.steps.is_empty() && random.below(2) > 0 => {
                (case.with_steps_of(other, random), random.below(4))
            }
            Some((case, _)) => (case.bytes.clone(), 1 + random.below(6)),
            None => (Vec::new(), 1 + random.below(6)),
        };
        if bytes.is_empty() {
            bytes = (0..random.below(200)).map(|_| random.number() as u8).collect();
        }
        for _ in 0..changes {
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
                    let other =
                        self.pool.get(random.below(self.pool.len())).map_or(&[][..], |case| &case.bytes);
                    let from = random.below(other.len());
                    // A piece, or all that follows.
                    let len = if random.below(4) > 0 { random.below(64) } else { other.len() };
                    let piece = other.get(from..(from + len).min(other.len()));
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

/// Prints the case on which a test has panicked, when the test unwinds.
#[derive(Debug)]
pub struct Witness<'a> {
    /// The name of the target.
    pub target: &'a str,
    /// The bytes of the case.
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
