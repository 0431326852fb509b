//! What an operator must know about a dialect: the first lines that `prefill` and `decode` print.

use super::Dialect;
use crate::cli::Mode;
use crate::rank::RankSpec;

/// Which dialect the rank speaks, and how the other side is to be configured; nothing for the native protocol.
pub fn notes(spec: &RankSpec) -> Vec<String> {
    let (side, number, page_size) = (spec.side, spec.number, spec.cache.page_size);
    let other = side.other();
    let (spoken, theirs, ours) = match spec.dialect.dialect {
        Dialect::Native => return Vec::new(),
        Dialect::Vllm => {
            let (mode, connector) = match spec.hand_over.mode {
                Mode::Push => ("push", "NixlPushConnector"),
                Mode::Pull | Mode::Auto => ("pull", "NixlConnector"),
            };
            let theirs = format!(
                "a vLLM 0.33 engine with kv_connector {connector}, kv_buffer_device cpu, \
                 kv_connector_extra_config {{\"enforce_handshake_compat\": false}}, VLLM_KV_CACHE_LAYOUT=HND, \
                 --block-size {page_size}, --dtype float32 and the same model"
            );
            (format!("vLLM 0.33's ({mode})"), theirs, format!("--dialect vllm --mode {mode}"))
        }
        Dialect::Sglang => {
            let theirs = format!(
                "an SGLang 0.5.23 engine with --disaggregation-mode {other}, --disaggregation-transfer-backend nixl, \
                 --page-size {page_size}, --dtype float32 and the same model"
            );
            ("SGLang 0.5.23's".to_owned(), theirs, "--dialect sglang".to_owned())
        }
    };
    vec![
        format!("{side}/{number} speaks {spoken} dialect over NIXL"),
        format!("the {other} side is {theirs}; or the example `{other}` with {ours}"),
    ]
}
