//! How long the bytes of each request were on the wire, and when its reader was last heard of, as the
//! transport sees it.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_transfer::unstable::{
    Directions, Origin, Post, Transport, TransportEvent, TransportOffer, TransportWait, WriteFence,
};
use kv_transfer::{PeerId, PostId, Region, RegionRole, Time, TransportError};

use super::heartbeats::Heartbeats;

/// A transport that notes when each data operation began and ended. Workers take any [`Transport`], so that a
/// server can put a transport of its own in between.
pub struct TimedTransport<P> {
    inner: P,
    log: WireLog,
    heartbeats: Heartbeats,
    /// Bytes of a page in each region; `None` where items are no pages.
    page_bytes: Vec<Option<u64>>,
    posts: HashMap<PostId, (u32, Transfer)>,
}

/// The notes of a [`TimedTransport`], by the first page that an operation touches. Clones share one record.
#[derive(Clone, Default)]
pub struct WireLog(Arc<Mutex<BTreeMap<u32, Vec<Transfer>>>>);

/// The notes on one data operation.
struct Transfer {
    bytes: u64,
    from: Instant,
    to: Instant,
}

/// All data operations of a request.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wire {
    /// The number of bytes that the operations moved.
    pub bytes: u64,
    /// The time in which at least one of the operations was in flight.
    pub busy: Duration,
}

impl<P> TimedTransport<P> {
    /// A transport that passes everything to `inner`, and notes it in `log` and `heartbeats`.
    pub fn new(inner: P, log: WireLog, heartbeats: Heartbeats) -> TimedTransport<P> {
        TimedTransport { inner, log, heartbeats, page_bytes: Vec::new(), posts: HashMap::new() }
    }

    /// The page of the first descriptor that is in one.
    fn first_page(&self, post: &Post) -> Option<u32> {
        post.descriptors.iter().find_map(|descriptor| {
            let page_bytes = (*self.page_bytes.get(descriptor.local_region as usize)?)?;
            u32::try_from(descriptor.local_offset / page_bytes).ok()
        })
    }
}

impl WireLog {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Vec<Transfer>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The notes on the request that has these pages, from `since` on. The entries are removed. To be called
    /// when the transfer is over, and before the pages go to another request.
    pub fn take(&self, pages: &[u32], since: Option<Instant>) -> Wire {
        let mut log = self.lock();
        let transfers = pages.iter().filter_map(|page| log.remove(page)).flatten();
        let mut transfers: Vec<Transfer> =
            transfers.filter(|transfer| since.is_none_or(|since| transfer.from >= since)).collect();
        transfers.sort_by_key(|transfer| transfer.from);
        let mut wire = Wire::default();
        let mut end = None;
        for Transfer { bytes, from, to } in transfers {
            wire.bytes += bytes;
            // Operations that overlap count once.
            let from = end.map_or(from, |end| from.max(end));
            wire.busy += to.saturating_duration_since(from);
            end = Some(end.map_or(to, |end| to.max(end)));
        }
        wire
    }
}

impl<P: Transport> Transport for TimedTransport<P> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn directions(&self, peer: Option<PeerId>) -> Directions {
        self.inner.directions(peer)
    }

    fn register(&mut self, region: &Region) -> Result<(), TransportError> {
        let pages = region.role == RegionRole::Kv;
        self.page_bytes.push(pages.then_some(region.item_len).filter(|bytes| *bytes > 0));
        self.inner.register(region)
    }

    fn metadata(&self) -> Result<Bytes, TransportError> {
        self.inner.metadata()
    }

    fn offers(&self) -> Result<Vec<TransportOffer>, TransportError> {
        self.inner.offers()
    }

    fn connect_by(&mut self, peer: PeerId, transport: &TransportOffer) -> Result<(), TransportError> {
        self.inner.connect_by(peer, transport)
    }

    fn may_speak_by(&self, from: Origin, transport: &TransportOffer) -> bool {
        self.inner.may_speak_by(from, transport)
    }

    fn connect(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), TransportError> {
        self.inner.connect(peer, metadata)
    }

    fn may_speak_for(&self, from: Origin, metadata: &[u8]) -> bool {
        self.inner.may_speak_for(from, metadata)
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.inner.disconnect(peer);
    }

    fn send(&mut self, peer: PeerId, frame: Bytes) -> Result<(), TransportError> {
        self.inner.send(peer, frame)
    }

    fn post(&mut self, peer: PeerId, post: Post) -> Result<(), TransportError> {
        let (id, page) = (post.id, self.first_page(&post));
        let bytes = post.descriptors.iter().map(|descriptor| descriptor.len).sum();
        let from = Instant::now();
        self.inner.post(peer, post)?;
        if let Some(page) = page {
            self.posts.insert(id, (page, Transfer { bytes, from, to: from }));
        }
        Ok(())
    }

    fn cancel(&mut self, post: PostId) {
        self.inner.cancel(post);
    }

    fn permit(&mut self, peer: PeerId, until: Time) {
        self.inner.permit(peer, until);
    }

    fn write_fence(&self, peer: PeerId) -> WriteFence {
        self.inner.write_fence(peer)
    }

    fn revoke(&mut self, peer: PeerId) {
        self.inner.revoke(peer);
    }

    fn poll(&mut self, now: Time, events: &mut Vec<TransportEvent>) {
        let before = events.len();
        self.inner.poll(now, events);
        for event in events.iter().skip(before) {
            if let TransportEvent::Frame { frame, .. } = event {
                self.heartbeats.note(frame);
            }
            if let TransportEvent::Posted { post, result } = event
                && let Some((page, transfer)) = self.posts.remove(post)
                && result.is_ok()
            {
                let transfer = Transfer { to: Instant::now(), ..transfer };
                self.log.lock().entry(page).or_default().push(transfer);
            }
        }
    }

    fn wait(&self) -> TransportWait {
        self.inner.wait()
    }
}

/// For workers of other dialects, whose peers are agents of other programs.
#[cfg(feature = "interop")]
impl<P: kv_transfer::interop::Agents> kv_transfer::interop::Agents for TimedTransport<P> {
    fn agent_name(&self) -> String {
        self.inner.agent_name()
    }

    fn agent_metadata(&self) -> Result<Bytes, TransportError> {
        self.inner.agent_metadata()
    }

    fn connect_agent(
        &mut self,
        peer: PeerId,
        metadata: &[u8],
        regions: &[kv_transfer::interop::message::AgentRegion],
    ) -> Result<(), TransportError> {
        self.inner.connect_agent(peer, metadata, regions)
    }

    fn next_notification(&mut self) -> Option<(Arc<str>, Bytes)> {
        self.inner.next_notification()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_operations_count_their_time_once_and_are_taken_once() {
        let log = WireLog::default();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        for (page, from, to) in [(3, 0, 10), (4, 5, 20), (4, 6, 7), (9, 30, 35), (50, 0, 99)] {
            let transfer = Transfer { bytes: 100, from: at(from), to: at(to) };
            log.lock().entry(page).or_default().push(transfer);
        }
        let wire = log.take(&[2, 3, 4, 9], None);
        assert_eq!((wire.bytes, wire.busy), (400, Duration::from_millis(25)));
        assert_eq!(log.take(&[2, 3, 4, 9], None).bytes, 0);
        assert_eq!(log.take(&[50], Some(at(1))).bytes, 0);
    }
}
