//! Sending: the senders of a prefill side that have not ended, and what became of the others.

use std::collections::BTreeMap;

use kv_transfer::{
    AuxIndex, EngineSender, KvManager, KvSender, KvSession, LeaseRef, PageList, Pages, Room, SessionId,
    SessionOptions,
};
use serde_json::{Value, json};

use crate::engine::Engine;
use crate::error::PairError;
use crate::harm::Harm;

/// All senders of our side.
#[derive(Default)]
pub struct Sending {
    open: BTreeMap<SessionId, Open>,
    /// The requests whose pages came back after success, in order.
    sent: Vec<String>,
    failed: BTreeMap<String, String>,
    /// Sessions that have ended in either way.
    ended: usize,
    /// What is done to a process once so many more sessions have ended.
    harm: Option<Harm>,
}

struct Open {
    session: EngineSender,
    name: String,
    ended: bool,
}

/// A request whose KV is in the cache.
pub struct Computed {
    pub name: String,
    pub room: Room,
    pub blocks: Vec<u32>,
    pub aux: Option<AuxIndex>,
    /// Parts in which the blocks are sent.
    pub chunks: usize,
    pub options: SessionOptions,
}

impl Sending {
    /// Opens the sender of a request and gives it the pages. Returns its lease references, for the router.
    pub fn send(&mut self, engine: &Engine, request: Computed) -> Result<Vec<LeaseRef>, PairError> {
        let Computed { name, room, blocks, aux, chunks, options } = request;
        let total = blocks.len();
        let mut rest: Pages = engine.pool.adopt(PageList::from_pages(blocks)?)?;
        let mut session = engine.group.sender(engine.bootstrap(), room, &[], options)?;
        session.init(total, aux).map_err(|_| PairError::full("init"))?;
        let leases = session.lease_refs();
        let chunk = total.div_ceil(chunks.max(1)).max(1);
        while !rest.is_empty() {
            let later = rest.split_off(chunk.min(rest.len()));
            session.send(std::mem::replace(&mut rest, later)).map_err(|_| PairError::full("send"))?;
        }
        self.open.insert(session.id(), Open { session, name, ended: false });
        Ok(leases)
    }

    /// Takes in what has changed, and takes back the pages of senders that have ended.
    pub fn step(&mut self, engine: &Engine) -> Result<(), PairError> {
        let mut changes = Vec::new();
        engine.group.drain(|change| changes.push(change));
        for change in changes {
            let Some(open) = self.open.get_mut(&change.session) else { continue };
            // The session may have ended since the change was told, and its pages be back.
            let back = open.session.reclaim();
            if (back.is_some() || open.session.poll().is_terminal()) && !open.ended {
                open.ended = true;
                self.ended += 1;
                if let Some(error) = open.session.failure() {
                    self.failed.insert(open.name.clone(), error.to_string());
                }
            }
            if let Some(back) = back {
                engine.pool.release(back.pages)?;
                if let Some(open) = self.open.remove(&change.session)
                    && !self.failed.contains_key(&open.name)
                {
                    self.sent.push(open.name);
                }
            }
        }
        if self.harm.is_some_and(|harm| self.ended >= harm.after)
            && let Some(harm) = self.harm.take()
        {
            harm.inflict();
        }
        Ok(())
    }

    /// Does this to a process once so many more sessions have ended.
    pub fn harm(&mut self, mut harm: Harm) {
        harm.after += self.ended;
        self.harm = Some(harm);
    }

    /// Aborts the senders of these requests.
    pub fn abort(&mut self, names: &[&str]) {
        let named = self.open.values_mut().filter(|open| names.contains(&open.name.as_str()));
        named.for_each(|open| open.session.abort());
    }

    /// Whether the request has ended: the cause if it failed. `None` while it goes on.
    pub fn result(&self, name: &str) -> Option<Result<(), &str>> {
        if let Some(why) = self.failed.get(name) {
            return Some(Err(why));
        }
        // The last ones are asked for.
        self.sent.iter().rev().any(|sent| sent == name).then_some(Ok(()))
    }

    /// What a peer's driver asks for.
    pub fn json(&self, engine: &Engine) -> Value {
        json!({
            "sent": self.sent, "failed": self.failed, "open": self.open.len(),
            "pages_out": engine.pool.num_out(), "quarantine": engine.quarantine(),
        })
    }
}
