//! Routers of other projects in front of the processes: vLLM's two steps, over plain HTTP.

use kv_transfer::bootstrap::KvBootstrapServer;
use serde_json::{Value, json};

use crate::support::{
    Alone, CHATS, COMPLETIONS, Reply, Serve, ask, completion, monolithic, post, prompt, receive, send, tokens,
};

#[test]
fn the_router_of_another_project_may_send_the_two_steps_itself() {
    for mode in ["pull", "push"] {
        let serve = Serve::start(&["--mode", mode]);
        let addr = |name| serve.rank(name)["addr"].as_str().unwrap().to_owned();
        let (prefill, decode) = (addr("prefill/0"), addr("decode/0"));
        let prompt = prompt(70);
        // As vLLM's proxy writes it.
        let mut first = completion(&prompt, 1);
        first["stream"] = false.into();
        first["kv_transfer_params"] = json!({
            "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
            "remote_block_ids": null, "remote_host": null, "remote_port": null,
        });
        let computed = ask(&prefill, COMPLETIONS, &first);
        let params = computed["kv_transfer_params"].clone();
        assert_eq!(params["do_remote_prefill"], true, "{computed}");
        let mut second = completion(&prompt, 12);
        second["kv_transfer_params"] = params;
        let answer = ask(&decode, COMPLETIONS, &second);
        let expected = monolithic(&prompt, 12);
        assert_eq!(tokens(&answer), expected, "{mode}");
        assert_eq!(tokens(&computed), expected[..1]);

        // A prompt that is wanted no more is given up with a request for no token.
        let params = ask(&prefill, COMPLETIONS, &first)["kv_transfer_params"].clone();
        second["kv_transfer_params"] = params;
        second["max_tokens"] = 0.into();
        assert_eq!(ask(&decode, COMPLETIONS, &second)["usage"]["completion_tokens"], 0);
        serve.check_pages();

        // Each engine says what is missing or of the other side.
        let wrong = |addr: &str, params: Value| {
            let mut body = completion(&prompt, 1);
            body["kv_transfer_params"] = params;
            let reply = post(addr, COMPLETIONS, &body.to_string());
            assert_eq!(reply.status, 400);
            assert!(reply.error().contains("kv_transfer_params"), "{}", reply.error());
        };
        wrong(&prefill, Value::Null);
        wrong(&prefill, json!({ "do_remote_decode": "perhaps" }));
        wrong(&decode, json!({ "do_remote_decode": true }));
        wrong(&decode, json!({ "do_remote_prefill": true, "remote_port": 70_000 }));
    }
}

#[test]
fn parameters_of_another_prompt_are_refused_and_spoil_nobodys_answer() {
    for mode in ["pull", "push"] {
        let serve = Serve::start(&["--mode", mode]);
        let addr = |name| serve.rank(name)["addr"].as_str().unwrap().to_owned();
        let (prefill, decode) = (addr("prefill/0"), addr("decode/0"));
        let [one, other, third] = [160, 161, 162].map(|seed| prompt(seed)[..160].to_vec());
        let with = |prompt: &[u32], params: &Value| {
            let mut body = completion(prompt, 1);
            body["kv_transfer_params"] = params.clone();
            body
        };
        // The KV of one prompt for another one of the same length.
        let computed = ask(&prefill, COMPLETIONS, &with(&one, &json!({ "do_remote_decode": true })));
        let reply = post(&decode, COMPLETIONS, &with(&other, &computed["kv_transfer_params"]).to_string());
        assert_eq!(reply.status, 503, "{}", String::from_utf8_lossy(&reply.body));
        assert!(reply.error().contains("prompt"), "{}", reply.error());
        assert_eq!(tokens(&ask(&serve.addr, COMPLETIONS, &completion(&other, 80))), monolithic(&other, 80));

        // What the decode engine keeps of one chat, for another one.
        let turn: Vec<u32> = other.iter().copied().chain(monolithic(&other, 80)).collect();
        let kept = ask(&decode, "/kept_kv", &json!({ "prompt": turn }));
        let mut params = kept["kv_transfer_params"].clone();
        assert_eq!(params["remote_num_tokens"], 224, "{kept}");
        let strange: Vec<u32> = third.iter().copied().chain(turn[160..].iter().copied()).collect();
        params["transfer_mode"] = "pull".into();
        ask(&prefill, COMPLETIONS, &with(&strange, &params));
        let answer = ask(&serve.addr, COMPLETIONS, &completion(&strange, 9));
        assert_eq!(tokens(&answer), monolithic(&strange, 9), "{mode}");
        serve.check_pages();
    }
}

/// The keys of `kv_transfer_params` that vLLM's own engines have.
const KEYS_OF_VLLM: [&str; 13] = [
    "do_remote_decode",
    "do_remote_prefill",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "dcp_size",
    "pp_size",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "transfer_mode",
];

/// One request through vLLM's `toy_proxy_server.py`, in Rust: the same bodies and headers in the same order. With
/// `strict`, only the keys that vLLM knows come through.
fn proxied((prefill, decode): (&str, &str), client: &Value, number: usize, strict: bool) -> Reply {
    let headers = format!("x-request-id: cmpl-{number:08x}-proxy\r\nauthorization: Bearer none\r\n");
    let mut first = client.clone();
    first["kv_transfer_params"] = json!({
        "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
        "remote_block_ids": null, "remote_host": null, "remote_port": null,
    });
    first["stream"] = false.into();
    first["max_tokens"] = 1.into();
    first["min_tokens"] = 1.into();
    let first_body = first.as_object_mut().unwrap();
    if let Some(tokens) = first_body.get_mut("max_completion_tokens") {
        *tokens = 1.into();
    }
    first_body.remove("stream_options");
    let path = if client["messages"].is_array() { CHATS } else { COMPLETIONS };
    let computed = receive(send(prefill, "POST", path, &headers, first.to_string().as_bytes()));
    assert_eq!(computed.status, 200, "{}", String::from_utf8_lossy(&computed.body));
    let computed = computed.json();
    assert_eq!(computed["usage"]["completion_tokens"], 1);
    let mut second = client.clone();
    if let Value::Object(params) = &computed["kv_transfer_params"] {
        let mut params = params.clone();
        params.retain(|key, _| !strict || KEYS_OF_VLLM.contains(&key.as_str()));
        assert_eq!(params["do_remote_prefill"], true);
        assert!(params["remote_block_ids"][0].is_array() && params["remote_port"].is_u64(), "{params:?}");
        second["kv_transfer_params"] = params.into();
    }
    receive(send(decode, "POST", path, &headers, second.to_string().as_bytes()))
}

#[test]
fn vllms_proxy_serves_clients_by_processes_that_were_started_one_by_one() {
    let bootstrap = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let addr = bootstrap.local_addr().to_string();
    let start = |side| Alone::start(side, &["--bootstrap", &addr, "--lease-seconds", "5"]);
    let (prefill, decode) = (start("prefill"), start("decode"));
    let way = (prefill.addr.as_str(), decode.addr.as_str());
    for (number, strict) in [(0, false), (1, true)] {
        let prompt = prompt(90 + number as u32);
        let mut client = completion(&prompt, 12);
        client["stream"] = true.into();
        client["stream_options"] = json!({ "include_usage": true });
        let events = proxied(way, &client, number, strict).events();
        let ids = events.iter().filter(|event| event["choices"][0]["token_ids"].is_array());
        assert_eq!(ids.flat_map(tokens).collect::<Vec<_>>(), monolithic(&prompt, 12), "strict: {strict}");
        assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], 12);
    }
    let chat = json!({
        "messages": [{ "role": "user", "content": "hello" }], "max_completion_tokens": 7, "return_token_ids": true,
    });
    assert_eq!(tokens(&proxied(way, &chat, 2, false).json()).len(), 7);
    // Many at once, as the proxy's clients are.
    std::thread::scope(|scope| {
        for number in 10..26 {
            scope.spawn(move || {
                let prompt = prompt(number as u32 * 9);
                let answer = proxied(way, &completion(&prompt, 9), number, number % 2 == 0);
                assert_eq!(tokens(&answer.json()), monolithic(&prompt, 9), "{number}");
            });
        }
    });
    for process in [prefill, decode] {
        process.check_pages();
    }
}
