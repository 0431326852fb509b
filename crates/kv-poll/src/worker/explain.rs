//! What a worker says about itself when [`Setup::verbose`](super::Setup::verbose) is set: one line
//! on standard error for each change of a session, each peer, and each failed operation.
#![allow(clippy::print_stderr)]

use std::error::Error;
use std::fmt::Write;

use kv_core::WorkerId;
use kv_core::machine::{Amounts, Input, Output, SessionResource, SessionStatus};

/// Speaks for one worker, or says nothing.
pub(super) struct Explain {
    worker: Option<WorkerId>,
}

impl Explain {
    pub(super) fn new(worker: WorkerId, verbose: bool) -> Explain {
        Explain { worker: verbose.then_some(worker) }
    }

    pub(super) fn input<C>(&self, input: &Input<C>) {
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

    pub(super) fn output<S, R, F>(&self, output: &Output<S, R, F>)
    where
        S: SessionStatus,
        R: SessionResource,
        F: Error,
    {
        let Some(worker) = &self.worker else { return };
        match output {
            Output::Connect { peer, .. } => eprintln!("{worker}: connects to peer {peer}"),
            Output::Disconnect { peer } => eprintln!("{worker}: forgets peer {peer}"),
            Output::Status { session, failure: Some(error), .. } => {
                eprintln!("{worker}: session {session} failed: {error}");
            }
            Output::Status { session, poll, .. } => eprintln!("{worker}: session {session} is {poll}"),
            Output::Release { session, resource } => {
                eprintln!("{worker}: session {session} gives back {}", list::<R>(resource.amounts()));
            }
            _ => {}
        }
    }
}

/// How much of each kind, in words.
fn list<R: SessionResource>(amounts: Amounts) -> String {
    let mut text = String::new();
    for (kind, amount) in R::KINDS.iter().zip(amounts.0).filter(|(_, amount)| *amount > 0) {
        let comma = if text.is_empty() { "" } else { ", " };
        // Writing into a string cannot fail.
        let _ = write!(text, "{comma}{amount} {kind}");
    }
    if text.is_empty() { "nothing".to_owned() } else { text }
}
