//! Push: a vLLM engine writes the pages of a request into this worker's memory.
//!
//! A registration is sent once, to every rank that writes. A second one would be dangerous: vLLM keeps a
//! registration that comes after the write has begun, for ever, and gives it the KV of a later request with the
//! same id. vLLM has no message that takes a registration back. The pages of a registered request are therefore
//! the engine's until every rank has notified this worker, or until the engine is dead.
//!
//! Each session has an id of its own at the engine: the id of the request with a fresh suffix, so that no
//! notification for an earlier session is taken for this one's.

use kv_core::{Cause, KvPoll, PageList, SessionId};

use super::super::context::Context;
use super::super::gauges::Ignored;
use super::super::geometry::differs;
use super::super::notification::PushRegistration;
use super::Consumer;
use super::receiving::{Progress, host_and_port};

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
        let request_id = self.new_request_id(session);
        let Some(live) = self.sessions.live(session) else { return };
        let receiving = &mut live.dialect;
        let Some(engine) = self.engines.get(receiving.engine) else { return };
        let Some((remote_host, remote_port)) = host_and_port(&engine.key.addr) else { return };
        let registration = PushRegistration {
            request_id: request_id.clone(),
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
        let bytes = registration.encode();
        for agent in engine.agents() {
            cx.effects.notify(agent, bytes.clone());
        }
        receiving.progress = Progress::Registered { id: request_id.clone(), written: Default::default() };
        self.registered.insert(request_id, session);
    }

    /// The request's id without its suffix, and a suffix that no session here has.
    fn new_request_id(&mut self, session: SessionId) -> String {
        let base = self.sessions.any(session).map(|open| open.dialect.remote.request.base().to_owned());
        let base = base.unwrap_or_default();
        loop {
            let suffix = self.random.bits() as u32;
            let id = format!("{base}-{suffix:08x}");
            if !self.registered.contains_key(&id) {
                return id;
            }
        }
    }

    /// A rank of `ranks` tensor-parallel ranks has written a request.
    pub(super) fn rank_has_written(&mut self, cx: &mut Context, session: SessionId, agent: &str, ranks: u32) {
        let own = self.cache.geometry.parallel.tp_size.max(1);
        let Some(open) = self.sessions.any(session) else { return };
        let (over, receiving) = (open.has_ended(), &mut open.dialect);
        let Progress::Registered { written, .. } = &mut receiving.progress else { return };
        if !written.insert(agent.to_owned()) {
            return cx.ignore(Ignored::Repeated);
        }
        let needed = receiving.remote.pp_size.max(1) as usize * (ranks / own).max(1) as usize;
        if written.len() < needed {
            return;
        }
        match over {
            true => self.free(cx, session),
            false => self.finish(cx, session),
        }
    }

    /// The pages were given, and bytes may move.
    pub(super) fn moving(&mut self, cx: &mut Context, session: SessionId) {
        self.sessions.advance(&mut cx.effects, session, KvPoll::Transferring);
    }
}
