//! The commands by which a scheduler gives the pages of a sending session: chunk by chunk, final at
//! once or layer by layer. `given.rs` keeps the record of them.

use std::ops::Range;

use crate::error::Cause;
use crate::id::{ChunkId, SessionId};
use crate::lease::TransferMode;
use crate::pages::Pages;
use crate::proto::context::Context;
use crate::proto::ending::Ending;
use crate::proto::sending::Sending;
use crate::trace::KvWhat;

impl Sending {
    /// Takes the pages of a chunk, all of which are final.
    pub(in crate::proto) fn send_chunk(&mut self, cx: &mut Context, session: SessionId, chunk: Pages) {
        if let Some(number) = self.begin_chunk(cx, session, chunk) {
            self.layers_final(cx, session, number, None);
        }
    }

    /// Takes the next pages, of which no layer is final. Returns the number of the chunk, unless
    /// the session has ended.
    pub(in crate::proto) fn begin_chunk(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        chunk: Pages,
    ) -> Option<ChunkId> {
        let bad = chunk.list().check_below(cx.config.args.geometry().num_pages).err();
        let Some(sender) = self.sessions.get_mut(&session).filter(|sender| sender.standing.is_going()) else {
            cx.fx.release(session, chunk);
            return None;
        };
        let pages = chunk.len();
        match (sender.given.begin(chunk), bad) {
            (Ok(chunk), None) => {
                cx.fx.tell(session, || KvWhat::ChunkGiven { chunk, pages });
                return Some(chunk);
            }
            (Ok(_), Some(bad)) => self.fail(cx, session, Cause::BadPages(bad)),
            (Err(cause), _) => self.fail(cx, session, cause),
        }
        None
    }

    /// Layers of a chunk are final; `None` for all layers of this rank.
    pub(in crate::proto) fn layers_final(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        chunk: ChunkId,
        layers: Option<Range<u32>>,
    ) {
        let Some(sender) = self.sessions.get_mut(&session).filter(|sender| sender.standing.is_going()) else {
            return;
        };
        if let Err(error) = sender.given.finish(chunk, layers, &self.held_layers) {
            return self.fail(cx, session, error.into());
        }
        self.plan_groups(cx, session);
        self.update_sender(cx, session);
        self.grant_if_complete(cx, session);
    }

    fn grant_if_complete(&mut self, cx: &mut Context, session: SessionId) {
        let lease_id = self.sessions.get(&session).is_some_and(|sender| {
            sender.given.is_complete() && sender.mode != TransferMode::Push && sender.pinned_until.is_none()
        });
        if lease_id {
            self.grant(cx, session);
        }
    }
}
