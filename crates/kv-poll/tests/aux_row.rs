//! Aux rows: their documented bytes, what refuses a row that is another's or damaged, and what refuses ranks whose rows
//! differ.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use kv_core::hash::Fnv1a;
use kv_core::{Geometry, KvArgs, Mismatch, Region, RegionRole, Room};
use kv_poll::queue::{AuxLayout, AuxRow, AuxRowError, Logprob, aux_tag};

const LAYOUT: AuxLayout = AuxLayout { logprobs: 3, top_logprobs: 2, hidden_bytes: 24 };

fn row() -> AuxRow {
    let logprob = |token, top: &[(u32, f32)]| Logprob { token, logprob: -0.5, top: top.to_vec() };
    AuxRow {
        first_token: 70_001,
        prompt_tokens: 512,
        cached_tokens: 128,
        logprobs: vec![logprob(70_001, &[(70_001, -0.5), (3, f32::NEG_INFINITY)]), logprob(9, &[])],
        hidden: vec![7; 20],
    }
}

fn encoded(row: &AuxRow, layout: AuxLayout, room: u64) -> Vec<u8> {
    let mut bytes = vec![0xee; layout.row_len() as usize];
    row.encode(&layout, &Room::from(room), &mut bytes).unwrap();
    bytes
}

#[test]
fn a_row_has_the_documented_bytes_and_nothing_of_what_was_there_before() {
    let bytes = encoded(&row(), LAYOUT, 7);
    // 40 + 3 × (12 + 2 × 8) is 124; the hidden states begin at 128, and end before 192.
    assert_eq!((LAYOUT.hidden_at(), bytes.len()), (128, 192));
    assert_eq!(bytes[..8], aux_tag(&Room::from(7)).to_le_bytes());
    assert_eq!(bytes[16..24], [1, 0, 3, 0, 2, 0, 2, 0]);
    assert_eq!(bytes[24..40], [70_001_u32, 512, 128, 20].map(u32::to_le_bytes).concat());
    let half = (-0.5_f32).to_le_bytes();
    let token = 70_001_u32.to_le_bytes();
    let infinity = f32::NEG_INFINITY.to_le_bytes();
    assert_eq!(bytes[40..68], [token, half, [2, 0, 0, 0], token, half, [3, 0, 0, 0], infinity].concat());
    assert_eq!(bytes[68..80], [[9, 0, 0, 0], half, [0; 4]].concat());
    assert_eq!(bytes[80..128], [0; 48]);
    assert_eq!((&bytes[128..148], &bytes[148..]), (&[7; 20][..], &[0; 44][..]));
    let checked = [&bytes[16..96], &bytes[128..148]].concat();
    assert_eq!(bytes[8..16], Fnv1a::of(&checked).to_le_bytes());
    assert_eq!(AuxRow::decode(&LAYOUT, &Room::from(7), &bytes), Ok(row()));
}

#[test]
fn rows_of_every_fill_come_back_as_they_were_and_are_whole_cache_lines() {
    for (logprobs, top_logprobs, hidden_bytes) in
        (0..4).flat_map(|a| (0..4).flat_map(move |b| [0, 1, 63, 64, 300].map(|c| (a, b, c))))
    {
        let layout = AuxLayout { logprobs, top_logprobs, hidden_bytes };
        assert_eq!((layout.row_len() % 64, layout.hidden_at() % 16), (0, 0), "{layout:?}");
        for records in 0..=logprobs {
            let top = |number: u16| (0..number.min(top_logprobs)).map(|top| (top.into(), 1.5)).collect();
            let record = |number: u16| Logprob { token: number.into(), logprob: -1.0, top: top(number) };
            let row = AuxRow {
                first_token: u32::MAX,
                prompt_tokens: 5,
                cached_tokens: 5,
                logprobs: (0..records).map(record).collect(),
                hidden: (0..hidden_bytes / 2).map(|byte| byte as u8).collect(),
            };
            let bytes = encoded(&row, layout, 1);
            assert_eq!(AuxRow::decode(&layout, &Room::from(1), &bytes), Ok(row), "{layout:?}");
            assert_eq!(layout.tag(&bytes), Ok(aux_tag(&Room::from(1))));
        }
    }
}

#[test]
fn a_row_of_another_request_an_earlier_request_or_nobody_is_never_taken() {
    let bytes = encoded(&row(), LAYOUT, 7);
    let expected = aux_tag(&Room::from(8));
    let refused = |bytes: &[u8]| AuxRow::decode(&LAYOUT, &Room::from(8), bytes);
    assert_eq!(refused(&bytes), Err(AuxRowError::Tag { expected, found: aux_tag(&Room::from(7)) }));
    assert_eq!(refused(&[0; 192]), Err(AuxRowError::Tag { expected, found: 0 }));
    assert_eq!(LAYOUT.tag(&[0; 192]), Err(AuxRowError::Version { ours: 1, theirs: 0 }));
}

#[test]
fn a_bit_that_has_changed_anywhere_in_the_content_is_noticed() {
    let (bytes, room) = (encoded(&row(), LAYOUT, 7), Room::from(7));
    let mut unnoticed = Vec::new();
    for bit in 0..bytes.len() * 8 {
        let mut other = bytes.clone();
        other[bit / 8] ^= 1 << (bit % 8);
        match AuxRow::decode(&LAYOUT, &room, &other) {
            Ok(read) => {
                assert_eq!(read, row(), "bit {bit}");
                unnoticed.push(bit / 8);
            }
            Err(_) => assert!(LAYOUT.tag(&other) != Ok(aux_tag(&room)), "bit {bit} passes the gate"),
        }
    }
    unnoticed.dedup();
    assert_eq!(unnoticed, (96..128).chain(148..192).collect::<Vec<_>>(), "only bytes without content");
}

#[test]
fn what_the_layout_has_no_room_for_is_refused_with_both_numbers_and_not_written() {
    let refused = |change: fn(&mut AuxRow)| {
        let (mut row, mut bytes) = (row(), [0xee; 192]);
        change(&mut row);
        let error = row.encode(&LAYOUT, &Room::from(7), &mut bytes).unwrap_err();
        assert_eq!(bytes, [0xee; 192]);
        error
    };
    let room = |field, got, room| AuxRowError::Room { field, got, room };
    assert_eq!(refused(|row| row.logprobs.resize(4, Logprob::default())), room("logprobs", 4, 3));
    assert_eq!(refused(|row| row.logprobs[1].top = vec![(1, 0.0); 3]), room("top_logprobs", 3, 2));
    assert_eq!(refused(|row| row.hidden.resize(25, 0)), room("hidden_bytes", 25, 24));
    let cached = AuxRowError::Cached { cached_tokens: 513, prompt_tokens: 512 };
    assert_eq!(refused(|row| row.cached_tokens = 513), cached);
    for len in [0, 191, 193] {
        let length = AuxRowError::Length { got: len, row_len: 192 };
        let mut bytes = vec![0; len as usize];
        assert_eq!(row().encode(&LAYOUT, &Room::from(7), &mut bytes), Err(length));
        assert_eq!(AuxRow::decode(&LAYOUT, &Room::from(7), &bytes), Err(length));
        assert_eq!(LAYOUT.tag(&bytes), Err(length));
    }
}

/// The bytes with another number of 16 bits at `at`, and the checksum that fits.
fn sealed(mut bytes: Vec<u8>, at: usize, number: u16) -> Vec<u8> {
    bytes[at..at + 2].copy_from_slice(&number.to_le_bytes());
    if let Err(AuxRowError::Checksum { computed, .. }) = LAYOUT.tag(&bytes) {
        bytes[8..16].copy_from_slice(&computed.to_le_bytes());
    }
    bytes
}

#[test]
fn rows_that_say_more_than_they_may_are_refused_though_their_checksum_fits() {
    let bytes = encoded(&row(), LAYOUT, 7);
    let refused =
        |at, number| AuxRow::decode(&LAYOUT, &Room::from(7), &sealed(bytes.clone(), at, number)).unwrap_err();
    let room = |field, got, room| AuxRowError::Room { field, got, room };
    assert_eq!(refused(16, 2), AuxRowError::Version { ours: 1, theirs: 2 });
    assert_eq!(refused(18, 4), AuxRowError::Layout { field: "logprobs", ours: 3, theirs: 4 });
    assert_eq!(refused(20, 1), AuxRowError::Layout { field: "top_logprobs", ours: 2, theirs: 1 });
    assert_eq!(refused(22, 4), room("logprobs", 4, 3));
    assert_eq!(refused(32, 513), AuxRowError::Cached { cached_tokens: 513, prompt_tokens: 512 });
    assert_eq!(refused(36, 25), room("hidden_bytes", 25, 24));
    assert_eq!(refused(48, 3), room("top_logprobs", 3, 2));
}

/// The cache of a rank with rows of this layout.
fn geometry(layout: AuxLayout) -> Geometry {
    let args = KvArgs::builder("engine", 0)
        .pages(8, 16)
        .region(Region::dram(RegionRole::Kv, 0x1_0000, 8 * 64, 64).layer(0))
        .region(Region::dram(RegionRole::Aux, 0x2_0000, 4 * layout.row_len(), layout.row_len()));
    args.build().unwrap().geometry().clone()
}

#[test]
fn ranks_whose_rows_differ_in_length_refuse_each_other_and_name_the_field() {
    let wider = AuxLayout { hidden_bytes: 128, ..LAYOUT };
    let mismatch = |ours: &str, theirs: &str| {
        let field = "regions[1].item_len".to_owned();
        Err(Mismatch { field, ours: ours.to_owned(), theirs: theirs.to_owned() })
    };
    assert_eq!(geometry(LAYOUT).check(&geometry(wider)), mismatch("192", "256"));
    assert_eq!(geometry(wider).check(&geometry(LAYOUT)), mismatch("256", "192"));
    assert_eq!(geometry(LAYOUT).check(&geometry(LAYOUT)), Ok(()));
}

#[test]
fn layouts_with_rows_of_one_length_are_told_apart_by_the_row() {
    let other = AuxLayout { logprobs: 2, top_logprobs: 3, hidden_bytes: 64 };
    assert_eq!((other.row_len(), geometry(LAYOUT).check(&geometry(other))), (192, Ok(())));
    let bytes = encoded(&AuxRow::default(), other, 7);
    let error = AuxRow::decode(&LAYOUT, &Room::from(7), &bytes).unwrap_err();
    assert_eq!(error, AuxRowError::Layout { field: "logprobs", ours: 3, theirs: 2 });
    let all = AuxLayout { logprobs: u16::MAX, top_logprobs: u16::MAX, hidden_bytes: u32::MAX };
    assert!(all.row_len() > 1 << 35, "no number of a layout overflows");
}
