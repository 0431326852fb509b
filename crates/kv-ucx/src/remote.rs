//! [`Remote`]: one life of another transport, as far as this side knows it: UCX's endpoint to it, the life of its
//! process, and what either side has to do with the other.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use kv_core::Time;
use kv_host::{Host, Latency, Life, ProcessIdentity, Token};

use crate::metadata::Name;
use crate::way::WayId;

/// Number of a remote; never used again. The owner of the transport knows it as the origin of frames.
pub(crate) type RemoteId = u64;

/// Most sessions of one remote: ways by which it has connected this side. The oldest ends for one more.
pub(crate) const MAX_SESSIONS: usize = 16;

/// One life of another transport.
#[derive(Debug)]
pub(crate) struct Remote {
    pub(crate) name: Name,
    pub(crate) endpoint: u64,
    /// Where the remote says that it runs, and what is known about its process.
    pub(crate) home: (Host, ProcessIdentity),
    pub(crate) life: Life,
    pub(crate) stage: Stage,
    /// The secret of this side's endpoint, and that of the remote's, once it has come.
    pub(crate) parting: Token,
    pub(crate) their_parting: Option<Token>,
    /// Ways of the remote to this side, oldest first: its name of the way, and the session that it was given.
    sessions: Vec<(Token, Token)>,
    /// This side's ways to the remote.
    pub(crate) ways: BTreeSet<WayId>,
    /// Slices under way, and their weight.
    pub(crate) flights: usize,
    pub(crate) weight: u64,
    pub(crate) latency: Latency,
}

/// | from | to | when |
/// |---|---|---|
/// | | Standing | the endpoint was opened |
/// | Standing | Ending | the endpoint has failed, or the process has ended |
/// | Ending | removed | nothing of the connection touches memory any more, as far as it can be known |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Standing,
    Ending {
        since: Time,
        /// Slices were under way: their bytes may be on their way to a peer that lives.
        unquiet: bool,
    },
}

impl Remote {
    pub(crate) fn new(
        name: Name,
        home: (Host, ProcessIdentity),
        life: Life,
        endpoint: u64,
        parting: Token,
    ) -> Remote {
        Remote {
            name,
            endpoint,
            home,
            life,
            stage: Stage::Standing,
            parting,
            their_parting: None,
            sessions: Vec::new(),
            ways: BTreeSet::new(),
            flights: 0,
            weight: 0,
            latency: Latency::default(),
        }
    }

    pub(crate) fn is_standing(&self) -> bool {
        self.stage == Stage::Standing
    }

    /// True if neither side has to do with the other.
    fn is_idle(&self) -> bool {
        self.is_standing() && self.sessions.is_empty() && self.ways.is_empty() && self.flights == 0
    }
}

/// All remotes.
#[derive(Debug, Default)]
pub(crate) struct Remotes {
    remotes: BTreeMap<RemoteId, Remote>,
    /// Those that stand.
    by_name: HashMap<Name, RemoteId>,
    by_endpoint: HashMap<u64, RemoteId>,
    by_session: HashMap<Token, RemoteId>,
    by_parting: HashMap<Token, RemoteId>,
}

impl Remotes {
    pub(crate) fn insert(&mut self, id: RemoteId, remote: Remote) {
        self.by_name.insert(remote.name.clone(), id);
        self.by_endpoint.insert(remote.endpoint, id);
        self.by_parting.insert(remote.parting, id);
        self.remotes.insert(id, remote);
    }

    pub(crate) fn remove(&mut self, id: RemoteId) -> Option<Remote> {
        self.end(id);
        let remote = self.remotes.remove(&id)?;
        self.by_endpoint.remove(&remote.endpoint);
        Some(remote)
    }

    /// The remote is not found by its name any more, and its sessions, which are returned, are over.
    pub(crate) fn end(&mut self, id: RemoteId) -> Vec<Token> {
        let Some(remote) = self.remotes.get_mut(&id) else { return Vec::new() };
        if self.by_name.get(&remote.name) == Some(&id) {
            self.by_name.remove(&remote.name);
        }
        self.by_parting.remove(&remote.parting);
        let sessions: Vec<Token> = remote.sessions.drain(..).map(|(_, session)| session).collect();
        for session in &sessions {
            self.by_session.remove(session);
        }
        sessions
    }

    pub(crate) fn get(&self, id: RemoteId) -> Option<&Remote> {
        self.remotes.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: RemoteId) -> Option<&mut Remote> {
        self.remotes.get_mut(&id)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = (RemoteId, &Remote)> {
        self.remotes.iter().map(|(id, remote)| (*id, remote))
    }

    pub(crate) fn by_name(&self, name: &Name) -> Option<RemoteId> {
        self.by_name.get(name).copied()
    }

    pub(crate) fn by_endpoint(&self, endpoint: u64) -> Option<RemoteId> {
        self.by_endpoint.get(&endpoint).copied()
    }

    pub(crate) fn by_session(&self, session: Token) -> Option<RemoteId> {
        self.by_session.get(&session).copied()
    }

    /// The remote that stands and whose endpoint has this secret.
    pub(crate) fn by_parting(&self, parting: Token) -> Option<RemoteId> {
        self.by_parting.get(&parting).copied()
    }

    /// The session of a remote's way: the one that it has, or `new`.
    pub(crate) fn session(&mut self, id: RemoteId, way: Token, new: Token) -> Option<Token> {
        let remote = self.remotes.get_mut(&id)?;
        if let Some((_, session)) = remote.sessions.iter().find(|(known, _)| *known == way) {
            return Some(*session);
        }
        if remote.sessions.len() >= MAX_SESSIONS {
            let (_, oldest) = remote.sessions.remove(0);
            self.by_session.remove(&oldest);
        }
        remote.sessions.push((way, new));
        self.by_session.insert(new, id);
        Some(new)
    }

    /// The remote has said goodbye.
    pub(crate) fn end_session(&mut self, session: Token) {
        let id = self.by_session.remove(&session);
        if let Some(remote) = id.and_then(|id| self.remotes.get_mut(&id)) {
            remote.sessions.retain(|(_, known)| *known != session);
        }
    }

    /// The oldest remote with which this side has no business.
    pub(crate) fn oldest_idle(&self) -> Option<RemoteId> {
        self.remotes.iter().find(|(_, remote)| remote.is_idle()).map(|(id, _)| *id)
    }

    pub(crate) fn len(&self) -> usize {
        self.remotes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remote(number: u8) -> Remote {
        let name = Name { token: Token::from_bytes([number; 16]), address: vec![number].into() };
        let parting = Token::from_bytes([100 + number; 16]);
        Remote::new(name, Default::default(), Life::Unseen, u64::from(number), parting)
    }

    #[test]
    fn a_way_has_one_session_and_the_oldest_of_too_many_ends() {
        let token = |number: u8| Token::from_bytes([number; 16]);
        let mut remotes = Remotes::default();
        remotes.insert(7, remote(1));
        assert_eq!(remotes.oldest_idle(), Some(7));
        assert_eq!(remotes.session(7, token(1), token(101)), Some(token(101)));
        assert_eq!(remotes.session(7, token(1), token(102)), Some(token(101)), "the hello came twice");
        assert_eq!(remotes.oldest_idle(), None);
        for number in 2..=MAX_SESSIONS as u8 {
            remotes.session(7, token(number), token(100 + number));
        }
        assert_eq!(remotes.by_session(token(101)), Some(7));
        remotes.session(7, token(60), token(160));
        assert_eq!((remotes.by_session(token(101)), remotes.by_session(token(160))), (None, Some(7)));
        remotes.end_session(token(160));
        assert_eq!(remotes.by_session(token(160)), None);
        remotes.end(7);
        assert_eq!((remotes.by_session(token(102)), remotes.len()), (None, 1));
        assert_eq!(remotes.session(8, token(1), token(2)), None);
    }

    #[test]
    fn a_new_remote_of_the_same_name_is_not_forgotten_with_the_old_one() {
        let mut remotes = Remotes::default();
        remotes.insert(1, remote(1));
        remotes.end(1);
        let again = Remote { endpoint: 9, ..remote(1) };
        let name = again.name.clone();
        remotes.insert(2, again);
        assert!(remotes.remove(1).is_some());
        assert_eq!(
            (remotes.by_name(&name), remotes.by_endpoint(9), remotes.by_endpoint(1)),
            (Some(2), Some(2), None)
        );
    }
}
