//! A machine within another machine: a service that is built on the machine of another service hands
//! inputs on to the inner machine, and the inner machine's outputs on to the worker.

use super::{Input, Output};
use crate::id::SessionId;

/// An output of an inner machine that is about one of its sessions, and so is for the outer machine.
#[derive(Debug, PartialEq, Eq)]
pub enum OfSession<S, R, F> {
    /// As [`Output::Status`].
    Status {
        /// The session of the inner machine.
        session: SessionId,
        /// The new state of the session.
        poll: S,
        /// The error, if the session failed.
        failure: Option<Box<F>>,
    },
    /// As [`Output::Release`].
    Release {
        /// The session of the inner machine.
        session: SessionId,
        /// The resource, as it was lent.
        resource: R,
    },
}

impl<S, R, F> Output<S, R, F> {
    /// The same output of a machine with other sessions. An output about a session comes back as the
    /// error, because only the outer machine knows what the session was opened for.
    pub fn within<T, Q, E>(self) -> Result<Output<T, Q, E>, OfSession<S, R, F>> {
        Ok(match self {
            Output::Connect { peer, transport } => Output::Connect { peer, transport },
            Output::Disconnect { peer } => Output::Disconnect { peer },
            Output::Send { peer, frame } => Output::Send { peer, frame },
            Output::Post { peer, post } => Output::Post { peer, post },
            Output::Permit { peer, until } => Output::Permit { peer, until },
            Output::Revoke { peer } => Output::Revoke { peer },
            Output::Cancel { post } => Output::Cancel { post },
            Output::Lookup { lookup, addr, query } => Output::Lookup { lookup, addr, query },
            Output::Status { session, poll, failure } => {
                return Err(OfSession::Status { session, poll, failure });
            }
            Output::Release { session, resource } => return Err(OfSession::Release { session, resource }),
        })
    }
}

impl<C> Input<C> {
    /// The same input for an inner machine with other commands. A command comes back as the error.
    pub fn within<D>(self) -> Result<Input<D>, C> {
        Ok(match self {
            Input::Command(command) => return Err(command),
            Input::Frame { from, frame } => Input::Frame { from, frame },
            Input::Posted { post, result } => Input::Posted { post, result },
            Input::Connected { peer, directions, fence } => Input::Connected { peer, directions, fence },
            Input::ConnectFailed { peer, error } => Input::ConnectFailed { peer, error },
            Input::PeerGone { peer, end } => Input::PeerGone { peer, end },
            Input::Revoked { peer } => Input::Revoked { peer },
            Input::Found { lookup, ranks } => Input::Found { lookup, ranks },
            Input::LookupFailed { lookup, error } => Input::LookupFailed { lookup, error },
            Input::Timeout => Input::Timeout,
        })
    }
}
