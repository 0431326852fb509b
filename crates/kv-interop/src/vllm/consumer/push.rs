//! Push: a vLLM engine writes the pages of a request into this worker's memory.
//!
//! A registration is sent once, by one rank of those that share a vLLM rank, because the vLLM rank writes to all of
//! them. A second one would be dangerous: vLLM keeps a registration that comes after the write has begun, for ever,
//! and gives it the KV of a later request with the same id. vLLM has no message that takes a registration back. The
//! pages of a registered request are therefore the engine's until every rank has notified this worker, or until every
//! rank has ended (`death.rs`).
//!
//! Each session has an id of its own at the engine: the id of the request with another suffix, so that no
//! notification for an earlier session is taken for this one's. All ranks of this engine must have the same id: they
//! compute the suffix from what all of them know. A rank that shares its vLLM rank may be written before its own
//! handshake has ended. All ranks must be given the same pages, as by an `EngineGroup`, which also returns no page
//! before every rank has returned it.

use kv_core::hash::Fnv1a;
use kv_core::random::mix;
use kv_core::{Cause, KvPoll, PageList, RemoteRequest, SessionId};

use super::super::context::Context;
use super::super::notification::PushRegistration;
use super::Consumer;
use super::receiving::{Progress, host_and_port};
use crate::cache::differs;
use crate::gauges::Ignored;

/// Most requests of which is known how often they were opened.
const MAX_OPENED: usize = 1 << 16;

impl Consumer {
    /// Tells the ranks of a session's engine where to write.
    pub(super) fn register(&mut self, cx: &mut Context, session: SessionId, pages: &PageList) {
        let Some(own) = self.config.side_channel.clone() else {
            let missing = differs("side_channel", "none", "needed by an engine that writes");
            return self.fail(cx, session, Cause::Incompatible(missing));
        };
        if pages.is_empty() {
            // vLLM's own receivers register nothing either; the engine frees the request when its lease ends.
            return self.finish(cx, session);
        }
        if let Err(cause) = self.check_blocks(session, pages.len()) {
            return self.fail(cx, session, cause);
        }
        let Some(live) = self.sessions.live(session) else { return };
        let receiving = &mut live.dialect;
        let Some(engine) = self.engines.get(receiving.engine) else { return };
        let Some((remote_host, remote_port)) = host_and_port(&engine.key.addr) else { return };
        let registration = PushRegistration {
            request_id: receiving.own_id.clone(),
            decode_engine_id: self.config.engine_id.clone(),
            decode_host: own.host,
            decode_port: own.port,
            decode_tp_size: self.cache.geometry.parallel.tp_size,
            local_block_ids: vec![pages.iter().collect()],
            remote_engine_id: engine.key.engine.as_str().to_owned(),
            remote_host,
            remote_port,
            remote_tp_size: engine.key.tp_size,
            remote_pp_size: engine.key.pp_size,
        };
        if self.cache.speaks_for_all(engine.key.tp_size) {
            let bytes = registration.encode();
            for agent in engine.agents() {
                cx.effects.notify(agent, bytes.clone());
            }
        }
        receiving.progress = Progress::Registered;
        self.end_if_written(cx, session);
    }

    /// Refuses more pages than the engine has, if the parameters name the engine's blocks. vLLM's writer takes a
    /// registration of more pages for impossible, and forgets whatever has come together with the registration,
    /// that of other receivers too.
    fn check_blocks(&mut self, session: SessionId, pages: usize) -> Result<(), Cause> {
        let Some(live) = self.sessions.live(session) else { return Ok(()) };
        let blocks = live.dialect.remote.block_ids.iter().map(PageList::len).max().unwrap_or(0);
        let no = live.dialect.engine;
        let metadata = self.engines.get(no).and_then(|engine| engine.ranks.first()?.metadata.as_ref());
        let Some(metadata) = metadata.filter(|_| blocks > 0) else { return Ok(()) };
        let block = u64::from(metadata.block_size) * u64::from(metadata.physical_blocks_per_logical_kv_block);
        let tokens = block.saturating_mul(blocks as u64);
        let sent = usize::try_from(tokens / u64::from(self.cache.geometry.page_size)).unwrap_or(usize::MAX);
        if pages <= sent { Ok(()) } else { Err(Cause::PageCount { sent, registered: pages }) }
    }

    /// The id of a new session at the engine: the request's id without its suffix, and a suffix that depends on how
    /// often the request was opened here.
    pub(super) fn new_request_id(&mut self, remote: &RemoteRequest) -> String {
        let base = remote.request.base();
        // Ranks of one engine know the same numbers; a rank that is alone need not be predictable.
        let alone = self.cache.geometry.parallel.tp_size == 1;
        let mut salt = if alone { self.random.bits() } else { 0 };
        if self.opened.len() >= MAX_OPENED {
            self.opened.clear();
        }
        let opened = self.opened.entry((remote.engine.clone(), base.to_owned())).or_default();
        *opened += 1;
        let mut hash = Fnv1a::new();
        for text in [&self.config.engine_id, remote.engine.as_str(), remote.request.as_str()] {
            hash.write(text.as_bytes());
            hash.write(&[0]);
        }
        hash.write(&opened.to_le_bytes());
        loop {
            let suffix = mix(hash.finish() ^ salt) as u32;
            let id = format!("{base}-{suffix:08x}");
            if !self.registered.contains_key(&id) {
                return id;
            }
            salt = salt.wrapping_add(1);
        }
    }

    /// A rank of `ranks` tensor-parallel ranks has written a request.
    pub(super) fn rank_has_written(&mut self, cx: &mut Context, session: SessionId, agent: &str, ranks: u32) {
        let own = self.cache.geometry.parallel.tp_size.max(1);
        let Some(open) = self.sessions.any(session) else { return };
        let receiving = &mut open.dialect;
        if !receiving.written.insert(agent.to_owned()) {
            return cx.ignore(Ignored::Repeated);
        }
        receiving.writers = receiving.remote.pp_size.max(1) as usize * (ranks / own).max(1) as usize;
        self.end_if_written(cx, session);
    }

    /// Ends a session into whose pages every rank has written, or hands its pages back if the session has ended.
    fn end_if_written(&mut self, cx: &mut Context, session: SessionId) {
        let Some(open) = self.sessions.any(session) else { return };
        let receiving = &open.dialect;
        if !receiving.is_written() {
            return;
        }
        match (open.has_ended(), &receiving.progress) {
            (true, _) => self.free(cx, session),
            (false, Progress::Registered) => self.finish(cx, session),
            // The pages are not known here yet.
            (false, _) => {}
        }
    }

    /// The pages were given, and bytes may move.
    pub(super) fn moving(&mut self, cx: &mut Context, session: SessionId) {
        self.sessions.advance(&mut cx.effects, session, KvPoll::Transferring);
    }
}
