//! The names of transports' agents.

/// The form of the names: `x` is a hexadecimal digit of the transport's token.
pub(crate) const FORM: &str = "kv-xxxxxxxxxxxxxxxx";

/// The name of the agent of the transport with this token.
pub(crate) fn agent_name(token: u64) -> String {
    format!("kv-{token:016x}")
}

/// A name as the engines of vLLM and SGLang give it to their agents: a random UUID, of these bytes.
pub(crate) fn uuid_name(random: [u8; 16]) -> String {
    let number = u128::from_be_bytes(random);
    // Version 4, variant 1.
    let number = (number & !(0xf << 76) & !(0x3 << 62)) | 0x4 << 76 | 0x2 << 62;
    let digits = format!("{number:032x}");
    let part = |from: usize, to: usize| digits.get(from..to).unwrap_or_default();
    [part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32)].join("-")
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
    fn a_uuid_names_no_transport_and_has_its_version_and_variant() {
        assert_eq!(uuid_name([0xff; 16]), "ffffffff-ffff-4fff-bfff-ffffffffffff");
        assert_eq!(uuid_name([0; 16]), "00000000-0000-4000-8000-000000000000");
        assert!(!is_of_a_transport(&uuid_name([7; 16])));
    }

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
