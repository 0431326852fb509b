//! The dictionaries of engines and routers that this library has not written: those of vLLM 0.33's NIXL
//! connector, of its two toy proxies, and of llm-d's sidecar.

use std::time::Duration;

use kv_transfer::params::*;
use kv_transfer::prelude::*;
use kv_transfer::{EngineId, Lease, LeaseRef, MAX_ENGINE_ID, MAX_REQUEST_ID, SessionId, TransferMode};
use serde_json::{Map, Value, json};

use super::pages;

/// What vLLM's prefill engine answers in pull mode, for a prompt of 61 tokens.
const VLLM_P_PULL: &str = r#"{
    "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[4, 5, 6, 9]],
    "remote_engine_id": "engine-7", "remote_request_id": "cmpl-9f0c-0-1a2b3c4d", "remote_host": "10.1.2.3",
    "remote_port": 5600, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 61,
    "remote_blocks_expiry_time": null, "remote_registration_generation": 1, "transfer_mode": "pull"
}"#;
/// The same in push mode: the expiry and the generation are absent.
const VLLM_P_PUSH: &str = r#"{
    "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[4, 5, 6, 9]],
    "remote_engine_id": "engine-7", "remote_request_id": "cmpl-9f0c-0-1a2b3c4d", "remote_host": "10.1.2.3",
    "remote_port": 5600, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 61,
    "transfer_mode": "push"
}"#;
/// What vLLM's decode engine answers, with `bidirectional_kv_xfer`, after 75 tokens; its clock said 73945.8.
const VLLM_D_TURN_1: &str = r#"{
    "do_remote_prefill": false, "do_remote_decode": true, "remote_block_ids": [[14, 15, 16, 19, 20]],
    "remote_engine_id": "engine-7", "remote_request_id": "cmpl-9f0c-0-5e6f7a8b", "remote_host": "10.1.2.3",
    "remote_port": 5601, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 75,
    "remote_blocks_expiry_time": 74425.8, "remote_registration_generation": 1, "transfer_mode": "pull"
}"#;
/// What vLLM's prefill engine answers if it has kept nothing.
const VLLM_P_NOTHING: &str = r#"{
    "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[]],
    "remote_engine_id": "engine-7", "remote_request_id": "cmpl-abcd-0-00000000", "remote_host": "10.1.2.3",
    "remote_port": 5600, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 0,
    "remote_blocks_expiry_time": null, "remote_registration_generation": 1, "transfer_mode": "pull"
}"#;
/// What both toy proxies and llm-d send to a prefill engine on the first turn.
const PROXY_TO_P: &str = r#"{
    "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
    "remote_block_ids": null, "remote_host": null, "remote_port": null
}"#;
/// What the toy push proxy sends to a decode engine.
const TOY_PUSH_TO_D: &str = r#"{
    "do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": "engine-7",
    "remote_request_id": "cmpl-9f0c-0-1a2b3c4d", "remote_host": "10.1.2.3", "remote_port": 5600, "tp_size": 1
}"#;
/// What llm-d sends to a decode engine in push mode, before the prefill engine has answered: the identity
/// that it has kept of the engine, its own id of the request, and a key of its own.
const LLMD_PUSH_TO_D: &str = r#"{
    "do_remote_decode": false, "do_remote_prefill": true, "dcp_size": 1, "pp_size": 1,
    "remote_engine_id": "engine-7", "remote_host": "10.1.2.3", "remote_port": 5600,
    "remote_request_id": "00000000-0000-0000-0000-000000000003", "tp_size": 2, "transfer_mode": "push",
    "transfer_id": "xfer-0f0e"
}"#;
/// llm-d's identity of a push engine alone.
const LLMD_PUSH_IDENTITY: &str = r#"{
    "do_remote_decode": false, "do_remote_prefill": true, "dcp_size": 1, "pp_size": 1,
    "remote_engine_id": "engine-7", "remote_host": "10.1.2.3", "remote_port": 5600, "tp_size": 2,
    "transfer_mode": "push"
}"#;
/// The fields of a decode engine's answer that llm-d keeps for the next turn.
const LLMD_TURN_2_FIELDS: [&str; 11] = [
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "tp_size",
    "dcp_size",
    "pp_size",
    "transfer_mode",
];

fn object(text: &str) -> Map<String, Value> {
    let Ok(Value::Object(map)) = serde_json::from_str(text) else { panic!("{text}") };
    map
}

/// The parameters with some keys changed; a null removes the key.
fn changed(text: &str, keys: Value) -> TransferParams {
    let mut map = object(text);
    map.append(&mut keys.as_object().unwrap().clone());
    map.retain(|_, value| !value.is_null());
    TransferParams::from_value(&Value::Object(map)).unwrap()
}

fn parsed(text: &str) -> TransferParams {
    TransferParams::parse(text).unwrap()
}

fn remote(text: &str) -> RemoteKv {
    parsed(text).remote().unwrap().clone()
}

/// What llm-d makes of a decode engine's answer, for the prefill engine of the next turn.
fn through_llmd(mut answer: Value) -> Value {
    let kept = answer.as_object_mut().unwrap();
    kept.retain(|key, _| LLMD_TURN_2_FIELDS.contains(&key.as_str()));
    kept.insert("do_remote_decode".to_owned(), json!(true));
    kept.insert("do_remote_prefill".to_owned(), json!(false));
    answer
}

/// What our prefill worker says of 40 tokens in three pages of 16 tokens.
fn ours(room: Room) -> RemoteKv {
    let region = Region::dram(RegionRole::Kv, 0x1000, 64 * 64, 64);
    let args = KvArgs::builder("prefill-0", 0).pages(64, 16).region(region).build().unwrap();
    let lease_ref = LeaseRef::new(kv_transfer::Incarnation::from_random(9), SessionId(7));
    let lease = Lease::Renewable(Duration::from_secs(30));
    RemoteKv::granted(&args, "10.0.0.1:8998", room, 40, &pages(&[7, 8, 3]), &[lease_ref], lease).unwrap()
}

#[test]
fn foreign_dictionaries_come_back_with_the_keys_that_they_had() {
    for text in [
        VLLM_P_PULL,
        VLLM_P_PUSH,
        VLLM_D_TURN_1,
        VLLM_P_NOTHING,
        PROXY_TO_P,
        TOY_PUSH_TO_D,
        LLMD_PUSH_TO_D,
        LLMD_PUSH_IDENTITY,
    ] {
        let mut expected = object(text);
        expected.retain(|_, value| !value.is_null());
        assert_eq!(parsed(text).to_value(), Value::Object(expected), "{text}");
    }
    let turn_2 = through_llmd(serde_json::from_str(VLLM_D_TURN_1).unwrap());
    assert_eq!(TransferParams::from_value(&turn_2).unwrap().to_value(), turn_2);
}

/// vLLM's classes compare the generation with a number, index `remote_block_ids`, format the port, and
/// take `tp_size` without a default.
#[test]
fn what_we_write_for_vllm_has_the_types_of_its_classes() {
    let kept = ours(Room::request("cmpl-1-0-0123abcd").unwrap()).side_channel("[fd00::1]:5600").unwrap();
    for (params, flags) in [
        (TransferParams::decode(TransferMode::Pull, kept.clone()), [true, false]),
        (TransferParams::decode(TransferMode::Push, kept.clone()), [true, false]),
        (TransferParams::next_turn(kept), [false, true]),
    ] {
        let value = params.to_value();
        assert_eq!([&value["do_remote_prefill"], &value["do_remote_decode"]], [&flags[0], &flags[1]]);
        let of_vllm = |key: &str| !["kv_leases", "remote_dp_rank"].contains(&key);
        for (key, value) in value.as_object().unwrap().iter().filter(|(key, _)| of_vllm(key)) {
            let right = match key.as_str() {
                "do_remote_prefill" | "do_remote_decode" => value.is_boolean(),
                "remote_block_ids" => *value == json!([[7, 8, 3]]),
                "remote_engine_id" | "remote_request_id" | "transfer_mode" => value.is_string(),
                "remote_host" => value == "fd00::1",
                "remote_blocks_expiry_time" => value.is_f64(),
                _ => value.is_u64(),
            };
            assert!(right, "{key}: {value}");
        }
        assert!(value.get("remote_registration_generation").is_none(), "{value}");
    }
    let known = ours(Room::Number(1)).with(|remote| {
        (remote.registration_generation, remote.expiry_time) = (Some(2), Some(70.0));
    });
    let value = TransferParams::next_turn(known).to_value();
    assert_eq!(value["remote_registration_generation"], json!(2));
    assert_eq!(value["remote_blocks_expiry_time"].to_string(), "70.0");
}

#[test]
fn a_side_channel_leaves_our_readers_their_bootstrap_server() {
    let kept = ours(Room::Number(1)).side_channel("10.0.0.9:5600").unwrap();
    let text = TransferParams::decode(TransferMode::Pull, kept).to_json();
    let kept = remote(&text);
    assert_eq!((kept.host.as_str(), kept.port), ("10.0.0.9", 5600));
    assert_eq!(kept.bootstrap_addr(), "10.0.0.1:8998");
    assert_eq!(remote(VLLM_P_PULL).bootstrap_addr(), "10.1.2.3:5600");
    let error = ours(Room::Number(1)).side_channel("5600").unwrap_err().to_string();
    assert_eq!(error, "side_channel must be host:port, and is \"5600\"");
}

#[test]
fn a_receiver_of_another_dialect_is_told_what_the_router_says() {
    let told = remote(VLLM_D_TURN_1).reader_options(SessionOptions::default());
    let told = *told.remote.unwrap();
    let modes = [VLLM_P_PULL, LLMD_PUSH_TO_D].map(|text| remote(text).remote_request().unwrap().mode);
    assert_eq!(modes, [Some(TransferMode::Pull), Some(TransferMode::Push)]);
    assert_eq!(ours(Room::Number(1)).remote_request().unwrap().mode, None);
    assert_eq!((told.engine.as_str(), told.request.as_str()), ("engine-7", "cmpl-9f0c-0-5e6f7a8b"));
    assert_eq!(told.block_ids, [pages(&[14, 15, 16, 19, 20])]);
    assert_eq!((told.tp_size, told.pp_size, told.dcp_size), (1, 1, 1));
    assert_eq!((told.num_tokens, told.registration_generation), (Some(75), Some(1)));
    assert_eq!(told.expires_at, Some(Duration::from_secs_f64(74425.8)));
    let told = remote(LLMD_PUSH_TO_D).remote_request().unwrap();
    assert_eq!((told.tp_size, told.block_ids, told.expires_at), (2, Vec::new(), None));
    let before_zero = remote(VLLM_D_TURN_1).with(|remote| remote.expiry_time = Some(-1.0));
    assert_eq!(before_zero.remote_request().unwrap().expires_at, None);
    assert_eq!(ours(Room::Number(7)).remote_request().unwrap().request.as_str(), "7");
}

#[test]
fn a_push_without_a_request_id_takes_the_reader_s_own() {
    let params = parsed(LLMD_PUSH_IDENTITY);
    assert_eq!(params.mode, Some(TransferMode::Push));
    let nameless = params.remote().unwrap().clone();
    assert_eq!((&nameless.room, nameless.remote_request()), (&None, None));
    assert_eq!(nameless.bootstrap_addr(), "10.1.2.3:5600");
    let policy = FetchPolicy::decode(16);
    assert_eq!(nameless.fetch(40, 0, None, &policy), Ok(Fetch::Read { first: 0, pages: 3 }));
    let own = Room::request("cmpl-9-0-0badcafe").unwrap();
    let named = nameless.with(|remote| _ = remote.room.get_or_insert(own));
    let told = named.remote_request().unwrap();
    assert_eq!((told.request.as_str(), told.tp_size), ("cmpl-9-0-0badcafe", 2));
    let text = TransferParams::decode(TransferMode::Push, named.clone()).to_json();
    assert_eq!(remote(&text), named);
}

/// vLLM's prefill scheduler looks at the remote cache only if the pages and all four keys are there.
#[test]
fn a_turn_whose_history_is_named_in_part_is_computed() {
    for key in ["remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids"] {
        assert_eq!(changed(VLLM_D_TURN_1, json!({ key: null })).leg, Leg::Prefill { cached: None }, "{key}");
    }
    let unlisted = changed(VLLM_D_TURN_1, json!({"remote_block_ids": []}));
    assert_eq!(unlisted.leg, Leg::Prefill { cached: None });
    let other = changed(VLLM_D_TURN_1, json!({"tp_size": null}));
    assert!(other.remote().is_some());
    for key in ["remote_engine_id", "remote_host", "remote_port"] {
        let mut map = object(VLLM_P_PULL);
        map.remove(key);
        let error = TransferParams::from_value(&Value::Object(map)).unwrap_err();
        assert!(matches!(error, ParamsError::Missing { field } if field == key), "{error}");
    }
}

#[test]
fn numbers_may_be_floats_without_a_fraction_or_texts() {
    let as_text = json!({"remote_port": "5600", "tp_size": "1", "remote_num_tokens": "61",
        "remote_block_ids": [["4", "5", "6", "9"]], "remote_registration_generation": "1"});
    let as_float = json!({"remote_port": 5600.0, "tp_size": 1.0, "remote_num_tokens": 61.0,
        "remote_block_ids": [[4.0, 5.0, 6.0, 9.0]], "remote_registration_generation": 1.0});
    for keys in [as_text, as_float] {
        let params = changed(VLLM_P_PULL, keys);
        assert_eq!(params, parsed(VLLM_P_PULL));
        // What is written again has the types of vLLM's own.
        assert_eq!(params.to_json(), parsed(VLLM_P_PULL).to_json());
    }
    // Older engines write one flat list.
    assert_eq!(changed(VLLM_P_PULL, json!({"remote_block_ids": ["4", 5.0, 6, 9]})), parsed(VLLM_P_PULL));
    let expiry = changed(VLLM_D_TURN_1, json!({"remote_blocks_expiry_time": "74425.8"}));
    assert_eq!(expiry, parsed(VLLM_D_TURN_1));
}

#[test]
fn ids_may_be_as_long_as_those_of_vllm() {
    let (engine, request) = ("e".repeat(MAX_ENGINE_ID), "r".repeat(MAX_REQUEST_ID));
    let long = changed(
        VLLM_P_PULL,
        json!({"remote_engine_id": engine.clone(), "remote_request_id": request.clone()}),
    );
    let long = long.remote().unwrap();
    assert_eq!(
        (long.engine.as_str(), &long.room),
        (engine.as_str(), &Some(Room::request(&request).unwrap()))
    );
    assert!(EngineId::new(&"e".repeat(300)).is_ok() && Room::request(&"r".repeat(1000)).is_ok());
}

/// Go and JavaScript keep numbers as doubles.
#[test]
fn a_room_that_a_router_has_rounded_is_the_one_that_its_digits_say() {
    for number in [(1 << 53) + 1, u64::MAX, u64::MAX - 4000, 1 << 60, 42] {
        let written = TransferParams::decode(TransferMode::Pull, ours(Room::Number(number))).to_value();
        let rounded = written["kv_leases"]["bootstrap_room"].as_f64().unwrap();
        let as_go = serde_json::from_str::<Value>(&format!("{rounded:.0}")).unwrap();
        for room in [json!(rounded), as_go, json!(number.to_string())] {
            let mut value = written.clone();
            value["kv_leases"]["bootstrap_room"] = room;
            let params = TransferParams::from_value(&value).unwrap();
            assert_eq!(params.remote().unwrap().room, Some(Room::Number(number)));
            assert_eq!(params.to_value(), written);
        }
    }
    // Numbers that no rounding makes of each other contradict.
    let mut value = TransferParams::decode(TransferMode::Pull, ours(Room::Number(42))).to_value();
    value["kv_leases"]["bootstrap_room"] = json!(43);
    let error = TransferParams::from_value(&value).unwrap_err().to_string();
    assert_eq!(error, "bootstrap_room is 43, but remote_request_id says \"42\"");
    value["remote_request_id"] = json!("043");
    assert!(TransferParams::from_value(&value).is_err());
}

#[test]
fn a_holder_without_tokens_leaves_everything_to_compute() {
    let policy = FetchPolicy::decode(16);
    let fetch = |remote: &RemoteKv| remote.fetch(40, 0, None, &policy).unwrap();
    assert_eq!(fetch(&remote(VLLM_P_NOTHING)), Fetch::Nothing);
    let silent = changed(VLLM_P_NOTHING, json!({"remote_num_tokens": null}));
    assert_eq!(fetch(silent.remote().unwrap()), Fetch::Nothing);
    // Pages that are kept all the same are given back.
    let pages_only = changed(VLLM_P_PULL, json!({"remote_num_tokens": 0}));
    assert_eq!(fetch(pages_only.remote().unwrap()), Fetch::Release(ReleaseReason::NothingThere));
    let leased = ours(Room::Number(1)).with(|remote| remote.num_tokens = Some(0));
    assert_eq!(fetch(&leased), Fetch::Release(ReleaseReason::NothingThere));
    // Of a decode worker that does not say how much it has, nothing is known to be there.
    let silent = changed(VLLM_D_TURN_1, json!({"remote_num_tokens": null}));
    let silent = silent.remote().unwrap();
    let next_turn = FetchPolicy::next_turn(16);
    assert_eq!(silent.fetch(75, 0, None, &next_turn), Ok(Fetch::Release(ReleaseReason::NothingThere)));
    assert_eq!(silent.fetch(75, 0, None, &policy), Ok(Fetch::Read { first: 0, pages: 5 }));
}

#[test]
fn unequal_page_sizes_are_reckoned_each_with_its_own_pages() {
    let vllm = remote(VLLM_P_PULL); // 61 tokens in 4 pages of 16 tokens
    for (page_size, computed, first, pages) in [(8, 0, 0, 8), (8, 16, 2, 6), (32, 0, 0, 2), (32, 40, 1, 1)] {
        let policy = FetchPolicy::decode(page_size);
        let read = Ok(Fetch::Read { first, pages });
        assert_eq!(vllm.fetch(61, computed, None, &policy), read, "page size unknown");
        let knows = policy.with(|policy| policy.holder_page_size = Some(16));
        assert_eq!(vllm.fetch(61, computed, None, &knows), read, "page size known");
        // Our own holders say their page size: 40 tokens in 3 pages of 16 tokens.
        let pages = 40u32.div_ceil(page_size) as usize;
        assert_eq!(ours(Room::Number(1)).fetch(40, 0, None, &policy), Ok(Fetch::Read { first: 0, pages }));
    }
    let wrong = FetchPolicy::decode(16).with(|policy| policy.holder_page_size = Some(8));
    let error = vllm.fetch(61, 0, None, &wrong).unwrap_err().to_string();
    assert_eq!(error, "remote_num_tokens is 61, but remote_block_ids says 4");
}

#[test]
fn the_pages_beyond_a_shorter_prompt_are_left_out_at_a_vllm_holder_only() {
    let policy = FetchPolicy::decode(16).with(|policy| policy.holder_page_size = Some(16));
    let vllm = remote(VLLM_P_PULL);
    assert_eq!(vllm.fetch(40, 16, None, &policy), Ok(Fetch::Read { first: 1, pages: 2 }));
    let other = ReleaseReason::OtherPrompt { needed: 2, held: 3 };
    assert_eq!(ours(Room::Number(1)).fetch(20, 0, None, &policy), Ok(Fetch::Release(other)));
    // Of two cache groups the one with a window lists only the pages of the window.
    let groups = changed(VLLM_P_PULL, json!({"remote_block_ids": [[4, 5, 6, 9], [11, 12]]}));
    let groups = groups.remote().unwrap();
    assert_eq!(groups.fetch(61, 0, None, &policy), Ok(Fetch::Read { first: 0, pages: 4 }));
    let short = changed(VLLM_P_PULL, json!({"remote_block_ids": [[4, 5, 6], [11, 12]]}));
    let error = short.remote().unwrap().fetch(61, 0, None, &policy).unwrap_err().to_string();
    assert_eq!(error, "remote_num_tokens is 61, but remote_block_ids says 3");
}

#[test]
fn the_next_turn_reads_back_from_a_vllm_decode_engine_while_it_keeps_the_pages() {
    let Leg::Prefill { cached: Some(cached) } = parsed(VLLM_D_TURN_1).leg else { panic!("no history") };
    let policy = FetchPolicy::next_turn(16).with(|policy| policy.holder_page_size = Some(16));
    let fetch = |clock| cached.fetch(120, 0, cached.remaining(clock), &policy).unwrap();
    let read = Fetch::Read { first: 0, pages: 5 };
    assert_eq!(fetch(Some(73945.8)), read);
    // vLLM reads nothing from five seconds before the end.
    assert_eq!(fetch(Some(74420.7)), read);
    assert!(matches!(fetch(Some(74420.9)), Fetch::Expired { .. }));
    assert!(matches!(fetch(Some(80000.0)), Fetch::Expired { remaining: Duration::ZERO }));
    // A router may drop the time, and then vLLM reads.
    assert_eq!(fetch(None), read);
}

#[test]
fn what_llm_d_keeps_of_our_answer_is_enough_for_the_next_turn() {
    let room = Room::request("cmpl-1-0-0123abcd").unwrap();
    let answer = ours(room.clone()).with(|remote| remote.num_tokens = Some(40));
    let value = through_llmd(TransferParams::next_turn(answer).to_value());
    assert!(value.get("kv_leases").is_none() && value.get("remote_dp_rank").is_none());
    let params = TransferParams::from_value(&value).unwrap();
    let Leg::Prefill { cached: Some(cached) } = &params.leg else { panic!("{params:?}") };
    assert_eq!((&cached.room, cached.bootstrap_addr()), (&Some(room), "10.0.0.1:8998".to_owned()));
    let policy = FetchPolicy::next_turn(16).with(|policy| policy.recompute_threshold = 0);
    let fetch = cached.fetch(90, 0, cached.remaining(None), &policy);
    assert_eq!(fetch, Ok(Fetch::Read { first: 0, pages: 3 }));
    let options = cached.reader_options(SessionOptions::default());
    assert!(options.lease_refs.is_empty() && options.remote.is_some());
}
