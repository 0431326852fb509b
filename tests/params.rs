//! Transfer parameters: dictionaries as vLLM writes them are understood, ours survive the way through a
//! router, and anything else is refused by name.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

#[path = "params/foreign.rs"]
mod foreign;
use std::sync::Arc;
use std::time::Duration;

use kv_conformance::Random;
use kv_transfer::layout::MAX_CACHE_GROUPS;
use kv_transfer::params::*;
use kv_transfer::prelude::*;
use kv_transfer::{
    EngineId, IdError, Incarnation, Lease, LeaseRef, MAX_ENGINE_ID, MAX_REQUEST_ID, PagesError, Parallel,
    RemoteRequest, RequestId, SessionId, TransferMode,
};
use serde_json::{Value, json};

/// The answer of a vLLM prefill engine in pull mode.
const PULL_RESPONSE: &str = r#"{
    "do_remote_prefill": true, "do_remote_decode": false,
    "remote_block_ids": [[4, 5, 6, 9]], "remote_engine_id": "b7a1c2f0-6d1e-4f5a-9a53-0c8c1d2e3f40",
    "remote_request_id": "cmpl-9f0c-0-1a2b3c4d", "remote_host": "10.1.2.3", "remote_port": 5600,
    "tp_size": 2, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 61,
    "remote_blocks_expiry_time": null, "remote_registration_generation": 0, "transfer_mode": "pull"
}"#;

/// The first request of a proxy to a prefill engine.
const PROXY_REQUEST: &str = r#"{
    "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
    "remote_block_ids": null, "remote_host": null, "remote_port": null
}"#;

/// The answer of a vLLM decode engine, for the next turn.
const DECODE_RESPONSE: &str = r#"{
    "do_remote_prefill": false, "do_remote_decode": true,
    "remote_block_ids": [[11, 12], [3]], "remote_engine_id": "d-0", "remote_request_id": "cmpl-1-0",
    "remote_host": "::1", "remote_port": 5601, "tp_size": 1, "dcp_size": 1, "pp_size": 1,
    "remote_num_tokens": 300, "remote_blocks_expiry_time": 8812.5,
    "remote_registration_generation": 3, "transfer_mode": "pull"
}"#;

fn pages(list: &[u32]) -> PageList {
    PageList::from_pages(list.iter().copied()).unwrap()
}

/// Our own parameters, with every key.
fn full() -> TransferParams {
    let mut remote = RemoteKv::new(EngineId::new("prefill-0").unwrap(), Room::Number(u64::MAX), "h", 8998);
    remote.block_ids = vec![pages(&[7, 8, 3])];
    (remote.num_tokens, remote.dp_rank) = (Some(40), Some(1));
    remote.expiry_time = Some(17.25);
    remote.registration_generation = Some(2);
    (remote.tp_size, remote.pp_size) = (Some(2), Some(3));
    let lease = |rank| {
        RankLease::new(rank, Incarnation::from_random(u64::MAX - u64::from(rank)), SessionId(u64::MAX))
    };
    remote.leases = Some(Leases::new("10.0.0.1:8998", 3, Duration::from_millis(29_750)).with(|leases| {
        leases.renewable = true;
        leases.page_size = Some(16);
        leases.ranks = vec![lease(0), lease(1)];
    }));
    TransferParams::decode(TransferMode::Pull, remote)
}

#[test]
fn a_vllm_prefill_response_names_engine_request_and_pages() {
    let params = TransferParams::parse(PULL_RESPONSE).unwrap();
    assert_eq!(params.mode, Some(TransferMode::Pull));
    let Leg::Decode { remote } = &params.leg else { panic!("{params:?}") };
    assert_eq!(remote.engine.as_str(), "b7a1c2f0-6d1e-4f5a-9a53-0c8c1d2e3f40");
    assert_eq!(remote.room, Some(Room::request("cmpl-9f0c-0-1a2b3c4d").unwrap()));
    assert_eq!(remote.room.as_ref().and_then(Room::base), Some("cmpl-9f0c-0"));
    assert_eq!(remote.bootstrap_addr(), "10.1.2.3:5600");
    assert_eq!(remote.pages(), Some(&pages(&[4, 5, 6, 9])));
    assert_eq!((remote.tp_size, remote.dcp_size, remote.pp_size), (Some(2), Some(1), Some(1)));
    assert_eq!((remote.num_tokens, remote.num_pages()), (Some(61), Some(4)));
    assert_eq!((remote.expiry_time, remote.registration_generation), (None, Some(0)));
    assert_eq!(remote.remaining(Some(1e9)), None);
    assert_eq!(remote.leases, None);
}

#[test]
fn a_proxy_s_request_of_nulls_is_a_prompt_without_history() {
    let params = TransferParams::parse(PROXY_REQUEST).unwrap();
    assert_eq!(params.leg, Leg::Prefill { cached: None });
    assert_eq!(TransferParams::parse("{}").unwrap().leg, Leg::Local);
    let ours = TransferParams::prefill(TransferMode::Pull);
    assert_eq!(
        ours.to_value(),
        json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_mode": "pull"})
    );
}

#[test]
fn a_vllm_decode_response_leads_the_next_prefill_to_its_cache() {
    let params = TransferParams::parse(DECODE_RESPONSE).unwrap();
    let Leg::Prefill { cached: Some(cached) } = &params.leg else { panic!("{params:?}") };
    assert_eq!(cached.bootstrap_addr(), "[::1]:5601");
    assert_eq!(cached.block_ids, [pages(&[11, 12]), pages(&[3])]);
    assert_eq!((cached.pages(), cached.num_pages()), (None, Some(3)));
    assert_eq!(cached.remaining(Some(8800.0)), Some(Duration::from_millis(12_500)));
    assert_eq!(cached.remaining(Some(9000.0)), Some(Duration::ZERO));
    assert_eq!(cached.remaining(None), None);
}

#[test]
fn older_engines_write_one_flat_list_of_blocks() {
    let mut value: Value = serde_json::from_str(PULL_RESPONSE).unwrap();
    value["remote_block_ids"] = json!([4, 5, 6, 9]);
    let flat = TransferParams::from_value(&value).unwrap();
    assert_eq!(flat, TransferParams::parse(PULL_RESPONSE).unwrap());
}

#[test]
fn everything_survives_the_way_through_a_router() {
    let mut params = full();
    for _ in 0..2 {
        assert_eq!(TransferParams::parse(&params.to_json()).unwrap(), params);
        params = TransferParams::next_turn(params.remote().unwrap().clone());
    }
    let request = Room::request("cmpl-7").unwrap();
    let push = RemoteKv::new(EngineId::new("p").unwrap(), request, "h", 1);
    let params = TransferParams::decode(TransferMode::Push, push);
    assert_eq!(TransferParams::parse(&params.to_json()).unwrap(), params);
}

#[test]
fn a_session_s_lease_reaches_the_reader_s_options() {
    let region = Region::dram(RegionRole::Kv, 0x1000, 64 * 64, 64);
    let parallel = Parallel::default().with(|parallel| {
        parallel.dp_size = 4;
        parallel.dp_rank = 3;
    });
    let args = KvArgs::builder("prefill", 3).pages(64, 16).region(region).parallel(parallel).build().unwrap();
    let lease_of = |life| LeaseRef::new(Incarnation::from_random(life), SessionId(7));
    let lease_refs = [lease_of(9), lease_of(4)];
    let lease = Lease::Fixed(Duration::from_secs(480));
    let granted = |addr: &str| {
        RemoteKv::granted(&args, addr, Room::Number(5), 33, &pages(&[1, 2, 9]), &lease_refs, lease)
    };
    let params = TransferParams::next_turn(granted("[::1]:8998").unwrap());
    let params = TransferParams::parse(&params.to_json()).unwrap();
    let remote = params.remote().unwrap();
    assert_eq!((remote.host.as_str(), remote.port), ("::1", 8998));
    assert_eq!(remote.bootstrap_addr(), "[::1]:8998");
    let given = SessionOptions::default().with(|options| options.deadline = Some(Duration::from_secs(1)));
    let options = remote.reader_options(given.clone());
    let expected = [lease_of(9), lease_of(4)].map(|lease| lease.of_pages(pages(&[1, 2, 9])));
    assert_eq!(
        options,
        given.with(|options| {
            options.prefill_dp_rank = Some(3);
            options.lease_refs = expected.to_vec();
            options.remote = Some(Box::new(
                RemoteRequest::new(args.worker().engine.clone(), RequestId::new("5").unwrap()).with(
                    |remote| {
                        remote.mode = Some(TransferMode::Pull);
                        remote.block_ids = vec![pages(&[1, 2, 9])];
                        remote.num_tokens = Some(33);
                    },
                ),
            ));
        })
    );
    assert_eq!(remote.lease_ref(4).map(|lease| lease.incarnation), Some(Incarnation::from_random(4)));
    let error = granted("nowhere").unwrap_err().to_string();
    assert_eq!(error, "bootstrap_addr must be host:port, and is \"nowhere\"");
}

#[test]
fn every_key_of_vllm_is_written_under_its_name() {
    let ours = full().to_value();
    let theirs: Value = serde_json::from_str(PULL_RESPONSE).unwrap();
    for key in theirs.as_object().unwrap().keys() {
        assert!(ours.get(key).is_some(), "{key}");
    }
    assert_eq!(ours["remote_request_id"], json!(u64::MAX.to_string()));
    assert_eq!(ours["remote_block_ids"], json!([[7, 8, 3]]));
    assert_eq!(ours["kv_leases"]["ranks"][0]["incarnation"], json!("ffffffffffffffff"));
    assert_eq!(ours["kv_leases"]["lease_seconds"], json!(29.75));
}

#[test]
fn unknown_keys_of_transfer_parameters_are_kept() {
    let mut value: Value = serde_json::from_str(PULL_RESPONSE).unwrap();
    value["tracing"] = json!({"id": [1, "x"]});
    let params = TransferParams::from_value(&value).unwrap();
    assert_eq!(params.to_value()["tracing"], json!({"id": [1, "x"]}));
    for i in 0..MAX_UNKNOWN_KEYS {
        value[format!("key {i}")] = json!(i);
    }
    let error = TransferParams::from_value(&value).unwrap_err();
    let (got, max) = (MAX_UNKNOWN_KEYS + 1, MAX_UNKNOWN_KEYS);
    assert_eq!(error, ParamsError::TooMany { field: "kv_transfer_params", got, max });
}

/// The error for a value in place of that at a path.
fn refused(path: &str, value: Value) -> ParamsError {
    let mut params = full().to_value();
    *params.pointer_mut(path).unwrap_or_else(|| panic!("{path}")) = value;
    TransferParams::from_value(&params).expect_err(path)
}

#[test]
fn errors_of_transfer_parameters_name_the_key_and_both_values() {
    for (path, value, message) in [
        ("/do_remote_decode", json!(true), "do_remote_prefill is true, but do_remote_decode says true"),
        ("/do_remote_prefill", json!(1), "do_remote_prefill must be a boolean, and is 1"),
        (
            "/remote_engine_id",
            json!(null),
            "remote_engine_id is missing or null; parameters in this direction must have it",
        ),
        ("/remote_host", json!(["h"]), "remote_host must be a text, and is a list of 1 elements"),
        ("/remote_port", json!(70_000), "remote_port is 70000; it must be 1 to 65535"),
        ("/remote_port", json!(8998.5), "remote_port must be a whole number, and is 8998.5"),
        ("/remote_port", json!("0x23"), "remote_port must be a whole number, and is \"0x23\""),
        ("/remote_num_tokens", json!("-1"), "remote_num_tokens must be a whole number, and is \"-1\""),
        ("/remote_num_tokens", json!(-1.0), "remote_num_tokens is -1.0; it must be 0 to 4294967295"),
        (
            "/remote_registration_generation",
            json!(9007199254740992.0),
            "remote_registration_generation must be a whole number, and is 9007199254740992.0",
        ),
        (
            "/remote_blocks_expiry_time",
            json!("inf"),
            "remote_blocks_expiry_time must be a number, and is \"inf\"",
        ),
        ("/remote_num_tokens", json!(-1), "remote_num_tokens is -1; it must be 0 to 4294967295"),
        ("/tp_size", json!(0), "tp_size is 0; it must be 1 to 4096"),
        ("/transfer_mode", json!("shove"), "transfer_mode must be push, pull or auto, and is \"shove\""),
        ("/remote_block_ids", json!([[7, 8, 3, 4]]), "num_pages is 3, but remote_block_ids says 4"),
        ("/remote_block_ids/0/1", json!("b8"), "remote_block_ids must be a whole number, and is \"b8\""),
        (
            "/remote_block_ids/0/1",
            json!(u64::MAX),
            "remote_block_ids is 18446744073709551615; it must be 0 to 4294967294",
        ),
        (
            "/remote_request_id",
            json!("18446744073709552000"),
            "bootstrap_room is 18446744073709551615, but remote_request_id says \"18446744073709552000\"",
        ),
        ("/kv_leases", json!("x"), "kv_leases must be an object, and is \"x\""),
        (
            "/kv_leases/bootstrap_addr",
            json!("nowhere"),
            "bootstrap_addr must be host:port, and is \"nowhere\"",
        ),
        ("/kv_leases/lease_seconds", json!(-0.5), "lease_seconds is -0.5; it must be 0 to 604800"),
        ("/kv_leases/ranks/1/rank", json!(0), "rank is 0, but another entry of ranks says 0"),
        (
            "/kv_leases/ranks/1/incarnation",
            json!("0"),
            "incarnation is 0; it must be 1 to 18446744073709551615",
        ),
        (
            "/kv_leases/ranks/1/lease_id",
            json!("+1"),
            "lease_id must be 1 to 16 hexadecimal digits, and is \"+1\"",
        ),
        ("/kv_leases/ranks/1/lease_id", json!(1e19), "lease_id must be a text, and is 1e+19"),
    ] {
        assert_eq!(refused(path, value).to_string(), message);
    }
    let id = |field, got, max| ParamsError::Id(IdError::Length { field, got, max });
    assert_eq!(refused("/remote_engine_id", json!("")), id("engine_id", 0, MAX_ENGINE_ID));
    let long = json!("x".repeat(MAX_REQUEST_ID + 1));
    assert_eq!(refused("/remote_request_id", long), id("request_id", MAX_REQUEST_ID + 1, MAX_REQUEST_ID));
    assert_eq!(
        TransferParams::parse("{\"do_remote_prefill\": tru}"),
        Err(ParamsError::NotJson { line: 1, column: 26 })
    );
    assert!(matches!(TransferParams::parse("[]"), Err(ParamsError::Type { .. })));
}

#[test]
fn sizes_in_transfer_parameters_are_bounded() {
    let text = " ".repeat(MAX_PARAMS_BYTES + 1);
    let (got, max) = (MAX_PARAMS_BYTES + 1, MAX_PARAMS_BYTES);
    assert_eq!(TransferParams::parse(&text), Err(ParamsError::TooLong { got, max }));
    assert!(matches!(TransferParams::parse(&"[".repeat(1 << 20)), Err(ParamsError::NotJson { .. })));
    let groups = json!(vec![Vec::<u32>::new(); MAX_CACHE_GROUPS + 1]);
    let too_many = |field, got, max| ParamsError::TooMany { field, got, max };
    assert_eq!(
        refused("/remote_block_ids", groups),
        too_many("remote_block_ids", MAX_CACHE_GROUPS + 1, MAX_CACHE_GROUPS)
    );
    let half = vec![1u32; MAX_BLOCKS / 2 + 1];
    assert_eq!(
        refused("/remote_block_ids", json!([half, half])),
        too_many("remote_block_ids", MAX_BLOCKS + 2, MAX_BLOCKS)
    );
    assert_eq!(refused("/remote_host", json!("h".repeat(256))), too_many("remote_host", 256, 255));
    let ranks = json!(vec![0; MAX_RANKS as usize + 1]);
    assert_eq!(refused("/kv_leases/ranks", ranks), too_many("ranks", 4097, 4096));
    // As many pages as one list may name are not too many for it.
    assert!(!matches!(PageList::from_pages(0..MAX_BLOCKS as u32), Err(PagesError::TooMany { .. })));
}

#[test]
fn a_reader_fetches_only_the_pages_that_it_lacks() {
    let mut remote = full().remote().unwrap().clone(); // 40 tokens in 3 pages
    let decode = FetchPolicy::decode(16);
    let fetch = |prompt, computed| remote.fetch(prompt, computed, None, &decode).unwrap();
    assert_eq!(fetch(40, 0), Fetch::Read { first: 0, pages: 3 });
    assert_eq!(fetch(40, 16), Fetch::Read { first: 1, pages: 2 });
    // A page that is here in part is read whole.
    assert_eq!(fetch(40, 31), Fetch::Read { first: 1, pages: 2 });
    assert_eq!(fetch(40, 32), Fetch::Read { first: 2, pages: 1 });
    assert_eq!(fetch(40, 40), Fetch::Release(ReleaseReason::AllHere));
    assert_eq!(fetch(40, 48), Fetch::Release(ReleaseReason::AllHere));
    // Of a shorter prompt the last pages are not needed, of a longer one they are not there.
    let other = ReleaseReason::OtherPrompt { needed: 2, held: 3 };
    assert_eq!(fetch(20, 0), Fetch::Release(other));
    assert_eq!(fetch(400, 16), Fetch::Read { first: 1, pages: 2 });
    assert_eq!(fetch(0, 0), Fetch::Release(ReleaseReason::AllHere));
    remote.num_tokens = Some(49);
    let error = remote.fetch(80, 0, None, &decode).unwrap_err();
    assert_eq!(error.to_string(), "remote_num_tokens is 49, but kv_leases.num_pages says 3");
}

#[test]
fn the_next_turn_computes_short_suffixes_and_expiring_pages() {
    let mut remote = full().remote().unwrap().clone();
    (remote.num_tokens, remote.block_ids) = (Some(200), Vec::new());
    remote.leases.as_mut().unwrap().num_pages = 13; // of 16 tokens
    let policy = FetchPolicy::next_turn(16);
    let fetch = |computed, seconds| {
        remote.fetch(500, computed, Some(Duration::from_secs_f64(seconds)), &policy).unwrap()
    };
    assert_eq!(fetch(0, 5.1), Fetch::Read { first: 0, pages: 13 });
    assert_eq!(fetch(0, 5.0), Fetch::Expired { remaining: Duration::from_secs(5) });
    assert_eq!(fetch(136, 60.0), Fetch::Read { first: 8, pages: 5 });
    let short = ReleaseReason::BelowThreshold { tokens: 63, threshold: 64 };
    assert_eq!(fetch(137, 60.0), Fetch::Release(short));
    assert_eq!(fetch(200, 60.0), Fetch::Release(ReleaseReason::AllHere));

    // What a router keeps between turns gets no younger.
    assert_eq!(remote.remaining(None), Some(Duration::from_millis(29_750)));
    let aged = remote.clone().aged(Duration::from_secs(25));
    assert_eq!(aged.remaining(None), Some(Duration::from_millis(4_750)));
    assert_eq!(remote.clone().aged(Duration::MAX).remaining(None), Some(Duration::ZERO));
    // The shorter of the two counts.
    assert_eq!(remote.remaining(Some(17.0)), Some(Duration::from_millis(250)));
    assert_eq!(remote.remaining(Some(-100.0)), Some(Duration::from_millis(29_750)));
    assert_eq!(remote.remaining(Some(f64::NAN)), Some(Duration::ZERO));
}

/// Any value, also such as no peer would write.
fn hostile(random: &mut Random, depth: usize) -> Value {
    match random.below(if depth == 0 { 9 } else { 11 }) {
        0 => Value::Null,
        1 => json!(random.chance(50)),
        2 => json!(random.bits()),
        3 => json!(-(random.below(1 << 20) as i64)),
        4 => json!([0.5, -1.5, 1e300, 1e10][random.below(4)]),
        5 => json!(""),
        6 => json!("\u{0}\n\u{202e}é".repeat(random.below(200))),
        7 => json!(format!("{:x}", random.bits())),
        8 => json!(random.below(5)),
        9 => Value::Array((0..random.below(5)).map(|_| hostile(random, depth - 1)).collect()),
        _ => {
            let keys = ["rank", "lease_id", "incarnation", "bootstrap_room", "x"];
            let pairs = (0..random.below(4)).map(|_| {
                let key = keys[random.below(keys.len())].to_owned();
                (key, hostile(random, depth - 1))
            });
            Value::Object(pairs.collect())
        }
    }
}

/// Every place in the value, as a JSON pointer.
fn places(value: &Value, path: &str, all: &mut Vec<String>) {
    all.push(path.to_owned());
    match value {
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(i, item)| places(item, &format!("{path}/{i}"), all));
        }
        Value::Object(map) => map.iter().for_each(|(key, item)| places(item, &format!("{path}/{key}"), all)),
        _ => {}
    }
}

#[test]
fn hostile_json_is_refused_or_understood_and_never_panics() {
    let mut random = Random::new("hostile_json");
    let seeds = [full().to_json(), PULL_RESPONSE.to_owned(), DECODE_RESPONSE.to_owned()];
    let (mut taken, mut refused) = (0, 0);
    for _ in 0..20_000 {
        let mut value: Value = serde_json::from_str(&seeds[random.below(seeds.len())]).unwrap();
        for _ in 0..1 + random.below(3) {
            let mut all = Vec::new();
            places(&value, "", &mut all);
            let place = &all[random.below(all.len())];
            let new = hostile(&mut random, 3);
            *value.pointer_mut(place).unwrap() = new;
        }
        match TransferParams::from_value(&value) {
            Ok(params) => {
                taken += 1;
                let again = TransferParams::from_value(&params.to_value());
                assert_eq!(again.as_ref(), Ok(&params), "{value}");
                if let Some(remote) = params.remote() {
                    let (prompt, computed) = (random.bits() as u32, random.bits() as u32);
                    let policy =
                        FetchPolicy::next_turn(1).with(|policy| policy.page_size = random.below(20) as u32);
                    let clock = random.chance(50).then_some(random.bits() as f64);
                    let left = remote.clone().aged(Duration::from_millis(random.bits())).remaining(clock);
                    let page_size = policy.page_size.max(1) as u64;
                    if let Ok(Fetch::Read { first, pages }) = remote.fetch(prompt, computed, left, &policy) {
                        let tokens = remote.num_tokens.unwrap_or(prompt).min(prompt);
                        assert_eq!((first + pages) as u64, u64::from(tokens).div_ceil(page_size), "{value}");
                        assert!(tokens > computed && pages > 0, "{value}");
                    }
                }
            }
            Err(error) => {
                refused += 1;
                assert!(error.to_string().len() < 1000, "{error}");
            }
        }
    }
    assert!(taken > 1000 && refused > 1000, "{taken} taken, {refused} refused");

    for _ in 0..20_000 {
        let mut text = seeds[random.below(seeds.len())].clone().into_bytes();
        for _ in 0..1 + random.below(4) {
            let at = random.below(text.len());
            match random.below(3) {
                0 => text[at] = random.bits() as u8,
                1 => text.truncate(at.max(1)),
                _ => text.insert(at, b"[]{}\",:0-e\\"[random.below(11)]),
            }
        }
        let _ = TransferParams::parse(&String::from_utf8_lossy(&text));
    }
}

/// Both lists come from a client, as long as the bounds of the parameters allow: their product is not to be stored.
#[test]
fn many_ranks_with_many_pages_take_no_more_memory_than_both_lists() {
    let engine = EngineId::new("p").unwrap();
    let list = pages(&(0..100_000).map(|page| 2 * page).collect::<Vec<u32>>());
    let leases = Leases::new("h:1", 100_000, Duration::from_secs(30)).with(|leases| {
        let rank = |rank| RankLease::new(rank, Incarnation::from_random(1 + u64::from(rank)), SessionId(1));
        leases.ranks = (0..MAX_RANKS).map(rank).collect();
    });
    let remote = RemoteKv::new(engine, Room::Number(1), "h", 1).with(|remote| {
        remote.block_ids = vec![list.clone()];
        remote.leases = Some(leases);
    });
    let lease_refs = remote.reader_options(SessionOptions::default()).lease_refs;
    assert_eq!(lease_refs.len(), MAX_RANKS as usize);
    let first = lease_refs[0].pages.clone().unwrap();
    assert_eq!(*first, list);
    assert!(lease_refs.iter().all(|lease| Arc::ptr_eq(lease.pages.as_ref().unwrap(), &first)));
}
