//! What a dialect's machine does, as events for a listener: most of the events are the machine's own inputs and
//! outputs.

use std::collections::BTreeMap;

use kv_core::machine::{Output, SessionResource};
use kv_core::proto::{Command, Resource};
use kv_core::trace::{Half, KvWhat, Log};
use kv_core::{KvPoll, PeerId, PostId, Time, TransportError};

use crate::effects::{Effects, Out};

/// Turns inputs and outputs into events. Keeps nothing while nobody listens.
#[derive(Debug, Default)]
pub(crate) struct Telling {
    /// The posts in flight: the beginning, the bytes and the peer of each.
    posts: BTreeMap<PostId, (Time, u64, PeerId)>,
}

impl Telling {
    /// Tells that a command opens a session.
    pub(crate) fn command(&mut self, log: &mut Log<KvWhat>, now: Time, command: &Command) {
        match command {
            Command::OpenSender { session, room, .. } => {
                log.tell(now, *session, || KvWhat::Opened { room: room.clone(), half: Half::Sender });
            }
            Command::OpenReceiver { session, room, .. } => {
                log.tell(now, *session, || KvWhat::Opened { room: room.clone(), half: Half::Receiver });
            }
            Command::InitReceiver { session, pages, .. } => {
                log.tell(now, *session, || KvWhat::PagesGiven { pages: pages.len() });
            }
            _ => {}
        }
    }

    /// Tells that a post has ended.
    pub(crate) fn posted(
        &mut self,
        log: &mut Log<KvWhat>,
        now: Time,
        post: PostId,
        result: &Result<(), TransportError>,
    ) {
        let Some((began, bytes, peer)) = self.posts.remove(&post) else { return };
        let error = result.as_ref().err().cloned();
        log.tell(now, peer, || KvWhat::PostEnded { post, bytes, took: now - began, error });
    }

    /// Tells what an output says, which the worker takes now. `rest` are the outputs behind it: what a session hands
    /// back follows the session's end at once, or comes later if `held`.
    pub(crate) fn output(&mut self, log: &mut Log<KvWhat>, now: Time, out: &Out, rest: &Effects, held: bool) {
        if !log.is_heard() {
            return self.posts.clear();
        }
        let session = match out {
            Output::Status { session, poll, failure } => {
                log.tell(now, *session, || match (failure, poll) {
                    (Some(failure), _) => KvWhat::Failed(failure.clone()),
                    (None, KvPoll::Success) => KvWhat::Ended,
                    (None, poll) => KvWhat::State(*poll),
                });
                matches!(poll, KvPoll::Success | KvPoll::Failed).then_some(*session)
            }
            Output::Release { session, resource } => {
                log.tell(now, *session, || match resource {
                    Resource::Pages(pages) => KvWhat::PagesBack { pages: pages.len() },
                    items => KvWhat::ItemsBack { items: items.amounts().kind(Resource::ITEMS) },
                });
                Some(*session)
            }
            Output::Post { peer, post } => {
                let bytes = post.descriptors.iter().map(|descriptor| descriptor.len).sum();
                self.posts.insert(post.id, (now, bytes, *peer));
                let (post, op, descriptors) = (post.id, post.op, post.descriptors.len());
                log.tell(now, *peer, || KvWhat::PostStarted { post, op, bytes, descriptors });
                None
            }
            _ => None,
        };
        if let Some(session) = session.filter(|session| !held && !rest.releases(*session)) {
            log.tell(now, session, || KvWhat::Closed);
        }
    }
}
