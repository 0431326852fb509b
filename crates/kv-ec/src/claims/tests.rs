//! What becomes of claims when room goes and comes back.

use kv_core::ContentHash;

use super::{Claim, Claims};
use crate::machine::EcError;
use crate::request::FillError;
use crate::room::{Entries, Key, Room};

fn key(name: &str) -> Key {
    (ContentHash::new(name).unwrap(), 1)
}

fn room(usable: u32, away: u32) -> Room {
    Room { usable, away, stuck: Entries::new() }
}

/// Claims of 8 blocks each in a region of 16, each with two entries of its own.
fn claim(claims: &Claims, name: &str) -> Claim {
    let entries = ["first", "second"].map(|entry| (key(&format!("{name}-{entry}")), 4));
    claims.claim(entries.into(), room(16, 0))
}

fn is_in_turn(claims: [&Claim; 3]) -> [bool; 3] {
    claims.map(|claim| claim.waits().is_none())
}

#[test]
fn those_who_have_no_entry_wait_again_when_room_goes_and_keep_their_place() {
    let claims = Claims::default();
    let [one, two, three] = ["one", "two", "three"].map(|name| claim(&claims, name));
    assert_eq!(is_in_turn([&one, &two, &three]), [true, true, false]);
    for gone in [room(15, 0), room(16, 1), room(8, 8)] {
        claims.look(gone);
        assert_eq!(is_in_turn([&one, &two, &three]), [true, false, false]);
        assert!(!two.hold([key("two-first")]));
        assert_eq!(claims.look(room(16, 0)), [two.number()].into());
        assert_eq!(is_in_turn([&one, &two, &three]), [true, true, false]);
    }
    claims.look(room(15, 0));
    drop(one);
    assert_eq!(claims.look(room(15, 0)), [two.number()].into());
    assert_eq!(is_in_turn([&two, &two, &three]), [true, true, false]);
}

#[test]
fn those_who_have_a_part_take_no_more_until_room_comes_back_or_end_if_it_is_lost() {
    let claims = Claims::default();
    let [one, two, three] = ["one", "two", "three"].map(|name| claim(&claims, name));
    assert!(one.hold([key("one-first")]) && two.hold([key("two-first")]));
    claims.look(room(16, 5));
    assert_eq!(two.waits(), Some(EcError::NotInTurn { blocks: 8, claimed: 16, region: 16 }));
    assert!(!two.hold([key("two-second")]));
    assert_eq!(claims.look(room(16, 0)), [two.number()].into());
    assert_eq!(is_in_turn([&one, &two, &three]), [true, true, false]);
    // One that has all of its entries waits for nobody, and nobody ends for its sake.
    assert!(one.hold([key("one-second")]));
    assert!(claims.look(room(11, 0)).is_empty());
    assert_eq!(is_in_turn([&one, &two, &three]), [true, true, false]);
    drop((one, three));
    let [four, five] = ["four", "five"].map(|name| claim(&claims, name));
    claims.look(room(16, 0));
    assert!(four.hold([key("four-first")]));
    assert_eq!(claims.look(room(11, 0)), [four.number()].into());
    assert_eq!(four.waits(), Some(EcError::RoomLost { blocks: 8, region: 11 }));
    assert_eq!(is_in_turn([&two, &four, &five]), [true, false, false]);
    assert_eq!(claims.look(room(7, 0)), [two.number(), five.number()].into());
    let never = Some(EcError::TooLargeTogether { blocks: 8, region: 7 });
    assert_eq!((two.waits(), five.waits()), (never.clone(), never));
}

#[test]
fn one_who_was_held_back_takes_what_was_encoded_here_once_nothing_is_to_come() {
    let claims = Claims::default();
    let [one, two] = ["one", "two"].map(|name| claim(&claims, name));
    assert!(one.hold([key("one-first")]) && two.hold([key("two-first")]));
    claims.look(room(16, 9));
    let why = EcError::NotInTurn { blocks: 8, claimed: 16, region: 16 };
    assert_eq!(two.fill(&key("two-second")), Err(FillError::NotInTurn(Box::new(why))));
    two.give_up(&key("two-second"));
    assert_eq!(two.fill(&key("two-second")), Ok(()));
}
