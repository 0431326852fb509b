//! Chats: the KV of earlier turns is kept on both sides, and answers go back to the prefill side.

use kv_examples::model::ModelConfig;
use serde_json::{Value, json};

use crate::support::{CHATS, COMPLETIONS, Serve, ask, completion, post, prompt, tokens};

#[test]
fn a_second_turn_of_a_chat_computes_and_moves_only_what_is_new() {
    let serve = Serve::start(&[]);
    let question = "tell me of the mill, the river and the long way home";
    let mut messages = vec![json!({ "role": "user", "content": question })];
    let body =
        |messages: &[Value]| json!({ "messages": messages, "max_tokens": 40, "return_token_ids": true });
    let first = ask(&serve.addr, CHATS, &body(&messages));
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let prompt_tokens = first["usage"]["prompt_tokens"].as_u64().unwrap();
    messages.push(first["choices"][0]["message"].clone());
    messages.push(json!({ "role": "user", "content": "and then?" }));
    let second = ask(&serve.addr, CHATS, &body(&messages));
    // D has the prompt and the answer of the first turn, but for the last token and the rest of a page.
    let kept = (prompt_tokens + 39) / 16 * 16;
    assert_eq!(second["usage"]["prompt_tokens_details"]["cached_tokens"], kept);
    let pages = |name| serve.rank(name)["pages"]["cached"].as_u64().unwrap();
    assert!(pages("prefill/0") >= prompt_tokens / 16);
    // The same turn without anything kept.
    serve.check_pages();
    let cold = ask(&serve.addr, CHATS, &body(&messages));
    assert_eq!(cold["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(tokens(&cold), tokens(&second));
    let count = |name: &str| serve.count(name, &[r#"process="prefill/0""#]);
    let second_tokens = second["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(count("serve_prompt_tokens_total"), prompt_tokens + 2 * second_tokens);
    let computed = count("serve_prompt_tokens_total") - count("serve_cached_tokens_total");
    assert_eq!(count("serve_computed_tokens_total"), computed);
    assert_eq!(count("serve_cached_tokens_total"), prompt_tokens / 16 * 16);
}

/// What two turns of a chat have moved and computed.
#[test]
fn on_the_next_turn_the_answer_goes_back_and_each_side_gets_only_what_it_lacks() {
    for mode in ["pull", "push"] {
        let serve = Serve::start(&["--mode", mode]);
        let read = |process: &str| {
            let ops = [r#"op="read""#, r#"op="write""#];
            let of =
                |op: &&str| serve.count("kv_transfer_bytes_total", &[op, &format!("process=\"{process}\"")]);
            ops.iter().map(of).sum::<u64>()
        };
        let p = |name: &str| serve.count(name, &[r#"process="prefill/0""#]);
        let mut messages = vec![json!({ "role": "user", "content": "tell me of the mill and the river" })];
        let body =
            |messages: &[Value]| json!({ "messages": messages, "max_tokens": 200, "return_token_ids": true });
        let first = ask(&serve.addr, CHATS, &body(&messages));
        serve.quiet();
        let prompt_tokens = first["usage"]["prompt_tokens"].as_u64().unwrap();
        // The bytes of both sides: the pages, and the aux row.
        let moved = read("prefill/0") + read("decode/0");
        let page = page_bytes();
        let aux = moved - prompt_tokens.div_ceil(16) * page;
        assert!(aux < 1000, "{mode}: {aux}");

        messages.push(first["choices"][0]["message"].clone());
        messages.push(json!({ "role": "user", "content": "and then?" }));
        let before = [read("prefill/0"), read("decode/0")];
        let second = ask(&serve.addr, CHATS, &body(&messages));
        serve.quiet();
        let after = [read("prefill/0"), read("decode/0")];
        let second_tokens = second["usage"]["prompt_tokens"].as_u64().unwrap();
        // D keeps prompt and answer of the first turn, but for the last token, which has no KV, and the rest of a page.
        let kept = (prompt_tokens + 199) / 16 * 16;
        assert_eq!(second["usage"]["prompt_tokens_details"]["cached_tokens"], kept, "{mode}");
        // P keeps the full pages of the first prompt, reads those of the answer, and computes the rest.
        let pulled = kept - prompt_tokens / 16 * 16;
        assert_eq!(p("serve_pulled_back_tokens_total"), pulled, "{mode}");
        assert_eq!(p("serve_computed_tokens_total"), prompt_tokens + second_tokens - kept, "{mode}");
        // In pull mode P reads from D, and D from P. In push mode P reads, too, and writes what D lacks.
        let lacking = (second_tokens.div_ceil(16) - kept / 16) * page + aux;
        let back = pulled / 16 * page;
        let [p_moved, d_moved] = [after[0] - before[0], after[1] - before[1]];
        let expected = if mode == "pull" { [back, lacking] } else { [back + lacking, 0] };
        assert_eq!([p_moved, d_moved], expected, "{mode}");

        // The same chat on an engine that keeps nothing has the same tokens.
        serve.check_pages();
        let cold = ask(&serve.addr, CHATS, &body(&messages));
        assert_eq!(cold["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
        assert_eq!(tokens(&cold), tokens(&second), "{mode}");
        serve.check_pages();
    }
}

/// Bytes of a page of the server's model.
fn page_bytes() -> u64 {
    let config = ModelConfig::small();
    (config.num_hidden_layers * (config.key_dim() + config.value_dim()) * size_of::<f32>() * 16) as u64
}

#[test]
fn a_chat_goes_on_where_its_decode_process_was_killed_between_the_turns() {
    let serve = Serve::start(&["--deadline", "10"]);
    let mut messages = vec![json!({ "role": "user", "content": "tell me of the mill and the river" })];
    let body =
        |messages: &[Value]| json!({ "messages": messages, "max_tokens": 100, "return_token_ids": true });
    let first = ask(&serve.addr, CHATS, &body(&messages));
    messages.push(first["choices"][0]["message"].clone());
    messages.push(json!({ "role": "user", "content": "and then?" }));
    serve.kill("decode/0");
    let second = ask(&serve.addr, CHATS, &body(&messages));
    // The new process has nothing of the first turn.
    assert_eq!(second["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(serve.count("serve_pulled_back_tokens_total", &[]), 0);
    serve.check_pages();
    let cold = ask(&serve.addr, CHATS, &body(&messages));
    assert_eq!(tokens(&cold), tokens(&second));
}

#[test]
fn an_answer_ends_before_a_stop_string_and_its_kv_is_kept() {
    let serve = Serve::start(&[]);
    let whole = ask(&serve.addr, COMPLETIONS, &completion(&prompt(20), 60));
    let text = whole["choices"][0]["text"].as_str().unwrap();
    // In the middle of the answer, and across the border of two tokens.
    let stop = text.get(100..108).unwrap();
    let expected = text.split_once(stop).unwrap().0;
    let mut body = completion(&prompt(20), 60);
    body["stop"] = json!(["no such text", stop]);
    let stopped = ask(&serve.addr, COMPLETIONS, &body);
    assert_eq!(stopped["choices"][0]["text"], expected);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    let count = stopped["usage"]["completion_tokens"].as_u64().unwrap();
    assert!(count > 10 && count < 40, "{count}");
    assert_eq!(tokens(&stopped), tokens(&whole)[..count as usize]);
    body["stream"] = true.into();
    let events = post(&serve.addr, COMPLETIONS, &body.to_string()).events();
    let told: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    assert_eq!(told, expected);
    let last = events.last().unwrap();
    assert_eq!(last["choices"][0]["finish_reason"], "stop");
    let ids = events.iter().filter(|event| event["choices"][0]["token_ids"].is_array());
    assert_eq!(ids.flat_map(tokens).collect::<Vec<_>>(), tokens(&stopped));
    // The engine computes no more of it, and every page comes back.
    serve.check_pages();
}
