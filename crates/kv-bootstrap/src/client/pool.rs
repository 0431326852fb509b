//! [`Pool`]: the servers that a client talks to, by their addresses.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use bytes::Bytes;
use kv_core::{BootstrapError, Time};
use mio::{Events, Poll, Token, Waker};
use slab::Slab;

use super::endpoint::{Context, Endpoint, Outcome, Request};
use super::resolve::{Resolver, Target};
use crate::config::ClientConfig;
use crate::error::BootstrapClientError;

const WAKER: Token = Token(usize::MAX);

/// Servers with one keep-alive connection each. Every request submitted comes back exactly once, with the purpose
/// `P` for which the request was made.
pub(super) struct Pool<P> {
    pub(super) config: ClientConfig,
    poll: Poll,
    ready: Events,
    resolver: Resolver,
    endpoints: Slab<Endpoint<P>>,
    by_addr: BTreeMap<String, usize>,
    scratch: Vec<u8>,
}

impl<P> Pool<P> {
    pub(super) fn new(config: ClientConfig) -> Result<Pool<P>, BootstrapClientError> {
        let os = |call| move |source| BootstrapClientError::Os { call, source };
        let poll = Poll::new().map_err(os("epoll_create"))?;
        let waker = Waker::new(poll.registry(), WAKER).map_err(os("eventfd"))?;
        Ok(Pool {
            config,
            poll,
            ready: Events::with_capacity(64),
            resolver: Resolver::new(waker),
            endpoints: Slab::new(),
            by_addr: BTreeMap::new(),
            scratch: vec![0; 16 << 10],
        })
    }

    /// Waits for socket events for `wait` at most, and takes the answers of name servers.
    pub(super) fn wait(&mut self, now: Time, wait: Duration, outcomes: &mut Vec<Outcome<P>>) {
        if self.poll.poll(&mut self.ready, Some(wait)).is_ok() {
            for event in &self.ready {
                if let Some(endpoint) = self.endpoints.get_mut(event.token().0) {
                    endpoint.ready(event);
                }
            }
        }
        while let Some((addr, found)) = self.resolver.next_answer() {
            if let Some(endpoint) = self.by_addr.get(&addr).and_then(|key| self.endpoints.get_mut(*key)) {
                endpoint.resolved(now, &self.config, found, outcomes);
            }
        }
    }

    /// Sends and receives what can be sent and received now, and forgets servers without a use.
    pub(super) fn advance(&mut self, now: Time, outcomes: &mut Vec<Outcome<P>>) {
        for (_, endpoint) in &mut self.endpoints {
            let mut context = Context {
                now,
                config: &self.config,
                registry: self.poll.registry(),
                resolver: &mut self.resolver,
                scratch: &mut self.scratch,
            };
            endpoint.advance(&mut context, outcomes);
        }
        self.endpoints.retain(|_, endpoint| {
            let unused = endpoint.is_unused();
            if unused {
                self.by_addr.remove(endpoint.addr());
            }
            !unused
        });
    }

    /// Queues a request for a server; `Err` with the request and the reason if that is impossible.
    #[allow(clippy::result_large_err, reason = "an outcome like any other, not passed up any further")]
    pub(super) fn submit(
        &mut self,
        now: Time,
        addr: &str,
        purpose: P,
        bytes: Bytes,
    ) -> Result<(), Outcome<P>> {
        let request = Request::new(purpose, bytes, now, now + self.config.request_timeout);
        let key = match self.by_addr.get(addr) {
            Some(key) => *key,
            None => {
                let Some(target) = Target::parse(addr) else {
                    return Err((request, Err(BootstrapError::Address(addr.to_owned()))));
                };
                if self.endpoints.len() >= self.config.max_servers {
                    return Err((request, Err(BootstrapError::Busy)));
                }
                let entry = self.endpoints.vacant_entry();
                let key = entry.key();
                entry.insert(Endpoint::new(addr, target, Token(key), now));
                self.by_addr.insert(addr.to_owned(), key);
                key
            }
        };
        match self.endpoints.get_mut(key) {
            Some(endpoint) => {
                endpoint.submit(&self.config, request).map_err(|request| (request, Err(BootstrapError::Busy)))
            }
            None => Err((request, Err(BootstrapError::Busy))),
        }
    }

    /// The purposes of the requests to a server that have not been sent yet.
    pub(super) fn queued_mut(&mut self, addr: &str) -> impl Iterator<Item = &mut P> {
        let endpoint = self.by_addr.get(addr).and_then(|key| self.endpoints.get_mut(*key));
        endpoint.into_iter().flat_map(|endpoint| endpoint.queued_mut()).map(|request| &mut request.purpose)
    }

    /// The purposes of all requests that have not come back.
    pub(super) fn pending(&self) -> impl Iterator<Item = &P> {
        self.endpoints.iter().flat_map(|(_, endpoint)| endpoint.pending()).map(|request| &request.purpose)
    }

    /// The addresses of the servers.
    pub(super) fn addrs(&self) -> impl Iterator<Item = &String> {
        self.by_addr.keys()
    }

    /// When [`Pool::advance`] must be called again if no event comes before.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.endpoints.iter().filter_map(|(_, endpoint)| endpoint.next_timeout(&self.config)).min()
    }

    pub(super) fn as_raw_fd(&self) -> RawFd {
        self.poll.as_raw_fd()
    }
}
