//! Slices of guests: pages that they write land in this side's regions, and pages that they read are sent.

use bytes::Buf;
use kv_core::{Origin, TransportEvent};
use kv_host::clock;

use crate::connection::{Connection, Owner, Writing};
use crate::guest::GuestId;
use crate::inbound::{Landing, Received};
use crate::message::{Asked, Broken, Reply, Request, Verdict, WHOLE, ZEROED};
use crate::sockets::{EVENTS, Over};
use crate::transport::TcpTransport;

/// A guest's connection on which so many segments wait to be written is not read until some are: the guest
/// reads more slowly than it asks.
const QUEUED: usize = 4096;

/// True if a connection is not read for now.
pub(crate) fn is_full(connection: &Connection) -> bool {
    matches!(connection.owner, Owner::Guest(_)) && connection.outbound.len() >= QUEUED
}

impl TcpTransport {
    /// Reads a share of what a guest has sent.
    pub(crate) fn read_guest(&mut self, connection: &mut Connection, id: GuestId) -> Result<(), Over> {
        let mut left = connection.share();
        let mut more = true;
        loop {
            self.take_requests(connection, id)?;
            if !more || left == 0 || is_full(connection) || self.posts.events() >= EVENTS {
                return Ok(());
            }
            self.judge(connection, id);
            match self.receive(connection, left)? {
                Received::Bytes(count) => left = left.saturating_sub(count),
                Received::Last(_) => more = false,
                Received::Nothing => return Ok(()),
                Received::End => return Err(Over::Closed),
            }
        }
    }

    /// Takes the requests out of what has come, until the connection is full.
    pub(crate) fn take_requests(&mut self, connection: &mut Connection, id: GuestId) -> Result<(), Over> {
        while !is_full(connection) {
            if let Some(writing) = connection.writing {
                self.judge(connection, id);
                if !connection.inbound.settle(self.given.regions())?
                    || connection.inbound.bytes.len() < 1 + writing.notify
                {
                    return Ok(());
                }
                self.landed(connection, id)?;
                continue;
            }
            let given = &self.given;
            match Request::next(&mut connection.inbound.bytes, |region| given.len_of(region))? {
                None => return Ok(()),
                Some(Request::Frame(frame)) => {
                    self.posts.tell(TransportEvent::Frame { from: Origin(id), frame });
                }
                Some(Request::Write(asked, notify)) => {
                    let Asked { number, until, ranges, bytes } = asked;
                    connection.inbound.landing = Some(Landing::new(ranges, bytes));
                    connection.writing = Some(Writing { number, until, notify, verdict: Verdict::Done });
                }
                Some(Request::Read(asked)) => give(connection, asked),
            }
        }
        Ok(())
    }

    /// Throws pages away that may not land any more. No page lands without this having been asked before.
    fn judge(&self, connection: &mut Connection, id: GuestId) {
        let (Some(writing), Some(landing)) = (&mut connection.writing, &mut connection.inbound.landing)
        else {
            return;
        };
        if writing.verdict != Verdict::Done || landing.is_complete() {
            return;
        }
        if self.guests.get(id).is_none_or(|guest| guest.revoked) {
            writing.verdict = Verdict::Revoked;
            landing.discard();
        } else if writing.until <= clock::now() {
            writing.verdict = Verdict::Late;
            landing.discard();
        }
    }

    /// All pages of a write have come, the byte that ends them, and the frame that follows.
    fn landed(&mut self, connection: &mut Connection, id: GuestId) -> Result<(), Over> {
        connection.inbound.landing = None;
        let Some(writing) = connection.writing.take() else { return Ok(()) };
        let verdict = match (connection.inbound.bytes.get_u8(), writing.verdict) {
            (WHOLE, verdict) => verdict,
            // By the clock of the peer the slice was late, whatever this side's clock says.
            (ZEROED, Verdict::Done) => Verdict::Late,
            (ZEROED, verdict) => verdict,
            (other, _) => return Err(Broken::Ending(other).into()),
        };
        let frame = connection.inbound.bytes.split_to(writing.notify);
        if verdict == Verdict::Done && !frame.is_empty() {
            let frame = bytes::Bytes::copy_from_slice(&frame);
            self.posts.tell(TransportEvent::Frame { from: Origin(id), frame });
        }
        let answer = Reply::Answer { number: writing.number, verdict, clock: clock::now() };
        connection.outbound.push(answer.encode());
        Ok(())
    }
}

/// Queues the pages of a read, and the answer after them.
fn give(connection: &mut Connection, asked: Asked) {
    let Asked { number, until, ranges, bytes } = asked;
    let now = clock::now();
    if until <= now {
        let answer = Reply::Answer { number, verdict: Verdict::Late, clock: now };
        connection.outbound.push(answer.encode());
        return;
    }
    connection.outbound.push(Reply::Bytes { number, bytes }.encode());
    connection.outbound.push_pages(ranges, until);
    connection.outbound.push_read_done(number);
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    use bytes::BytesMut;
    use kv_core::{PeerId, Region, RegionRole, Time, Transport, TransportEvent, WayEnd};
    use kv_host::{Arena, Token};

    use super::*;
    use crate::config::TcpConfig;
    use crate::hello::{Hello, WELCOME};
    use crate::message::{self, HEADER, MAX_RANGES, Range};
    use crate::metadata::{Identity, Metadata};
    use crate::sockets::MESSAGES;
    use crate::way::Stage;

    /// Reads that are asked for, and the bytes of each of their ranges: more than the kernel's buffers hold.
    const READS: u32 = 200;
    const LEN: usize = 512;

    /// A transport that serves this memory, and the connection of a guest of this token, which has said hello.
    fn served(arena: &Arena) -> (TcpTransport, TcpStream, Token) {
        let mut transport = TcpTransport::new(TcpConfig::new("127.0.0.1:0".parse().unwrap())).unwrap();
        transport.add_memory(arena).unwrap();
        transport.register(&Region::dram(RegionRole::Kv, arena.addr(), arena.len() as u64, 1)).unwrap();
        let token = Token::random().unwrap();
        let guest = greeted(&transport, token);
        (transport, guest, token)
    }

    /// The connection of a guest of this token, which has said hello in a way of its own.
    fn greeted(transport: &TcpTransport, token: Token) -> TcpStream {
        let to = Identity::of(transport.given.token(), &transport.metadata().unwrap());
        let mut guest = TcpStream::connect(transport.local_addr()).unwrap();
        let way = Token::random().unwrap();
        let hello = Hello { number: 0, to, from: Identity::of(token, b"a guest"), way };
        guest.write_all(&hello.encode()).unwrap();
        guest.set_nonblocking(true).unwrap();
        guest
    }

    #[test]
    fn a_transport_that_is_proven_dead_is_served_no_more_though_its_connection_stands() {
        let arena = Arena::new(4096).unwrap();
        let (mut transport, mut guest, token) = served(&arena);
        let turn = |transport: &mut TcpTransport| {
            let mut events = Vec::new();
            transport.poll(kv_host::clock::now(), &mut events);
            events
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        while transport.guests.len() == 0 {
            assert!(Instant::now() < deadline);
            turn(&mut transport);
        }
        // Nothing listens there any more. What has inherited the connection keeps it open.
        let nowhere = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let metadata = Metadata { token, addresses: vec![nowhere], regions: vec![4096], tls: false };
        transport.connect(PeerId(1), &metadata.encode().unwrap()).unwrap();
        let dead =
            TransportEvent::PeerGone { peer: PeerId(1), end: WayEnd::Dead { quiet_after: Duration::ZERO } };
        while !turn(&mut transport).contains(&dead) {
            assert!(Instant::now() < deadline);
        }
        assert_eq!((transport.guests.len(), transport.connections.len()), (0, 0));
        guest.set_nonblocking(false).unwrap();
        let mut rest = Vec::new();
        guest.read_to_end(&mut rest).unwrap();
        assert_eq!(rest.len(), WELCOME, "nothing but the welcome, and the end");
    }

    #[test]
    fn frames_of_a_dead_transport_that_are_not_read_yet_are_told_before_its_end() {
        let arena = Arena::new(4096).unwrap();
        let (mut transport, mut guest, token) = served(&arena);
        let deadline = Instant::now() + Duration::from_secs(60);
        while transport.guests.len() == 0 {
            assert!(Instant::now() < deadline);
            transport.poll(Time::ZERO, &mut Vec::new());
        }
        let from = Origin(transport.guests.of(token)[0]);
        let nowhere = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let metadata = Metadata { token, addresses: vec![nowhere], regions: vec![4096], tls: false };
        transport.connect(PeerId(1), &metadata.encode().unwrap()).unwrap();
        while !transport.ways.values().any(|way| matches!(way.stage, Stage::Ending { .. })) {
            assert!(Instant::now() < deadline);
            transport.serve_sockets();
        }
        guest.write_all(&[&message::frame(8)[..], b"the last"].concat()).unwrap();
        transport.serve_timers();
        let mut events = Vec::new();
        transport.poll(Time::ZERO, &mut events);
        let frame = TransportEvent::Frame { from, frame: bytes::Bytes::from_static(b"the last") };
        let end = WayEnd::Dead { quiet_after: Duration::ZERO };
        assert_eq!(events, [frame, TransportEvent::PeerGone { peer: PeerId(1), end }]);
    }

    #[test]
    fn a_guest_that_asks_for_pages_and_takes_none_is_asked_no_more_and_loses_nothing() {
        let arena = Arena::new(1 << 20).unwrap();
        arena.write(0, &[7; 1 << 20]).unwrap();
        let (mut transport, mut guest, _) = served(&arena);
        let until = kv_host::clock::now() + Duration::from_secs(3600);
        let ranges = vec![Range { region: 0, len: LEN as u32, offset: 5 }; MAX_RANGES];
        let request = |number| {
            let asked = Asked { number, until, ranges: ranges.clone(), bytes: (LEN * MAX_RANGES) as u64 };
            message::read(&asked)
        };
        let requests: Vec<u8> = (0..READS).flat_map(request).collect();
        let (mut asked, mut got, mut most) = (0, Vec::new(), (0, 0));
        let answers = WELCOME + READS as usize * (2 * HEADER + LEN * MAX_RANGES);
        let mut taken_at = Instant::now() + Duration::from_millis(500);
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut piece = vec![0; 64 << 10];
        while got.len() < answers {
            assert!(Instant::now() < deadline, "{} of {answers} bytes, {asked} bytes asked", got.len());
            match guest.write(&requests[asked..]) {
                Ok(count) => {
                    asked += count;
                    if count > 0 && got.is_empty() {
                        taken_at = Instant::now() + Duration::from_millis(500);
                    }
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
            transport.poll(Time::ZERO, &mut Vec::new());
            for connection in transport.connections.values() {
                most.0 = connection.outbound.len().max(most.0);
                most.1 = connection.inbound.bytes.len().max(most.1);
            }
            // Nothing is taken until everything stands still.
            if Instant::now() < taken_at {
                continue;
            }
            match guest.read(&mut piece) {
                Ok(0) => panic!("the guest was closed"),
                Ok(count) => got.extend_from_slice(&piece[..count]),
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
        }
        assert!(most.0 > QUEUED && most.0 <= QUEUED + MAX_RANGES + 2, "{most:?}");
        assert!(most.1 <= 2 * (HEADER + 16 * MAX_RANGES), "{most:?}");
        let mut got = BytesMut::from(&got[WELCOME..]);
        for number in 0..READS {
            let bytes = (LEN * MAX_RANGES) as u64;
            assert_eq!(Reply::next(&mut got), Ok(Some(Reply::Bytes { number, bytes })));
            assert!(got.split_to(LEN * MAX_RANGES).iter().all(|byte| *byte == 7));
            let answer = Reply::next(&mut got).unwrap();
            assert!(
                matches!(answer, Some(Reply::Answer { number: n, verdict: Verdict::Done, .. }) if n == number)
            );
        }
    }

    #[test]
    fn pages_that_a_guest_takes_after_their_time_are_not_read() {
        // More than the kernel's buffers hold.
        let len = 16 << 20;
        let arena = Arena::new(len).unwrap();
        arena.write(0, &vec![7; len]).unwrap();
        let (mut transport, mut guest, _) = served(&arena);
        let until = clock::now() + Duration::from_secs(1);
        let ranges = vec![Range { region: 0, len: len as u32, offset: 0 }];
        guest.write_all(&message::read(&Asked { number: 3, until, ranges, bytes: len as u64 })).unwrap();
        while clock::now() <= until {
            transport.poll(Time::ZERO, &mut Vec::new());
        }
        arena.write(0, &vec![9; len]).unwrap();
        let (mut got, mut piece) = (BytesMut::new(), vec![0; 64 << 10]);
        let deadline = Instant::now() + Duration::from_secs(60);
        while got.len() < WELCOME + 2 * HEADER + len {
            assert!(Instant::now() < deadline, "{} bytes", got.len());
            transport.poll(Time::ZERO, &mut Vec::new());
            if let Ok(count) = guest.read(&mut piece) {
                got.extend_from_slice(&piece[..count]);
            }
        }
        let mut got = got.split_off(WELCOME + HEADER);
        assert!(!got.split_to(len).contains(&9), "bytes of the next owner of the pages");
        let answer = Reply::next(&mut got).unwrap();
        assert!(matches!(answer, Some(Reply::Answer { verdict: Verdict::Late, .. })), "{answer:?}");
    }

    /// What this side does with a write of two pages whose second page comes after `lag` and is followed by `ending`, when
    /// the write is to be in place within `time`: the verdict, the frames that it tells, and the byte that it has of
    /// each page.
    fn written(time: Duration, lag: Duration, revoke: bool, ending: u8) -> (Verdict, usize, [u8; 2]) {
        const PAGE: usize = 4096;
        let arena = Arena::new(2 * PAGE).unwrap();
        let (mut transport, mut guest, token) = served(&arena);
        let mut events = Vec::new();
        let mut poll = |transport: &mut TcpTransport, time: Duration| {
            let until = Instant::now() + time;
            while Instant::now() < until {
                transport.poll(Time::ZERO, &mut events);
            }
            events.len()
        };
        let ranges = vec![Range { region: 0, len: 2 * PAGE as u32, offset: 0 }];
        let asked = Asked { number: 7, until: clock::now() + time, ranges, bytes: 2 * PAGE as u64 };
        guest.write_all(&message::write(&asked, 6)).unwrap();
        guest.write_all(&[1; PAGE]).unwrap();
        poll(&mut transport, lag);
        if revoke {
            let guests = transport.guests.of(token);
            transport.guests.get_mut(guests[0]).unwrap().revoked = true;
        }
        guest.write_all(&[2; PAGE]).unwrap();
        guest.write_all(&[ending]).unwrap();
        guest.write_all(b"notify").unwrap();
        let (mut got, mut piece) = (BytesMut::new(), [0; 256]);
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            assert!(Instant::now() < deadline);
            let frames = poll(&mut transport, Duration::from_millis(1));
            if let Ok(count) = guest.read(&mut piece) {
                got.extend_from_slice(&piece[..count]);
            }
            if got.len() == WELCOME + HEADER {
                let answer = Reply::next(&mut got.split_off(WELCOME)).unwrap();
                let Some(Reply::Answer { number: 7, verdict, .. }) = answer else { panic!("{answer:?}") };
                let pages = [0, PAGE].map(|at| {
                    let mut page = vec![0; PAGE];
                    arena.read(at, &mut page).unwrap();
                    assert!(page.iter().all(|byte| *byte == page[0]));
                    page[0]
                });
                return (verdict, frames, pages);
            }
        }
    }

    #[test]
    fn pages_that_come_after_their_time_or_after_the_right_was_revoked_are_not_put_in_place() {
        let (soon, hour) = (Duration::from_millis(100), Duration::from_secs(3600));
        assert_eq!(written(hour, soon, false, WHOLE), (Verdict::Done, 1, [1, 2]));
        assert_eq!(written(20 * soon, 21 * soon, false, WHOLE), (Verdict::Late, 0, [1, 0]));
        assert_eq!(written(Duration::ZERO, soon, false, WHOLE), (Verdict::Late, 0, [0, 0]));
        assert_eq!(written(hour, soon, true, WHOLE), (Verdict::Revoked, 0, [1, 0]));
    }

    #[test]
    fn a_write_is_late_if_its_sender_was_late_whatever_this_sides_clock_says() {
        let (soon, hour) = (Duration::from_millis(100), Duration::from_secs(3600));
        assert_eq!(written(hour, soon, false, ZEROED).0, Verdict::Late);
        assert_eq!(written(hour, soon, false, ZEROED).1, 0, "the frame says that the pages are there");
        assert_eq!(written(hour, soon, true, ZEROED), (Verdict::Revoked, 0, [1, 0]));
    }

    #[test]
    fn the_right_to_write_is_revoked_on_all_ways_of_a_peer_also_after_the_way_to_it_was_lost() {
        let arena = Arena::new(4096).unwrap();
        let (mut transport, _guest, token) = served(&arena);
        // The peer has lost sight of its first connection, which stands here, and has opened another one.
        let _again = greeted(&transport, token);
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut events = Vec::new();
        while transport.guests.len() < 2 {
            assert!(Instant::now() < deadline);
            transport.poll(Time::ZERO, &mut events);
        }
        // Nobody answers at the peer's address, but its connections stand.
        transport.config.handshake_timeout = Duration::from_millis(200);
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let addresses = vec![silent.local_addr().unwrap()];
        let metadata = Metadata { token, addresses, regions: vec![4096], tls: false };
        let peer = PeerId(1);
        transport.connect(peer, &metadata.encode().unwrap()).unwrap();
        while events.is_empty() {
            assert!(Instant::now() < deadline);
            transport.poll(Time::ZERO, &mut events);
        }
        assert_eq!(events, [TransportEvent::PeerGone { peer, end: WayEnd::Lost }]);
        assert_eq!(transport.write_fence(peer), kv_core::WriteFence::Revocable);
        transport.revoke(peer);
        transport.poll(Time::ZERO, &mut events);
        assert_eq!(events[1..], [TransportEvent::Revoked { peer }]);
        let guests = transport.guests.of(token);
        assert_eq!(guests.len(), 2);
        for guest in guests {
            assert!(transport.guests.get(guest).unwrap().revoked, "its writes would still land");
        }
        // The peer has to open new connections, over which it may write again.
        transport.disconnect(peer);
        assert_eq!((transport.guests.len(), transport.connections.len()), (0, 0));
        assert_eq!(
            transport.write_fence(peer),
            kv_core::WriteFence::AtDeath,
            "nobody can revoke it any more"
        );
    }

    fn until_a_guest_is_here(transport: &mut TcpTransport) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while transport.guests.len() == 0 {
            assert!(Instant::now() < deadline);
            transport.poll(Time::ZERO, &mut Vec::new());
        }
    }

    #[test]
    fn a_connection_that_a_revoked_guest_adds_brings_no_right_to_write() {
        let arena = Arena::new(4096).unwrap();
        let (mut transport, _guest, token) = served(&arena);
        until_a_guest_is_here(&mut transport);
        let deadline = Instant::now() + Duration::from_secs(60);
        let id = transport.guests.of(token)[0];
        transport.guests.get_mut(id).unwrap().revoked = true;
        let to = Identity::of(transport.given.token(), &transport.metadata().unwrap());
        let way = transport.guests.get(id).unwrap().way;
        let hello = Hello { number: 1, to, from: Identity::of(token, b"a guest"), way };
        let mut added = TcpStream::connect(transport.local_addr()).unwrap();
        added.write_all(&hello.encode()).unwrap();
        let until = clock::now() + Duration::from_secs(3600);
        let ranges = vec![Range { region: 0, len: 4096, offset: 0 }];
        added.write_all(&message::write(&Asked { number: 1, until, ranges, bytes: 4096 }, 0)).unwrap();
        added.write_all(&[1; 4096]).unwrap();
        added.write_all(&[WHOLE]).unwrap();
        added.set_nonblocking(true).unwrap();
        let (mut got, mut piece) = (BytesMut::new(), [0; 256]);
        while got.len() < WELCOME + HEADER {
            assert!(Instant::now() < deadline);
            transport.poll(Time::ZERO, &mut Vec::new());
            if let Ok(count) = added.read(&mut piece) {
                got.extend_from_slice(&piece[..count]);
            }
        }
        let answer = Reply::next(&mut got.split_off(WELCOME)).unwrap();
        assert!(matches!(answer, Some(Reply::Answer { verdict: Verdict::Revoked, .. })), "{answer:?}");
        let mut bytes = vec![1; 4096];
        arena.read(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn a_guest_speaks_only_for_the_metadata_of_which_its_hello_has_the_hash() {
        let arena = Arena::new(4096).unwrap();
        let (mut transport, _guest, token) = served(&arena);
        until_a_guest_is_here(&mut transport);
        let addresses = vec![transport.local_addr()];
        let metadata = Metadata { token, addresses, regions: vec![4096], tls: false }.encode().unwrap();
        let guest = transport.guests.of(token)[0];
        assert!(
            !transport.may_speak_for(Origin(guest), &metadata),
            "the same life, with another table of regions"
        );
        transport.guests.get_mut(guest).unwrap().from = Identity::of(token, &metadata);
        assert!(transport.may_speak_for(Origin(guest), &metadata));
        assert!(!transport.may_speak_for(Origin(guest + 1), &metadata), "another connection");
    }

    #[test]
    fn frames_that_the_owner_has_not_taken_are_bounded_whatever_a_guest_sends() {
        let arena = Arena::new(4096).unwrap();
        let (mut transport, mut guest, _) = served(&arena);
        let frames: Vec<u8> = (0..5000).flat_map(|_| message::frame(0)).collect();
        let mut rest = &frames[..];
        let deadline = Instant::now() + Duration::from_secs(60);
        // The owner is told nothing yet.
        let mut turns = 0;
        while turns < 100 {
            assert!(Instant::now() < deadline);
            if let Ok(written) = guest.write(rest) {
                rest = &rest[written..];
            }
            transport.serve_sockets();
            turns += usize::from(transport.posts.events() >= EVENTS);
        }
        // What is read at once, beside what was read before.
        let at_once = 2 * MESSAGES / HEADER;
        assert!(transport.posts.events() <= EVENTS + at_once, "{}", transport.posts.events());
        let mut events = Vec::new();
        while events.len() < 5000 {
            assert!(Instant::now() < deadline, "{} frames", events.len());
            if let Ok(written) = guest.write(rest) {
                rest = &rest[written..];
            }
            transport.poll(Time::ZERO, &mut events);
        }
    }

    #[test]
    fn requests_that_have_come_when_a_connection_gets_full_are_served_once_it_is_not() {
        const PAGE: usize = 4096;
        let arena = Arena::new(PAGE).unwrap();
        let (mut transport, mut guest, _) = served(&arena);
        let until = clock::now() + Duration::from_secs(3600);
        let mut asked = 0;
        let mut ask = |guest: &mut TcpStream, count: u32| {
            let request = |number| {
                let ranges = vec![Range { region: 0, len: PAGE as u32, offset: 0 }];
                message::read(&Asked { number, until, ranges, bytes: PAGE as u64 })
            };
            let requests: Vec<u8> = (asked..asked + count).flat_map(request).collect();
            guest.write_all(&requests).unwrap();
            asked += count;
        };
        let deadline = Instant::now() + Duration::from_secs(30);
        let queued =
            |transport: &TcpTransport| transport.connections.values().map(|it| it.outbound.len()).max();
        // The guest takes nothing, so that what the kernel does not keep waits here.
        while queued(&transport).unwrap_or(0) < QUEUED - 100 {
            assert!(Instant::now() < deadline, "{:?}", queued(&transport));
            ask(&mut guest, 1);
            transport.poll(Time::ZERO, &mut Vec::new());
        }
        // These come at once, and some of them are too many.
        ask(&mut guest, 300);
        while !transport.connections.values().any(is_full) {
            assert!(Instant::now() < deadline, "{:?}", queued(&transport));
            transport.poll(Time::ZERO, &mut Vec::new());
        }
        let (mut got, mut piece) = (0, vec![0; 64 << 10]);
        let wanted = WELCOME + asked as usize * (2 * HEADER + PAGE);
        while got < wanted {
            assert!(Instant::now() < deadline, "{got} of {wanted} bytes");
            transport.poll(Time::ZERO, &mut Vec::new());
            match guest.read(&mut piece) {
                Ok(count) => got += count,
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
        }
        assert_eq!(got, wanted);
    }
}
