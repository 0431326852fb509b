//! What real vLLM and SGLang engines have said to each other, from the recordings of `kv-interop`.

use std::collections::BTreeSet;

use serde_json::Value;

const VLLM: &str = concat!(
    include_str!("../../../kv-interop/tests/recordings/vllm-pull.jsonl"),
    include_str!("../../../kv-interop/tests/recordings/vllm-push.jsonl"),
);
const SGLANG: &str = include_str!("../../../kv-interop/tests/recordings/sglang.jsonl");

/// The parts of all messages that went this way, each message once.
fn recorded(text: &str, via: &str) -> BTreeSet<Vec<Vec<u8>>> {
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let messages = lines.filter(|line| line["via"] == via);
    messages.map(|line| line["parts"].as_array().unwrap().iter().map(bytes).collect()).collect()
}

fn bytes(hex: &Value) -> Vec<u8> {
    let hex = hex.as_str().unwrap();
    (0..hex.len() / 2).map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap()).collect()
}

/// Parts in one input, each behind its length.
fn joined(parts: &[Vec<u8>]) -> Vec<u8> {
    let joined = |part: &Vec<u8>| match u8::try_from(part.len()) {
        Ok(len @ 0..=254) => [&[len][..], part].concat(),
        _ => [&[255][..], &(part.len() as u16).to_le_bytes(), part].concat(),
    };
    parts.iter().flat_map(joined).collect()
}

pub(crate) fn vllm_answers() -> Vec<Vec<u8>> {
    // Answers have two parts, and questions one.
    let answers: Vec<_> = recorded(VLLM, "zmq").into_iter().filter(|parts| parts.len() > 1).collect();
    let one = &answers.first().expect("an answer was recorded")[0];
    let whole = answers.iter().map(|parts| [&[0][..], &joined(parts)].concat());
    let payload = kv_interop::vllm::NixlHandshakePayload::decode(one).unwrap();
    let alone = [[&[1][..], one].concat(), [&[2][..], &payload.agent_metadata_bytes].concat()];
    whole.chain(alone).collect()
}

pub(crate) fn vllm_notifications() -> Vec<Vec<u8>> {
    recorded(VLLM, "notification").into_iter().flatten().collect()
}

pub(crate) fn sglang_messages() -> Vec<Vec<u8>> {
    let more = [&["ABORT", "7", "10.0.0.1", "5600", "17"][..], &["ABORT_ACK", "7", "0", "17"]];
    let more = more.map(|parts| parts.iter().map(|part| part.as_bytes().to_vec()).collect::<Vec<_>>());
    let all = recorded(SGLANG, "zmq").into_iter().chain(more);
    all.map(|parts| joined(&parts)).collect()
}
