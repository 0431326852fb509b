//! [`Parted`]: peers from which this side has parted, and which may not have noticed.
//!
//! When this side closes its endpoint to a peer, the peer's own endpoint to this side goes on. UCX drops the longer ones
//! of the messages that come by it, and says so to nobody; the others are of sessions that are over. So the peer is told,
//! by the next endpoint that this side opens to it, with a secret that only the peer can have given.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use kv_core::Time;
use kv_host::{Host, ProcessIdentity, Token};

use crate::metadata::Name;
use crate::remote::MAX_SESSIONS;

/// How long a peer is left in peace before it is told, and told again: one that has died is known to be dead by then.
const PAUSE: Duration = Duration::from_secs(1);

/// One peer.
#[derive(Debug, Clone)]
pub(crate) struct Stranded {
    pub(crate) name: Name,
    pub(crate) host: Host,
    pub(crate) process: ProcessIdentity,
    /// What the peer understands as the end of its endpoint.
    parting: Token,
    /// Sessions that the peer may still use: as many as one remote may have.
    sessions: VecDeque<Token>,
    /// No frame of such a session has this side open an endpoint before.
    rested: Time,
}

/// All such peers.
#[derive(Debug, Default)]
pub(crate) struct Parted {
    /// The oldest first.
    peers: BTreeMap<u64, Stranded>,
    by_name: HashMap<Name, u64>,
    by_session: HashMap<Token, u64>,
    last: u64,
}

impl Parted {
    /// Takes note of a peer, of at most `most` peers. The newest secret counts.
    pub(crate) fn add(
        &mut self,
        name: Name,
        (host, process): (Host, ProcessIdentity),
        parting: Token,
        sessions: Vec<Token>,
        now: Time,
        most: usize,
    ) {
        let kept = self.forget(&name).map(|peer| peer.sessions).unwrap_or_default();
        let mut sessions: VecDeque<Token> = kept.into_iter().chain(sessions).collect();
        sessions.drain(..sessions.len().saturating_sub(MAX_SESSIONS));
        while self.peers.len() >= most.max(1)
            && let Some(name) = self.peers.first_key_value().map(|(_, peer)| peer.name.clone())
        {
            self.forget(&name);
        }
        self.last += 1;
        self.by_name.insert(name.clone(), self.last);
        self.by_session.extend(sessions.iter().map(|session| (*session, self.last)));
        self.peers
            .insert(self.last, Stranded { name, host, process, parting, sessions, rested: now + PAUSE });
    }

    /// The peer is dead.
    pub(crate) fn forget(&mut self, name: &Name) -> Option<Stranded> {
        let peer = self.peers.remove(&self.by_name.remove(name)?)?;
        for session in &peer.sessions {
            self.by_session.remove(session);
        }
        Some(peer)
    }

    /// What has to be said first by a new endpoint to the peer.
    pub(crate) fn parting(&self, name: &Name) -> Option<Token> {
        self.peers.get(self.by_name.get(name)?).map(|peer| peer.parting)
    }

    /// The peer of a session that is over, if it is time to tell it.
    pub(crate) fn by_session(&mut self, session: Token, now: Time) -> Option<Stranded> {
        let peer = self.peers.get_mut(self.by_session.get(&session)?)?;
        if now < peer.rested {
            return None;
        }
        peer.rested = now + PAUSE;
        Some(peer.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(number: u8) -> Token {
        Token::from_bytes([number; 16])
    }

    fn name(number: u8) -> Name {
        Name { token: token(number), address: vec![number].into() }
    }

    fn add(parted: &mut Parted, number: u8, parting: u8, sessions: &[u8], now: Time) {
        let sessions = sessions.iter().copied().map(token).collect();
        parted.add(name(number), Default::default(), token(parting), sessions, now, 3);
    }

    #[test]
    fn the_oldest_of_too_many_peers_and_sessions_are_forgotten() {
        let mut parted = Parted::default();
        let mut later = Time::ZERO;
        let mut found = |parted: &mut Parted, session| {
            later = later + 2 * PAUSE;
            parted.by_session(token(session), later).map(|peer| peer.name)
        };
        for number in 1..=4 {
            add(&mut parted, number, 10 + number, &[20 + number], Time::ZERO);
        }
        assert_eq!((parted.parting(&name(1)), parted.parting(&name(2))), (None, Some(token(12))));
        assert_eq!((found(&mut parted, 21), found(&mut parted, 22)), (None, Some(name(2))));
        // A peer that has parted again is the newest, with its newest secret and all its sessions.
        add(&mut parted, 2, 50, &[51], Time::ZERO);
        add(&mut parted, 5, 15, &[25], Time::ZERO);
        assert_eq!((parted.parting(&name(3)), parted.parting(&name(2))), (None, Some(token(50))));
        assert_eq!((found(&mut parted, 22), found(&mut parted, 51)), (Some(name(2)), Some(name(2))));
        let many: Vec<u8> = (100..100 + MAX_SESSIONS as u8).collect();
        add(&mut parted, 2, 50, &many, Time::ZERO);
        assert_eq!((found(&mut parted, 51), found(&mut parted, 100)), (None, Some(name(2))));
        parted.forget(&name(2));
        assert_eq!((parted.parting(&name(2)), found(&mut parted, 100)), (None, None));
        assert_eq!((parted.peers.len(), parted.by_name.len(), parted.by_session.len()), (2, 2, 2));
    }

    #[test]
    fn frames_of_a_session_that_is_over_find_the_peer_once_in_a_while() {
        let mut parted = Parted::default();
        let begin = Time::ZERO + PAUSE;
        add(&mut parted, 1, 2, &[3, 4], begin);
        let mut told = |session, at| parted.by_session(token(session), at).is_some();
        assert!(!told(3, begin + PAUSE / 2));
        assert!(told(3, begin + PAUSE));
        assert!(!told(3, begin + PAUSE) && !told(4, begin + PAUSE * 3 / 2));
        assert!(told(4, begin + PAUSE * 2));
    }
}
