//! The names of transports' agents.

/// The form of the names: `x` is a hexadecimal digit of the transport's token.
pub(crate) const FORM: &str = "kv-xxxxxxxxxxxxxxxx";

/// The name of the agent of the transport with this token.
pub(crate) fn agent_name(token: u64) -> String {
    format!("kv-{token:016x}")
}

/// Whether a transport of this crate can have an agent of this name.
pub(crate) fn is_of_a_transport(name: &str) -> bool {
    let token = name.strip_prefix("kv-").and_then(|token| u64::from_str_radix(token, 16).ok());
    token.is_some_and(|token| agent_name(token) == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_a_transport_can_have_are_reserved() {
        for token in [0, 1, 0x0123_4567_89ab_cdef, u64::MAX] {
            let name = agent_name(token);
            assert!(is_of_a_transport(&name) && name.len() == FORM.len(), "{name}");
        }
        let others = ["", "kv-", "kv-1", "kv-0123456789abcde", "kv-0123456789abcdef0", "0123456789abcdef"];
        let written_otherwise = ["kv-0123456789ABCDEF", "kv-+123456789abcdef", "KV-0123456789abcdef"];
        for name in others.into_iter().chain(written_otherwise) {
            assert!(!is_of_a_transport(name), "{name}");
        }
    }
}
