//! Raw notifications of foreign agents, until their reader takes them. All together are bounded, and so are
//! the notifications of each agent.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use kv_core::MAX_FRAME;

/// Bytes that a notification counts beside its own: for its place in the inbox, and for its agent's name.
pub(crate) const OVERHEAD: usize = 256;
/// The notifications of one agent take at most the inbox divided by this number.
pub(crate) const SHARE: usize = 4;
/// Longest name of an agent, in bytes. vLLM and SGLang name their agents by UUIDs.
pub(crate) const LONGEST_NAME: usize = 256;

/// A notification as a foreign agent has sent it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawNotification {
    /// The name of the sender's agent, as the sender's NIXL says. A program that speaks UCX on its own
    /// can write any name, and an agent that was started again may have the name of its former life.
    pub agent: Arc<str>,
    /// The bytes, at most [`MAX_FRAME`].
    pub message: Bytes,
}

/// What became of a notification that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Put {
    Taken,
    /// The inbox has no room for the notification, or the notification is too long.
    Dropped,
    /// The configuration does not ask for raw notifications.
    Unwanted,
}

/// Notifications in the order in which they came.
#[derive(Debug)]
pub(crate) struct Inbox {
    /// Most bytes that may be held; 0 if raw notifications are not asked for.
    most: usize,
    held: usize,
    waiting: VecDeque<RawNotification>,
    /// Bytes held of each agent that has notifications in the inbox.
    shares: HashMap<Arc<str>, usize>,
}

impl Inbox {
    pub(crate) fn new(most: usize) -> Inbox {
        Inbox { most, held: 0, waiting: VecDeque::new(), shares: HashMap::new() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(crate) fn put(&mut self, agent: &str, message: Bytes) -> Put {
        if self.most == 0 {
            return Put::Unwanted;
        }
        if message.len() > MAX_FRAME || agent.len() > LONGEST_NAME {
            return Put::Dropped;
        }
        let size = message.len() + OVERHEAD;
        let known = self.shares.get_key_value(agent).map(|(name, share)| (Arc::clone(name), *share));
        let (agent, share) = known.unwrap_or_else(|| (agent.into(), 0));
        if self.held + size > self.most || share + size > self.most / SHARE {
            return Put::Dropped;
        }
        self.held += size;
        self.shares.insert(Arc::clone(&agent), share + size);
        self.waiting.push_back(RawNotification { agent, message });
        Put::Taken
    }

    pub(crate) fn take(&mut self) -> Option<RawNotification> {
        let taken = self.waiting.pop_front()?;
        let size = taken.message.len() + OVERHEAD;
        self.held -= size;
        if let Some(share) = self.shares.get_mut(&taken.agent) {
            *share -= size;
            if *share == 0 {
                self.shares.remove(&taken.agent);
            }
        }
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: usize = 64 << 10;

    #[test]
    fn an_agent_that_floods_the_inbox_leaves_room_for_the_others() {
        let mut inbox = Inbox::new(MOST);
        let message = |byte: u8| Bytes::from(vec![byte; 44]);
        let taken = (0..10_000).filter(|_| inbox.put("flood", message(1)) == Put::Taken).count();
        assert_eq!(taken, MOST / SHARE / (44 + OVERHEAD));
        assert_eq!(inbox.put("quiet", message(2)), Put::Taken);
        // Many agents fill the rest, and no more.
        for agent in 0..10_000 {
            inbox.put(&agent.to_string(), Bytes::new());
        }
        assert!(inbox.held <= MOST && inbox.held > MOST - 2 * OVERHEAD, "{}", inbox.held);
        assert!(inbox.waiting.len() <= MOST / OVERHEAD);
        let mut came = Vec::new();
        while let Some(RawNotification { agent, message }) = inbox.take() {
            came.push((agent, message));
        }
        assert!(came[..taken].iter().all(|(agent, bytes)| &**agent == "flood" && *bytes == message(1)));
        assert_eq!((&*came[taken].0, &came[taken].1), ("quiet", &message(2)));
        assert_eq!((inbox.held, inbox.shares.len()), (0, 0), "nothing of an agent is kept");
    }

    #[test]
    fn too_long_and_unwanted_notifications_are_not_held() {
        let mut inbox = Inbox::new(8 * MAX_FRAME);
        assert_eq!(inbox.put("a", Bytes::from(vec![0; MAX_FRAME])), Put::Taken);
        assert_eq!(inbox.put("a", Bytes::from(vec![0; MAX_FRAME + 1])), Put::Dropped);
        assert_eq!(inbox.put(&"a".repeat(LONGEST_NAME + 1), Bytes::new()), Put::Dropped);
        assert_eq!(Inbox::new(0).put("a", Bytes::new()), Put::Unwanted);
    }
}
