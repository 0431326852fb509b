//! The router: what a request is called on either side, and what a receiver is told of its sender.

use kv_core::random::mix;
use kv_core::{EngineId, PageList, RemoteRequest, RequestId, Room, TransferMode};

use super::Dialect;
use super::hosts::PAGE_SIZE;
use super::requests::{Request, RequestNo};
use super::world::World;

impl World {
    /// The name of a request at its sender.
    pub(super) fn room(&self, request: RequestNo) -> Option<Room> {
        let name = self.requests[request].name;
        match self.params.dialect {
            Dialect::Sglang => Some(Room::Number(name)),
            _ => Room::request(&self.id_at_sender(request)).ok(),
        }
    }

    fn id_at_sender(&self, request: RequestNo) -> String {
        let suffix = mix(self.params.seed ^ (request as u64) << 8) as u32;
        format!("cmpl-{}-{suffix:08x}", self.requests[request].name)
    }

    /// The name of a request at its receivers.
    pub(super) fn remote_room(&self, request: RequestNo) -> Option<Room> {
        let id = match self.params.dialect {
            Dialect::VllmPush => format!("cmpl-{}-{:08x}", self.requests[request].name, request),
            _ => self.id_at_sender(request),
        };
        Room::request(&id).ok()
    }

    /// What the router says of a request at its sender.
    pub(super) fn remote(&self, request: RequestNo) -> Option<RemoteRequest> {
        let pull = match self.params.dialect {
            Dialect::Sglang => return None,
            dialect => dialect == Dialect::VllmPull,
        };
        let Request { engines: (prefill, _), pages, .. } = &self.requests[request];
        let engine = EngineId::new(&format!("p-{prefill}")).ok()?;
        let id = match self.remote_room(request)? {
            Room::Request(id) => id,
            Room::Number(number) => RequestId::new(&number.to_string()).ok()?,
        };
        let blocks = PageList::from_pages(pages.iter().copied()).ok()?;
        Some(RemoteRequest::new(engine, id).with(|remote| {
            remote.mode = Some(if pull { TransferMode::Pull } else { TransferMode::Push });
            remote.block_ids = if pull { vec![blocks] } else { Vec::new() };
            remote.tp_size = self.params.prefill_tp;
            remote.num_tokens = Some(pages.len() as u32 * PAGE_SIZE);
        }))
    }
}
