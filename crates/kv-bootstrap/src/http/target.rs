//! The query of a request target.

/// Names and values of a query, in order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Query(Vec<(String, String)>);

impl Query {
    /// The first value that the query gives this name.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// Decodes a query `a=b&c=d`; `None` if an escape is not `%` with two hexadecimal digits, or the decoded text
/// is not UTF-8.
pub(crate) fn decode_query(text: &str) -> Option<Query> {
    let pairs = text.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        Some((decode(name)?, decode(value)?))
    });
    pairs.collect::<Option<Vec<_>>>().map(Query)
}

fn decode(text: &str) -> Option<String> {
    let mut bytes = text.bytes();
    let mut decoded = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'+' => b' ',
            b'%' => hex(bytes.next()?)? << 4 | hex(bytes.next()?)?,
            other => other,
        });
    }
    String::from_utf8(decoded).ok()
}

/// A text encoded as a value of a query: every byte but ASCII letters, digits and `-._~` is escaped.
pub(crate) fn encode_value(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'-' | b'.' | b'_' | b'~' => encoded.push(char::from(byte)),
            _ if byte.is_ascii_alphanumeric() => encoded.push(char::from(byte)),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).map(|value| value as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percent_escapes_in_queries_are_decoded() {
        let query = decode_query("a=%2D1&b%20c=x+y&&flag&a=2&e=%C3%a9").unwrap();
        assert_eq!(query.get("a"), Some("-1"));
        assert_eq!(query.get("b c"), Some("x y"));
        assert_eq!(query.get("flag"), Some(""));
        assert_eq!(query.get("e"), Some("é"));
        assert_eq!(query.get("z"), None);
    }

    #[test]
    fn encoded_query_values_decode_to_the_original() {
        for text in ["kv", "vllm.nixl-2_a~", "a b&c=d%#+é\r\n", ""] {
            let query = decode_query(&format!("x={}&y=1", encode_value(text))).unwrap();
            assert_eq!((query.get("x"), query.get("y")), (Some(text), Some("1")));
        }
        assert_eq!(encode_value("a b\n"), "a%20b%0A");
    }

    #[test]
    fn broken_percent_escapes_in_a_query_are_refused() {
        for text in ["a=%", "a=%2", "a=%zz", "a=%ff", "%=1", "a=%+1"] {
            assert_eq!(decode_query(text), None, "{text}");
        }
    }
}
