//! The example `port` as processes: an adapter with the operations of a hand-written transfer hands over KV between two
//! schedulers, whatever is killed.
//!
//! The program is the one that cargo builds beside the tests of the package: `cargo test --test port` alone builds none,
//! so `cargo build --example port` comes first, with the same profile.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::Command;

use serde_json::Value;

/// What came of a run of the example. It has no wrong answer, and every block is free at its end.
fn run(options: &[&str]) -> Value {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().unwrap().with_file_name("examples").join("port");
    assert!(path.exists(), "{} is missing: build the examples of the package first", path.display());
    let output = Command::new(path).arg("--json").args(options).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{options:?}: {said}{}", String::from_utf8_lossy(&output.stdout));
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((number(&result, "wrong"), number(&result, "blocks_missing")), (0, 0), "{result}");
    result
}

fn number(result: &Value, field: &str) -> i64 {
    result[field].as_i64().unwrap_or_else(|| panic!("no {field} in {result}"))
}

fn causes(result: &Value) -> String {
    result["causes"].to_string()
}

/// Blocks for all requests of a run. With fewer, P may have no room for the next one before it has heard that an earlier one
/// was read, and D computes that prompt itself.
const ROOM_FOR_ALL: [&str; 2] = ["--blocks", "2048"];

#[test]
fn every_long_prompt_is_computed_by_p_and_every_byte_is_right() {
    let result = run(&[&["--requests", "40"], &ROOM_FOR_ALL[..]].concat());
    assert_eq!((number(&result, "remote"), number(&result, "local")), (40, 0), "{result}");
    let short = run(&["--requests", "10", "--tokens", "127"]);
    assert_eq!((number(&short, "remote"), number(&short, "local")), (0, 10), "{short}");
}

#[test]
fn a_killed_p_costs_no_answer_because_d_computes_the_prompts_itself() {
    let result = run(&["--requests", "60", "--kill", "prefill"]);
    assert_eq!(number(&result, "requests"), 60);
    assert!(number(&result, "remote") >= 15 && number(&result, "local") > 0, "{result}");
}

#[test]
fn a_killed_d_gives_ps_blocks_back_and_its_ids_start_again_without_foreign_kv() {
    // The prompts of the second life are others, so that KV of the first life would be wrong.
    let result = run(&["--requests", "60", "--kill", "decode"]);
    assert!(number(&result, "requests") > 60 && number(&result, "remote") >= 60, "{result}");
}

#[test]
fn tensor_parallel_ranks_pair_by_rank_and_unequal_numbers_of_ranks_are_served() {
    for (prefill, decode) in [("2", "2"), ("2", "1"), ("1", "4"), ("4", "2")] {
        let ranks = ["--requests", "20", "--prefill-tp", prefill, "--decode-tp", decode];
        let result = run(&[&ranks, &ROOM_FOR_ALL[..]].concat());
        assert_eq!((number(&result, "remote"), number(&result, "local")), (20, 0), "{result}");
    }
}

#[test]
fn a_full_ring_of_commands_delays_requests_and_fails_none_of_them() {
    for (commands, ranks) in [("1", "1"), ("2", "1"), ("1", "2")] {
        let options = ["--command-queue", commands, "--prefill-tp", ranks, "--decode-tp", ranks];
        let result =
            run(&[&options[..], &["--requests", "200", "--tokens", "192", "--answer", "2"]].concat());
        // D computes a prompt itself for which its own ring has no room, and loses none that it has given to P.
        assert_eq!(causes(&result), "[]", "{options:?}: {result}");
        assert!(number(&result, "remote") > 20, "{options:?}: {result}");
    }
}

#[test]
fn two_prefill_processes_serve_one_decode_process_and_the_other_way_round() {
    assert_eq!(number(&run(&["--prefill", "2"]), "remote"), 40);
    assert_eq!(number(&run(&["--decode", "2"]), "remote"), 80);
    let result = run(&["--prefill", "2", "--requests", "60", "--kill", "prefill"]);
    assert!(number(&result, "remote") > 15, "{result}");
}

#[test]
fn a_cache_with_other_heads_is_refused_by_name_with_both_values() {
    let result = run(&["--other-head-dim", "--requests", "10"]);
    assert_eq!(number(&result, "remote"), 0);
    assert!(causes(&result).contains("head_dim differs: 64 here, 32 at the peer"), "{result}");
}

#[test]
fn sequences_without_blocks_are_swapped_out_and_come_back_as_they_were() {
    // Three prompts fill the blocks, and every answer needs one more.
    let result = run(&["--tokens", "512", "--answer", "80", "--blocks", "26", "--requests", "12"]);
    assert!(number(&result, "swapped") > 0, "{result}");
}

#[test]
fn a_thousand_requests_leave_the_resident_memory_as_it_was() {
    let result = run(&["--requests", "1000", "--tokens", "192", "--answer", "2"]);
    assert_eq!(number(&result, "requests"), 1000);
    // Over two thirds of the requests: 4 MiB would be 6 KiB of each.
    assert!(number(&result, "resident_growth_kib") < 4096, "{result}");
}
