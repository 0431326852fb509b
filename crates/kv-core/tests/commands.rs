//! What a worker must understand of a command, whatever the machine makes of it.
#![allow(clippy::unwrap_used)]

use kv_core::machine::{Amounts, SessionCommand, SessionResource, SessionStatus};
use kv_core::proto::{Command, Resource};
use kv_core::{
    CacheGroupItems, ChunkId, FinalLayers, KvPoll, PageList, Pages, ReadyEventError, RequestCacheGroups,
    Room, SessionId,
};

fn pages(list: &[u32]) -> Pages {
    Pages::unpooled(PageList::from_pages(list.iter().copied()).unwrap()).unwrap()
}

fn groups() -> RequestCacheGroups {
    let mut groups = RequestCacheGroups::none();
    groups.push(CacheGroupItems::new(1, pages(&[5, 6, 7]))).unwrap();
    groups
}

/// One of each that lends something, and how much.
fn lenders() -> Vec<(Command, Amounts)> {
    let session = SessionId(1);
    vec![
        (Command::Send { session, chunk: pages(&[1, 2]) }, Amounts::of(Resource::PAGES, 2)),
        (Command::BeginChunk { session, chunk: pages(&[3]) }, Amounts::of(Resource::PAGES, 1)),
        (Command::InitReceiver { session, pages: Pages::none(), aux: None }, Amounts::default()),
        (Command::RequestCacheGroups { session, groups: groups() }, Amounts::of(Resource::ITEMS, 3)),
    ]
}

#[test]
fn a_command_gives_back_exactly_what_it_lends_and_other_commands_lend_nothing() {
    for (command, amounts) in lenders() {
        assert_eq!(command.lends(), Some(amounts), "{command:?}");
        assert_eq!(command.into_resource().map(|resource| resource.amounts()), Some(amounts));
    }
    let session = SessionId(1);
    for command in [
        Command::InitSender { session, num_pages: 3, aux: None },
        Command::LayersFinal { session, layers: FinalLayers::all(ChunkId(0)) },
        Command::abort(session),
        Command::Drain,
        Command::shutdown(),
    ] {
        assert_eq!(command.lends(), None, "{command:?}");
        assert_eq!(command.into_resource(), None);
    }
}

#[test]
fn only_commands_to_an_open_session_can_be_addressed() {
    let to = SessionId(9);
    for (mut command, _) in lenders() {
        assert!(command.address(to), "{command:?}");
        assert!(format!("{command:?}").contains(&format!("{to:?}")), "{command:?}");
    }
    let (session, options) = (SessionId(1), Box::default());
    let opens = Command::OpenSender { session, room: Room::from(1), receivers: 1, options };
    for mut command in [opens, Command::Drain, Command::shutdown()] {
        assert!(!command.address(to));
        assert!(!format!("{command:?}").contains(&format!("{to:?}")), "{command:?}");
    }
}

#[test]
fn a_ready_event_is_taken_out_once_and_one_that_fails_names_its_chunk() {
    let layers = FinalLayers::new(ChunkId(4), 0..2).after(|| Ok(true));
    let mut command = Command::LayersFinal { session: SessionId(1), layers };
    assert!(command.take_ready().is_some());
    assert!(command.take_ready().is_none());
    let error = ReadyEventError::Device { code: 700 };
    let failed = command.not_ready(error);
    assert!(
        matches!(failed, Command::ReadyEventFailed { session: SessionId(1), chunk: ChunkId(4), error: said } if said == error)
    );
}

#[test]
fn every_state_has_a_number_of_its_own_and_the_two_ends_are_terminal() {
    let states: Vec<KvPoll> = (0..=126).filter_map(<KvPoll as SessionStatus>::from_u8).collect();
    assert_eq!(states.len(), 5);
    assert!(states.iter().all(|state| KvPoll::from_u8(state.to_u8()) == Some(*state)));
    let terminal = |state: &&KvPoll| SessionStatus::is_terminal(**state);
    assert_eq!(states.iter().filter(terminal).count(), 2);
    assert!(!KvPoll::OPENED.is_terminal() && KvPoll::FAILED.is_terminal());
}

#[test]
fn amounts_of_different_kinds_do_not_mix_and_never_fall_below_nothing() {
    let (pages, items) = (Amounts::of(0, 5), Amounts::of(1, 2));
    let both = pages.plus(items);
    assert_eq!((both.kind(0), both.kind(1), both.kind(2), both.kind(99)), (5, 2, 0, 0));
    assert_eq!((both.minus(pages), both.least(items)), (items, items));
    assert!(items.minus(both).is_empty() && Amounts::of(99, 7).is_empty());
}
