//! A worker over two transports meets workers that have one of the two, and workers that have both, on either
//! side. Peers are killed, and each death is reported once.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use std::time::Duration;

use kv_conformance::Random;
use kv_transfer::prelude::*;
use kv_transfer::{Cause, TransportError};
use support::host::Host;
use support::process::{Kind, Process};
use support::store::Store;
use support::{ended, failed, reclaimed, server, until};

/// Pages of a large request: 12 MiB.
const MANY: usize = 192;

/// The entry point of the other process. In the test's own process it does nothing.
#[test]
fn child() {
    support::process::child();
}

/// A host over two transports.
fn host(role: WorkerRole, addr: &str) -> Host {
    Kind::Several.setup(role, addr).start()
}

/// The notes on its transport since the last call.
fn log(host: &Host) -> Vec<String> {
    let Store::Several(_, log) = &host.memory.store else { panic!("a transport that nobody overhears") };
    std::mem::take(&mut *log.lock().unwrap())
}

/// The same once an end was reported, and some time after that, to see that the end is reported once.
fn log_of_end(host: &Host) -> Vec<String> {
    let mut told = Vec::new();
    until("the end of the peer", || {
        told.append(&mut log(host));
        told.iter().any(|line| line == "dead")
    });
    std::thread::sleep(Duration::from_millis(300));
    told.append(&mut log(host));
    // A connection may end a moment before its process does.
    told.retain(|line| line != "lost");
    told
}

fn receive(host: &mut Host, room: u64, pages: usize, content: u64) {
    let mut receiver = host.receiver(&host.addr, room, SessionOptions::default());
    receiver.init(host.room_for(pages), None).unwrap();
    assert_eq!(ended(&receiver), KvPoll::Success, "{:?}", receiver.failure());
    let pages = reclaimed(receiver);
    host.arrived(pages.list(), content, &"a request");
    host.free(pages);
}

fn send(host: &mut Host, room: u64, pages: usize, content: u64) {
    let mut sender = host.sender(room, SessionOptions::default());
    sender.init(pages, None).unwrap();
    let prompt = host.prompt(pages, content);
    sender.send(prompt).unwrap();
    assert_eq!(ended(&sender), KvPoll::Success, "{:?}", sender.failure());
    let pages = reclaimed(sender);
    host.free(pages);
}

/// Receives from two incarnations of a prefill process, the first of which is killed in the middle of a
/// transfer.
fn decodes_from(kind: Kind, way: &str) {
    let mut random = Random::new("decodes_from");
    let (_server, addr) = server();
    let mut host = host(WorkerRole::Decode, &addr);
    let mut prefill = Process::start_as(kind, WorkerRole::Prefill, &addr);
    prefill.tell("send 1 5 0 11");
    receive(&mut host, 1, 5, 11);
    assert_eq!(prefill.end_of(1), "Success");
    assert_eq!(log(&host), [format!("connect {way}")]);

    prefill.tell(&format!("send 2 {MANY} 1 12"));
    let mut cut = host.receiver(&addr, 2, SessionOptions::default());
    let room = host.room_for(MANY);
    let first = room.list().iter().next().unwrap();
    let before = host.memory.page(first);
    cut.init(room, None).unwrap();
    until("the first bytes", || host.memory.page(first) != before);
    std::thread::sleep(Duration::from_micros(random.below(3000) as u64));
    prefill.kill();
    assert_eq!(failed(&cut), Cause::PeerLost);
    let pages = reclaimed(cut);
    host.missed(pages.list(), 12, &"a request that was cut off");
    host.rewrite(pages.list());
    host.free(pages);
    assert_eq!(log_of_end(&host), ["dead"]);

    let mut prefill = Process::start_as(kind, WorkerRole::Prefill, &addr);
    prefill.tell(&format!("send 3 {MANY} 0 13"));
    receive(&mut host, 3, MANY, 13);
    assert_eq!(prefill.end_of(3), "Success");
    assert_eq!(log(&host), [format!("connect {way}")]);
    host.check_idle("after the restart");
    prefill.close();
    host.close("decode");
}

/// Sends to two incarnations of a decode process, the first of which is killed in the middle of a transfer.
fn prefills_for(kind: Kind, way: &str) {
    let (_server, addr) = server();
    let mut host = host(WorkerRole::Prefill, &addr);
    let mut decode = Process::start_as(kind, WorkerRole::Decode, &addr);
    decode.tell("receive 1 5 11");
    send(&mut host, 1, 5, 11);
    assert_eq!(decode.end_of(1), "Success");
    assert_eq!(log(&host), [format!("connect {way}")], "it answers by the way that the other has chosen");

    let posts = host.gauges().posts;
    decode.tell(&format!("receive 2 {MANY} 12"));
    let mut cut = host.sender(2, SessionOptions::default());
    cut.init(MANY, None).unwrap();
    let mut prompt = host.prompt(MANY, 12);
    let kept = prompt.split_off(MANY - 1);
    cut.send(prompt).unwrap();
    until("the first post", || host.gauges().posts > posts);
    decode.kill();
    let lost = [Cause::PeerLost, Cause::Post(TransportError::PeerGone)];
    assert!(lost.contains(&failed(&cut)), "{:?}", cut.failure());
    let pages = reclaimed(cut);
    assert_eq!(pages.len(), MANY - 1);
    host.free(pages);
    host.free(kept);
    assert_eq!(log_of_end(&host), ["dead"]);

    let mut decode = Process::start_as(kind, WorkerRole::Decode, &addr);
    decode.tell(&format!("receive 3 {MANY} 13"));
    send(&mut host, 3, MANY, 13);
    assert_eq!(decode.end_of(3), "Success");
    assert_eq!(log(&host), [format!("connect {way}")]);
    host.check_idle("after the restart");
    decode.close();
    host.close("prefill");
}

#[test]
fn a_decode_worker_over_two_transports_receives_from_a_single_transport_worker() {
    decodes_from(Kind::Usual, "local");
}

#[test]
fn a_prefill_worker_over_two_transports_serves_a_single_transport_worker() {
    prefills_for(Kind::Usual, "local");
}

#[test]
fn two_workers_over_two_transports_meet_by_the_preferred_transport() {
    decodes_from(Kind::Several, "near");
    prefills_for(Kind::Several, "near");
}
