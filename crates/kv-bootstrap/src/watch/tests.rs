//! The watcher over times made by hand: how often it dials, and what of a client it remembers.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::time::Duration;

use mio::{Events, Poll};

use super::*;

fn at(seconds: u64) -> Time {
    Time::from_nanos(seconds * 1_000_000_000)
}

/// A watcher, and what its sockets are registered with.
fn watcher(change: impl FnOnce(&mut WatchConfig)) -> (Watcher, Poll) {
    (Watcher::new(WatchConfig::default().with(change), 0), Poll::new().unwrap())
}

/// A port of this host that accepts connections.
fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let addr = listener.local_addr().unwrap();
    (listener, addr)
}

/// The order to watch port number `seq` for a client.
fn begin(seq: u64, addr: SocketAddr, client: u32) -> WatchOrder {
    WatchOrder::Begin { seq, addr, client: IpAddr::from(Ipv4Addr::from_bits(client)).into() }
}

fn verdicts(watcher: &mut Watcher) -> Vec<Verdict> {
    watcher.take_verdicts().into_iter().map(|(_, verdict)| verdict).collect()
}

/// Hands over events until one of them has led to a verdict.
fn until_verdict(watcher: &mut Watcher, poll: &mut Poll, now: Time) -> Vec<Verdict> {
    let mut events = Events::with_capacity(8);
    loop {
        poll.poll(&mut events, Some(Duration::from_secs(20))).unwrap();
        assert!(!events.is_empty(), "nothing has happened for long");
        for event in &events {
            watcher.ready(now, poll.registry(), event);
        }
        let verdicts = verdicts(watcher);
        if !verdicts.is_empty() {
            return verdicts;
        }
    }
}

/// Refusals that are far apart, of a host under load, would take a worker that lives off the list.
#[test]
fn only_refusals_in_a_row_prove_that_a_process_is_dead() {
    for between in [None, Some(Sign::Missed), Some(Sign::Greeted)] {
        let (mut watcher, poll) = watcher(|_| ());
        let last = if between.is_none() { Verdict::Dead } else { Verdict::Refused };
        watcher.take_order(at(100), poll.registry(), 0, begin(1, listener().1, 1));
        for sign in [Some(Sign::Refused), between, Some(Sign::Refused)].into_iter().flatten() {
            watcher.take_sign(at(100), poll.registry(), 0, sign);
        }
        assert_eq!(verdicts(&mut watcher).last(), Some(&last));
    }
}

/// An engine that is restarted often would be watched no longer, and keep its place after its death.
#[test]
fn a_port_that_is_watched_no_longer_makes_room_for_another() {
    let (mut watcher, poll) = watcher(|config| config.max_ports_per_client = 1);
    let (_listener, addr) = listener();
    for seq in 0..3 {
        watcher.take_order(at(100), poll.registry(), 0, begin(seq, addr, 1));
        watcher.take_order(at(100), poll.registry(), 0, begin(100, addr, 1));
        assert_eq!(watcher.len(), 1, "one port for each client");
        watcher.take_order(at(100), poll.registry(), 0, WatchOrder::End { seq });
        assert_eq!(watcher.len(), 0);
    }
}

/// Many clients together could have the server dial as often as they like.
#[test]
fn connections_of_all_clients_together_are_bounded_in_every_second() {
    let (mut watcher, poll) = watcher(|config| config.max_dials = 2);
    let (_listener, addr) = listener();
    for client in 0..3 {
        watcher.take_order(at(100), poll.registry(), 0, begin(u64::from(client), addr, client));
    }
    let dialed = |watcher: &Watcher| watcher.ports.iter().filter(|(_, port)| port.dialed.is_some()).count();
    watcher.expire(at(100), poll.registry());
    assert_eq!((dialed(&watcher), watcher.next_timeout()), (2, Some(at(101))));
    watcher.expire(at(101), poll.registry());
    assert_eq!(dialed(&watcher), 3);
}

/// Clients that come and go would fill the server's memory.
#[test]
fn clients_whose_ports_are_watched_no_longer_are_forgotten() {
    let (mut watcher, poll) = watcher(|_| ());
    let (_listener, addr) = listener();
    for client in 0..1000 {
        let (now, seq) = (at(100 + u64::from(client)), u64::from(client));
        watcher.take_order(now, poll.registry(), 0, begin(seq, addr, client));
        watcher.take_order(now, poll.registry(), 0, WatchOrder::End { seq });
    }
    assert!(watcher.clients.len() <= SWEEP, "{}", watcher.clients.len());
}

/// A port that greets and hangs up at once would be dialed as fast as it does so.
#[test]
fn a_port_that_hangs_up_is_dialed_again_after_the_interval() {
    for (ends, due) in [(at(100), at(101)), (at(102), at(102))] {
        let (mut watcher, mut poll) = watcher(|config| config.interval = Duration::from_secs(1));
        let (listener, addr) = listener();
        watcher.take_order(at(100), poll.registry(), 0, begin(1, addr, 1));
        watcher.expire(at(100), poll.registry());
        let (mut held, _) = listener.accept().unwrap();
        held.write_all(&[0xff]).unwrap();
        assert_eq!(until_verdict(&mut watcher, &mut poll, at(100)), [Verdict::Lives]);
        drop(held);
        assert_eq!(until_verdict(&mut watcher, &mut poll, ends), [Verdict::Unknown]);
        assert_eq!(watcher.next_timeout(), Some(due));
    }
}
