//! Heartbeats: what keeps the pages of requests at their holder until they were read.

use kv_core::{Cause, SessionId};

use super::super::context::Context;
use super::super::notification::heartbeat;
use super::Consumer;
use super::engine::{EngineNo, Stage};

/// Most bytes of request ids in one heartbeat.
const MAX_BYTES: usize = 16 << 10;

impl Consumer {
    /// Sends a heartbeat for all sessions of an engine, if none was sent for a sixth of the lease. Sessions whose
    /// lease may be over fail.
    pub(super) fn beat_if_due(&mut self, cx: &mut Context, no: EngineNo) {
        let interval = self.config.kv_lease_duration / 6;
        let idle = self.config.reader.engine_ttl;
        let Some(engine) = self.engines.get(no) else { return };
        if engine.stage != Stage::Ready {
            return;
        }
        if engine.users.is_empty() {
            let due = engine.idle_since + idle;
            return self.engines.set_due(no, Some(due.max(cx.now + interval)));
        }
        let next = engine.last_beat.map_or(cx.now, |last| last + interval);
        if next > cx.now {
            return self.engines.set_due(no, Some(next));
        }
        engine.last_beat = Some(cx.now);
        let (clock, users) = (engine.clock, engine.users.iter().copied().collect::<Vec<_>>());
        let agents: Vec<_> = engine.agents().collect();
        self.engines.set_due(no, Some(cx.now + interval));
        let mut ids: Vec<String> = Vec::new();
        for session in users {
            let Some(live) = self.sessions.live(session) else { continue };
            let receiving = &mut live.dialect;
            if receiving.is_pull() && receiving.lease.over_at(clock) <= cx.now {
                self.fail(cx, session, Cause::LeaseExpired);
                continue;
            }
            let id = receiving.remote.request.as_str();
            // A heartbeat is cut at commas: of such an id, others would be renewed.
            if !id.contains(',') && receiving.lease.beat(cx.now) {
                ids.push(id.to_owned());
            }
        }
        for message in messages(&ids) {
            for agent in &agents {
                cx.effects.notify(*agent, heartbeat(message.iter().map(String::as_str)));
            }
        }
    }

    /// Whether the lease of a session may be over.
    pub(super) fn is_expired(&mut self, cx: &Context, session: SessionId) -> bool {
        let Some(live) = self.sessions.any(session) else { return true };
        let (lease, no) = (live.dialect.lease.clone(), live.dialect.engine);
        let clock = self.engines.get(no).and_then(|engine| engine.clock);
        lease.over_at(clock) <= cx.now
    }
}

/// The ids of heartbeats, in messages of a bounded size.
fn messages(ids: &[String]) -> Vec<&[String]> {
    let (mut all, mut begin, mut bytes) = (Vec::new(), 0, 0);
    for (number, id) in ids.iter().enumerate() {
        if number > begin && bytes + id.len() > MAX_BYTES {
            all.push(&ids[begin..number]);
            (begin, bytes) = (number, 0);
        }
        bytes += id.len() + 1;
    }
    if begin < ids.len() {
        all.push(&ids[begin..]);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heartbeats_for_many_requests_are_cut_into_messages() {
        let ids: Vec<String> = (0..1000).map(|n| format!("{n:0100}")).collect();
        let cut = messages(&ids);
        assert!(cut.iter().all(|ids| ids.iter().map(|id| id.len() + 1).sum::<usize>() <= MAX_BYTES + 101));
        assert_eq!(cut.concat(), ids);
        assert_eq!((cut.len(), messages(&[]).len()), (7, 0));
    }
}
