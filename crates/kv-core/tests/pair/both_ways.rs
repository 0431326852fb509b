//! Two workers each of which receives from the other.

use std::time::Duration;

use kv_core::proto::Command;
use kv_core::{KvPoll, Room};

use crate::pair::*;

/// A request whose pages go to `node` from the other one, and how it ended there.
fn transfer_to(pair: &mut Pair, node: usize, room: u64) -> KvPoll {
    let (receiver, sender) = (kv_core::SessionId(room * 2), kv_core::SessionId(room * 2 + 1));
    let (room, options) = (Room::Number(room), Box::default());
    let bootstrap_addr = "bootstrap:1".to_owned();
    pair.command(
        node,
        Command::OpenReceiver { session: receiver, room: room.clone(), bootstrap_addr, options },
    );
    pair.command(node, Command::InitReceiver { session: receiver, pages: pages(&[5, 6]), aux: None });
    let (from, options) = (1 - node, Box::default());
    pair.command(from, Command::OpenSender { session: sender, room, receivers: 1, options });
    pair.command(from, Command::InitSender { session: sender, num_pages: 2, aux: None });
    pair.command(from, Command::Send { session: sender, chunk: pages(&[1, 2]) });
    for _ in 0..60 {
        pair.complete_posts();
        pair.run_for(Duration::from_secs(1));
    }
    pair.poll(node, receiver)
}

#[test]
fn a_worker_that_forgot_another_receives_from_it_again_after_it_was_greeted() {
    let mut pair = Pair::with(|config| config.limits.max_peers = 1);
    assert_eq!(transfer_to(&mut pair, P, 100), KvPoll::Success);
    pair.make_forget(P);
    assert_eq!(transfer_to(&mut pair, D, 101), KvPoll::Success);
    assert_eq!(transfer_to(&mut pair, P, 102), KvPoll::Success);
    pair.assert_empty();
}
