//! What a worker says about itself when [`KvArgs::verbose`](kv_core::KvArgs::verbose) is set: one line
//! on standard error for each change of a session, each peer, and each failed operation.
#![allow(clippy::print_stderr)]

use kv_core::proto::{Input, Output};
use kv_core::{KvPoll, WorkerId};

/// Speaks for one worker, or says nothing.
pub(super) struct Explain {
    worker: Option<WorkerId>,
}

impl Explain {
    pub(super) fn new(worker: &WorkerId, verbose: bool) -> Explain {
        Explain { worker: verbose.then(|| worker.clone()) }
    }

    pub(super) fn input(&self, input: &Input) {
        let Some(worker) = &self.worker else { return };
        match input {
            Input::Posted { post, result: Err(error) } => eprintln!("{worker}: post {post} failed: {error}"),
            Input::ConnectFailed { peer, error } => {
                eprintln!("{worker}: cannot connect to peer {peer}: {error}")
            }
            Input::PeerGone { peer, end } => {
                eprintln!("{worker}: the way to peer {peer} has ended: {end:?}");
            }
            Input::LookupFailed { error, .. } => eprintln!("{worker}: lookup failed: {error}"),
            _ => {}
        }
    }

    pub(super) fn output(&self, output: &Output) {
        let Some(worker) = &self.worker else { return };
        match output {
            Output::Connect { peer, .. } => eprintln!("{worker}: connects to peer {peer}"),
            Output::Disconnect { peer } => eprintln!("{worker}: forgets peer {peer}"),
            Output::Status { session, poll: KvPoll::Failed, failure: Some(error) } => {
                eprintln!("{worker}: session {session} failed: {error}");
            }
            Output::Status { session, poll, .. } => eprintln!("{worker}: session {session} is {poll}"),
            Output::Release { session, pages } => {
                eprintln!("{worker}: session {session} gives {} pages back", pages.len());
            }
            Output::ReleaseGroups { session, groups, .. } => {
                eprintln!("{worker}: session {session} gives {} items of state groups back", groups.len());
            }
            _ => {}
        }
    }
}
