//! Requests to NIXL are started in turns, and watched until they end. `slices` chooses the content of
//! requests; `settle` decides what becomes of their posts.

use std::time::{Duration, Instant};

use kv_core::TransportError;

use crate::agent::engine::{Progress, Started};
use crate::connections::id::RemoteId;
use crate::connections::route::Route;
use crate::transfers::line::Length;
use crate::transfers::request::Request;
use crate::transfers::speed::Stopwatch;
use crate::transport::NixlTransport;

/// One call of `poll` starts requests of short posts until a slice's time divided by this number has passed.
const SHORT_TIME: u32 = 8;
/// One call of `poll` starts requests of long posts until a slice's time divided by this number has passed.
const START_TIME: u32 = 3;
/// How long a turn waits for the end of copies before a long request is started.
const PROMPT: Duration = Duration::from_micros(100);

impl NixlTransport {
    /// Starts requests, peer after peer: first of short posts, then of long posts, and at least one long
    /// request in every other turn. All of it takes about the time of a slice.
    pub(crate) fn start_requests(&mut self) {
        let begun = Instant::now();
        let time = self.config.slice_time;
        // Nothing long waits for the end of the short ones: fewer turns.
        let short = if self.line.of(Length::Long).is_empty() { START_TIME } else { SHORT_TIME };
        for (length, time) in [(Length::Short, time / short), (Length::Long, time / START_TIME)] {
            if length == Length::Long && !self.line.of(Length::Long).is_empty() {
                self.see_copies_end();
                // What has come or ended is told first, but not in two turns without a long post.
                self.line.long_waited = !self.line.long_waited && !self.events.is_empty();
                if self.line.long_waited {
                    return;
                }
            }
            while let Some(id) = self.line.of(length).pop_front() {
                if let Some(remote) = self.remotes.get_mut(&id) {
                    remote.run.of(length).in_line = false;
                    if remote.is_open() && remote.has_turn(length) {
                        self.start_one(id, length);
                    }
                    self.stand_in_line(id);
                }
                if begun.elapsed() >= time {
                    break;
                }
            }
        }
    }

    /// Waits a moment for copies that are as good as done. A copy between processes is over when its post
    /// returns, but UCX may say so only when what NIXL has sent before has arrived; the owner should not learn of the
    /// copy behind a long slice.
    fn see_copies_end(&mut self) {
        let begun = Instant::now();
        let near = |request: &Request| {
            if request.failed.is_some() {
                return false;
            }
            let remote = self.remotes.get(&request.parts.remote);
            remote.is_some_and(|remote| remote.route == Route::Memory)
        };
        let copies = self.requests.iter().filter(|request| near(request)).count();
        let others = self.requests.len() - copies;
        while self.requests.len() > others && begun.elapsed() < PROMPT {
            self.check_requests();
        }
    }

    /// Starts one request of the posts that wait at this peer.
    fn start_one(&mut self, id: RemoteId, length: Length) {
        let watch = Stopwatch::start();
        let Some((made, parts)) = self.next_request(id, length, watch.started()) else { return };
        let Some(remote) = self.remotes.get_mut(&id) else { return };
        let request = match made.request {
            Ok(request) => request,
            Err(error) => {
                // NIXL drops what it knows of a peer when its connection has failed.
                let known = remote.route == Route::Storage || self.engine.knows(&remote.name);
                let error = if known { TransportError::from(error) } else { TransportError::PeerGone };
                if !known {
                    self.break_off(id);
                }
                self.finish(&parts, Some(error));
                return;
            }
        };
        // Over TCP, the processor of the peer puts the bytes in place, or sends them.
        let asked =
            if remote.route == Route::Tcp { remote.lead.begin(parts.load, watch.started()) } else { None };
        self.stats.requests += 1;
        self.stats.requests_by_number += u64::from(made.by_number);
        self.stats.descriptors += made.descriptors;
        self.stats.bytes += made.bytes;
        let (handle, failed) = match self.engine.start(request) {
            Started::Done => {
                remote.speed(parts.op).measured(parts.weight, watch.took(), watch.started().elapsed());
                self.finish(&parts, None);
                self.ask(id, asked);
                return;
            }
            Started::InFlight(handle) => (handle, false),
            Started::Failed(handle) => (handle, true),
        };
        self.pace.stir();
        remote.requests += 1;
        remote.load += parts.load;
        remote.underway += parts.weight;
        self.requests.push(Request { handle: Some(handle), parts, failed: None });
        if failed {
            self.fail(self.requests.len() - 1);
        }
        self.ask(id, asked);
    }

    /// Takes note that NIXL calls a request failed. The connection ends with that, but the request may go on:
    /// NIXL goes by the last of its descriptors, and by none once another request of the connection has
    /// failed. The posts of the request end with the connection.
    fn fail(&mut self, index: usize) {
        let Some(request) = self.requests.get_mut(index) else { return };
        request.failed = Some(Instant::now());
        let id = request.parts.remote;
        let Some(remote) = self.remotes.get_mut(&id) else { return };
        remote.failed += 1;
        if remote.route != Route::Storage {
            self.break_off(id);
        }
    }

    /// Whether a failed request of a file has been kept long enough. No connection ends with such a request:
    /// its other descriptors go on in the kernel, which answers for them into NIXL's request: both are kept
    /// for a while.
    fn file_is_quiet(&self, request: &Request, failed: Instant) -> bool {
        let remote = self.remotes.get(&request.parts.remote);
        remote.is_some_and(|remote| remote.route == Route::Storage) && failed.elapsed() >= self.config.settle
    }

    /// Looks at the states of all requests.
    pub(crate) fn check_requests(&mut self) {
        let mut index = 0;
        while let Some(request) = self.requests.get(index) {
            if let Some(failed) = request.failed {
                if self.file_is_quiet(request, failed) {
                    let (call, status) = ("post_xfer_req", "the file system refused");
                    let error = TransportError::Backend { call, status, code: None };
                    let parts = self.take_over(index);
                    self.finish(&parts, Some(error));
                } else {
                    index += 1;
                }
                continue;
            }
            match request.handle.as_ref().map(|handle| self.engine.progress(handle)) {
                None | Some(Progress::InFlight) => index += 1,
                Some(Progress::Failed) => {
                    self.pace.stir();
                    self.fail(index);
                    index += 1;
                }
                Some(Progress::Done) => {
                    self.pace.stir();
                    let parts = self.take_over(index);
                    if let Some(remote) = self.remotes.get_mut(&parts.remote) {
                        remote.speed(parts.op).ended(parts.weight, parts.started, Instant::now());
                    }
                    self.finish(&parts, None);
                    self.stand_in_line(parts.remote);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use kv_core::{
        Descriptor, MemoryKind, Op, Post, PostId, Region, RegionRole, Transport, TransportEvent, WayEnd,
    };

    use kv_host::HostMemory;

    use super::*;
    use crate::config::NixlConfig;
    use crate::testing::{LEN, PEER, nixl, others, pass, until, whole, worker};

    /// Two workers; the first one's read of the second one's region, all sevens, is on its way, for the
    /// second one is not polled. Half of what is on its way is of a read that has been cancelled.
    fn reading() -> Option<[(NixlTransport, HostMemory); 2]> {
        let nixl = nixl()?;
        let ((mut here, ours), (mut there, theirs)) = (worker(nixl), worker(nixl));
        theirs.write(0, &vec![7; LEN]).unwrap();
        here.connect(PEER, &there.metadata().unwrap()).unwrap();
        here.post(PEER, whole(0, Op::Read)).unwrap();
        until(&mut [&mut here, &mut there], "a read", |_, events| !events.is_empty());
        here.post(PEER, whole(1, Op::Read)).unwrap();
        here.post(PEER, whole(2, Op::Read)).unwrap();
        until(&mut [&mut here], "requests", |here, _| here.requests.len() == 2);
        here.cancel(PostId(2));
        ours.write(0, &vec![1; LEN]).unwrap();
        Some([(here, ours), (there, theirs)])
    }

    fn posted(events: &[TransportEvent], post: u64, error: TransportError) -> bool {
        events.contains(&TransportEvent::Posted { post: PostId(post), result: Err(error) })
    }

    /// NIXL drops a peer when one request fails, and from then on calls the others failed without
    /// looking at them.
    #[test]
    fn requests_that_nixl_calls_failed_keep_their_posts_until_their_bytes_have_come() {
        let Some([(mut here, ours), (mut there, _theirs)]) = reading() else { return };
        let name = here.remotes.values().next().unwrap().name.clone();
        here.engine.forget(&name);
        let events = pass(&mut [&mut here], Duration::from_millis(100));
        assert_eq!((others(&ours, 1), events), (0, Vec::new()), "nothing has come, and nothing is over");
        assert_eq!(here.stats().unquiet, 2);

        let events = until(&mut [&mut here, &mut there], "an end", |here, _| here.peers.is_empty());
        assert!(others(&ours, 1) > 0, "the reads went on, or this shows nothing");
        assert_eq!(events.len(), 3, "{events:?}");
        assert!(posted(&events, 1, TransportError::PeerGone), "{events:?}");
        assert!(posted(&events, 2, TransportError::Cancelled), "{events:?}");
        assert!(events.contains(&TransportEvent::PeerGone { peer: PEER, end: WayEnd::Lost }), "{events:?}");
        ours.write(0, &vec![0xee; LEN]).unwrap();
        let events = pass(&mut [&mut here, &mut there], Duration::from_millis(300));
        assert_eq!((others(&ours, 0xee), events), (0, Vec::new()), "written after the end of its post");
        assert!(here.requests.is_empty() && here.stats().unquiet == 0);
    }

    /// NIXL's progress goes on for as long as something comes, and UCX confirms writes from inside of it. A peer whose
    /// thread is kept there serves nobody.
    #[test]
    fn writers_over_tcp_let_a_peers_thread_out_of_nixls_progress() {
        let Some(nixl) = nixl() else { return };
        let ((mut here, _ours), (mut there, _theirs)) = (worker(nixl), worker(nixl));
        here.connect(PEER, &there.metadata().unwrap()).unwrap();
        there.connect(PEER, &here.metadata().unwrap()).unwrap();
        here.permit(PEER, kv_core::Time::MAX);
        let mut post = 0;
        let mut keep_writing = |here: &mut NixlTransport| {
            while here.transfers.len() < 4 {
                post += 1;
                here.post(PEER, whole(post, Op::Write)).unwrap();
            }
        };
        let mut events = Vec::new();
        // Both threads run, and the peer answers.
        let begun = Instant::now();
        while here.stats().bytes < 32 * LEN as u64 {
            assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", here.stats());
            keep_writing(&mut here);
            here.poll(kv_core::Time::ZERO, &mut events);
            there.poll(kv_core::Time::ZERO, &mut Vec::new());
        }
        // From now on the peer's thread makes progress only, as inside of one call of NIXL.
        let (before, begun) = (here.stats().bytes, Instant::now());
        let mut last = begun;
        while !here.requests.is_empty() || last.elapsed() < Duration::from_millis(20) {
            assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", here.stats());
            keep_writing(&mut here);
            let written = here.stats().bytes;
            here.poll(kv_core::Time::ZERO, &mut events);
            let _ = there.engine.receive(|_, _| {});
            if here.stats().bytes > written {
                last = Instant::now();
                assert!(written - before < LEN as u64, "{} bytes, and it would go on", written - before);
            }
        }
        // It comes out, and all goes on.
        let goal = here.stats().bytes + 4 * LEN as u64;
        let begun = Instant::now();
        while here.stats().bytes < goal {
            assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", here.stats());
            keep_writing(&mut here);
            here.poll(kv_core::Time::ZERO, &mut events);
            there.poll(kv_core::Time::ZERO, &mut Vec::new());
        }
    }

    #[test]
    fn memory_under_a_request_stays_when_its_transport_and_its_owner_are_dropped() {
        let Some([(here, ours), (_there, _theirs)]) = reading() else { return };
        let (addr, mut bytes) = (ours.addr(), vec![0; LEN]);
        drop((here, ours));
        let memory = std::fs::File::open("/proc/self/mem").unwrap();
        memory.read_exact_at(&mut bytes, addr).expect("the peer may answer yet");
        assert!(bytes.iter().all(|byte| *byte == 1), "it is the memory of somebody else");
    }

    /// One piece was refused, the others are on their way, and the connection is as good as before.
    #[test]
    fn a_request_that_failed_on_a_working_connection_is_never_taken_for_quiet_by_time() {
        let Some([(mut here, ours), (mut there, _theirs)]) = reading() else { return };
        here.fail(0);
        let long = here.config.settle * 2;
        let events = pass(&mut [&mut here], long);
        assert!(!posted(&events, 1, TransportError::PeerGone), "{events:?}");
        let events = pass(&mut [&mut here, &mut there], long);
        assert!(!posted(&events, 1, TransportError::PeerGone), "{events:?}");
        assert!(others(&ours, 1) > 0, "the reads went on, or this shows nothing");
        drop(there);
        let events = until(&mut [&mut here], "the end", |here, _| here.peers.is_empty());
        assert!(posted(&events, 1, TransportError::PeerGone), "{events:?}");
        assert!(here.requests.is_empty() && here.stats().unquiet == 0);
    }

    /// The kernel goes on with its other pieces, and NIXL does not say when they have ended.
    #[test]
    fn a_failed_read_of_a_file_keeps_its_pages_for_a_while_also_when_forgotten() {
        let Some(nixl) = nixl() else { return };
        let path = std::env::temp_dir().join(format!("kv-nixl-failed-{}", std::process::id()));
        let file = std::fs::File::options().read(true).write(true).create(true).truncate(false).open(&path);
        let file = file.unwrap();
        file.set_len(LEN as u64).unwrap();
        std::fs::remove_file(&path).unwrap();
        let pool = HostMemory::new(LEN).unwrap();
        let settle = Duration::from_millis(300);
        let mut here = NixlTransport::new(nixl, NixlConfig { settle, ..NixlConfig::default() }).unwrap();
        here.add_memory(&pool).unwrap();
        let device = here.add_file(file).unwrap();
        let memory = Region::dram(RegionRole::Kv, pool.addr(), LEN as u64, 4096);
        here.register(&memory).unwrap();
        let in_file = Region::dram(RegionRole::Kv, 0, LEN as u64, 4096).memory(MemoryKind::File, device);
        here.register(&in_file).unwrap();
        here.connect(PEER, &here.metadata().unwrap()).unwrap();
        let descriptor = Descriptor { remote_region: 1, ..whole(1, Op::Read).descriptors[0] };
        here.post(PEER, Post { descriptors: vec![descriptor], ..whole(1, Op::Read) }).unwrap();
        until(&mut [&mut here], "a request", |here, events| !here.requests.is_empty() || !events.is_empty());
        assert!(!here.requests.is_empty(), "it has ended before it could fail");
        let failed = Instant::now();
        here.fail(0);
        here.disconnect(PEER);
        let events = until(&mut [&mut here], "the end", |_, events| !events.is_empty());
        assert!(failed.elapsed() >= settle, "{events:?}");
        assert!(
            matches!(events[..], [TransportEvent::Posted { post: PostId(1), result: Err(_) }]),
            "{events:?}"
        );
        pass(&mut [&mut here], Duration::from_millis(10));
        assert!(here.requests.is_empty() && here.remotes.is_empty());
    }
}
