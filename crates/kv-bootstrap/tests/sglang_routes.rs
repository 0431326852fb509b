//! SGLang's routes: the table of requests and exact answers.
#![allow(clippy::unwrap_used)]

mod support;

use kv_bootstrap::{KvBootstrapServer, ServerConfig};
use serde_json::{Value, json};
use std::time::Duration;
use support::{Http, eventually, once};

const ALL: &str = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1";

/// The body as SGLang 0.5.23 sends it.
fn claim(tp_size: u32, tp_rank: u32, port: u16) -> Value {
    json!({
        "attn_tp_size": tp_size, "attn_tp_rank": tp_rank, "attn_cp_size": 1, "attn_cp_rank": 0,
        "attn_dp_size": 1, "attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0,
        "system_dp_size": 1, "system_dp_rank": 0, "rank_ip": "10.0.0.7", "rank_port": port,
        "page_size": 64, "kv_cache_dtype": "torch.bfloat16", "kv_layout": null, "dsv41_spec_layout": null,
        "load_balance_method": "follow_bootstrap_room", "enable_dsa_cache_layer_split": false,
        "enable_kv_cache_sharding": false, "prefill_http_port": 30000,
        "decode_allocation_policy": "early", "a_field_of_the_future": {"x": [1, null]},
    })
}

fn route(dp: &str, cp: &str, tp: &str, pp: &str) -> String {
    format!("/route?prefill_dp_rank={dp}&prefill_cp_rank={cp}&target_tp_rank={tp}&target_pp_rank={pp}")
}

fn ask(http: &mut Http, method: &str, target: &str, body: Option<Value>) -> (u16, String, String) {
    let answer = http.request(method, target, body.map(|body| body.to_string()).as_deref());
    let kind = answer.header("content-type").unwrap().to_owned();
    (answer.status, answer.body, kind)
}

fn text(status: u16, text: &str) -> (u16, String, String) {
    (status, text.to_owned(), "text/plain; charset=utf-8".to_owned())
}

#[test]
fn two_ranks_register_and_are_found_with_the_answers_of_sglang() {
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let mut http = Http::connect(server.local_addr());
    let mut ask = |method: &str, target: &str, body: Option<Value>| ask(&mut http, method, target, body);
    assert_eq!(ask("GET", "/health", None), text(200, "OK"));
    let waiting =
        |n| text(503, &format!("Prefill server not fully registered yet ({n} workers registered)."));
    assert_eq!(ask("GET", ALL, None), waiting(0));
    assert_eq!(ask("GET", &route("0", "0", "0", "0"), None), waiting(0));
    for _ in 0..3 {
        // SGLang repeats a registration whose answer it did not get.
        assert_eq!(ask("PUT", "/route", Some(claim(2, 1, 7001))), text(200, "OK"));
        assert_eq!(ask("GET", ALL, None), waiting(1));
    }
    assert_eq!(ask("PUT", "/route", Some(claim(2, 0, 7000))), text(200, "OK"));

    let (status, body, kind) = ask("GET", ALL, None);
    assert_eq!((status, kind.as_str()), (200, "application/json; charset=utf-8"));
    let info = json!({
        "attn_tp_size": 2, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "page_size": 64,
        "kv_cache_dtype": "torch.bfloat16", "follow_bootstrap_room": true,
        "enable_dsa_cache_layer_split": false, "decode_allocation_policy": "early",
        "enable_kv_cache_sharding": false, "prefill_http_port": 30000, "target_tp_rank": null,
        "target_tp_ranks": null, "target_cp_ranks": null, "target_pp_ranks": null,
        "required_dst_info_num": null, "required_prefill_response_num": null,
    });
    assert_eq!(serde_json::from_str::<Value>(&body).unwrap(), info);

    let (status, body, kind) = ask("GET", &route("0", "0", "1", "0"), None);
    assert_eq!((status, kind.as_str()), (200, "application/json; charset=utf-8"));
    let rank = json!({"rank_ip": "10.0.0.7", "rank_port": 7001});
    assert_eq!(serde_json::from_str::<Value>(&body).unwrap(), rank);
    let missing = "Bootstrap info not found for dp_rank=0 pcp_rank=0 tp_rank=2 pp_rank=0";
    assert_eq!(ask("GET", &route("0", "0", "2", "0"), None), text(404, missing));
    let missing = "Bootstrap info not found for dp_rank=0 pcp_rank=-1 tp_rank=0 pp_rank=0";
    assert_eq!(ask("GET", &route("0", "-1", "0", "0"), None), text(404, missing));

    // A rank that restarted is found at its new port.
    assert_eq!(ask("PUT", "/route", Some(claim(2, 1, 7777))).0, 200);
    assert!(ask("GET", &route("0", "0", "1", "0"), None).1.contains("7777"));
    server.stop();
}

#[test]
fn refusals_have_the_statuses_and_texts_of_sglang() {
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let mut http = Http::connect(server.local_addr());
    let mut ask = |method: &str, target: &str, body: Option<Value>| ask(&mut http, method, target, body);
    for rank in [0, 1] {
        assert_eq!(ask("PUT", "/route", Some(claim(2, rank, 7000 + rank as u16))), text(200, "OK"));
    }
    let inputs = text(400, "Missing inputs for bootstrap server.");
    assert_eq!(ask("GET", "/route", None), inputs);
    assert_eq!(ask("GET", &route("0", "", "0", "0"), None), inputs);
    assert_eq!(ask("GET", &route("0", "x", "0", "0"), None).0, 400);
    assert_eq!(ask("GET", "/route?prefill_dp_rank=%zz", None).0, 400);

    let refused = (405, "Method not allowed".to_owned(), "application/json; charset=utf-8".to_owned());
    assert_eq!(ask("POST", "/route", Some(json!({}))), refused);
    assert_eq!(ask("DELETE", "/route", None), refused);
    assert_eq!(ask("GET", "/nothing", None), text(404, "404: Not Found"));
    assert_eq!(ask("POST", "/health", Some(json!({}))).0, 405);
    assert_eq!(ask("GET", "/register_dp_rank", None).0, 405);

    let mut late = claim(2, 1, 7001);
    late["decode_allocation_policy"] = json!("prefill_complete");
    assert_eq!(ask("PUT", "/route", Some(late)), text(400, "Inconsistent prefill allocation policies"));
    let mut late = claim(2, 1, 7001);
    late["dsv41_spec_layout"] = json!({"layers": 3});
    let layouts = "DeepSeek-V4.1 DSpark PD layout differs across prefill ranks";
    assert_eq!(ask("PUT", "/route", Some(late)), text(400, layouts));
}

#[test]
fn optional_values_appear_only_when_set_and_data_parallel_systems_use_their_own_rank() {
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    for rank in 0..2 {
        let mut claim = claim(1, 0, 7000 + rank);
        claim["system_dp_size"] = json!(2);
        claim["system_dp_rank"] = json!(rank);
        claim["kv_layout"] = json!("nhd");
        claim["dsv41_spec_layout"] = json!({"layers": [1, 2]});
        claim["load_balance_method"] = json!("round_robin");
        claim["rank_port"] = json!((7000 + rank).to_string());
        claim.as_object_mut().unwrap().remove("prefill_http_port");
        claim.as_object_mut().unwrap().remove("decode_allocation_policy");
        let answer = once(server.local_addr(), "PUT", "/route", Some(&claim.to_string()));
        assert_eq!((answer.status, answer.body.as_str()), (200, "OK"));
    }
    let info = once(server.local_addr(), "GET", ALL, None).json();
    assert_eq!(info["dp_size"], json!(2));
    assert_eq!(info["kv_layout"], json!("nhd"));
    assert_eq!(info["dsv41_spec_layout"], json!({"layers": [1, 2]}));
    assert_eq!(info["follow_bootstrap_room"], json!(false));
    assert_eq!(info["prefill_http_port"], Value::Null);
    assert_eq!(info["decode_allocation_policy"], json!("early"));
    let rank = once(server.local_addr(), "GET", &route("1", "0", "0", "0"), None).json();
    assert_eq!(rank, json!({"rank_ip": "10.0.0.7", "rank_port": 7001}));
}

#[test]
fn bad_registrations_are_400_and_change_nothing() {
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let put = |body: &str| once(server.local_addr(), "PUT", "/route", Some(body));
    for field in claim(1, 0, 1).as_object().unwrap().keys() {
        let mut partial = claim(1, 0, 1);
        partial.as_object_mut().unwrap().remove(field);
        let answer = put(&partial.to_string());
        let optional = [
            "kv_layout",
            "dsv41_spec_layout",
            "load_balance_method",
            "enable_dsa_cache_layer_split",
            "enable_kv_cache_sharding",
            "prefill_http_port",
            "decode_allocation_policy",
            "a_field_of_the_future",
        ];
        if !optional.contains(&field.as_str()) {
            assert_eq!(answer.status, 400, "{field}");
            assert!(answer.body.contains(field.as_str()), "{field}: {}", answer.body);
        }
    }
    for body in ["", "{", "[]", "null", "\u{0}", &"[".repeat(30_000)] {
        assert_eq!(put(body).status, 400, "{:?}", &body[..body.len().min(20)]);
    }
    assert_eq!(once(server.local_addr(), "PUT", "/route", None).status, 411);
}

#[test]
fn rooms_are_registered_queried_and_forgotten() {
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let mut http = Http::connect(server.local_addr());
    let mut post = |target: &str, body: Value| http.request("POST", target, Some(&body.to_string()));
    let room = 9_223_372_036_854_775_807_u64;
    for (room, rank) in [(json!(room), 3), (json!(7), 1), (json!("8"), 0)] {
        let answer = post("/register_dp_rank", json!({"bootstrap_room": room, "dp_rank": rank}));
        assert_eq!((answer.status, answer.body.as_str()), (200, "OK"));
    }
    let known = post("/query_dp_ranks", json!({"bootstrap_rooms": [room, 7, 8, 9, 7]}));
    assert_eq!(known.header("content-type"), Some("application/json; charset=utf-8"));
    assert_eq!(known.json(), json!({"9223372036854775807": 3, "7": 1, "8": 0}));
    assert_eq!(post("/query_dp_ranks", json!({"bootstrap_rooms": []})).json(), json!({}));
    assert_eq!(post("/query_dp_ranks", json!({"bootstrap_rooms": ["x"]})).status, 400);
    assert_eq!(post("/query_dp_ranks", json!({})).status, 400);
    assert_eq!(post("/register_dp_rank", json!({"bootstrap_room": 1})).status, 400);
    assert_eq!(post("/query_dp_ranks", json!({"bootstrap_rooms": vec![1; 70_000]})).status, 400);

    let config = ServerConfig::default().with(|config| config.dp_rank_ttl = Duration::from_millis(300));
    let server = KvBootstrapServer::start_with("127.0.0.1:0", config).unwrap();
    let mut http = Http::connect(server.local_addr());
    let mut post = |target: &str, body: Value| http.request("POST", target, Some(&body.to_string()));
    assert_eq!(post("/register_dp_rank", json!({"bootstrap_room": 7, "dp_rank": 1})).status, 200);
    eventually("rooms are forgotten", || {
        post("/query_dp_ranks", json!({"bootstrap_rooms": [7]})).json() == json!({})
    });
}

#[test]
fn a_registration_with_a_lease_leaves() {
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let mut leased = claim(1, 0, 7000);
    leased["lease_ttl_s"] = json!(0.2);
    assert_eq!(once(server.local_addr(), "PUT", "/route", Some(&leased.to_string())).status, 200);
    eventually("the rank has left", || once(server.local_addr(), "GET", ALL, None).status == 503);
}
