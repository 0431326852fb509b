//! Every decoder takes any bytes: it refuses them, or what it accepts means the same when it is written
//! again.
//!
//! `KV_FUZZ_CASES` sets the number of cases of each target (default 20 000), and `KV_FUZZ_SEED` the seed. `KV_FUZZ_TARGETS`
//! names the decoders that are run, separated by commas (default: all).

#![allow(clippy::print_stdout)]

use std::time::Duration;

use kv_fuzz::DECODERS;
use kv_fuzz::driver::{Cases, Witness, corpus, named_corpus, setting};
use rustix::time::{ClockId, clock_gettime};

#[global_allocator]
static COUNTING: kv_fuzz::alloc::Counting = kv_fuzz::alloc::Counting;

/// How many bytes a decoder may allocate for each byte of input, beside a fixed amount for tables, buffers
/// and the text of an error. The check doubles the need, because accepted inputs are written and read again.
const PER_BYTE: u64 = 400;
const BASE: u64 = 256 << 10;
/// A list in msgpack may ask for up to 1 MiB before its first element is read, and a list in a list for as much
/// again. Each side of the comparison reads the message.
const OF_LISTS: u64 = 4 << 20;
/// The CPU time that a case may take. The slowest cases take some milliseconds.
const MOST_TIME: Duration = Duration::from_secs(2);

/// Mutations of inputs in an old format get no further than the first check: the corpus is to be written again.
#[test]
fn every_input_that_the_corpus_has_for_a_decoder_to_accept_is_accepted() {
    let mut stale = Vec::new();
    for &(target, accepts) in DECODERS {
        let mut numbered = named_corpus(target);
        // Others were found by chance, or are to be refused.
        numbered.retain(|(name, _)| name.parse::<u32>().is_ok());
        assert!(!numbered.is_empty(), "{target} has no input to accept");
        numbered.retain(|(_, input)| !accepts(input));
        stale.extend(numbered.into_iter().map(|(name, _)| format!("{target}/{name}")));
    }
    assert!(stale.is_empty(), "refused: {stale:?}");
}

#[test]
fn decoders_refuse_or_understand_whatever_comes_and_allocate_by_its_length() {
    let (cases, seed) = (setting("KV_FUZZ_CASES", 20_000), setting("KV_FUZZ_SEED", 24301));
    println!("to repeat this run: KV_FUZZ_CASES={cases} KV_FUZZ_SEED={seed}");
    let only = std::env::var("KV_FUZZ_TARGETS").ok();
    let is_wanted = |name| only.as_ref().is_none_or(|only| only.split(',').any(|wanted| wanted == name));
    for &(name, target) in DECODERS.iter().filter(|(name, _)| is_wanted(*name)) {
        let corpus = corpus(name);
        assert!(!corpus.is_empty(), "{name} has no corpus");
        let mut all = Cases::new(corpus, 64 << 10, seed);
        let (mut worst, mut most) = (0, 0);
        for _ in 0..cases {
            let case = all.next_case();
            let witness = Witness { target: name, case: &case };
            let (before, start) = (kv_fuzz::alloc::allocated(), cpu_time());
            target(&case);
            let time = cpu_time() - start;
            assert!(time < MOST_TIME, "{name} takes {time:?}");
            let allocated = kv_fuzz::alloc::allocated() - before;
            let base = if name == "vllm_answer" { OF_LISTS } else { BASE };
            assert!(allocated <= base + PER_BYTE * case.len() as u64, "{name} allocates {allocated} bytes");
            drop(witness);
            if allocated > worst {
                (worst, most) = (allocated, case.len());
                all.keep(&case, Vec::new());
            }
        }
        println!(
            "{name:<20} {cases} cases; the largest allocation is {worst} bytes for an input of {most} bytes"
        );
    }
}

/// The CPU time of this thread.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
