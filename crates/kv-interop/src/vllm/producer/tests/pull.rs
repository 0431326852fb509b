//! vLLM's ranks read, and this worker waits for their notifications.

use std::time::Duration;

use kv_core::machine::Machine;
use kv_core::proto::Command;
use kv_core::{
    AuxIndex, Cause, ChunkId, FinalLayers, KvPoll, Lease, PageList, PagePool, PagesError, QuarantineReason,
    RequestCacheGroups, SessionId, SessionOptions, TransferMode,
};

use crate::gauges::Ignored;
use crate::vllm::geometry::tests::args;
use crate::vllm::notification::{done, heartbeat};
use crate::vllm::rig::{Rig, SECOND, at};
use KvPoll::{Failed, Success, Transferring, WaitingForInput};

const READ_BOUND: Duration = Duration::from_secs(7);

fn rig() -> Rig {
    Rig::new(args((1, 0), false), |config| config.timing.read_bound = READ_BOUND)
}

fn leased(options: Lease) -> SessionOptions {
    SessionOptions::default().with(|chosen| chosen.lease = Some(options))
}

#[test]
fn a_reader_that_has_read_frees_the_pages_and_nothing_is_said_to_it() {
    let mut rig = rig();
    let session = rig.sent(1, "r-1", &[4, 2, 7]);
    assert_eq!(rig.states(session), [WaitingForInput, Transferring]);
    assert_eq!((rig.machine.leased(), rig.back(session)), (3, &[][..]));
    rig.notify("d", heartbeat(["r-1"]));
    rig.notify("d", done("r-1", 1));
    assert_eq!(rig.told(session), (Success, &[4, 2, 7][..]));
    assert_eq!((rig.machine.leased(), rig.machine.next_timeout()), (0, None));
    assert!(rig.out.is_empty(), "a reader is sent nothing");
    rig.notify("d", done("r-1", 1));
    assert_eq!((rig.ignored(Ignored::UnknownRequest), rig.gauges.total()), (1, 1));
}

#[test]
fn chunks_are_read_only_when_all_have_come_and_a_notification_may_come_before() {
    let mut rig = rig();
    let session = rig.open(1, "r", SessionOptions::default());
    rig.announce(session, 3);
    rig.send(session, &[1, 2]);
    assert_eq!(rig.machine.leased(), 0);
    // The reader was aborted, and needs nothing.
    rig.notify("d", done("r", 1));
    assert_eq!(rig.told(session), (Transferring, &[][..]));
    rig.send(session, &[3]);
    assert_eq!(rig.told(session), (Success, &[1, 2, 3][..]));
    assert_eq!(rig.machine.leased(), 0);
}

#[test]
fn pages_given_layer_by_layer_are_leased_when_every_layer_is_final() {
    let mut rig = rig();
    let session = rig.open(1, "r", SessionOptions::default());
    rig.announce(session, 2);
    let chunk = rig.pages(&[5, 6]);
    rig.command(Command::BeginChunk { session, chunk });
    let layers = |layer| FinalLayers::new(ChunkId(0), layer..layer + 1);
    rig.command(Command::LayersFinal { session, layers: layers(1) });
    assert_eq!((rig.state(session), rig.machine.leased()), (Transferring, 0));
    rig.command(Command::LayersFinal { session, layers: layers(0) });
    assert_eq!(rig.machine.leased(), 2);
    rig.notify("d", done("r", 1));
    assert_eq!(rig.told(session), (Success, &[5, 6][..]));
}

#[test]
fn the_pages_wait_for_as_many_agents_as_a_message_names() {
    let mut rig = rig();
    let session = rig.sent(1, "r", &[1]);
    rig.notify("d-0", done("r", 2));
    rig.notify("d-0", done("r", 2));
    assert_eq!((rig.state(session), rig.ignored(Ignored::Repeated)), (Transferring, 1));
    rig.notify("d-1", done("r", 1));
    assert_eq!(rig.told(session), (Success, &[1][..]));
}

#[test]
fn the_scheduler_may_demand_more_readers_than_a_message_names() {
    let mut rig = rig();
    let session = SessionId(1);
    let options = SessionOptions::default().with(|options| options.mode = Some(TransferMode::Pull));
    let (room, options) = (kv_core::Room::request("r").unwrap(), Box::new(options));
    rig.command(Command::OpenSender { session, room, receivers: 2, options });
    rig.announce(session, 1);
    rig.send(session, &[1]);
    rig.notify("d-0", done("r", 1));
    assert_eq!(rig.state(session), Transferring);
    rig.notify("d-1", done("r", 1));
    assert_eq!(rig.state(session), Success);
}

#[test]
fn heartbeats_extend_the_lease_to_two_thirds_and_never_shorten_it() {
    let mut rig = rig();
    let session = rig.sent(1, "r", &[1]);
    rig.wait_until(at(5));
    rig.notify("d", heartbeat(["other", "r"]));
    rig.wait_until(at(29));
    assert_eq!(rig.state(session), Transferring, "30 s count, not 5 s and 20 s");
    rig.notify("d", heartbeat(["r"]));
    rig.wait_until(at(48));
    assert_eq!((rig.state(session), rig.machine.leased()), (Transferring, 1));
    rig.wait_until(at(49));
    assert_eq!((rig.state(session), rig.cause(session)), (Failed, Some(Cause::LeaseExpired)));
    assert_eq!(rig.gauges.total(), 0, "heartbeats for unknown requests are usual");
}

#[test]
fn an_expired_lease_keeps_the_pages_for_the_reads_that_may_be_under_way() {
    let mut rig = rig();
    let session = rig.sent(1, "r", &[1, 2]);
    rig.notify("d-0", done("r", 2));
    rig.wait_until(at(30));
    assert_eq!(rig.cause(session), Some(Cause::LeaseExpired), "one of two readers is not enough");
    assert_eq!((rig.back(session), rig.machine.leased()), (&[][..], 0));
    let shown = rig.quarantine();
    assert_eq!((shown.len(), shown[0].reason, shown[0].pages), (1, QuarantineReason::ReaderLease, 2));
    assert_eq!(shown[0].ends_within, Some(READ_BOUND));
    rig.wait_until(at(36));
    assert!(rig.back(session).is_empty());
    rig.wait_until(at(37));
    assert_eq!(rig.back(session), [1, 2]);
    assert_eq!((rig.quarantine(), rig.machine.next_timeout()), (vec![], None));
}

#[test]
fn a_reader_that_lives_on_after_the_end_keeps_the_quarantine_until_it_has_read() {
    let mut rig = rig();
    let session = rig.sent(1, "r", &[1]);
    rig.wait_until(at(30));
    rig.wait_until(at(35));
    rig.notify("d", heartbeat(["r"]));
    // 20 s of lease from now, and the time of a read.
    assert_eq!(rig.quarantine()[0].ends_within, Some(20 * SECOND + READ_BOUND));
    rig.wait_until(at(61));
    assert!(rig.back(session).is_empty());
    rig.notify("d", done("r", 1));
    assert_eq!(rig.told(session), (Failed, &[1][..]), "a late read frees, and changes no outcome");
    assert_eq!(rig.machine.next_timeout(), None);
}

#[test]
fn an_abort_before_the_pages_are_complete_gives_them_back_at_once() {
    let mut rig = rig();
    let session = rig.open(1, "r", SessionOptions::default());
    rig.announce(session, 3);
    rig.send(session, &[1, 2]);
    rig.abort(session);
    assert_eq!((rig.told(session), rig.cause(session)), ((Failed, &[1, 2][..]), Some(Cause::Aborted)));
    assert_eq!(rig.machine.next_timeout(), None);
    rig.send(session, &[3]);
    assert_eq!(rig.back(session), [1, 2, 3], "given too late, and back at once");
}

#[test]
fn an_abort_while_readers_may_read_waits_for_the_lease_and_for_the_reads() {
    for known_early in [false, true] {
        let mut rig = rig();
        let session = rig.open(1, "r", SessionOptions::default());
        rig.announce(session, 2);
        rig.send(session, &[1]);
        if known_early {
            rig.notify("d", heartbeat(["r"]));
        } else {
            rig.send(session, &[2]);
        }
        rig.abort(session);
        rig.abort(session);
        assert_eq!((rig.state(session), rig.machine.leased()), (Failed, 0));
        let wait = if known_early { READ_BOUND } else { 30 * SECOND + READ_BOUND };
        assert_eq!(rig.quarantine()[0].ends_within, Some(wait));
        rig.wait_until(at(0) + (wait - SECOND));
        assert!(rig.back(session).is_empty());
        rig.wait_until(at(0) + wait);
        assert!(!rig.back(session).is_empty());
    }
}

#[test]
fn a_deadline_ends_a_session_in_every_phase() {
    for sent in [false, true] {
        let mut rig = rig();
        let options = SessionOptions::default().with(|options| options.deadline = Some(9 * SECOND));
        let session = rig.open(1, "r", options);
        rig.announce(session, 1);
        if sent {
            rig.send(session, &[1]);
        }
        rig.wait_until(at(8));
        assert_ne!(rig.state(session), Failed);
        rig.wait_until(at(9));
        let cause = Cause::DeadlineExceeded { after: 9 * SECOND, last: None };
        assert_eq!((rig.state(session), rig.cause(session)), (Failed, Some(cause)));
        assert!(rig.back(session).is_empty());
        rig.wait_until(at(37));
        assert_eq!(rig.back(session).len(), usize::from(sent));
    }
}

#[test]
fn pages_kept_for_the_next_turn_have_a_lease_that_nothing_extends() {
    let mut rig = rig();
    let session = rig.open(1, "r", leased(Lease::Fixed(60 * SECOND)));
    rig.announce(session, 1);
    rig.send(session, &[1]);
    rig.wait_until(at(59));
    rig.notify("p", heartbeat(["r"]));
    rig.wait_until(at(60));
    assert_eq!(rig.cause(session), Some(Cause::LeaseExpired));
    rig.notify("p", heartbeat(["r"]));
    assert_eq!(rig.quarantine()[0].ends_within, Some(READ_BOUND));
}

#[test]
fn a_lease_of_any_length_overflows_nothing() {
    let mut rig = rig();
    let session = rig.open(1, "r", leased(Lease::Renewable(Duration::MAX)));
    rig.announce(session, 1);
    rig.send(session, &[1]);
    rig.notify("d", heartbeat(["r"]));
    rig.abort(session);
    rig.notify("d", heartbeat(["r"]));
    rig.notify("d", done("r", 1));
    assert_eq!(rig.told(session), (Failed, &[1][..]));
}

#[test]
fn a_request_is_not_opened_again_while_a_reader_of_its_pages_may_tell_its_end() {
    let mut rig = rig();
    let first = rig.sent(1, "r", &[1]);
    let again = rig.sent(2, "r", &[2]);
    assert_eq!(rig.told(again), (Failed, &[2][..]));
    assert!(matches!(rig.cause(again), Some(Cause::AmbiguousRoom { .. })));
    rig.abort(first);
    let again = rig.sent(3, "r", &[2]);
    assert_eq!(rig.state(again), Failed, "the pages of the first are held");
    rig.wait_until(at(37));
    assert_eq!(rig.back(first), [1]);
    let again = rig.sent(4, "r", &[2]);
    rig.notify("d", done("r", 1));
    assert_eq!(rig.told(again), (Success, &[2][..]));
}

#[test]
fn what_the_scheduler_may_not_do_fails_the_session_and_gives_its_pages_back() {
    let mut rig = rig();
    let unannounced = rig.open(1, "a", SessionOptions::default());
    rig.send(unannounced, &[1]);
    assert_eq!((rig.cause(unannounced), rig.back(unannounced)), (Some(Cause::InitOrder), &[1][..]));
    let twice = rig.open(2, "b", SessionOptions::default());
    rig.announce(twice, 1);
    rig.announce(twice, 1);
    assert_eq!(rig.cause(twice), Some(Cause::InitOrder));
    let more = rig.open(3, "c", SessionOptions::default());
    rig.announce(more, 1);
    rig.send(more, &[1, 2]);
    let cause = Cause::TooManyPages { sent: 2, announced: 1 };
    assert_eq!((rig.cause(more), rig.back(more)), (Some(cause), &[1, 2][..]));
    let row = rig.open(4, "d", SessionOptions::default());
    rig.command(Command::InitSender { session: row, num_pages: 1, aux: Some(AuxIndex(0)) });
    assert_eq!(rig.cause(row), Some(Cause::AuxOneSided { sender: true, receiver: false }));
    let layers = rig.open(5, "e", SessionOptions::default());
    rig.command(Command::LayersFinal { session: layers, layers: FinalLayers::all(ChunkId(3)) });
    assert!(matches!(rig.cause(layers), Some(Cause::Layers(_))));
    assert_eq!(rig.machine.next_timeout(), None);
}

#[test]
fn pages_that_the_cache_does_not_have_fail_the_session() {
    let mut rig = rig();
    let session = rig.open(1, "r", SessionOptions::default());
    rig.announce(session, 1);
    // Pages of the pool of another cache.
    let chunk = PagePool::new(20).adopt(PageList::from_pages([15]).unwrap()).unwrap();
    rig.command(Command::Send { session, chunk });
    let bad = PagesError::OutOfRange { page: 15, num_pages: 10 };
    assert_eq!((rig.cause(session), rig.back(session)), (Some(Cause::BadPages(bad)), &[15][..]));
}

#[test]
fn empty_cache_groups_come_back_and_items_are_refused() {
    let mut rig = rig();
    let session = rig.open(1, "r", SessionOptions::default());
    rig.command(Command::RequestCacheGroups { session, groups: RequestCacheGroups::none() });
    assert_eq!(rig.state(session), WaitingForInput);
    let mut groups = RequestCacheGroups::none();
    groups.push(kv_core::CacheGroupItems::new(3, rig.pages(&[1]))).unwrap();
    rig.command(Command::RequestCacheGroups { session, groups });
    assert_eq!(rig.cause(session), Some(Cause::UnknownGroup { group: 3 }));
}

#[test]
fn a_worker_that_stops_ends_every_session_and_opens_none() {
    let mut rig = rig();
    let waiting = rig.open(1, "a", SessionOptions::default());
    let leased = rig.sent(2, "b", &[1]);
    rig.command(Command::Shutdown);
    let late = rig.open(3, "c", SessionOptions::default());
    for session in [waiting, leased, late] {
        assert_eq!(rig.cause(session), Some(Cause::WorkerStopped));
    }
    assert_eq!(rig.quarantine()[0].pages, 1);
    rig.notify("d", done("b", 1));
    assert_eq!((rig.back(leased), rig.machine.next_timeout()), (&[1][..], None));
}

#[test]
fn a_worker_that_drains_keeps_its_leases_until_they_are_read_and_opens_no_session() {
    let mut rig = rig();
    let leased = rig.sent(1, "b", &[1]);
    rig.command(Command::Drain);
    let late = rig.open(2, "c", SessionOptions::default());
    assert_eq!(rig.cause(late), Some(Cause::Draining));
    assert_eq!((rig.state(leased), rig.machine.leased()), (Transferring, 1));
    rig.notify("d", done("b", 1));
    assert_eq!((rig.state(leased), rig.back(leased)), (Success, &[1][..]));
}

#[test]
fn what_no_vllm_would_send_is_counted_and_changes_nothing() {
    let mut rig = rig();
    let session = rig.sent(1, "r", &[1]);
    for bytes in [&b"r"[..], b"r:", b"r:0", b"\xff\xff", b"PUSH_REG:\xc1", b""] {
        rig.notify("x", bytes.to_vec());
    }
    assert_eq!(rig.ignored(Ignored::Malformed), 6);
    rig.reply(kv_core::PeerId(3), vec![]);
    assert_eq!(rig.ignored(Ignored::NotAsked), 1);
    rig.notify("x", done("r ", 1));
    assert_eq!(rig.ignored(Ignored::UnknownRequest), 1);
    assert_eq!((rig.state(session), rig.machine.leased()), (Transferring, 1));
}

#[test]
fn pages_given_beyond_those_that_are_leased_fail_the_session_and_the_lease_is_counted_back() {
    let mut rig = rig();
    let session = rig.sent(1, "r", &[4, 2]);
    assert_eq!(rig.machine.leased(), 2);
    rig.send(session, &[5, 6, 7]);
    assert_eq!((rig.state(session), rig.machine.leased()), (Failed, 0));
}
