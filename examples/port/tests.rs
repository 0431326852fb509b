//! What can be tested without processes; the rest is in `examples/tests/port.rs`.
#![allow(clippy::unwrap_used)]
use kv_examples::cli::TransportKind;
use kv_transfer::queue::AuxRow;
use kv_transfer::{AuxIndex, Room};

use super::cache::{KvCache, Shape};

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
fn a_row_is_read_for_the_room_that_it_was_written_for_and_for_no_other() {
    let cache = KvCache::new(Shape::SMALL, 4, 2, "port", TransportKind::Local).unwrap();
    let row =
        AuxRow { first_token: 151_645, prompt_tokens: 16_384, cached_tokens: 16_320, ..AuxRow::default() };
    let (one, other) = (Room::Number(1), Room::Number(2));
    cache.write_row(AuxIndex(3), &one, &row).unwrap();
    assert_eq!(cache.read_row(AuxIndex(3), &one).unwrap(), row);
    assert!(cache.read_row(AuxIndex(3), &other).is_err());
    assert!(cache.read_row(AuxIndex(2), &one).is_err(), "nobody has written this row");
}
