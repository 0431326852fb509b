//! The bytes of every message, as SGLang 0.5.23's own classes write them.

use super::*;
use kv_core::MemoryKind;

fn frames(parts: &[&[u8]]) -> Vec<Bytes> {
    parts.iter().map(|part| Bytes::copy_from_slice(part)).collect()
}

fn registration() -> Registration {
    Registration {
        ip: "10.0.0.7".to_owned(),
        port: 4321,
        agent: "agent-1".to_owned(),
        metadata: Bytes::from_static(b"nixlSerDes|blob"),
        kv_ptrs: vec![0x10000, 0x20000],
        kinds: vec![MemoryKind::Dram; 2],
        item_lens: vec![64; 2],
        layer_ids: vec![],
        aux_ptrs: vec![0x30000, 0x31000],
        has_state: false,
        device: 0,
        tp_size: 2,
        tp_rank: 1,
        slots: 100,
        dcp_size: 1,
        dcp_rank: 0,
    }
}

fn registration_frames() -> Vec<Bytes> {
    let (kv, aux) = (b"\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0", b"\0\0\x03\0\0\0\0\0\0\x10\x03\0\0\0\0\0");
    let lens = b"\x40\0\0\0\0\0\0\0\x40\0\0\0\0\0\0\0";
    frames(&[
        b"NixlMsgGuard",
        b"None",
        b"10.0.0.7",
        b"4321",
        b"agent-1",
        b"nixlSerDes|blob",
        kv,
        aux,
        b"",
        b"0",
        b"2",
        b"1",
        b"64",
        b"",
        b"",
        b"",
        b"",
        b"100",
        b"DRAM,DRAM",
        lens,
        b"",
        b"",
        b"1",
        b"0",
        b"",
    ])
}

fn request() -> (Request, Vec<Bytes>) {
    let request = Request {
        room: 9,
        ip: "10.0.0.7".to_owned(),
        port: 4321,
        agent: "agent-1".to_owned(),
        pages: vec![3, 4, 7],
        aux: 5,
        required: 2,
        has_state: false,
        prefix_tokens: 32,
        dummy: false,
    };
    let pages = b"\x03\0\0\0\x04\0\0\0\x07\0\0\0";
    let start: [&[u8]; 5] = [b"NixlMsgGuard", b"9", b"10.0.0.7", b"4321", b"agent-1"];
    let rest: [&[u8]; 6] = [pages, b"5", b"2", b"", b"32", b"0"];
    (request, frames(&[&start[..], &rest[..]].concat()))
}

#[test]
fn every_message_has_the_bytes_that_sglang_writes_and_reads() {
    let (request, request_frames) = request();
    let dummy = Request { dummy: true, pages: vec![], required: 1, prefix_tokens: 0, ..request.clone() };
    let mut dummy_frames = request_frames.clone();
    for (at, bytes) in [(5, &b""[..]), (7, b"1"), (9, b"0"), (10, b"1")] {
        dummy_frames[at] = Bytes::copy_from_slice(bytes);
    }
    let reply_to = Some(("10.0.0.7".to_owned(), 4321));
    let abort = Abort { room: 9, reply_to: reply_to.clone(), generation: Some(17) };
    let unarmed = Abort { room: 9, reply_to, generation: None };
    let ack = AbortAck { room: 9, rank: 3, generation: Some(17) };
    let success = KvStatus { room: 9, status: SUCCESS, rank: 3, reason: String::new() };
    let failed = KvStatus { room: 9, status: FAILED, rank: 3, reason: "no".to_owned() };
    let all = [
        (
            SglangMessage::Registration(Box::new(registration())),
            registration().encode(),
            registration_frames(),
        ),
        (SglangMessage::Request(request.clone()), request.encode(), request_frames),
        (SglangMessage::Request(dummy.clone()), dummy.encode(), dummy_frames),
        (
            SglangMessage::Abort(abort.clone()),
            abort.encode(),
            frames(&[b"ABORT", b"9", b"10.0.0.7", b"4321", b"17"]),
        ),
        (
            SglangMessage::Abort(unarmed.clone()),
            unarmed.encode(),
            frames(&[b"ABORT", b"9", b"10.0.0.7", b"4321"]),
        ),
        (SglangMessage::AbortAck(ack.clone()), ack.encode(), frames(&[b"ABORT_ACK", b"9", b"3", b"17"])),
        (
            SglangMessage::Status(success.clone()),
            success.encode(),
            frames(&[b"KV_STATUS", b"9", b"4", b"3", b""]),
        ),
        (
            SglangMessage::Status(failed.clone()),
            failed.encode(),
            frames(&[b"KV_STATUS", b"9", b"0", b"3", b"no"]),
        ),
    ];
    for (message, written, expected) in all {
        assert_eq!(written, expected);
        assert_eq!(SglangMessage::decode(&expected), Ok(message));
    }
}

#[test]
fn messages_of_newer_versions_are_read_up_to_the_known_fields() {
    let mut longer = registration_frames();
    longer.push(Bytes::from_static(b"new"));
    assert_eq!(SglangMessage::decode(&longer), Ok(SglangMessage::Registration(Box::new(registration()))));
    let older = &registration_frames()[..20];
    assert_eq!(SglangMessage::decode(older), Ok(SglangMessage::Registration(Box::new(registration()))));
}

#[test]
fn each_field_that_is_out_of_form_is_named_in_the_error() {
    let broken = |mut frames: Vec<Bytes>, at: usize, bytes: &'static [u8]| {
        frames[at] = Bytes::from_static(bytes);
        SglangMessage::decode(&frames).unwrap_err().to_string()
    };
    let of_registration = |at, bytes| broken(registration_frames(), at, bytes);
    assert_eq!(of_registration(3, b"70000"), "decode port is \"70000\"; it must be a number from 0 to 65535");
    assert_eq!(of_registration(3, b"+1"), "decode port is \"+1\"; it must be a number from 0 to 65535");
    assert_eq!(of_registration(4, b""), "agent_name is not a text of 1 to 128 printable characters");
    assert_eq!(of_registration(4, b"a\nb"), "agent_name is not a text of 1 to 128 printable characters");
    assert_eq!(
        of_registration(6, b"123"),
        "kv_data_ptrs has 3 bytes, which are no whole number of entries of 8 bytes"
    );
    assert_eq!(of_registration(18, b"DRAM"), "kv_data_mem_kinds has 1 entries, but there are 2 regions");
    assert_eq!(
        of_registration(18, b"DRAM,DRAM,DRAM"),
        "kv_data_mem_kinds has 3 entries, but there are 2 regions"
    );
    assert_eq!(
        of_registration(18, b"DRAM,disk"),
        "kv_data_mem_kinds names \"disk\", which is neither DRAM nor VRAM"
    );
    assert_eq!(of_registration(19, b"12345678"), "kv_item_lens has 1 entries, but there are 2 regions");
    assert_eq!(of_registration(21, b"1234"), "kv_layer_ids has 1 entries, but there are 2 regions");
    let of_request = |at, bytes| broken(request().1, at, bytes);
    assert_eq!(
        of_request(5, b"\xff\xff\xff\xff"),
        "dst_kv_indices is \"-1\"; it must be a number from 0 to 2147483647"
    );
    assert_eq!(of_request(6, b"None"), "dst_aux_index is \"None\"; it must be a number from 0 to 2147483647");
    assert_eq!(
        of_request(1, b"-9"),
        format!("bootstrap_room is \"-9\"; it must be a number from 0 to {}", u64::MAX)
    );
    let short = SglangMessage::decode(&frames(&[b"KV_STATUS", b"9"])).unwrap_err().to_string();
    assert_eq!(short, "KV_STATUS has 2 frames; 4 or more are needed");
    for unknown in [frames(&[]), frames(&[b""]), frames(&[b"WATERMARK", b"1"])] {
        assert!(matches!(SglangMessage::decode(&unknown), Err(Malformed::Name { .. })));
    }
}

#[test]
fn a_reason_is_kept_as_one_short_line() {
    let long = [b"a\n\xff".as_slice(), &[b'x'; 4000]].concat();
    let message = frames(&[b"KV_STATUS", b"9", b"0", b"3", &long]);
    let Ok(SglangMessage::Status(status)) = SglangMessage::decode(&message) else { panic!() };
    assert!(status.reason.starts_with("a \u{fffd}x"));
    assert_eq!(status.reason.chars().count(), 512);
}
