//! Workers on two hosts, as far as one machine can show it: a decode worker in one network namespace and a prefill
//! process in another, joined by a link that is slow, drops packets, or is cut. Each test runs in namespaces of its
//! own, and is skipped with the reason where those are not permitted.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use kv_conformance::Random;
#[cfg(any(feature = "ucx", feature = "fabric"))]
use kv_conformance::needed;
use kv_transfer::params::TransferParams;
use kv_transfer::prelude::*;
use support::host::Host;
#[cfg(feature = "ucx")]
use support::netns::has_own_sys;
use support::netns::{Beyond, enter, far, near};
use support::process::{Kind, Process, reader};
use support::store::{Members, Place, Store};
use support::{PATIENCE, ended, reclaimed, until};

/// Pages of a request: 3 MiB.
const PAGES: usize = 48;
/// Pages of a long request: 12 MiB.
const MANY: usize = 192;

/// The content of requests over a link that is cut.
#[cfg(any(feature = "nixl", feature = "ucx", feature = "fabric"))]
const CUT_OFF: u64 = 99;

/// The entry point of the other process. In the test's own process it does nothing.
#[test]
fn child() {
    support::process::child();
}

/// A decode worker in this namespace, and a prefill process in the one beyond.
struct Hosts {
    beyond: Beyond,
    _server: KvBootstrapServer,
    decode: Host,
    prefill: Process,
    rooms: u64,
}

impl Hosts {
    fn over(members: Members) -> Hosts {
        let place = |bind| Place::at(bind, members);
        Hosts::at(place(near(false)), place(far(false)))
    }

    fn at(here: Place, there: Place) -> Hosts {
        let beyond = if there.members.has_two_links() { Beyond::joined_twice() } else { Beyond::joined() };
        let server = KvBootstrapServer::start(&near(false).to_string()).unwrap();
        let addr = server.local_addr().to_string();
        let by = beyond.by();
        let by: Vec<&str> = by.iter().map(String::as_str).collect();
        let mut prefill = Process::start_by(&by, Kind::Placed(there), WorkerRole::Prefill, &addr);
        prefill.tell("deadline 60000");
        let decode = Kind::Placed(here).setup(WorkerRole::Decode, &addr).start();
        Hosts { beyond, _server: server, decode, prefill, rooms: 0 }
    }

    /// Pages that the prefill worker writes.
    fn push(&mut self, pages: usize) {
        self.rooms += 1;
        let (room, content, addr) = (self.rooms, 3 * self.rooms, self.decode.addr.clone());
        self.prefill.tell(&format!("send {room} {pages} 0 {content}"));
        let mut receiver = self.decode.receiver(&addr, room, SessionOptions::default());
        receiver.init(self.decode.room_for(pages), None).unwrap();
        self.arrives(receiver, room, content);
    }

    /// Pages that the decode worker reads.
    fn pull(&mut self, pages: usize) {
        self.rooms += 1;
        let (room, content) = (self.rooms, 3 * self.rooms);
        self.prefill.tell(&format!("keep {room} {pages} {content} 30000"));
        let params = self.prefill.expect("kept").join(" ");
        let (_, mut receiver) = reader(&self.decode, &TransferParams::parse(&params).unwrap());
        receiver.init(self.decode.room_for(pages), None).unwrap();
        self.arrives(receiver, room, content);
    }

    fn arrives(&mut self, receiver: kv_transfer::Receiver, room: u64, content: u64) {
        assert_eq!(ended(&receiver), KvPoll::Success, "{:?}", receiver.failure());
        let pages = reclaimed(receiver);
        self.decode.arrived(pages.list(), content, &format!("room {room}"));
        self.decode.free(pages);
        assert_eq!(self.prefill.end_of(room), "Success");
    }

    /// By which transports the prefill worker was reached.
    fn opened(&self) -> Vec<String> {
        let Store::Placed(_, _, log) = &self.decode.memory.store else { panic!("another transport") };
        let lines = log.lock().unwrap();
        lines.iter().filter(|line| line.starts_with("connect ")).cloned().collect()
    }

    fn close(self) {
        self.decode.check_idle("at the end");
        self.prefill.close();
        self.decode.close("decode");
        drop(self.beyond);
    }
}

#[test]
fn pages_cross_a_link_in_both_modes_and_over_both_families_of_addresses() {
    if !enter("pages_cross_a_link_in_both_modes_and_over_both_families_of_addresses") {
        return;
    }
    for v6 in [false, true] {
        let place = |bind| Place::at(bind, Members::Tcp);
        let mut hosts = Hosts::at(place(near(v6)), place(far(v6)));
        hosts.push(MANY);
        hosts.pull(MANY);
        hosts.close();
    }
}

#[test]
fn workers_that_listen_everywhere_are_reached_by_the_addresses_that_they_advertise() {
    if !enter("workers_that_listen_everywhere_are_reached_by_the_addresses_that_they_advertise") {
        return;
    }
    for (everywhere, v6) in [("0.0.0.0:0", false), ("[::]:0", true)] {
        let bind: SocketAddr = everywhere.parse().unwrap();
        let place = |advertised| Place { bind, advertised, members: Members::Tcp };
        let mut hosts = Hosts::at(place(near(v6)), place(far(v6)));
        hosts.push(PAGES);
        hosts.pull(PAGES);
        hosts.close();
    }
}

#[test]
fn a_peer_in_another_network_namespace_is_reached_by_tcp_where_local_is_preferred() {
    if !enter("a_peer_in_another_network_namespace_is_reached_by_tcp_where_local_is_preferred") {
        return;
    }
    let mut hosts = Hosts::over(Members::LocalTcp);
    hosts.push(PAGES);
    hosts.pull(PAGES);
    assert_eq!(
        hosts.opened(),
        ["connect local", "connect tcp"],
        "one attempt that is refused, and no later one"
    );
    hosts.close();
}

#[test]
fn a_narrow_link_that_drops_packets_delivers_every_byte() {
    if !enter("a_narrow_link_that_drops_packets_delivers_every_byte") {
        return;
    }
    let mut hosts = Hosts::over(Members::Tcp);
    if let Err(why) = hosts.beyond.shape("tbf rate 200mbit burst 16kb limit 24kb") {
        println!("SKIPPED: this kernel cannot limit a link: {why}");
        return hosts.close();
    }
    for _ in 0..2 {
        hosts.push(PAGES);
        hosts.pull(PAGES);
    }
    let dropped = hosts.beyond.dropped();
    println!("{dropped} packets were dropped");
    assert!(dropped > 0, "the link is too wide for this test");
    hosts.close();
}

#[test]
fn delayed_and_lost_packets_delay_requests_and_damage_none() {
    if !enter("delayed_and_lost_packets_delay_requests_and_damage_none") {
        return;
    }
    let mut hosts = Hosts::over(Members::Tcp);
    if let Err(why) = hosts.beyond.shape("netem delay 10ms 3ms loss 1% reorder 5%") {
        println!("SKIPPED: this kernel cannot delay and lose packets (sch_netem): {why}");
        return hosts.close();
    }
    for _ in 0..3 {
        hosts.push(PAGES);
        hosts.pull(PAGES);
    }
    hosts.close();
}

/// A partition, in the middle of a long request that takes seconds: both sides fail by their deadlines, all pages
/// come back while the link is still cut, and the next request after the partition is served.
#[test]
fn a_partition_ends_requests_by_their_deadlines_and_the_next_one_after_it_is_served() {
    if !enter("a_partition_ends_requests_by_their_deadlines_and_the_next_one_after_it_is_served") {
        return;
    }
    let mut random = Random::new("partition");
    let mut hosts = Hosts::over(Members::Tcp);
    hosts.push(PAGES);
    if let Err(why) = hosts.beyond.shape("tbf rate 40mbit burst 32kb limit 256kb") {
        println!("SKIPPED: this kernel cannot limit a link: {why}");
        return hosts.close();
    }
    let deadline = Duration::from_millis(4000);
    hosts.prefill.tell("deadline 4000");
    hosts.rooms += 1;
    let (room, addr) = (hosts.rooms, hosts.decode.addr.clone());
    let began = Instant::now();
    hosts.prefill.tell(&format!("send {room} {MANY} 0 99"));
    let options = SessionOptions::default().with(|options| options.deadline = Some(deadline));
    let mut receiver = hosts.decode.receiver(&addr, room, options);
    let pages = hosts.decode.room_for(MANY);
    let first = pages.list().iter().next().unwrap();
    let before = hosts.decode.memory.page(first);
    receiver.init(pages, None).unwrap();
    until("the first bytes", || hosts.decode.memory.page(first) != before);
    std::thread::sleep(Duration::from_micros(random.below(500_000) as u64));
    assert!(!receiver.poll().is_terminal(), "the link is too wide for this test");
    hosts.beyond.cut();
    assert_eq!(ended(&receiver), KvPoll::Failed);
    let (failed_after, why) = (began.elapsed(), receiver.failure());
    assert!(failed_after < deadline + Duration::from_secs(3), "{failed_after:?}: {why:?}");
    let pages = reclaimed(receiver);
    println!("failed after {failed_after:?} by {why:?}; pages are back after {:?}", began.elapsed());
    hosts.decode.missed(pages.list(), 99, &"a request that was cut off");
    hosts.decode.rewrite(pages.list());
    hosts.decode.free(pages);
    // The pipes of the other process do not go by the link.
    let theirs = hosts.prefill.end_of(room);
    assert!(theirs != "Success" && began.elapsed() < PATIENCE, "{theirs} after {:?}", began.elapsed());
    println!("the prefill side has its pages back after {:?}: {theirs}", began.elapsed());

    hosts.beyond.mend();
    hosts.prefill.tell("deadline 60000");
    hosts.push(PAGES);
    hosts.close();
}

#[cfg(feature = "nixl")]
#[test]
fn workers_over_nixl_on_two_hosts_outlive_a_link_that_is_cut() {
    if enter("workers_over_nixl_on_two_hosts_outlive_a_link_that_is_cut") && support::store::nixl().is_some()
    {
        outlive_a_cut_link(Members::Nixl, false);
    }
}

#[cfg(feature = "ucx")]
#[test]
fn workers_over_ucx_on_two_hosts_outlive_a_link_that_is_cut() {
    if !enter("workers_over_ucx_on_two_hosts_outlive_a_link_that_is_cut") || !has_own_sys() {
        return;
    }
    if needed("UCX", kv_transfer::ucx::Ucx::look(None)).is_some() {
        outlive_a_cut_link(Members::Ucx, false);
    }
}

#[cfg(feature = "fabric")]
#[test]
fn workers_over_libfabric_on_two_hosts_outlive_a_link_that_is_cut() {
    if !enter("workers_over_libfabric_on_two_hosts_outlive_a_link_that_is_cut") {
        return;
    }
    if needed("FABRIC", kv_transfer::fabric::installed()).is_some() {
        outlive_a_cut_link(Members::Fabric, true);
    }
}

#[cfg(feature = "fabric")]
#[test]
fn workers_with_two_devices_move_pages_over_both_links_and_over_the_first_alone() {
    if !enter("workers_with_two_devices_move_pages_over_both_links_and_over_the_first_alone") {
        return;
    }
    if let Some(mut hosts) = Hosts::with_two_devices() {
        // At first, the second devices do not reach each other.
        hosts.beyond.cut_link(1);
        hosts.only_the_first_link_carries();
        hosts.beyond.mend_link(1);
        hosts.both_links_carry();
        // The second link is cut while nothing moves. After a second in which nothing was heard on it, it is not used any more.
        hosts.beyond.cut_link(1);
        std::thread::sleep(Duration::from_millis(1500));
        hosts.only_the_first_link_carries();
        hosts.beyond.mend_link(1);
        hosts.both_links_carry();
        match hosts.beyond.shape_link(1, "tbf rate 8mbit burst 32kb limit 256kb") {
            Ok(()) => {
                let before = hosts.beyond.came_by();
                hosts.push(MANY);
                hosts.pull(MANY);
                let [first, second] = hosts.came_since(before);
                println!("beside a slow link: {first} and {second} bytes");
                assert!(first > second, "the slow link has held up the fast one: {first} and {second} bytes");
            }
            Err(why) => println!("NOT TESTED: a slow second link: {why}"),
        }
        hosts.close();
    }
}

/// A request in whose middle one of two links is cut fails by its deadline, and its pages come back only once the writes on
/// that link have ended. Meanwhile requests go over the other link.
#[cfg(feature = "fabric")]
#[test]
fn requests_go_on_over_one_link_while_pages_wait_for_another_that_is_cut() {
    if !enter("requests_go_on_over_one_link_while_pages_wait_for_another_that_is_cut") {
        return;
    }
    let mut random = Random::new("one link of two is cut");
    let Some(mut hosts) = Hosts::with_two_devices() else { return };
    hosts.both_links_carry();
    if let Err(why) = hosts.shape_both(NARROW) {
        println!("SKIPPED: this kernel cannot limit a link: {why}");
        return hosts.close();
    }
    let mut first = hosts.cut_link_within_a_push(&mut random, 1);
    hosts.holds_back(&mut first);
    hosts.prefill.tell("deadline 60000");
    hosts.only_the_first_link_carries();
    assert_eq!(hosts.decode.gauges().pages_quarantined(), MANY);
    hosts.beyond.mend_link(1);
    let mended = Instant::now();
    hosts.asked(first.room, |answer| answer.starts_with("back "));
    hosts.takes_back(first, mended);
    hosts.shape_both(WIDE).unwrap();
    hosts.both_links_carry();

    if let Err(why) = hosts.beyond.give_up_after(3) {
        println!("NOT TESTED: a connection that the kernels give up: {why}");
        return hosts.close();
    }
    hosts.shape_both(NARROW).unwrap();
    // The prefill worker tells over the first link that its writes on the second have ended.
    let second = hosts.cut_link_within_a_push(&mut random, 1);
    hosts.asked(second.room, |answer| answer.starts_with("back "));
    hosts.takes_back(second, Instant::now());
    hosts.shape_both(WIDE).unwrap();
    hosts.only_the_first_link_carries();
    hosts.beyond.mend_link(1);
    hosts.both_links_carry();
    hosts.close();
}

/// A link on which a request takes long enough to be cut in the middle; and one on which heartbeats do not wait behind pages.
#[cfg(feature = "fabric")]
const NARROW: &str = "tbf rate 40mbit burst 32kb limit 256kb";
#[cfg(feature = "fabric")]
const WIDE: &str = "pfifo limit 10000";

#[cfg(feature = "fabric")]
impl Hosts {
    fn shape_both(&self, discipline: &str) -> Result<(), String> {
        [0, 1].into_iter().try_for_each(|link| self.beyond.shape_link(link, discipline))
    }

    fn with_two_devices() -> Option<Hosts> {
        needed("FABRIC", kv_transfer::fabric::installed()).map(|_| Hosts::over(Members::FabricTwice))
    }

    fn came_since(&self, before: [u64; 2]) -> [u64; 2] {
        let now = self.beyond.came_by();
        [now[0] - before[0], now[1] - before[1]]
    }

    /// Pages are pushed and pulled until both links have carried a good part of a request each way. A device is used once the
    /// peer has answered by it.
    fn both_links_carry(&mut self) {
        for (mode, request) in [("push", Hosts::push as fn(&mut Hosts, usize)), ("pull", Hosts::pull)] {
            let begun = Instant::now();
            loop {
                let before = self.beyond.came_by();
                request(self, MANY);
                let came = self.came_since(before);
                assert!(came.iter().sum::<u64>() >= 12 << 20, "{mode}: {came:?} bytes of 12 MiB");
                if came.iter().all(|bytes| *bytes >= 1 << 20) {
                    println!("{mode} over both links: {came:?} bytes");
                    break;
                }
                assert!(begun.elapsed() < PATIENCE, "{mode}: {came:?} bytes");
            }
        }
    }

    fn only_the_first_link_carries(&mut self) {
        let before = self.beyond.came_by();
        self.push(PAGES);
        self.pull(PAGES);
        let came = self.came_since(before);
        println!("over the first link alone: {came:?} bytes");
        assert!(came[0] >= 6 << 20 && came[1] < 1 << 16, "{came:?} bytes");
    }
}

/// Requests between hosts, and then twice a link that is cut in the middle of a long one. Both sides fail by their
/// deadlines. The decode worker has its pages back only once the prefill worker, which may still write into them, has
/// answered; and then the next request is served. The first cut is over before the kernels give the connection up, which
/// takes a quarter of an hour by their defaults. In the second one they give up within seconds, and the prefill worker
/// has its pages back before the link is mended.
#[cfg(any(feature = "nixl", feature = "ucx", feature = "fabric"))]
fn outlive_a_cut_link(members: Members, reads: bool) {
    let mut random = Random::new(&format!("cuts over {members:?}"));
    let mut hosts = Hosts::over(members);
    hosts.push(MANY);
    if reads {
        hosts.pull(MANY);
    }
    if let Err(why) = hosts.beyond.shape("tbf rate 40mbit burst 32kb limit 256kb") {
        println!("SKIPPED: this kernel cannot limit a link: {why}");
        return hosts.close();
    }
    let mut first = hosts.cut_link_within_a_push(&mut random, 0);
    hosts.holds_back(&mut first);
    hosts.beyond.mend();
    let mended = Instant::now();
    hosts.asked(first.room, |answer| answer.starts_with("back "));
    println!("the prefill side has its pages back {:?} after the link", mended.elapsed());
    hosts.takes_back(first, mended);
    hosts.push(PAGES);

    if let Err(why) = hosts.beyond.give_up_after(3) {
        println!("NOT TESTED: a connection that the kernels give up: {why}");
        return hosts.close();
    }
    let mut second = hosts.cut_link_within_a_push(&mut random, 0);
    hosts.holds_back(&mut second);
    let cut = Instant::now();
    hosts.asked(second.room, |answer| answer.starts_with("back "));
    println!("the prefill side has its pages back {:?} later, while the link is cut", cut.elapsed());
    assert_eq!(hosts.decode.gauges().pages_quarantined(), MANY);
    hosts.beyond.mend();
    hosts.takes_back(second, Instant::now());
    hosts.push(PAGES);
    hosts.close();
}

/// A request that has failed over a cut link, and whose pages the peer may still write.
#[cfg(any(feature = "nixl", feature = "ucx", feature = "fabric"))]
struct Cut {
    room: u64,
    /// When the link was cut.
    at: Instant,
    receiver: kv_transfer::Receiver,
}

#[cfg(any(feature = "nixl", feature = "ucx", feature = "fabric"))]
impl Hosts {
    /// Cuts a link in the middle of a long push, and waits until both sides have failed.
    fn cut_link_within_a_push(&mut self, random: &mut Random, link: usize) -> Cut {
        let deadline = Duration::from_millis(3000);
        self.prefill.tell("deadline 3000");
        self.rooms += 1;
        let (room, addr) = (self.rooms, self.decode.addr.clone());
        let began = Instant::now();
        self.prefill.tell(&format!("send {room} {MANY} 0 {CUT_OFF}"));
        let options = SessionOptions::default().with(|options| options.deadline = Some(deadline));
        let mut receiver = self.decode.receiver(&addr, room, options);
        let pages = self.decode.room_for(MANY);
        let watched: Vec<u32> = pages.list().iter().collect();
        let before: Vec<Vec<u8>> = watched.iter().map(|page| self.decode.memory.page(*page)).collect();
        receiver.init(pages, None).unwrap();
        let changed = |page: (&u32, &Vec<u8>)| self.decode.memory.page(*page.0) != *page.1;
        until("the first bytes", || watched.iter().zip(&before).any(changed));
        std::thread::sleep(Duration::from_micros(random.below(400_000) as u64));
        assert!(
            !receiver.poll().is_terminal(),
            "the link is too wide for this test: {:?}",
            receiver.failure()
        );
        self.beyond.cut_link(link);
        let at = Instant::now();
        println!("cut {:?} after the beginning", began.elapsed());
        assert_eq!(ended(&receiver), KvPoll::Failed);
        println!(
            "the decode side failed after {:?}: {:?}",
            began.elapsed(),
            receiver.failure().unwrap().cause
        );
        let theirs = self.asked(room, |answer| answer != "open");
        println!("the prefill side failed after {:?}: {theirs}", began.elapsed());
        let in_time = began.elapsed() < deadline + Duration::from_secs(3);
        assert!(!theirs.ends_with("Success") && in_time, "{theirs} after {:?}", began.elapsed());
        Cut { room, at, receiver }
    }

    /// The permission to write ends meanwhile. But nobody can know here whether the peer does not write any more.
    fn holds_back(&self, cut: &mut Cut) {
        while cut.at.elapsed() < Duration::from_secs(6) {
            assert!(cut.receiver.reclaim().is_none(), "pages that the peer may still write have come back");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(self.decode.gauges().pages_quarantined(), MANY);
    }

    /// Waits for an answer of the prefill worker about a sender. Its pipes do not go by the link.
    fn asked(&mut self, room: u64, wanted: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.prefill.tell(&format!("ask {room}"));
            let answer = self.prefill.expect("asked").join(" ");
            if wanted(&answer) {
                return answer;
            }
            assert!(Instant::now() < deadline, "room {room} at the prefill worker is still: {answer}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The pages of the request come back, and nothing is written into them any more.
    fn takes_back(&mut self, cut: Cut, mended: Instant) {
        let pages = reclaimed(cut.receiver);
        println!("the decode side has its pages back {:?} after the link", mended.elapsed());
        self.decode.missed(pages.list(), CUT_OFF, &"a request that was cut off");
        self.decode.rewrite(pages.list());
        // The next requests and the end check that they stay as they are.
        self.decode.free(pages);
        self.prefill.tell("deadline 60000");
    }
}
