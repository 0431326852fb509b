//! What arrives: notifications (by NIXL or as datagrams) and rings; and the deaths of peers on this host.

use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::time::Instant;

use bytes::Bytes;
use kv_core::{MAX_FRAME, TransportEvent};
use kv_host::wake::Announced;
use rustix::event::{Timespec, epoll};

use crate::agent::name::is_of_a_transport;
use crate::connections::id::RemoteId;
use crate::connections::origins::Origins;
use crate::connections::remote::Remote;
use crate::notifications::arrivals::Arrivals;
use crate::notifications::envelope::{Answer, Kind, Notification};
use crate::notifications::inbox::{Inbox, Put};
use crate::transport::{NixlStats, NixlTransport};

impl NixlTransport {
    /// Takes the notifications and the rings that have arrived.
    pub(crate) fn take_notifications(&mut self) {
        let mut intake = Intake {
            token: self.token,
            names: &self.names,
            remotes: &mut self.remotes,
            arrivals: &mut self.arrivals,
            origins: &mut self.origins,
            inbox: &mut self.inbox,
            events: &mut self.events,
            announced: &mut self.announced,
            stats: &mut self.stats,
            after: After::default(),
        };
        let mut take_datagrams = |intake: &mut Intake<'_>| {
            let Some(datagrams) = self.datagrams.as_mut() else { return };
            intake.after.heard |= datagrams.take(|name, part| match part {
                Some(part) => intake.take_datagram(name, &part),
                None => intake.take_announcement(name),
            });
        };
        take_datagrams(&mut intake);
        // An error is of one backend's moment, and comes again if it lasts: sends will fail.
        let _ = self.engine.receive(|name, bytes| intake.take(name, bytes));
        if !intake.after.leaving.is_empty() {
            // What was sent before a farewell is there by now.
            take_datagrams(&mut intake);
        }
        let After { heard, due, confirmed, asked, answered, leaving } = intake.after;
        if heard {
            self.pace.stir();
        }
        for (name, connection, count) in due {
            if let Some(id) = self.names.get(&name) {
                self.confirm(*id, connection, count);
            }
        }
        for (id, count) in confirmed {
            if let Some(dialogue) = self.remotes.get_mut(&id).and_then(Remote::dialogue) {
                dialogue.confirm(count);
                self.flush(id);
            }
        }
        // This thread is out of NIXL's progress now, in which it takes what others write.
        for (id, (connection, number)) in asked {
            self.answer(id, Answer { asked: connection, number });
        }
        for (id, number) in answered {
            if let Some(remote) = self.remotes.get_mut(&id) {
                remote.lead.answer(number, Instant::now());
                self.stand_in_line(id);
            }
        }
        for (name, id) in leaving {
            let named = self.remotes.get_mut(&id).filter(|remote| remote.name == name);
            if let Some(dialogue) = named.and_then(Remote::dialogue) {
                dialogue.said_farewell = true;
                self.break_off(id);
            }
        }
    }

    /// Takes the deaths of peers on this host.
    pub(crate) fn take_deaths(&mut self) {
        let nothing = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut woken = [nothing; 16];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok(count) = epoll::wait(&self.wakes, &mut woken[..], Some(&now)) else { return };
        for event in woken.iter().take(count) {
            let id = RemoteId(event.data.u64());
            if self.remotes.contains_key(&id) {
                // It stays dead; it need not be reported again.
                self.watch_no_more(id);
                self.break_off(id);
            }
        }
    }
}

/// Where notifications go as they arrive.
struct Intake<'a> {
    token: u64,
    names: &'a HashMap<String, RemoteId>,
    remotes: &'a mut BTreeMap<RemoteId, Remote>,
    arrivals: &'a mut Arrivals,
    origins: &'a mut Origins,
    inbox: &'a mut Inbox,
    events: &'a mut Vec<TransportEvent>,
    announced: &'a mut Announced<RemoteId>,
    stats: &'a mut NixlStats,
    after: After,
}

/// What remains to be done once all notifications have been taken.
#[derive(Default)]
struct After {
    /// NIXL had at least one notification for this transport, or a peer has rung.
    heard: bool,
    /// Agents that are to be told a count: name, connection, bytes.
    due: Vec<(String, u64, u64)>,
    /// Counts that peers have confirmed, by connection.
    confirmed: Vec<(RemoteId, u64)>,
    /// Peers that ask whether this thread has come so far: the number of each peer's connection, and its last question.
    asked: HashMap<RemoteId, (u64, u64)>,
    /// Peers' answers, by connection.
    answered: Vec<(RemoteId, u64)>,
    /// Agents that say farewell, and the connections to them that they name.
    leaving: Vec<(String, RemoteId)>,
}

impl Intake<'_> {
    fn take(&mut self, name: &str, bytes: Bytes) {
        let known = self.names.get(name).and_then(|id| self.remotes.get(id));
        let foreign = known.map(Remote::is_foreign);
        // An agent whose name no transport has is foreign, whatever the agent says: its name may have any length.
        let speaks = foreign != Some(true) && is_of_a_transport(name);
        let ours = if speaks { Notification::decode(&bytes) } else { None };
        let Some(Notification { connection, kind, .. }) = ours.filter(|ours| ours.to == self.token) else {
            // Not of an agent of ours, which does not speak like this.
            let put = if foreign == Some(false) { Put::Unwanted } else { self.inbox.put(name, bytes) };
            match put {
                Put::Taken => self.after.heard = true,
                Put::Dropped => self.stats.foreign_dropped += 1,
                Put::Unwanted => self.stats.strangers += 1,
            }
            return;
        };
        self.after.heard = true;
        self.take_ours(name, connection, kind);
    }

    /// Takes note that an agent will send a datagram soon.
    fn take_announcement(&mut self, name: &str) {
        let Some(id) = self.names.get(name) else { return };
        let known = self.remotes.get_mut(id).filter(|remote| remote.is_open());
        if known.and_then(Remote::dialogue).is_some_and(|dialogue| mem::take(&mut dialogue.may_be_woken)) {
            self.announced.announce(*id);
        }
    }

    /// Takes a notification that came as a datagram: all but frames and confirmations come by NIXL.
    fn take_datagram(&mut self, name: &str, bytes: &Bytes) {
        let foreign =
            self.names.get(name).and_then(|id| self.remotes.get(id)).is_some_and(Remote::is_foreign);
        match Notification::decode(bytes) {
            Some(Notification { to, connection, kind: kind @ (Kind::Frame(_) | Kind::Arrived(_)) })
                if to == self.token && !foreign =>
            {
                self.take_ours(name, connection, kind);
            }
            _ => self.stats.strangers += 1,
        }
    }

    /// Counts what has arrived on a connection, and notes the count that is to be confirmed.
    fn arrived(&mut self, name: &str, connection: u64, len: usize) {
        if let Some(count) = self.arrivals.count(connection, name, len) {
            self.after.due.push((name.to_owned(), connection, count));
        }
    }

    fn take_ours(&mut self, name: &str, connection: u64, kind: Kind) {
        // It may be forged, but by nobody who gains by it: a farewell that names a wrong number is
        // not believed, and the end is seen otherwise.
        let mut origin = None;
        let id = self.names.get(name);
        if let Some((id, remote)) = id.and_then(|id| Some((id, self.remotes.get_mut(id)?))) {
            self.announced.came(id);
            origin = Some(remote.origin);
            if let Some(dialogue) = remote.dialogue()
                && matches!(kind, Kind::Frame(_) | Kind::Probe)
            {
                dialogue.theirs = Some(connection);
                (dialogue.may_wake, dialogue.may_be_woken) = (true, true);
            }
        }
        match kind {
            Kind::Frame(frame) if frame.len() <= MAX_FRAME => {
                self.arrived(name, connection, frame.len());
                let from = origin.unwrap_or_else(|| self.origins.of(name));
                self.events.push(TransportEvent::Frame { from, frame });
            }
            Kind::Arrived(count) => self.after.confirmed.push((RemoteId(connection), count)),
            Kind::Ask(number) => {
                if let Some(id) = id {
                    let last = self.after.asked.entry(*id).or_insert((connection, number));
                    let before = if last.0 == connection { last.1 } else { 0 };
                    *last = (connection, number.max(before));
                }
            }
            Kind::Answer(Answer { asked, number }) => {
                self.arrived(name, connection, Answer::LEN);
                self.after.answered.push((RemoteId(asked), number));
            }
            Kind::Farewell(proof) => self.after.leaving.push((name.to_owned(), RemoteId(proof))),
            Kind::Frame(_) | Kind::Probe => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    use kv_core::{Op, Origin, PeerId, PostId, Transport, TransportError, WayEnd};
    use kv_host::{Life, Process};
    use rustix::event::{PollFd, PollFlags};
    use rustix::io::{FdFlags, fcntl_setfd};

    use super::*;
    use crate::agent::engine::Engine;
    use crate::config::NixlConfig;
    use crate::connections::transport_metadata::TransportMetadata;
    use crate::notifications::datagrams::PeerSocket;
    use crate::notifications::speech::Speech;
    use crate::testing::{LEN, PEER, nixl, others, pass, until, whole, worker};

    const FRAME: &[u8] = b"frame";

    fn frames(events: &[TransportEvent]) -> Vec<Origin> {
        let frames = events.iter().filter_map(|event| match event {
            TransportEvent::Frame { from, frame } if *frame == FRAME => Some(*from),
            _ => None,
        });
        frames.collect()
    }

    /// A third agent that calls itself as the victim does, knows the numbers in which the victim's
    /// metadata and the transport's differ, and says goodbye for it in the middle of the victim's write.
    #[test]
    fn a_farewell_in_another_agents_name_ends_nothing_and_its_own_ends_it() {
        let Some(nixl) = nixl() else { return };
        let ((mut here, ours), (mut victim, theirs)) = (worker(nixl), worker(nixl));
        theirs.write(0, &vec![7; LEN]).unwrap();
        let (metadata, metadata_of_victim) = (here.metadata().unwrap(), victim.metadata().unwrap());
        here.connect(PEER, &metadata_of_victim).unwrap();
        victim.connect(PEER, &metadata).unwrap();
        let knows = |speech: &Speech| matches!(speech, Speech::Ours(said) if said.theirs.is_some());
        let told = |victim: &NixlTransport| victim.remotes.values().all(|remote| knows(&remote.speech));
        until(&mut [&mut victim, &mut here], "both know each other", |victim, _| told(victim));
        until(&mut [&mut here, &mut victim], "both know each other", |here, _| told(here));

        let name = &here.remotes.values().next().unwrap().name;
        let config =
            NixlConfig { backend_params: here.config.backend_params.clone(), ..NixlConfig::default() };
        let mut impostor = Engine::new(nixl, name, &config).unwrap();
        let decoded = TransportMetadata::decode(&metadata).unwrap();
        let target = impostor.load(&decoded.nixl).unwrap();
        // What the victim calls its connection to us, were that to leak, is not enough.
        let (victims, guess) = (victim.remotes.keys().next().unwrap().0, 1234);
        for (connection, proof) in
            [(guess, guess), (victims, victims), (victims, 0), (victims, decoded.token)]
        {
            let forged = Notification { to: decoded.token, connection, kind: Kind::Farewell(proof) };
            impostor.notify(&target, &forged.encode()).unwrap();
        }
        let last = Kind::Frame(Bytes::from_static(FRAME));
        let last = Notification { to: decoded.token, connection: guess, kind: last };
        impostor.notify(&target, &last.encode()).unwrap();
        victim.post(PEER, whole(1, Op::Write)).unwrap();
        let mut events = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(60);
        while frames(&events).is_empty() {
            assert!(Instant::now() < deadline, "the impostor is not heard");
            let _ = impostor.receive(|_, _| {});
            events.extend(pass(&mut [&mut here], Duration::from_millis(10)));
        }
        assert_eq!(events.len(), 1, "{events:?}");
        assert_eq!(others(&ours, 0), 0, "the victim is about to write");
        victim.permit(PEER, kv_core::Time::MAX);
        let written = until(&mut [&mut victim, &mut here], "a write", |_, events| !events.is_empty());
        assert_eq!(written, [TransportEvent::Posted { post: PostId(1), result: Ok(()) }]);
        assert_eq!(others(&ours, 7), 0, "it lives, and has written");

        // The impostor has made the victim's number unknown to us by its frame; nothing of ours.
        victim.shutdown(Duration::from_secs(1));
        victim.say_farewell();
        let events = until(&mut [&mut here, &mut victim], "the farewell", |_, events| !events.is_empty());
        let end = WayEnd::Dead { quiet_after: Duration::ZERO };
        assert_eq!(events, [TransportEvent::PeerGone { peer: PEER, end }]);
    }

    /// A farewell is the proof that no request is on its way: it comes behind the requests, by NIXL, or not at all.
    #[test]
    fn of_what_comes_as_datagrams_only_frames_and_confirmations_for_this_transport_are_heard() {
        let Some(nixl) = nixl() else { return };
        let ((mut here, _), (mut there, _)) = (worker(nixl), worker(nixl));
        here.connect(PEER, &there.metadata().unwrap()).unwrap();
        there.connect(PEER, &here.metadata().unwrap()).unwrap();
        let (id, origin) = here.remotes.iter().map(|(id, remote)| (*id, remote.origin)).next().unwrap();
        here.send(PEER, Bytes::from_static(FRAME)).unwrap();
        until(&mut [&mut there, &mut here], "a frame", |_, events| frames(events).len() == 1);
        let token = here.token;
        let frame = || Kind::Frame(Bytes::from_static(FRAME));
        let notification = |to, connection, kind| Notification { to, connection, kind }.encode();
        let mut socket = PeerSocket::new(there.token, token, true).unwrap();
        for ignored in [
            notification(token, 1, Kind::Farewell(id.0)),
            notification(token, 1, Kind::Probe),
            notification(token ^ 1, 1, frame()),
            b"no notification".to_vec(),
            notification(token, 1, frame()),
            notification(token, id.0, Kind::Arrived(u64::MAX)),
        ] {
            socket.put(&ignored);
        }
        socket.send().unwrap();
        let events = until(&mut [&mut here], "the frame", |_, events| !events.is_empty());
        let events = [events, pass(&mut [&mut here, &mut there], Duration::from_millis(50))].concat();
        assert_eq!(events, [TransportEvent::Frame { from: origin, frame: Bytes::from_static(FRAME) }]);
        assert_eq!(here.stats().strangers, 4);
        let Some(Speech::Ours(dialogue)) = here.remotes.get(&id).map(|remote| &remote.speech) else {
            panic!()
        };
        assert!(dialogue.confirmed > 0 && dialogue.confirmed == dialogue.sent && !dialogue.said_farewell);
    }

    #[test]
    fn answers_to_a_peer_that_takes_none_are_bounded_like_frames_and_go_on_when_it_does() {
        let Some(nixl) = nixl() else { return };
        let ((mut here, _), (mut there, _)) = (worker(nixl), worker(nixl));
        here.connect(PEER, &there.metadata().unwrap()).unwrap();
        there.connect(PEER, &here.metadata().unwrap()).unwrap();
        pass(&mut [&mut here, &mut there], Duration::from_millis(100));
        let (id, most) = (*here.remotes.keys().next().unwrap(), here.config.outbound_bytes as u64);
        let open = |here: &NixlTransport| match &here.remotes[&id].speech {
            Speech::Ours(dialogue) => dialogue.sent - dialogue.confirmed,
            Speech::Foreign(_) => panic!("a foreign agent"),
        };
        let flood = most / Answer::LEN as u64;
        (0..flood).for_each(|number| here.answer(id, Answer { asked: 1, number }));
        let unconfirmed = open(&here);
        assert!(unconfirmed <= most && unconfirmed > most - 1000, "{unconfirmed} of {most} bytes");
        assert_eq!(here.send(PEER, Bytes::from(vec![1; 1000])), Err(TransportError::WouldBlock));
        // Less is open than the peer confirms at once: the peer has taken all, and is answered again.
        until(&mut [&mut here, &mut there], "confirmations", |here, _| open(here) < 600 << 10);
        here.send(PEER, Bytes::from_static(FRAME)).unwrap();
        until(&mut [&mut there, &mut here], "a frame", |_, events| frames(events).len() == 1);
    }

    /// Two processes: one is taken for the process of the transport's peer, and the other has inherited the descriptor by
    /// which the transport sees the end of the first.
    fn processes_for(here: &mut NixlTransport) -> [Child; 2] {
        let sleep = || Command::new("sleep").arg("60").spawn().unwrap();
        let peer = sleep();
        let process = Process::open(peer.id() as i32).unwrap();
        let (id, remote) = here.remotes.iter_mut().next().unwrap();
        epoll::add(&here.wakes, &process, epoll::EventData::new_u64(id.0), epoll::EventFlags::IN).unwrap();
        fcntl_setfd(&process, FdFlags::empty()).unwrap();
        remote.life = Life::Watched(process);
        [peer, sleep()]
    }

    fn end(mut process: Child) {
        process.kill().unwrap();
        process.wait().unwrap();
    }

    /// Closing the descriptor is not enough: a transport that was woken by it would never sleep again.
    #[test]
    fn the_end_of_a_process_wakes_once_although_a_child_has_inherited_its_descriptor() {
        let Some(nixl) = nixl() else { return };
        for way in
            ["dies", "dies while a request is under way", "dies as it is lost", "dies after its connection"]
        {
            let ((mut here, _), (mut there, _)) = (worker(nixl), worker(nixl));
            here.connect(PEER, &there.metadata().unwrap()).unwrap();
            pass(&mut [&mut here, &mut there], Duration::from_millis(100));
            if way == "dies while a request is under way" {
                here.post(PEER, whole(1, Op::Read)).unwrap();
                until(&mut [&mut here], "a request", |here, _| !here.requests.is_empty());
            }
            let [dying, heir] = processes_for(&mut here);
            if way == "dies after its connection" {
                here.disconnect(PEER);
                until(&mut [&mut here], "the end", |here, _| here.remotes.is_empty());
            }
            end(dying);
            if way == "dies as it is lost" {
                here.break_off(*here.remotes.keys().next().unwrap());
                here.end_connections(Instant::now());
            }
            here.poll(kv_core::Time::ZERO, &mut Vec::new());
            let mut woken = [PollFd::new(&here.wakes, PollFlags::IN)];
            assert_eq!(
                rustix::event::poll(&mut woken, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })),
                Ok(0),
                "{way}"
            );
            until(&mut [&mut here, &mut there], "the end", |here, _| here.remotes.is_empty());
            end(heir);
        }
    }

    /// They are in the reader's socket before the process can end, but a look may have been over just then.
    #[test]
    fn the_last_datagrams_of_a_peer_come_before_its_death() {
        let Some(nixl) = nixl() else { return };
        let ((mut here, _), (mut there, _)) = (worker(nixl), worker(nixl));
        here.connect(PEER, &there.metadata().unwrap()).unwrap();
        there.connect(PEER, &here.metadata().unwrap()).unwrap();
        pass(&mut [&mut here, &mut there], Duration::from_millis(100));
        let [dying, heir] = processes_for(&mut here);
        end(dying);
        let mut events = Vec::new();
        here.poll(kv_core::Time::ZERO, &mut events);
        assert_eq!(events, []);
        there.send(PEER, Bytes::from_static(FRAME)).unwrap();
        there.poll(kv_core::Time::ZERO, &mut Vec::new());
        let gone = WayEnd::Dead { quiet_after: Duration::ZERO };
        let events = until(&mut [&mut here], "the death", |_, events| !events.is_empty());
        assert_eq!(frames(&events).len(), 1, "{events:?}");
        assert_eq!(events[1..], [TransportEvent::PeerGone { peer: PEER, end: gone }]);
        end(heir);
    }

    /// Whatever number of a connection is written into a frame.
    #[test]
    fn frames_of_one_agent_have_one_origin_and_those_of_others_another() {
        let Some(nixl) = nixl() else { return };
        let ((mut here, _), (mut a, _), (mut b, _)) = (worker(nixl), worker(nixl), worker(nixl));
        let metadata = here.metadata().unwrap();
        let mut origins = Vec::new();
        for (round, other) in [(0, &mut a), (1, &mut b)] {
            other.connect(PEER, &metadata).unwrap();
            let (name, token) = (here.agent_name(), here.token);
            for connection in [1, 2, 1 << 62] {
                let frame =
                    Notification { to: token, connection, kind: Kind::Frame(Bytes::from_static(FRAME)) };
                other.engine.notify(&name, &frame.encode()).unwrap();
            }
            let events = until(&mut [&mut here, other], "frames", |_, events| frames(events).len() == 3);
            origins.extend(frames(&events));
            // Also once it is connected.
            here.connect(PeerId(10 + round), &other.metadata().unwrap()).unwrap();
            other.send(PEER, Bytes::from_static(FRAME)).unwrap();
            let events = until(&mut [&mut here, other], "a frame", |_, events| !events.is_empty());
            origins.extend(frames(&events));
        }
        let (a, b) = (origins[0], origins[4]);
        assert_ne!(a, b);
        assert_eq!(origins, [a, a, a, a, b, b, b, b]);
    }

    #[test]
    fn a_frame_of_an_agent_whose_name_no_transport_has_is_neither_reported_nor_counted() {
        let Some(nixl) = nixl() else { return };
        let (mut here, _) = worker(nixl);
        let metadata = TransportMetadata::decode(&here.metadata().unwrap()).unwrap();
        let config =
            NixlConfig { backend_params: here.config.backend_params.clone(), ..NixlConfig::default() };
        let mut stranger = Engine::new(nixl, &"x".repeat(300), &config).unwrap();
        let target = stranger.load(&metadata.nixl).unwrap();
        for connection in 1..=3 {
            let kind = Kind::Frame(Bytes::from_static(FRAME));
            let frame = Notification { to: metadata.token, connection, kind };
            stranger.notify(&target, &frame.encode()).unwrap();
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut events = Vec::new();
        while here.stats().strangers < 3 {
            assert!(Instant::now() < deadline && events.is_empty(), "{events:?}");
            let _ = stranger.receive(|_, _| {});
            events.extend(pass(&mut [&mut here], Duration::from_millis(10)));
        }
        assert!(events.is_empty(), "{events:?}");
        assert!(here.arrivals.is_empty(), "names of strangers would be kept for good");
    }
}
