//! What decode ranks, and whoever reaches the socket of a prefill rank, may not do: crowd out others, fill memory, or
//! have bytes written where a registration does not reach.

use super::sending::{DECODE, registration, request};
use super::*;
use crate::sglang::codec::{Registration, Request};

/// A prefill rank with these bounds.
fn bounded(change: impl FnOnce(&mut SglangLimits)) -> Rig {
    let mut rig = Rig::prefill();
    let config = SglangConfig::new(WorkerRole::Prefill).with(|config| {
        config.gauges = rig.gauges.clone();
        change(&mut config.limits);
    });
    rig.machine = SglangMachine::new(&args(tp(1, 0)), config, agent()).unwrap();
    rig
}

#[test]
fn a_full_table_forgets_the_agent_that_was_heard_least_recently() {
    let mut rig = bounded(|limits| limits.agents = 3);
    // "a" is registered first and asks last. SGLang's decode ranks register once: "a" could not come back.
    for (name, port) in [("a", 5001), ("b", 5002), ("c", 5003)] {
        rig.take(registration(name, port).encode());
    }
    rig.take(request("a", 5001, 9, &[20]).encode());
    rig.hear(&["ABORT", "9", DECODE.0, "5001", "77"]);
    assert_eq!(rig.words(), ["ABORT_ACK 9 0 77"]);
    rig.take(registration("d", 5004).encode());
    rig.take(request("a", 5001, 10, &[20]).encode());
    rig.take(request("c", 5003, 11, &[20]).encode());
    rig.take(request("d", 5004, 12, &[20]).encode());
    assert_eq!(rig.words(), Vec::<String>::new(), "these agents are still known");
    rig.take(request("b", 5002, 13, &[20]).encode());
    assert_eq!(rig.words(), ["KV_STATUS 13 0 0 the agent has not registered with this prefill rank"]);
    // All agents are asked for by a room or a sender: nobody makes room.
    rig.sender(1, 10);
    let unexpected = rig.gauges.of(Ignored::UnknownRequest);
    rig.take(registration("e", 5005).encode());
    assert_eq!(rig.gauges.of(Ignored::UnknownRequest), unexpected + 1);
    rig.abort(SessionId(1));
    rig.take(registration("e", 5005).encode());
    assert_eq!(
        rig.gauges.of(Ignored::UnknownRequest),
        unexpected + 1,
        "a sender that is over needs no agent"
    );
}

#[test]
fn requests_that_name_no_pages_are_bounded_as_well() {
    let mut rig = bounded(|limits| limits.unclaimed_rooms = 2);
    for n in 0..40 {
        let name = format!("d{n}");
        rig.take(registration(&name, 6000 + n).encode());
        let pageless = request(&name, 6000 + n, 9, &[]);
        rig.take(Request { required: 40, prefix_tokens: 16, ..pageless }.encode());
    }
    let words = rig.words();
    assert_eq!(words.len(), 8, "16 requests for each of two rooms: {words:?}");
    assert!(words.iter().all(|word| word.ends_with("too many requests wait for their prefill")));
    rig.wait(Duration::from_secs(300));
    rig.words();
    rig.take(request("d0", 6000, 10, &[20]).encode());
    assert_eq!(rig.words(), Vec::<String>::new(), "what was forgotten does not count");
}

#[test]
fn a_request_is_held_against_the_registration_that_counts_when_its_sender_comes() {
    let mut rig = Rig::prefill();
    rig.take(registration("d", DECODE.1).encode());
    rig.take(request("d", DECODE.1, 9, &[20, 31]).encode());
    rig.take(Registration { slots: 31, ..registration("d", DECODE.1) }.encode());
    let session = rig.sender(1, 9);
    rig.announce(session, 2, 1);
    rig.send(session, &[5, 6]);
    assert_eq!(rig.posts.len(), 0, "page 31 is none of the agent's: {:?}", rig.posts);
    assert_eq!(rig.cause(session), "page 31 is out of range: the cache has 31 pages");
    assert_eq!(rig.back(session), Some(2));
}

#[test]
fn a_decode_worker_that_dies_before_its_sender_comes_fails_the_sender_at_once() {
    let mut rig = Rig::prefill();
    rig.take(registration("d", DECODE.1).encode());
    rig.take(request("d", DECODE.1, 8, &[99]).encode());
    rig.take(request("d", DECODE.1, 9, &[20]).encode());
    let push = rig.ways.iter().find(|(_, way)| matches!(way, Way::Push { .. })).unwrap().0;
    rig.gone(push, WayEnd::Dead { quiet_after: Duration::from_secs(2) });
    let session = rig.sender(1, 9);
    assert_eq!(rig.cause(session), "the peer's process has ended or has closed its transport");
}

#[test]
fn an_address_that_would_raise_in_sglangs_threads_is_refused_at_the_start() {
    for host in ["", "m\u{e1}quina", "10.0.0.7 ", "a\nb"] {
        let agent = SglangAgent { pull: (host.to_owned(), PULL.1), ..agent() };
        let config = SglangConfig::new(WorkerRole::Prefill);
        let refused = SglangMachine::new(&args(tp(1, 0)), config, agent).map(|_| ()).unwrap_err();
        assert_eq!((refused.field.as_str(), refused.ours.as_str()), ("host", host));
    }
}

#[test]
fn a_decode_rank_that_has_room_for_more_pages_than_are_sent_is_refused() {
    let mut rig = Rig::prefill();
    rig.take(registration("d", DECODE.1).encode());
    rig.take(request("d", DECODE.1, 9, &[20, 21, 22]).encode());
    let session = rig.sender(1, 9);
    rig.announce(session, 2, 1);
    rig.send(session, &[5, 6]);
    assert_eq!(rig.cause(session), "2 pages are to be sent, but the receiver registered 3");
    assert_eq!((rig.posts.len(), rig.back(session)), (0, Some(2)));
}

#[test]
fn a_request_from_another_socket_than_the_agents_own_is_dropped() {
    let mut rig = Rig::prefill();
    rig.take(registration("d", DECODE.1).encode());
    rig.take(request("d", 5002, 9, &[20]).encode());
    let session = rig.sender(1, 9);
    assert_eq!((rig.states(session).as_str(), rig.gauges.of(Ignored::UnknownRequest)), ("", 1));
    assert_eq!((rig.words().len(), rig.ways.len()), (0, 0), "nobody is told anything");
}

#[test]
fn host_memory_of_a_decode_rank_is_named_by_device_zero_as_sglang_registers_it() {
    let mut rig = Rig::prefill();
    let kinds = vec![MemoryKind::Dram, MemoryKind::Vram];
    rig.take(Registration { device: 3, kinds, ..registration("d", DECODE.1) }.encode());
    rig.take(request("d", DECODE.1, 9, &[20]).encode());
    let devices: Vec<_> =
        rig.agent_way().1.iter().map(|region| (region.memory, region.device, region.len)).collect();
    assert_eq!(devices[..2], [(MemoryKind::Dram, 0, 32 * 64), (MemoryKind::Vram, 3, 32 * 64)]);
    assert!(devices[2..].iter().all(|(memory, device, _)| (*memory, *device) == (MemoryKind::Dram, 0)));
}

#[test]
fn a_stopping_worker_tells_the_decode_ranks_whose_sender_has_not_come() {
    let mut rig = Rig::prefill();
    rig.take(registration("d", DECODE.1).encode());
    rig.take(request("d", DECODE.1, 9, &[20]).encode());
    rig.input(Input::Command(Command::Shutdown));
    assert_eq!(rig.words(), ["KV_STATUS 9 0 0 the prefill worker is stopping"]);
    rig.take(request("d", DECODE.1, 10, &[20]).encode());
    assert_eq!(rig.words(), ["KV_STATUS 10 0 0 the prefill worker is stopping"]);
    assert_eq!(rig.machine.remembered().1, [0; 4]);
}

#[test]
fn a_worker_that_drains_serves_open_rooms_and_refuses_decode_ranks_whose_sender_will_not_come() {
    let mut rig = Rig::prefill();
    rig.take(registration("d", DECODE.1).encode());
    rig.take(request("d", DECODE.1, 9, &[20]).encode());
    let open = rig.sender(1, 10);
    rig.input(Input::Command(Command::Drain));
    assert_eq!(rig.words(), ["KV_STATUS 9 0 0 the prefill worker drains"]);
    assert!(rig.machine.awaits_peers(), "the decode rank of room 10 has not come");
    rig.take(request("d", DECODE.1, 10, &[20]).encode());
    assert_eq!((rig.states(open).as_str(), rig.words()), ("WaitingForInput", vec![]));
    assert!(!rig.machine.awaits_peers());
    rig.take(request("d", DECODE.1, 11, &[21]).encode());
    assert_eq!(rig.words(), ["KV_STATUS 11 0 0 the prefill worker drains"]);
    let late = rig.sender(2, 12);
    assert_eq!(rig.cause(late), "the local worker drains, and takes no new requests");
}
