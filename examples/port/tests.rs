//! What can be tested without processes; the rest is in `examples/tests/port.rs`.
#![allow(clippy::unwrap_used)]
use super::adapter::First;

#[test]
fn the_adapter_has_at_most_250_lines_of_code_and_its_channel_60() {
    let code = |text: &str| {
        text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//")).count()
    };
    for (text, most) in [(include_str!("adapter.rs"), 250), (include_str!("lines.rs"), 60)] {
        assert!(code(text) <= most, "{} lines", code(text));
    }
}

#[test]
fn a_row_holds_the_first_token_and_the_cached_tokens() {
    let first = First { token: 151_645, cached_tokens: 16_320 };
    assert_eq!(First::of_row(first.to_row()), first);
    assert_eq!(First::of_row([0; 8]), First::default());
}
