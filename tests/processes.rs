//! Processes that are killed, stopped and restarted: no request of a dead process succeeds, its successor
//! serves, and the survivor loses no page.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use std::time::Duration;

use kv_conformance::Random;
use kv_transfer::prelude::*;
use kv_transfer::{Cause, Sender, TransportError};
use rustix::process::Signal;
use support::host::Host;
use support::process::{Process, setup};
use support::{ended, failed, reclaimed, server, until};

/// Pages of a large request: 12 MiB.
const MANY: usize = 192;

/// The entry point of the other process. In the test's own process it does nothing.
#[test]
fn child() {
    support::process::child();
}

/// A receiver with its pages, which expects this content.
fn receiver(host: &mut Host, room: u64, pages: usize) -> kv_transfer::Receiver {
    let mut receiver = host.receiver(&host.addr, room, SessionOptions::default());
    receiver.init(host.room_for(pages), None).unwrap();
    receiver
}

/// A sender that has given all pages but the last `held`, and those pages.
fn sender(host: &mut Host, room: u64, pages: usize, held: usize, content: u64) -> (Sender, Pages) {
    let mut sender = host.sender(room, SessionOptions::default());
    sender.init(pages, None).unwrap();
    let mut all = host.prompt(pages, content);
    let rest = all.split_off(pages - held);
    sender.send(all).unwrap();
    (sender, rest)
}

fn receive(host: &mut Host, receiver: kv_transfer::Receiver, content: u64) {
    assert_eq!(ended(&receiver), KvPoll::Success, "{:?}", receiver.failure());
    let pages = reclaimed(receiver);
    host.arrived(pages.list(), content, &"a request");
    host.free(pages);
}

/// Takes back the pages of a failed receiver and writes on them, to see that they stay as they are.
fn recover(host: &mut Host, receiver: kv_transfer::Receiver, content: u64) -> usize {
    assert_eq!(receiver.poll(), KvPoll::Failed);
    let pages = reclaimed(receiver);
    host.missed(pages.list(), content, &"a failed request");
    for page in pages.list().iter() {
        let mine = vec![page as u8; host.memory.shape.page_len()];
        host.memory.write_page(page, &mine);
    }
    let count = pages.len();
    host.free(pages);
    count
}

/// Waits until bytes of a large request have come.
fn first_bytes(host: &Host, session: &kv_transfer::Receiver, before: &[Vec<u8>]) {
    until("the first bytes", || {
        assert!(!session.poll().is_terminal(), "{:?}", session.failure());
        (0..).zip(before).any(|(page, before)| host.memory.page(page) != *before)
    });
}

fn all_pages(host: &Host) -> Vec<Vec<u8>> {
    (0..host.memory.shape.pages).map(|page| host.memory.page(page)).collect()
}

#[test]
fn a_killed_prefill_process_fails_its_receivers_and_its_successor_serves_the_same_rooms() {
    let mut random = Random::new("a_killed_prefill_process");
    let (_server, addr) = server();
    let mut host = setup(WorkerRole::Decode, &addr).start();
    let mut prefill = Process::start(WorkerRole::Prefill, &addr);
    for life in 0..3 {
        let rooms = life * 100..;
        let [warm, large, alone, unready, late]: [u64; 5] =
            rooms.take(5).collect::<Vec<_>>().try_into().unwrap();
        prefill.tell(&format!("send {warm} 5 0 {}", warm + 1));
        let first = receiver(&mut host, warm, 5);
        receive(&mut host, first, warm + 1);
        assert_eq!(prefill.end_of(warm), "Success");

        // One in the middle of its bytes, one without a sender, one without pages.
        let before = all_pages(&host);
        prefill.tell(&format!("send {large} {MANY} 1 {}", large + 1));
        let receivers = [receiver(&mut host, large, MANY), receiver(&mut host, alone, 3)];
        let unready = host.receiver(&addr, unready, SessionOptions::default());
        until("handshake", || unready.poll() == KvPoll::WaitingForInput);
        first_bytes(&host, &receivers[0], &before);
        std::thread::sleep(Duration::from_micros(random.below(4000) as u64));
        let old = prefill.incarnation.clone();
        prefill.kill();
        for session in &receivers {
            assert_eq!(failed(session), Cause::PeerLost, "life {life}, room {}", session.room());
        }
        assert_eq!(failed(&unready), Cause::PeerLost);
        let lost: usize = receivers.map(|session| recover(&mut host, session, large + 1)).iter().sum();
        assert_eq!(lost, MANY + 3);
        drop(reclaimed(unready));
        host.check_idle("after the kill");

        // The bootstrap server still names the dead one: whoever believes it is not left to wait.
        let misled = receiver(&mut host, late, 4);
        assert_eq!(failed(&misled), Cause::PeerLost);
        recover(&mut host, misled, 0);

        prefill = Process::start(WorkerRole::Prefill, &addr);
        assert_ne!(prefill.incarnation, old);
        for (room, pages) in [(large, MANY), (alone, 3), (late, 4)] {
            let content = random.bits();
            prefill.tell(&format!("send {room} {pages} 0 {content}"));
            let session = receiver(&mut host, room, pages);
            receive(&mut host, session, content);
            assert_eq!(prefill.end_of(room), "Success");
        }
        host.check_idle("after the restart");
    }
    prefill.close();
    host.close("decode");
}

#[test]
fn a_killed_decode_process_fails_its_senders_and_leaves_others_waiting_for_its_successor() {
    let mut random = Random::new("a_killed_decode_process");
    let (_server, addr) = server();
    let mut host = setup(WorkerRole::Prefill, &addr).start();
    let mut decode = Process::start(WorkerRole::Decode, &addr);
    for life in 0..3 {
        let [warm, large, ready, waiting]: [u64; 4] =
            (life * 100..).take(4).collect::<Vec<_>>().try_into().unwrap();
        decode.tell(&format!("receive {warm} 5 {warm}"));
        let (session, _) = sender(&mut host, warm, 5, 0, warm);
        assert_eq!(ended(&session), KvPoll::Success, "{:?}", session.failure());
        host.free(reclaimed(session));
        assert_eq!(decode.end_of(warm), "Success");

        // One in the middle of its bytes, one registered, one whose receiver is yet to come.
        let posts = host.gauges().posts;
        decode.tell(&format!("receive {large} {MANY} {large}"));
        decode.tell(&format!("receive {ready} 2 {ready}"));
        let mut registered = host.sender(ready, SessionOptions::default());
        registered.init(2, None).unwrap();
        let (mut unmet, rest) = sender(&mut host, waiting, 6, 3, waiting);
        until("registration", || registered.poll() == KvPoll::WaitingForInput);
        let (session, kept) = sender(&mut host, large, MANY, 1, large);
        until("the first post", || host.gauges().posts > posts);
        std::thread::sleep(Duration::from_micros(random.below(4000) as u64));
        let old = decode.incarnation.clone();
        decode.kill();
        // A write may notice that nobody is there before the connection does.
        let lost = [Cause::PeerLost, Cause::Post(TransportError::PeerGone)];
        assert!(lost.contains(&failed(&session)), "{:?}", session.failure());
        assert_eq!(failed(&registered), Cause::PeerLost);
        let back = reclaimed(session);
        assert_eq!(back.len(), MANY - 1);
        host.free(back);
        host.free(kept);
        assert!(reclaimed(registered).is_empty());
        assert_eq!(unmet.poll(), KvPoll::Bootstrapping);

        decode = Process::start(WorkerRole::Decode, &addr);
        assert_ne!(decode.incarnation, old);
        decode.tell(&format!("receive {waiting} 6 {waiting}"));
        unmet.send(rest).unwrap();
        assert_eq!(ended(&unmet), KvPoll::Success, "{:?}", unmet.failure());
        host.free(reclaimed(unmet));
        assert_eq!(decode.end_of(waiting), "Success");
        let (session, _) = sender(&mut host, large, MANY, 0, large + 7);
        decode.tell(&format!("receive {large} {MANY} {}", large + 7));
        assert_eq!(ended(&session), KvPoll::Success, "{:?}", session.failure());
        host.free(reclaimed(session));
        assert_eq!(decode.end_of(large), "Success");
        host.check_idle("after the restart");
    }
    decode.close();
    host.close("prefill");
}

/// Silence is no proof: a stopped process may go on writing when it is resumed.
#[test]
fn pages_of_a_stopped_prefill_process_come_back_when_it_cannot_write_any_more() {
    let (_server, addr) = server();
    let mut host = setup(WorkerRole::Decode, &addr).start();
    let mut prefill = Process::start(WorkerRole::Prefill, &addr);
    let before = all_pages(&host);
    prefill.tell(&format!("send 1 {MANY} 1 10"));
    let session = receiver(&mut host, 1, MANY);
    first_bytes(&host, &session, &before);
    prefill.signal(Signal::STOP);
    assert!(matches!(failed(&session), Cause::PeerUnresponsive { .. }), "{:?}", session.failure());
    // Neither are newcomers left to their deadlines.
    let newcomer = receiver(&mut host, 2, 2);
    assert!(matches!(failed(&newcomer), Cause::PeerUnresponsive { .. }), "{:?}", newcomer.failure());
    recover(&mut host, newcomer, 0);
    std::thread::sleep(Duration::from_millis(800));
    // Stopped within a slice of a copy, it goes on with that when it continues; stopped between two, it has
    // lost its right to write by now.
    assert!([0, MANY].contains(&host.gauges().pages_quarantined()), "{:?}", host.gauges());
    prefill.signal(Signal::CONT);
    assert_eq!(recover(&mut host, session, 10), MANY);
    let end = prefill.end_of(1);
    // Its next slice may find out before it reads what its peer has said.
    assert!(
        ["OtherRankLost", "PeerUnresponsive", "Revoked"].iter().any(|cause| end.contains(cause)),
        "{end}"
    );
    host.check_idle("after the stop");
    // It is the same process, and serves again.
    prefill.tell(&format!("send 3 {MANY} 0 11"));
    let session = receiver(&mut host, 3, MANY);
    receive(&mut host, session, 11);
    assert_eq!(prefill.end_of(3), "Success");
    prefill.close();
    host.close("decode");
}

#[test]
fn a_stopped_decode_process_costs_its_sender_nothing_and_learns_of_the_end() {
    let (_server, addr) = server();
    let mut host = setup(WorkerRole::Prefill, &addr).start();
    let mut decode = Process::start(WorkerRole::Decode, &addr);
    decode.tell(&format!("receive 1 {MANY} 10"));
    let (session, kept) = sender(&mut host, 1, MANY, 1, 10);
    until("transfer", || session.poll() == KvPoll::Transferring);
    decode.signal(Signal::STOP);
    assert!(matches!(failed(&session), Cause::PeerUnresponsive { .. }), "{:?}", session.failure());
    // A sender knows when its writes are over: no word of the other side is needed.
    let back = reclaimed(session);
    assert_eq!(back.len(), MANY - 1);
    host.free(back);
    host.free(kept);
    host.check_idle("while it is stopped");

    decode.signal(Signal::CONT);
    let end = decode.end_of(1);
    assert!(end.contains("OtherRankLost") || end.contains("PeerUnresponsive"), "{end}");
    decode.tell(&format!("receive 2 {MANY} 11"));
    let (session, _) = sender(&mut host, 2, MANY, 0, 11);
    assert_eq!(ended(&session), KvPoll::Success, "{:?}", session.failure());
    host.free(reclaimed(session));
    assert_eq!(decode.end_of(2), "Success");
    decode.close();
    host.close("prefill");
}
