//! The scheduler's commands, as a script decides.

use std::time::Duration;

use kv_core::proto::Command;
use kv_core::{
    AuxIndex, CacheGroupItems, ChunkId, FinalLayers, Incarnation, Lease, LeaseRef, PageList, Pages,
    ReadyEventError, RequestCacheGroups, SessionId, SessionOptions, TransferMode,
};

use super::caches::PAGES;
use super::frames;
use super::script::Script;

/// A command that opens a session, and the amount that it pays for.
pub(super) fn open(
    script: &mut Script,
    session: SessionId,
    sender: bool,
    mode: TransferMode,
) -> (u64, Command) {
    let room = frames::room(script);
    let lease_refs = if sender { 0 } else { script.size(2000) };
    let lease_ref = |number: usize| {
        LeaseRef::new(Incarnation::from_random(number as u64 + 1), SessionId(1 + number as u64))
    };
    let options = Box::new(SessionOptions::default().with(|options| {
        options.mode = Some(mode);
        options.deadline = script.option(|script| Duration::from_millis(script.number() % 1_000_000));
        options.prefill_dp_rank = script.option(|script| u32::from(script.below(3)));
        options.lease =
            script.option(|script| Lease::Fixed(Duration::from_millis(script.number() % 100_000)));
        options.lease_refs = (0..lease_refs).map(lease_ref).collect();
        options.prefix_pages = if script.rarely() { script.size(5000) } else { 0 };
        options.tokens = script.option(|script| script.size(100_000));
    }));
    if sender {
        let receivers = script.size(5000) as u32;
        (1 + u64::from(receivers), Command::OpenSender { session, room, receivers, options })
    } else {
        let bootstrap_addr = format!("server-{}:1", script.text(2000));
        let own = 1 + lease_refs as u64 + bootstrap_addr.len() as u64 / 16;
        (own, Command::OpenReceiver { session, room, bootstrap_addr, options })
    }
}

/// Commands to a session: the amount that each pays for, how often it lends pages or items, and the command.
pub(super) fn commands(script: &mut Script, session: SessionId) -> Vec<(u64, u32, Command)> {
    let aux = if script.rarely() { Some(AuxIndex(script.small())) } else { None };
    match script.below(12) {
        0..=2 => {
            let chunk = own_pages(script);
            let num_pages = if script.rarely() { script.size(100_000) } else { chunk.len() };
            let own = cost_of(&chunk);
            let given = match script.flag() {
                true => Command::Send { session, chunk },
                false => Command::BeginChunk { session, chunk },
            };
            vec![(1, 0, Command::InitSender { session, num_pages, aux }), (own, 1, given)]
        }
        3 => {
            let chunk = own_pages(script);
            vec![(cost_of(&chunk), 1, Command::Send { session, chunk })]
        }
        4 => {
            let chunk = ChunkId(script.small());
            let start = script.below(3).into();
            let mut layers = FinalLayers::all(chunk);
            layers.layers = script.option(|script| start..start + u32::from(script.below(3)));
            vec![(1, 0, Command::LayersFinal { session, layers })]
        }
        5 => {
            let error = ReadyEventError::Device { code: 1 };
            vec![(0, 0, Command::ReadyEventFailed { session, chunk: ChunkId(0), error })]
        }
        6..=8 => {
            let pages = own_pages(script);
            vec![(cost_of(&pages), 1, Command::InitReceiver { session, pages, aux })]
        }
        9 | 10 => {
            let (mut groups, mut own) = (RequestCacheGroups::none(), 1);
            for group in (0..4).filter(|_| script.flag()).collect::<Vec<_>>() {
                let list = PageList::try_from(script.runs(4000, 4096)).unwrap_or_default();
                let items = Pages::unpooled(list).unwrap_or_default();
                own += cost_of(&items);
                // By rising number, and each once.
                let _ = groups.push(CacheGroupItems::from_number(group, script.small() % 1000, items));
            }
            vec![(own, 1, Command::RequestCacheGroups { session, groups })]
        }
        _ => vec![(0, 0, Command::Abort { session })],
    }
}

fn own_pages(script: &mut Script) -> Pages {
    let list = PageList::try_from(script.runs(20_000, PAGES)).unwrap_or_default();
    Pages::unpooled(list).unwrap_or_default()
}

fn cost_of(pages: &Pages) -> u64 {
    1 + pages.len() as u64
}
