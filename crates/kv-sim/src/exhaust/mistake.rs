//! Bugs that a machine could have, planted around it, to see that the search finds them.
//!
//! The machine itself stays as it is: a mistake changes what it hears, or what becomes of what it
//! says, just as if its author had got that part wrong.

use std::time::Duration;

use bytes::Bytes;
use kv_core::proto::Input;
use kv_core::wire::{Body, Frame, HeartbeatAck, Link, Release};
use kv_core::{Attempt, KvPoll, PostId, Time};

use super::ledger::Life;
use super::world::{LEASE, Letter, P, World};
use crate::Violation;

macro_rules! mistakes {
    ($($(#[$doc:meta])* $variant:ident $name:literal $scope:literal $invariant:literal,)*) => {
        /// A planted bug.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Mistake { $($(#[$doc])* $variant),* }

        impl Mistake {
            /// All of them.
            pub const ALL: &[Mistake] = &[$(Mistake::$variant),*];

            /// Its name, for the command line.
            pub fn name(self) -> &'static str {
                match self { $(Mistake::$variant => $name),* }
            }

            /// The scope in which it shows.
            pub fn scope(self) -> &'static str {
                match self { $(Mistake::$variant => $scope),* }
            }

            /// The invariant that it breaks.
            pub fn caught_by(self) -> &'static str {
                match self { $(Mistake::$variant => $invariant),* }
            }
        }
    };
}

mistakes! {
    /// The reader takes any grant or answer as a proof that never runs out.
    NoProof "no-proof" "plain" "success_means_granted_bytes",
    /// The reader counts a lease from the arrival of its answer, not from the question.
    ProofFromReceipt "proof-from-receipt" "equal-clocks" "success_means_granted_bytes",
    /// The reader leaves no margin for clocks that differ.
    NoMargin "no-margin" "plain" "success_means_granted_bytes",
    /// Heartbeats are answered, and the lease runs out nonetheless.
    RenewalsIgnored "renewals-ignored" "reading" "success_means_granted_bytes",
    /// A sender that fails frees its pages at once.
    FreedAtFailure "freed-at-failure" "one-reader" "success_means_granted_bytes",
    /// A sender that has failed still answers heartbeats.
    AnsweredAfterFailure "answered-after-failure" "one-reader" "success_means_granted_bytes",
    /// The first of two readers frees the pages.
    FreedByFirst "freed-by-first" "two-readers" "success_means_granted_bytes",
    /// The first of two reads ends the session.
    FirstReadEnds "first-read-ends" "two-reads" "success_means_granted_bytes",
    /// A read of a dead host's pages reads those of its successor.
    ReadsSuccessor "reads-successor" "restart" "success_means_granted_bytes",
    /// Leases never run out.
    NeverExpires "never-expires" "one-reader" "pages_come_back_with_the_lease",
    /// Leases last twice as long.
    LongLease "long-lease" "one-reader" "pages_come_back_with_the_lease",
    /// Tokens come back twice.
    ReleasedTwice "released-twice" "one-reader" "pages_come_back_once",
    /// Tokens never come back.
    NeverReleased "never-released" "one-reader" "pages_come_back_with_the_lease",
    /// Failures are not reported.
    SecretFailure "secret-failure" "one-reader" "pages_come_back_once",
    /// Ends are reported twice.
    EndsTwice "ends-twice" "one-reader" "ends_once",
    /// The reader releases what it was not told it had read.
    EagerRelease "eager-release" "one-reader" "success_is_mutual",
    /// Releases are never acknowledged.
    DeafToReleased "deaf-to-released" "one-reader" "rests_in_the_end",
}

impl World {
    /// What of a frame arrives; `None` for nothing.
    pub(super) fn tampered(&mut self, letter: &Letter) -> Result<Option<Bytes>, Violation> {
        let untouched = Ok(Some(letter.bytes.clone()));
        let Some(mistake) = self.mistake else { return untouched };
        let Ok(mut frame) = Frame::decode(&letter.bytes) else { return untouched };
        let host = letter.to.0;
        let clock = self.clock(host);
        match (mistake, &mut frame.body) {
            (Mistake::NoProof, Body::Granted(granted)) => granted.lease_ms = 1 << 40,
            (Mistake::NoProof, Body::HeartbeatAck(ack)) => ack.lease_ms = 1 << 40,
            (Mistake::ProofFromReceipt, Body::Granted(granted)) => {
                granted.lease_ms += self.age(host, granted.beat, clock);
            }
            (Mistake::ProofFromReceipt, Body::HeartbeatAck(ack)) => {
                ack.lease_ms += self.age(host, ack.beat, clock);
            }
            (Mistake::NoMargin, Body::Granted(granted)) => granted.lease_ms = granted.lease_ms * 32 / 31 + 1,
            (Mistake::NoMargin, Body::HeartbeatAck(ack)) => ack.lease_ms = ack.lease_ms * 32 / 31 + 1,
            (Mistake::RenewalsIgnored, Body::Heartbeat(heartbeat)) if self.is_open(P) => {
                let (beat, attempts) = (heartbeat.beat, heartbeat.attempts.clone());
                return self.answer_in_its_place(beat, attempts).map(|()| None);
            }
            (Mistake::AnsweredAfterFailure, Body::Heartbeat(heartbeat)) if !self.is_open(P) => {
                let (beat, attempts) = (heartbeat.beat, heartbeat.attempts.clone());
                return self.answer_in_its_place(beat, attempts).map(|()| None);
            }
            (Mistake::FreedByFirst, Body::Release(_)) => self.overwrite(),
            (Mistake::EagerRelease, Body::Granted(granted)) => {
                let attempts = vec![(granted.attempt.0, 1)];
                let release = Body::Release(Release { floor: Attempt(0), attempts });
                let frame = Frame { link: self.link_of(P), body: release };
                if let Ok(bytes) = frame.encode() {
                    let to = self.life(P);
                    self.wire.push(Letter { to, bytes });
                }
            }
            (Mistake::DeafToReleased, Body::Released(_)) => return Ok(None),
            _ => return untouched,
        }
        Ok(frame.encode().ok())
    }

    /// How long ago a heartbeat or claim was sent, in milliseconds.
    fn age(&self, host: usize, beat: u64, clock: Time) -> u64 {
        self.beats.get(&(host, beat)).map_or(0, |&sent| (clock - sent).as_millis() as u64)
    }

    /// Every decode host is told that its heartbeat was good.
    fn answer_in_its_place(&mut self, beat: u64, attempts: Vec<(u64, u32)>) -> Result<(), Violation> {
        let lease_ms = LEASE.as_millis() as u64 * 2 / 3;
        for host in 1..self.hosts.len() {
            let link = self.link_of(host);
            let ack = HeartbeatAck { beat, lease_ms, attempts: attempts.clone() };
            let frame = Frame { link, body: Body::HeartbeatAck(ack) };
            if let Ok(bytes) = frame.encode() {
                let to: Life = self.life(host);
                self.wire.push(Letter { to, bytes });
            }
        }
        Ok(())
    }

    /// What a host wants in the frames that it is sent, as the last one to it had it.
    fn link_of(&self, host: usize) -> Link {
        self.links.get(&host).copied().unwrap_or(Link::NONE)
    }

    pub(super) fn after_status(&mut self, host: usize, poll: KvPoll) {
        if self.mistake == Some(Mistake::FreedAtFailure) && host == P && poll == KvPoll::Failed {
            self.overwrite();
        }
    }

    /// How often a state is reported.
    pub(super) fn reports(&self, poll: KvPoll) -> usize {
        match self.mistake {
            Some(Mistake::SecretFailure) if poll == KvPoll::Failed => 0,
            Some(Mistake::EndsTwice) if poll.is_terminal() => 2,
            _ => 1,
        }
    }

    /// How often a token comes back.
    pub(super) fn releases(&self) -> usize {
        match self.mistake {
            Some(Mistake::ReleasedTwice) => 2,
            Some(Mistake::NeverReleased) => 0,
            _ => 1,
        }
    }

    /// The lease that a sender is opened with.
    pub(super) fn lease(&self) -> Duration {
        if self.mistake == Some(Mistake::LongLease) { LEASE * 2 } else { LEASE }
    }

    /// True if the host's timers never ring.
    pub(super) fn is_deaf(&self, host: usize) -> bool {
        self.mistake == Some(Mistake::NeverExpires) && host == P
    }

    pub(super) fn reads_successors(&self) -> bool {
        self.mistake == Some(Mistake::ReadsSuccessor)
    }

    /// A read has ended well; maybe so have others, as far as the machine is told.
    pub(super) fn read_ended(&mut self, host: usize, post: PostId) -> Result<(), Violation> {
        let mut ended = vec![post];
        if self.mistake == Some(Mistake::FirstReadEnds) {
            let others = self.reads.iter().filter(|read| read.host == host).map(|read| read.post);
            ended.extend(others);
            self.reads.retain(|read| read.host != host);
        }
        for post in ended {
            self.input(host, Input::Posted { post, result: Ok(()) })?;
        }
        Ok(())
    }
}
