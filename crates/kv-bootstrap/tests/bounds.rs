//! What clients can make the server keep and do is bounded, and who is refused learns by which bound.
#![allow(clippy::unwrap_used)]

mod support;

use std::net::SocketAddr;

use kv_bootstrap::{BootstrapGauges, KvBootstrapServer, RegistryConfig, Secret, ServerConfig};
use kv_core::RankRecord;
use serde_json::{Value, json};
use support::{Http, assert_alive, eventually, once, rank, rank_json};

const FIND: &str = "/v1/ranks?role=prefill&dp_rank=0";

fn start(config: ServerConfig) -> (KvBootstrapServer, SocketAddr) {
    let server = KvBootstrapServer::start_with("127.0.0.1:0", config).unwrap();
    let addr = server.local_addr();
    (server, addr)
}

/// The gauges after everything that was asked before has been answered and counted.
fn gauges(server: &KvBootstrapServer) -> BootstrapGauges {
    // The second request is answered in a turn after that of the first.
    assert_alive(server.local_addr());
    assert_alive(server.local_addr());
    server.gauges()
}

fn claim(rank: usize, rank_ip: &str) -> Value {
    json!({
        "attn_tp_size": 16384, "attn_tp_rank": rank, "attn_cp_size": 1, "attn_cp_rank": 0, "attn_dp_size": 1,
        "attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0, "system_dp_size": 1, "system_dp_rank": 0,
        "rank_ip": rank_ip, "rank_port": 1, "page_size": 16, "kv_cache_dtype": "bf16",
        "load_balance_method": "x",
    })
}

#[test]
fn long_addresses_are_refused_and_take_no_memory() {
    let (server, addr) = start(ServerConfig::default());
    let mut http = Http::connect(addr);
    let mut put = |rank, ip: &str| {
        let answer = http.request("PUT", "/route", Some(&claim(rank, ip).to_string()));
        (answer.status, answer.body)
    };
    for rank in 0..600 {
        let (status, text) = put(rank, &"x".repeat(1_000_000));
        assert_eq!(status, 413);
        assert!(
            text.starts_with("the body has 1000") && text.ends_with("at most 32768 are allowed"),
            "{text}"
        );
    }
    let refused = (400, "rank_ip has 256 bytes; at most 255 are allowed".to_owned());
    assert_eq!(put(0, &"x".repeat(256)), refused);
    assert_eq!((gauges(&server).route_ranks, gauges(&server).route_bytes), (0, 0));
    for rank in 0..600 {
        assert_eq!(put(rank, &"x".repeat(255)).0, 200);
    }
    let kept = gauges(&server);
    assert_eq!(kept.route_ranks, 600);
    assert!(kept.route_bytes < 600 * 1024 + 1024, "{kept:?}");
}

#[test]
fn route_places_and_bytes_end_with_429_and_507() {
    let config = ServerConfig::default().with(|config| config.max_route_ranks_per_client = 3);
    let (_server, addr) = start(config);
    let put = |addr, rank| once(addr, "PUT", "/route", Some(&claim(rank, "10.0.0.1").to_string()));
    for rank in 0..3 {
        assert_eq!(put(addr, rank).status, 200);
    }
    let refused = put(addr, 3);
    assert_eq!(
        (refused.status, refused.body.as_str()),
        (429, "the ranks registered by this client would be 4, the limit is 3")
    );
    assert_eq!(put(addr, 2).status, 200, "a place that it holds already");

    let (server, addr) = start(ServerConfig::default().with(|config| config.max_route_bytes = 4096));
    let refused = (0..100).map(|rank| put(addr, rank)).find(|answer| answer.status != 200).unwrap();
    assert_eq!(refused.status, 507);
    assert!(refused.body.starts_with("the table is full: bytes would be "), "{refused:?}");
    assert!(refused.body.ends_with("the limit is 4096"), "{refused:?}");
    assert!(gauges(&server).route_bytes <= 4096);
}

#[test]
fn records_beyond_a_clients_share_are_429_and_beyond_the_servers_507() {
    let put = |addr, record: &RankRecord| {
        let answer = once(addr, "PUT", "/v1/ranks", Some(&rank_json(record, 60_000)));
        (answer.status, answer.json()["error"].as_str().map(str::to_owned))
    };
    let first_refusal = |registry: RegistryConfig| {
        let (server, addr) = start(ServerConfig::default().with(|config| config.registry = registry));
        let refused =
            (0..100).map(|tp| put(addr, &rank("p", (128, tp), 1))).find(|(status, _)| *status != 200);
        let kept = gauges(&server);
        let (status, error) = refused.unwrap();
        (status, error.unwrap(), kept.rank_bytes)
    };
    let (status, error, kept) =
        first_refusal(RegistryConfig::default().with(|config| config.max_bytes_per_client = 30_000));
    assert_eq!(status, 429);
    assert!(error.starts_with("the client's share is full: bytes would be "), "{error}");
    assert!(error.ends_with("the limit is 30000") && (25_000..=30_000).contains(&kept), "{error} {kept}");
    let (status, error, kept) =
        first_refusal(RegistryConfig::default().with(|config| config.max_bytes = 30_000));
    assert_eq!(status, 507);
    assert!(error.starts_with("the registry is full: bytes would be "), "{error}");
    assert!(error.ends_with("the limit is 30000") && (25_000..=30_000).contains(&kept), "{error} {kept}");
    let (status, error, _) = first_refusal(RegistryConfig::default().with(|config| config.max_ranks = 5));
    assert_eq!((status, error.as_str()), (507, "the registry is full: ranks would be 6, the limit is 5"));
}

#[test]
fn a_text_that_is_too_long_is_named_with_its_length_and_the_maximum() {
    let (server, addr) = start(ServerConfig::default());
    let mut record = rank("p", (1, 0), 1);
    record.offers[0].service = "x".repeat(513);
    let refused = once(addr, "PUT", "/v1/ranks", Some(&rank_json(&record, 60_000)));
    assert_eq!(refused.status, 400);
    let expected = json!({
        "error": "offers.service (length) is 513; it must be 1 to 512",
        "field": "offers.service (length)", "got": 513, "min": 1, "max": 512,
    });
    assert_eq!(refused.json(), expected);
    let mut named: Value = serde_json::from_str(&rank_json(&rank("p", (1, 0), 1), 60_000)).unwrap();
    named["worker"]["engine"] = json!("x".repeat(100_000));
    let refused = once(addr, "PUT", "/v1/ranks", Some(&named.to_string()));
    assert_eq!(refused.status, 400);
    let error = refused.json()["error"].as_str().unwrap().to_owned();
    assert!(error.contains("engine_id") && error.contains("100000") && error.contains("512"), "{error}");
    assert!(error.len() < 300, "the text is not sent back");
    assert_eq!(gauges(&server).ranks, 0);
}

#[test]
fn a_lookup_among_thousands_of_incomplete_engines_takes_a_few_steps() {
    let (server, addr) = start(ServerConfig::default());
    let mut http = Http::connect(addr);
    for number in 0..16_000_u32 {
        let record = rank(&format!("e{:05}", number / 2000), (4096, number % 2000), 1);
        assert_eq!(http.request("PUT", "/v1/ranks", Some(&rank_json(&record, 3_600_000))).status, 200);
    }
    let before = gauges(&server).lookup_steps;
    for _ in 0..100 {
        let missing = http.request("GET", FIND, None);
        assert_eq!((missing.status, missing.json()["registered"].clone()), (503, json!(2000)));
    }
    let steps = gauges(&server).lookup_steps - before;
    assert!(steps <= 200, "{steps} steps for 100 lookups");
}

#[test]
fn connections_at_rest_hold_no_memory() {
    let (server, addr) = start(ServerConfig::default());
    let mut clients: Vec<Http> = (0..20).map(|_| Http::connect(addr)).collect();
    let body = format!("{{\"bootstrap_rooms\":[{}1]}}", "1,".repeat(50_000));
    for http in &mut clients {
        assert_eq!(http.request("POST", "/query_dp_ranks", Some(&body)).status, 200);
        assert_eq!(http.request("POST", "/query_dp_ranks", Some(&body)).status, 200);
    }
    eventually("nothing is buffered", || gauges(&server).buffered == 0);
    assert!(server.gauges().connections >= 20);
}

#[test]
fn an_unfinished_body_counts_with_all_memory_reserved_for_it() {
    let (server, addr) = start(ServerConfig::default());
    let mut http = Http::connect(addr);
    http.send("PUT /v1/ranks HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n");
    eventually("the head has come", || gauges(&server).connections >= 1);
    assert!(gauges(&server).buffered < 64 << 10, "a length that was only claimed reserves nothing");
    http.send(vec![b' '; 500_000]);
    eventually("the body is counted", || gauges(&server).buffered >= 500_000);
    drop(http);
    eventually("it is gone", || gauges(&server).buffered == 0);
}

#[test]
fn the_connections_and_bodies_of_one_client_do_not_close_other_clients() {
    let config = ServerConfig::default().with(|config| {
        config.max_connections_per_client = 4;
        config.max_buffered_per_client = 100_000;
    });
    // IPv4 and IPv6 loopback are two clients of one server.
    let server = KvBootstrapServer::start_with("[::]:0", config).unwrap();
    let port = server.local_addr().port();
    let (here, there) = (SocketAddr::from(([127, 0, 0, 1], port)), format!("[::1]:{port}").parse().unwrap());
    let busy = || {
        let mut http = Http::connect(here);
        http.send("PUT /route HTTP/1.1\r\nContent-Length: 30000\r\nExpect: 100-continue\r\n\r\n");
        assert_eq!(http.answer().status, 100);
        http
    };
    let mut idle = Http::connect(there);
    assert_eq!(idle.request("GET", "/health", None).status, 200);
    let mut held: Vec<Http> = (0..4).map(|_| busy()).collect();
    assert_eq!(once(here, "GET", "/health", None).status, 503, "its share is spent");
    assert_eq!(once(there, "GET", "/health", None).status, 200);
    assert_eq!(idle.request("GET", "/health", None).status, 200, "another client's was not closed for it");
    held.truncate(1);
    eventually("connections are free", || once(here, "GET", "/health", None).status == 200);

    let mut greedy = Http::connect(here);
    greedy.send("PUT /v1/ranks HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n");
    greedy.send(vec![b' '; 150_000]);
    assert_eq!(greedy.answer().status, 503);
    let mut fair = Http::connect(there);
    let mut record = rank("p", (1, 0), 1);
    record.transports[0].metadata = vec![7; 50_000].into();
    assert_eq!(fair.request("PUT", "/v1/ranks", Some(&rank_json(&record, 60_000))).status, 200);
}

#[test]
fn without_the_secret_no_record_can_be_read_made_renewed_or_removed() {
    let secret = Some(Secret::new("0123456789abcdef").unwrap());
    let (server, addr) = start(ServerConfig::default().with(|config| {
        config.secret = secret;
        config.sglang = false;
    }));
    let mut http = Http::connect(addr);
    let mut ask = |method: &str, target: &str, fields: &str, body: &str| {
        http.send(format!(
            "{method} {target} HTTP/1.1\r\n{fields}Content-Length: {}\r\n\r\n{body}",
            body.len()
        ));
        http.answer()
    };
    let record = rank("p", (1, 0), 1);
    let body = rank_json(&record, 60_000);
    let right = "Authorization: Bearer 0123456789abcdef\r\n";
    let requests = [
        ("PUT", "/v1/ranks"),
        ("POST", "/v1/ranks/renew"),
        ("GET", FIND),
        ("DELETE", "/v1/ranks"),
        ("PUT", "/v1/x"),
    ];
    let wrong = ["", "Authorization: Bearer 0123456789abcdeF\r\n", "Authorization: 0123456789abcdef\r\n"];
    for known in [false, true] {
        for (method, target) in requests {
            for fields in wrong.into_iter().chain([right.repeat(2).as_str()]) {
                let refused = ask(method, target, fields, &body);
                assert_eq!(refused.status, 401, "{method} {target} {fields}");
                assert_eq!(refused.header("www-authenticate"), Some("Bearer"));
                assert!(!refused.body.contains("metadata"));
            }
        }
        if !known {
            assert_eq!(ask("PUT", "/v1/ranks", right, &body).status, 200);
        }
    }
    assert_eq!(ask("GET", FIND, right, "").json()[0]["transports"][0]["metadata"], json!("cC8wLzEAAQ=="));
    assert_eq!(ask("GET", "/health", "", "").status, 200);
    for (method, target) in [("PUT", "/route"), ("POST", "/register_dp_rank"), ("POST", "/query_dp_ranks")] {
        assert_eq!(ask(method, target, "", &body).status, 404, "{target} is switched off");
    }
    assert_eq!(server.gauges().ranks, 1);
}
