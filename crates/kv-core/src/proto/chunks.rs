//! The pages of a sending session as its scheduler gives them: chunk by chunk, final at once or layer
//! by layer.
//!
//! ```text
//! begin ─▶ pages in hand ─ layers final ─▶ these may be written ─ all layers ─▶ chunk final
//! send   = begin, and all layers final
//! all announced pages given, every chunk final ─▶ complete: aux row may be written, pages may be read
//! ```

use std::ops::Range;

use super::io::Output;
use super::node::Node;
use super::run_set::RunSet;
use super::send::SendSession;
use crate::announce::LayersError;
use crate::error::Cause;
use crate::id::{ChunkId, SessionId};
use crate::layout::HeldLayers;
use crate::lease::TransferMode;
use crate::pages::Pages;

/// Pages in hand, their place in the request, and what of them is final.
#[derive(Debug)]
#[cfg_attr(feature = "model", derive(Clone))]
pub(super) struct Chunk {
    pub(super) offset: usize,
    pub(super) pages: Pages,
    pub(super) layers: Announced,
}

/// Layers of a chunk that have been announced.
#[derive(Debug, Clone, Default)]
pub(super) struct Announced {
    /// All at once.
    whole: bool,
    some: RunSet,
    /// How many of them this rank holds.
    held: u32,
}

/// One announcement: layers of a chunk that may be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Final {
    /// Position in the list of chunks.
    pub(super) chunk: usize,
    /// `None` for all that this rank has.
    pub(super) layers: Option<(u32, u32)>,
}

impl Announced {
    /// Notes layers as final. They are disjoint from those before, and of this rank.
    fn add(
        &mut self,
        chunk: usize,
        layers: Option<Range<u32>>,
        held: &HeldLayers,
    ) -> Result<Final, LayersError> {
        let hull = held.hull();
        if let Some(layers) = &layers {
            held.check(layers)?;
        }
        let wanted = layers.clone().unwrap_or(hull.clone());
        let (start, end) = (u64::from(wanted.start), u64::from(wanted.end));
        let before = if self.whole {
            Some(hull.clone())
        } else {
            let narrow = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
            self.some.shared(start..end).map(|run| narrow(run.start)..narrow(run.end))
        };
        if let Some(announced) = before {
            return Err(LayersError::Twice { chunk: number(chunk), layers: wanted, announced });
        }
        let layers = layers.filter(|layers| *layers != hull);
        self.whole = layers.is_none();
        self.some.insert(start, end - start);
        self.held += held.among(&wanted);
        Ok(Final { chunk, layers: layers.map(|layers| (layers.start, layers.end)) })
    }

    fn is_all(&self, held: &HeldLayers) -> bool {
        self.whole || self.held > 0 && self.held == held.among(&held.hull())
    }
}

impl SendSession {
    /// Notes whether everything has been given and announced.
    fn check_complete(&mut self) {
        let given = self.announced.is_some_and(|(announced, _)| self.given == announced);
        self.complete |= given && self.chunks.len() == self.chunks_final;
    }
}

impl Node {
    /// All pages of the chunk are final.
    pub(super) fn send_chunk(&mut self, session: SessionId, chunk: Pages) {
        if let Some(number) = self.begin_chunk(session, chunk) {
            self.layers_final(session, number, None);
        }
    }

    /// Takes the next pages; their number, unless the session has ended.
    pub(super) fn begin_chunk(&mut self, session: SessionId, chunk: Pages) -> Option<ChunkId> {
        let bad = chunk.list().check_below(self.config.args.geometry().num_pages).err();
        let Some(sender) = self.senders.get_mut(&session).filter(|sender| !sender.poll.is_terminal()) else {
            self.output(Output::Release { session, resource: chunk.into() });
            return None;
        };
        let (offset, sent) = (sender.given, sender.given + chunk.len());
        let cause = match sender.announced {
            None => Some(Cause::InitOrder),
            Some((announced, _)) if sent > announced => Some(Cause::TooManyPages { sent, announced }),
            Some(_) => bad.map(Cause::BadPages),
        };
        let index = sender.chunks.len();
        sender.given = sent;
        sender.chunks.push(Chunk { offset, pages: chunk, layers: Announced::default() });
        match cause {
            Some(cause) => self.fail_sender(session, cause),
            None => return Some(ChunkId(number(index))),
        }
        None
    }

    /// Layers of a chunk are final; `None` for all of this rank.
    pub(super) fn layers_final(&mut self, session: SessionId, chunk: ChunkId, layers: Option<Range<u32>>) {
        let Some(sender) = self.senders.get_mut(&session).filter(|sender| !sender.poll.is_terminal()) else {
            return;
        };
        let given = number(sender.chunks.len());
        let index = chunk.0 as usize;
        let noted = match sender.chunks.get_mut(index) {
            Some(chunk) => {
                let before = chunk.layers.is_all(&self.held_layers);
                let noted = chunk.layers.add(index, layers, &self.held_layers);
                // Layers that nobody holds may be announced after those that count.
                sender.chunks_final += usize::from(!before && chunk.layers.is_all(&self.held_layers));
                noted
            }
            None => Err(LayersError::UnknownChunk { chunk: chunk.0, given }),
        };
        match noted {
            Ok(noted) => sender.finals.push(noted),
            Err(error) => return self.fail_sender(session, error.into()),
        }
        sender.check_complete();
        self.plan_groups(session);
        self.update_sender(session);
        self.grant_if_complete(session);
    }

    fn grant_if_complete(&mut self, session: SessionId) {
        let grant = self.senders.get(&session).is_some_and(|sender| {
            sender.complete && sender.mode != TransferMode::Push && sender.pinned_until.is_none()
        });
        if grant {
            self.grant(session);
        }
    }
}

fn number(position: usize) -> u32 {
    u32::try_from(position).unwrap_or(u32::MAX)
}
