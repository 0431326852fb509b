//! What a model checker needs of a machine: a twin of it, and a number that stands for its state.
//!
//! Only with the feature `model`: a twin owns the same pages as its original, which no server may
//! ever allow. Both functions take each struct apart by name, so that a field that is added later
//! cannot be forgotten here.

use std::collections::VecDeque;
use std::fmt::Write;
use std::hash::{DefaultHasher, Hasher};

use super::chunks::Chunk;
use super::node::Node;
use super::peer::{Peer, Peers};
use super::receive::ReceiveSession;
use super::send::SendSession;
use crate::groups::Groups;

impl Node {
    /// A second machine in the same state. Outputs must have been drained: the twin has none.
    ///
    /// Every page token in it is a double: of one machine and its twins, a checker believes one.
    pub fn fork(&self) -> Node {
        let Node {
            config,
            now,
            random,
            timers,
            peers,
            directory,
            rendezvous,
            posting,
            senders,
            held_layers,
            receivers,
            stopping,
            frames_dropped,
            links_drawn,
            ended_grants,
            pages_leased,
            outputs: _,
        } = self;
        Node {
            config: config.clone(),
            now: *now,
            random: random.clone(),
            timers: timers.clone(),
            peers: peers.clone(),
            directory: directory.clone(),
            rendezvous: rendezvous.clone(),
            posting: posting.clone(),
            senders: senders.iter().map(|(&id, session)| (id, session.fork())).collect(),
            held_layers: held_layers.clone(),
            receivers: receivers.iter().map(|(&id, session)| (id, session.fork())).collect(),
            stopping: *stopping,
            frames_dropped: *frames_dropped,
            links_drawn: *links_drawn,
            ended_grants: ended_grants.clone(),
            pages_leased: *pages_leased,
            outputs: VecDeque::new(),
        }
    }

    /// Two machines with one configuration and the same number do the same for ever, but for the
    /// chance of 2⁻⁶⁴ that a hash has. Everything counts, except how many frames were dropped.
    pub fn fingerprint(&self) -> u64 {
        let Node {
            config: _,
            now,
            random,
            timers,
            peers,
            directory,
            rendezvous,
            posting,
            senders,
            held_layers: _,
            receivers,
            stopping,
            frames_dropped: _,
            links_drawn,
            ended_grants,
            pages_leased,
            outputs: _,
        } = self;
        let mut state = Text(DefaultHasher::new());
        state.add(&(now, random, timers, directory, rendezvous, posting));
        state.add(&(senders, receivers, stopping, links_drawn, ended_grants, pages_leased));
        peers.add_to(&mut state);
        state.0.finish()
    }
}

impl SendSession {
    fn fork(&self) -> SendSession {
        let SendSession {
            deadline,
            named,
            receivers,
            learns,
            mode,
            lease,
            pinned_until,
            poll,
            announced,
            chunks,
            given,
            chunks_final,
            finals,
            complete,
            groups,
            targets,
            target_of,
            failure,
        } = self;
        let chunks = chunks.iter().map(|Chunk { offset, pages, layers }| Chunk {
            offset: *offset,
            pages: pages.twin(),
            layers: layers.clone(),
        });
        SendSession {
            deadline: *deadline,
            named: named.clone(),
            receivers: *receivers,
            learns: *learns,
            mode: *mode,
            lease: *lease,
            pinned_until: *pinned_until,
            poll: *poll,
            announced: *announced,
            chunks: chunks.collect(),
            given: *given,
            chunks_final: *chunks_final,
            finals: finals.clone(),
            complete: *complete,
            groups: groups.as_ref().map(Groups::twin),
            targets: targets.clone(),
            target_of: target_of.clone(),
            failure: failure.clone(),
        }
    }
}

impl ReceiveSession {
    fn fork(&self) -> ReceiveSession {
        let ReceiveSession {
            room,
            deadline,
            opened,
            poll,
            mode,
            pulls,
            grants,
            question,
            given,
            groups,
            unheld,
            prefix,
            whole,
            sources,
            repeats,
            failure,
        } = self;
        ReceiveSession {
            room: room.clone(),
            deadline: *deadline,
            opened: *opened,
            poll: *poll,
            mode: *mode,
            pulls: *pulls,
            grants: grants.clone(),
            question: question.clone(),
            given: given.as_ref().map(|(pages, aux)| (pages.twin(), *aux)),
            groups: groups.as_ref().map(Groups::twin),
            unheld: unheld.clone(),
            prefix: *prefix,
            whole: *whole,
            sources: sources.clone(),
            repeats: *repeats,
            failure: failure.clone(),
        }
    }
}

impl Peers {
    fn add_to(&self, state: &mut Text) {
        for (id, peer) in self.iter() {
            // Who it is follows from its incarnation.
            let Peer {
                worker: _,
                incarnation,
                geometry: _,
                // These follow from the geometries.
                out: _,
                // Follows from the geometries, whenever it is needed.
                out_layers: _,
                inward: _,
                ranks_served: _,
                directions,
                // These follow from the incarnation and its geometry.
                aux_rows: _,
                group_items: _,
                mismatch: _,
                metadata: _,
                greeted,
                lost,
                origin,
                suffixed: _,
                codec,
                ours,
                theirs,
                hello,
                last_heard,
                given_up,
                refused,
                refuses,
                posts,
                next_attempt,
                outgoing,
                closing,
                releasing,
                heart,
                waiting,
                incoming,
                writes_out,
                writes_in,
            } = peer;
            state.add(&(id, incarnation, ours, theirs, hello, last_heard, given_up, refused, refuses, posts));
            state.add(&(directions, greeted, lost, origin, codec, writes_out, writes_in));
            state.add(&(next_attempt, outgoing, closing, releasing, heart, waiting, incoming));
        }
        state.add(&self.lingering());
    }
}

/// Hashes the debug output of whatever is added.
struct Text(DefaultHasher);

impl Text {
    fn add(&mut self, part: &dyn std::fmt::Debug) {
        // Writing into a hasher cannot fail.
        let _ = write!(self, "{part:?};");
    }
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0.write(text.as_bytes());
        Ok(())
    }
}
