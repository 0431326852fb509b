//! What a node knows about each peer.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;

use super::incoming::Attempts;
use super::permission::{WritesIn, WritesOut};
use super::read::of_life;
use super::rendezvous::Named;
use crate::args::RegionRole;
use crate::error::{Cause, Mismatch, PeerCause};
use crate::groups::GroupLists;
use crate::id::{Attempt, AuxIndex, Incarnation, PeerId, Room, SessionId, WorkerId};
use crate::layout::{Geometry, receivers_of};
use crate::lease::GrantRef;
use crate::meter::{each, step};
use crate::pages::PageList;
use crate::plan::{RegionMap, Side};
use crate::plane::{Directions, Origin};
use crate::time::Time;
use crate::wire::{Abort, Codec, Link};

/// Most layer ranges whose maps are kept for one peer.
const MAX_LAYER_MAPS: usize = 512;

/// Most attempts at a peer that were ended before it answered, and of which it is told when it does.
const MAX_RELEASING: usize = 4096;

/// One incarnation of a remote worker.
///
/// The conversation has a number on each side (`ours`, `theirs`). Under it, two independent halves:
/// *outgoing* attempts, in which this node receives and the peer serves, and *incoming* ones, in
/// which the peer receives and this node serves.
#[derive(Debug, Clone)]
pub(super) struct Peer {
    pub(super) worker: WorkerId,
    pub(super) incarnation: Incarnation,
    pub(super) geometry: Geometry,
    /// How many aux rows it has, and how many items of each state group: counted once.
    pub(super) aux_rows: u32,
    pub(super) group_items: Box<[u32]>,
    /// Why its cache does not fit this worker's.
    pub(super) mismatch: Option<Mismatch>,
    /// What this worker sends to it; `None` if the caches do not fit.
    pub(super) out: Option<RegionMap>,
    /// The same for some layers, as announcements have named them: made when first needed.
    pub(super) out_layers: BTreeMap<(u32, u32), RegionMap>,
    /// What it sends to this worker; `None` if the caches do not fit.
    pub(super) inward: Option<RegionMap>,
    /// How many ranks of this worker's engine it has to serve for a request.
    pub(super) ranks_served: u32,
    /// What the way to it is good for.
    pub(super) directions: Directions,
    /// How to reach its memory: with the incarnation, what tells it from all others.
    pub(super) metadata: Bytes,
    /// This worker has greeted it, and opens a lost way anew.
    pub(super) greeted: bool,
    /// This side's way to it is lost, and is to be opened again.
    pub(super) lost: bool,
    /// The transport connection that its frames come on, once it is proven that they do.
    pub(super) origin: Option<Origin>,
    /// How it is spoken to: in no version before it has said which it speaks.
    pub(super) codec: Codec,
    /// The number that the peer must put into its frames.
    pub(super) ours: Link,
    /// The number that the peer wants in ours; `None` until it answered the hello.
    pub(super) theirs: Option<Link>,
    /// The hello that was said to it and not answered yet.
    pub(super) hello: Option<HelloSaid>,
    /// Its engine adds a suffix to the ids of requests.
    pub(super) suffixed: bool,
    pub(super) last_heard: Time,
    /// Silent for so long that its sessions were failed. Ends with its next frame.
    pub(super) given_up: bool,
    /// It does not fit, and was told so.
    pub(super) refused: bool,
    /// It says that we do not fit: why its receivers here fail.
    pub(super) refuses: Option<Cause>,
    /// Posts to or from it that have not ended.
    pub(super) posts: u32,

    /// Attempts at it are numbered from 1.
    pub(super) next_attempt: u64,
    /// Open attempts at it → session and position among the session's sources.
    pub(super) outgoing: BTreeMap<Attempt, (SessionId, usize)>,
    /// Those of them whose session has failed, and about which the peer has not said that it writes no more.
    pub(super) closing: BTreeSet<Attempt>,
    /// Attempts at it that are over here, and that it has not acknowledged yet.
    pub(super) releasing: BTreeMap<Attempt, Releasing>,
    /// Heartbeats to it.
    pub(super) heart: Heart,
    /// Receivers that need it and have no attempt at it yet.
    pub(super) waiting: BTreeSet<SessionId>,

    /// Its attempts at this worker.
    pub(super) incoming: Attempts,
    /// What it lets this worker write into its memory.
    pub(super) writes_out: WritesOut,
    /// What it may write into this worker's.
    pub(super) writes_in: WritesIn,
}

/// A hello under way.
#[derive(Debug, Clone, Copy)]
pub(super) struct HelloSaid {
    pub(super) nonce: u64,
    pub(super) first_said: Time,
    pub(super) times: u32,
}

/// How an attempt at a peer ended here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Releasing {
    /// Everything was read.
    Read,
    /// The session failed.
    Aborted(Abort),
}

/// The heartbeats to one peer.
#[derive(Debug, Clone, Default)]
pub(super) struct Heart {
    /// Their numbers, and those of claims.
    pub(super) beats: Beats,
    /// The shortest interval that a live grant asks for.
    pub(super) interval: Option<Duration>,
}

/// Numbers of what was sent to a peer, each with its time: an answer repeats the number.
#[derive(Debug, Clone, Default)]
pub(super) struct Beats {
    /// The last one; they count from 1.
    last: u64,
    /// The latest ones, oldest first.
    sent: VecDeque<(u64, Time)>,
}

impl Beats {
    /// An answer that takes longer than this is worth nothing.
    const REMEMBERED: Duration = Duration::from_secs(60);
    /// Most numbers remembered: a thousand in a second, for as long.
    const MOST: usize = 60_000;

    /// The number for what is sent now. What is sent at one moment shares a number.
    pub(super) fn beat(&mut self, now: Time) -> u64 {
        if let Some(&(number, _)) = self.sent.back().filter(|&&(_, at)| at == now) {
            return number;
        }
        self.last += 1;
        let old = |&(_, at): &(u64, Time)| now - at > Beats::REMEMBERED;
        while self.sent.len() >= Beats::MOST || self.sent.front().is_some_and(old) {
            step(1);
            self.sent.pop_front();
        }
        self.sent.push_back((self.last, now));
        self.last
    }

    /// How many are remembered.
    pub(super) fn len(&self) -> usize {
        self.sent.len()
    }

    /// When what has this number was sent.
    pub(super) fn sent_at(&self, beat: u64) -> Option<Time> {
        let at = self.sent.binary_search_by_key(&beat, |&(number, _)| number).ok()?;
        self.sent.get(at).map(|&(_, time)| time)
    }
}

/// What a receiver registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Registration {
    pub(super) named: Named,
    /// The connection on which it came.
    pub(super) origin: Option<Origin>,
    /// How many ranks of the receiver's engine this worker has to serve.
    pub(super) ranks: u32,
    pub(super) wish: Wish,
}

/// What a receiver wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Wish {
    /// To have these pages and this row written.
    Write {
        /// From number `first` of the request on, which has `whole` pages at the receiver.
        pages: PageList,
        first: u32,
        whole: u32,
        aux: Option<AuxIndex>,
        /// The row is this worker's to write.
        aux_here: bool,
        groups: GroupLists,
    },
    /// To read the sender's pages. The number stands in the claim.
    Read { beat: u64 },
}

impl Registration {
    /// Runs of pages in it: what it costs.
    pub(super) fn runs(&self) -> usize {
        match &self.wish {
            Wish::Write { pages, groups, .. } => pages.runs().len() + groups.runs(),
            Wish::Read { .. } => 1,
        }
    }
}

impl Peer {
    pub(super) fn new(
        worker: WorkerId,
        incarnation: Incarnation,
        metadata: Bytes,
        geometry: Geometry,
        here: &Geometry,
        ours: Link,
        now: Time,
    ) -> Peer {
        Peer {
            worker,
            incarnation,
            aux_rows: geometry.aux_rows().unwrap_or(0),
            group_items: group_items(&geometry),
            mismatch: here.check(&geometry).err(),
            out: RegionMap::directed(here, &geometry, Side::Local).ok(),
            out_layers: BTreeMap::new(),
            inward: RegionMap::directed(here, &geometry, Side::Remote).ok(),
            ranks_served: u32::try_from(receivers_of(&geometry, here)).unwrap_or(u32::MAX).max(1),
            geometry,
            directions: Directions::BOTH,
            metadata,
            greeted: false,
            lost: false,
            origin: None,
            codec: Codec::MEETING,
            ours,
            theirs: None,
            hello: None,
            suffixed: false,
            last_heard: now,
            given_up: false,
            refused: false,
            refuses: None,
            posts: 0,
            next_attempt: 1,
            outgoing: BTreeMap::new(),
            closing: BTreeSet::new(),
            releasing: BTreeMap::new(),
            heart: Heart::default(),
            waiting: BTreeSet::new(),
            incoming: Attempts::default(),
            writes_out: WritesOut::default(),
            writes_in: WritesIn::default(),
        }
    }

    /// What this worker, whose geometry is `here`, sends to it of some layers, or of all.
    pub(super) fn map_out(&mut self, here: &Geometry, layers: Option<(u32, u32)>) -> Option<&RegionMap> {
        let all = self.out.as_ref()?;
        let Some(layers) = layers else { return Some(all) };
        // Servers cut the layers of all requests alike.
        if self.out_layers.len() >= MAX_LAYER_MAPS && !self.out_layers.contains_key(&layers) {
            self.out_layers.clear();
        }
        let make = || all.of_layers(here, &self.geometry, layers.0..layers.1);
        Some(self.out_layers.entry(layers).or_insert_with(make))
    }

    /// True if it has been met and answers.
    pub(super) fn is_up(&self) -> bool {
        self.theirs.is_some() && !(self.refused || self.given_up || self.lost || self.writes_in.revoking)
    }

    /// True if an answer of its is needed here.
    pub(super) fn is_needed(&self) -> bool {
        !(self.outgoing.is_empty() && self.releasing.is_empty() && self.waiting.is_empty())
    }

    /// True if nothing here depends on it.
    pub(super) fn is_idle(&self) -> bool {
        !self.is_needed() && self.posts == 0 && !self.serves()
    }

    /// Opens an attempt at it for a session's source.
    pub(super) fn open_attempt(&mut self, session: SessionId, source: usize) -> Attempt {
        let attempt = self.draw_attempt();
        self.outgoing.insert(attempt, (session, source));
        self.waiting.remove(&session);
        attempt
    }

    /// Aborts a room at it once it answers: a sender there should not wait in vain. Nothing, if it is
    /// not being greeted any more, or the request is another sender's.
    pub(super) fn abort_when_met(&mut self, room: &Room, grants: &[GrantRef], cause: &PeerCause) {
        let another = !grants.is_empty() && of_life(grants, self.incarnation).is_none();
        if self.hello.is_none() || another || self.releasing.len() >= MAX_RELEASING {
            return;
        }
        let attempt = self.draw_attempt();
        self.abort(attempt, room, grants, cause);
    }

    /// Ends an attempt at it that has failed. The abort is to be said until it is acknowledged.
    pub(super) fn abort(
        &mut self,
        attempt: Attempt,
        room: &Room,
        grants: &[GrantRef],
        cause: &PeerCause,
    ) -> Abort {
        let grant = of_life(grants, self.incarnation).map(|grant| grant.nonce);
        let abort = Abort { attempt, room: room.clone(), grant, cause: cause.clone() };
        self.end_attempt(attempt);
        self.releasing.insert(attempt, Releasing::Aborted(abort.clone()));
        abort
    }

    /// An attempt at it is over.
    pub(super) fn end_attempt(&mut self, attempt: Attempt) {
        self.outgoing.remove(&attempt);
        self.closing.remove(&attempt);
    }

    fn draw_attempt(&mut self) -> Attempt {
        let attempt = Attempt(self.next_attempt);
        self.next_attempt += 1;
        attempt
    }

    /// True if an attempt of its matters here. Results kept for a peer that does not answer any more
    /// do not.
    fn serves(&self) -> bool {
        self.incoming.live_len() > 0 || self.incoming.results_len() > 0 && !self.given_up
    }

    /// All attempts at it below this one are over.
    pub(super) fn outgoing_floor(&self) -> Attempt {
        let open = self.outgoing.first_key_value().map(|(&attempt, _)| attempt);
        let releasing = self.releasing.first_key_value().map(|(&attempt, _)| attempt);
        open.into_iter().chain(releasing).min().unwrap_or(Attempt(self.next_attempt))
    }
}

/// How many items every region of each state group has; none if there is no such region.
fn group_items(geometry: &Geometry) -> Box<[u32]> {
    let mut items = vec![None; geometry.layout.groups.len().max(1)];
    for region in each(&geometry.regions).filter(|region| region.role == RegionRole::State) {
        if let Some(known) = items.get_mut(usize::from(region.group)) {
            let own = u32::try_from(region.items()).unwrap_or(u32::MAX);
            *known = Some(known.map_or(own, |least: u32| least.min(own)));
        }
    }
    items.into_iter().map(Option::unwrap_or_default).collect()
}

/// All peers, by every name they have.
#[derive(Debug, Clone, Default)]
pub(super) struct Peers {
    peers: BTreeMap<PeerId, Peer>,
    by_link: BTreeMap<Link, PeerId>,
    /// An incarnation is a number that its worker has chosen; only with its metadata it is a worker's.
    by_identity: BTreeMap<(Incarnation, Bytes), PeerId>,
    /// Gone, but with posts that have not ended.
    gone: BTreeMap<PeerId, ((Incarnation, Bytes), u32)>,
    next: u64,
}

impl Peers {
    pub(super) fn insert(&mut self, peer: Peer) -> PeerId {
        let id = PeerId(self.next);
        self.next += 1;
        self.by_link.insert(peer.ours, id);
        self.by_identity.insert((peer.incarnation, peer.metadata.clone()), id);
        self.peers.insert(id, peer);
        id
    }

    /// Takes a peer out. Its number lives on until its posts have ended.
    pub(super) fn remove(&mut self, id: PeerId) -> Option<Peer> {
        let peer = self.peers.remove(&id)?;
        self.by_link.remove(&peer.ours);
        let identity = (peer.incarnation, peer.metadata.clone());
        self.by_identity.remove(&identity);
        if peer.posts > 0 {
            self.gone.insert(id, (identity, peer.posts));
        }
        Some(peer)
    }

    /// Gives the conversation with a peer a new number on this side.
    pub(super) fn renumber(&mut self, id: PeerId, link: Link) {
        if let Some(peer) = self.peers.get_mut(&id) {
            self.by_link.remove(&peer.ours);
            peer.ours = link;
            self.by_link.insert(link, id);
        }
    }

    pub(super) fn post_started(&mut self, id: PeerId) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.posts += 1;
        }
    }

    pub(super) fn post_ended(&mut self, id: PeerId) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.posts = peer.posts.saturating_sub(1);
        } else if let Some((_, posts)) = self.gone.get_mut(&id) {
            *posts = posts.saturating_sub(1);
            if *posts == 0 {
                self.gone.remove(&id);
            }
        }
    }

    /// True while posts to a former conversation with this worker have not ended.
    pub(super) fn has_lingering_posts(&self, incarnation: Incarnation, metadata: &Bytes) -> bool {
        each(self.gone.values()).any(|((gone, of), _)| *gone == incarnation && of == metadata)
    }

    /// The same for a worker that is known again.
    pub(super) fn lingers(&self, id: PeerId) -> bool {
        self.peers.get(&id).is_some_and(|peer| self.has_lingering_posts(peer.incarnation, &peer.metadata))
    }

    /// Former conversations with posts that have not ended, and the next number of a peer.
    #[cfg(feature = "model")]
    pub(super) fn lingering(&self) -> impl std::fmt::Debug {
        (&self.gone, self.next)
    }

    pub(super) fn get(&self, id: PeerId) -> Option<&Peer> {
        self.peers.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: PeerId) -> Option<&mut Peer> {
        self.peers.get_mut(&id)
    }

    /// The peer that is to put this number into its frames, and the connection on which they come.
    pub(super) fn with_link(&self, link: Link) -> Option<(PeerId, Option<Origin>)> {
        let &id = self.by_link.get(&link)?;
        Some((id, self.peers.get(&id)?.origin))
    }

    /// The peers whose frames come on this connection.
    pub(super) fn of_origin(&self, origin: Origin) -> impl Iterator<Item = (PeerId, &Peer)> {
        each(self.iter()).filter(move |(_, peer)| peer.origin == Some(origin))
    }

    pub(super) fn known(&self, incarnation: Incarnation, metadata: &Bytes) -> Option<PeerId> {
        self.by_identity.get(&(incarnation, metadata.clone())).copied()
    }

    /// True if another incarnation of the same worker is known.
    pub(super) fn has_successor(&self, worker: &WorkerId, incarnation: Incarnation) -> bool {
        each(self.peers.values()).any(|peer| peer.worker == *worker && peer.incarnation != incarnation)
    }

    /// The idle peer that has been silent the longest.
    pub(super) fn oldest_idle(&self) -> Option<PeerId> {
        let idle = each(self.peers.iter()).filter(|(_, peer)| peer.is_idle());
        idle.min_by_key(|(_, peer)| peer.last_heard).map(|(&id, _)| id)
    }

    /// Nobody listened for `deaf`: that time does not count as silence of any peer.
    pub(super) fn excuse(&mut self, deaf: Duration, now: Time) {
        for peer in each(self.peers.values_mut()) {
            peer.last_heard = (peer.last_heard + deaf).min(now);
            if let Some(said) = &mut peer.hello {
                said.first_said = (said.first_said + deaf).min(now);
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        self.peers.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (PeerId, &Peer)> {
        each(self.peers.iter()).map(|(&id, peer)| (id, peer))
    }
}

/// What is needed to meet a peer.
#[derive(Debug, Clone)]
pub(super) struct Introduction {
    pub(super) worker: WorkerId,
    pub(super) incarnation: Incarnation,
    pub(super) geometry: Geometry,
    pub(super) metadata: Bytes,
}
