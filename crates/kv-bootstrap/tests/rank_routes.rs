//! This library's own routes.
#![allow(clippy::unwrap_used)]

mod support;

use kv_bootstrap::{KvBootstrapServer, RankJson};
use kv_core::{RankRecord, ServiceOffer, WorkerRole};
use serde_json::{Value, json};
use support::{Answer, Http, eventually, once, rank, rank_json};

const FIND: &str = "/v1/ranks?role=prefill&dp_rank=0";

fn key(record: &RankRecord, lease_ms: Option<u64>) -> String {
    let key = json!({"worker": record.worker, "incarnation": record.incarnation, "lease_ms": lease_ms});
    key.to_string()
}

fn records(answer: &Answer) -> Vec<RankRecord> {
    assert_eq!(answer.status, 200, "{answer:?}");
    let list: Vec<RankJson> = serde_json::from_str(&answer.body).unwrap();
    list.into_iter().map(|json| json.into_record().unwrap()).collect()
}

#[test]
fn a_replica_is_found_only_while_all_of_its_ranks_are_registered() {
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let mut http = Http::connect(server.local_addr());
    let ranks = [rank("p", (2, 0), 10), rank("p", (2, 1), 11)];
    assert_eq!(http.request("GET", FIND, None).status, 404);
    for _ in 0..2 {
        let granted = http.request("PUT", "/v1/ranks", Some(&rank_json(&ranks[1], 60_000)));
        assert_eq!((granted.status, granted.json()), (200, json!({"lease_ms": 60_000})));
        let waiting = http.request("GET", FIND, None);
        assert_eq!((waiting.status, waiting.json()["registered"].clone()), (503, json!(1)));
        assert_eq!(waiting.json()["expected"], json!(2));
    }
    assert_eq!(http.request("PUT", "/v1/ranks", Some(&rank_json(&ranks[0], 60_000))).status, 200);
    assert_eq!(records(&http.request("GET", FIND, None)), ranks);
    assert_eq!(records(&http.request("GET", "/v1/ranks?role=prefill&modulo=4711", None)), ranks);
    assert_eq!(records(&http.request("GET", &format!("{FIND}&engine=p"), None)), ranks);
    assert_eq!(http.request("GET", &format!("{FIND}&engine=q"), None).status, 404);
    assert_eq!(http.request("GET", "/v1/ranks?role=decode&dp_rank=0", None).status, 404);
    assert_eq!(http.request("GET", "/v1/ranks?role=prefill&dp_rank=1", None).status, 404);

    let stranger = rank("p", (2, 0), 99);
    assert_eq!(http.request("DELETE", "/v1/ranks", Some(&key(&stranger, None))).status, 409);
    assert_eq!(http.request("DELETE", "/v1/ranks", Some(&key(&ranks[0], None))).status, 200);
    assert_eq!(http.request("DELETE", "/v1/ranks", Some(&key(&ranks[0], None))).status, 404);
    assert_eq!(http.request("GET", FIND, None).status, 503);
}

#[test]
fn registrations_end_with_their_lease_unless_renewed() {
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let mut http = Http::connect(server.local_addr());
    let record = rank("p", (1, 0), 1);
    assert_eq!(http.request("PUT", "/v1/ranks", Some(&rank_json(&record, 200))).status, 200);
    let renewed = http.request("POST", "/v1/ranks/renew", Some(&key(&record, Some(600))));
    if renewed.status == 200 {
        assert_eq!(renewed.json(), json!({"lease_ms": 600}));
    }
    eventually("the rank leaves", || http.request("GET", FIND, None).status == 404);
    let late = http.request("POST", "/v1/ranks/renew", Some(&key(&record, Some(600))));
    assert_eq!(late.status, 404);
    let long = http.request("PUT", "/v1/ranks", Some(&rank_json(&record, u64::MAX)));
    assert_eq!(long.json(), json!({"lease_ms": 3_600_000}), "leases are bounded");
}

#[test]
fn a_new_incarnation_replaces_the_old_record_at_once() {
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let mut http = Http::connect(server.local_addr());
    let (old, new) = (rank("p", (1, 0), 1), rank("p", (1, 0), 2));
    assert_eq!(http.request("PUT", "/v1/ranks", Some(&rank_json(&old, 60_000))).status, 200);
    assert_eq!(http.request("PUT", "/v1/ranks", Some(&rank_json(&new, 60_000))).status, 200);
    assert_eq!(records(&http.request("GET", FIND, None)), std::slice::from_ref(&new));
    assert_eq!(http.request("POST", "/v1/ranks/renew", Some(&key(&old, Some(1)))).status, 404);
    let zombie = http.request("PUT", "/v1/ranks", Some(&rank_json(&old, 60_000)));
    assert_eq!(zombie.status, 409);
    assert_eq!(http.request("DELETE", "/v1/ranks", Some(&key(&old, None))).status, 409);
    assert_eq!(records(&http.request("GET", FIND, None)), [new]);
}

#[test]
fn contradictions_are_409_with_the_field_and_both_values() {
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let put =
        |record: &RankRecord| once(server.local_addr(), "PUT", "/v1/ranks", Some(&rank_json(record, 60_000)));
    assert_eq!(put(&rank("p", (2, 0), 1)).status, 200);
    let other = put(&rank("p", (4, 1), 2));
    assert_eq!(other.status, 409);
    assert_eq!(other.json()["error"], json!("p/1: tp_size is 4, but 2 is registered"));
    let mut usurper = rank("p", (2, 0), 2);
    usurper.worker.rank = 1;
    let other = put(&usurper);
    assert_eq!(other.status, 409);
    assert!(other.body.contains("p/0 at dp_rank 0 pp_rank 0 pcp_rank 0 tp_rank 0"), "{other:?}");
    // Another engine, and another role, are another matter.
    assert_eq!(put(&rank("q", (4, 1), 2)).status, 200);
    let mut decode = rank("d", (1, 0), 3);
    decode.role = WorkerRole::Decode;
    assert_eq!(put(&decode).status, 200);
    let found = once(server.local_addr(), "GET", "/v1/ranks?role=decode&modulo=18446744073709551615", None);
    assert_eq!(records(&found), [decode]);
}

#[test]
fn answers_to_bad_requests_name_the_field_and_the_error() {
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let mut http = Http::connect(server.local_addr());
    let good: Value = serde_json::from_str(&rank_json(&rank("p", (1, 0), 1), 5)).unwrap();
    let changes = [
        ("/incarnation", json!(0), "incarnation"),
        ("/incarnation", json!(-1), ""),
        ("/worker/engine", json!(""), "engine_id"),
        ("/worker/engine", json!("x".repeat(1000)), "engine_id"),
        ("/role", json!("chef"), "chef"),
        ("/transports/0/metadata", json!("%%%"), "base64"),
        ("/offers/0/data", json!("%%%"), "base64"),
        ("/offers/0/max", json!(0), "offers.max"),
        ("/offers", json!(vec![&good["offers"][0]; 17]), "offers (count)"),
        ("/parallel/tp_rank", json!(1), "tp_rank"),
        ("/parallel/dp_size", json!(0), "dp_rank"),
        ("/lease_ms", json!(0), "lease_ms"),
        ("/transports/0/name", json!(""), "transports.name"),
    ];
    for (path, value, word) in changes {
        let mut bad = good.clone();
        *bad.pointer_mut(path).unwrap() = value;
        let answer = http.request("PUT", "/v1/ranks", Some(&bad.to_string()));
        assert_eq!(answer.status, 400, "{path}: {answer:?}");
        if path != "/incarnation" {
            assert!(answer.json()["error"].as_str().unwrap().contains(word), "{path}: {answer:?}");
        }
    }
    for query in [
        "",
        "?role=prefill",
        "?dp_rank=0",
        "?role=cook&dp_rank=0",
        "?role=prefill&dp_rank=-1",
        "?role=prefill&dp_rank=0&modulo=1",
        "?role=prefill&dp_rank=0&engine=",
        "?role=%ff",
    ] {
        assert_eq!(http.request("GET", &format!("/v1/ranks{query}"), None).status, 400, "{query}");
    }
    assert_eq!(http.request("POST", "/v1/ranks", Some("{}")).status, 405);
    assert_eq!(http.request("DELETE", "/v1/ranks", Some("{}")).status, 400);
    assert_eq!(http.request("DELETE", "/v1/ranks", None).status, 411);
    assert_eq!(http.request("GET", FIND, None).status, 404, "nothing was registered");
}

#[test]
fn a_lookup_finds_only_engines_that_offer_the_service() {
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let mut http = Http::connect(server.local_addr());
    let (cache, mut both) = (rank("a", (1, 0), 1), rank("b", (1, 0), 2));
    both.offers.push(ServiceOffer { service: "vllm nixl/2".to_owned(), ..both.offers[0].clone() });
    for record in [&cache, &both] {
        assert_eq!(http.request("PUT", "/v1/ranks", Some(&rank_json(record, 60_000))).status, 200);
    }
    let mut find = |service: &str| http.request("GET", &format!("{FIND}&service={service}"), None);
    assert_eq!(records(&find("kv")), std::slice::from_ref(&cache));
    assert_eq!(records(&find("vllm%20nixl%2f2")), [both]);
    assert_eq!(find("ec").status, 404);
    assert_eq!(records(&http.request("GET", FIND, None)), [cache], "any service");
}
