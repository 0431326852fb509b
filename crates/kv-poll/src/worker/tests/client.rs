//! A bootstrap client without a server.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use kv_core::{BootstrapClient, BootstrapError, BootstrapEvent, LookupId, RankQuery, RankRecord, Time};

use super::{Log, Seen};

/// A client that refuses every question, and has no descriptor: only being polled again after a
/// question brings out its answer.
pub(super) struct FakeClient {
    log: Log,
    answers: VecDeque<BootstrapEvent>,
    /// How long the withdrawal of a record takes; `None` if it is over at once.
    pub(super) withdraws_for: Option<Duration>,
    withdrawing: Option<Time>,
}

impl FakeClient {
    pub(super) fn new(log: &Log) -> FakeClient {
        let log = Arc::clone(log);
        FakeClient { log, answers: VecDeque::new(), withdraws_for: None, withdrawing: None }
    }
}

impl BootstrapClient for FakeClient {
    fn publish(&mut self, _: Time, addr: &str, record: RankRecord) {
        let way = &record.transports[0];
        assert_eq!((way.name.as_str(), &way.metadata[..]), ("fake", &b"metadata"[..]));
        self.log.lock().unwrap().push(Seen::Published(addr.to_owned()));
        let addr = addr.to_owned();
        let (error, retry_in) = (BootstrapError::TimedOut, Duration::ZERO);
        self.answers.push_back(BootstrapEvent::PublishFailed { addr: addr.clone(), error, retry_in });
        self.answers.push_back(BootstrapEvent::Published { addr });
    }

    fn leave(&mut self, _: Time) {
        self.log.lock().unwrap().push(Seen::Left);
    }

    fn withdraw(&mut self, now: Time) {
        self.log.lock().unwrap().push(Seen::Withdrawn);
        self.withdrawing = self.withdraws_for.map(|time| now + time);
    }

    fn lookup(&mut self, _: Time, lookup: LookupId, _: &str, _: &RankQuery) {
        self.answers.push_back(BootstrapEvent::Failed { lookup, error: BootstrapError::UnknownRank });
    }

    fn poll(&mut self, _: Time) -> Option<BootstrapEvent> {
        self.answers.pop_front()
    }

    fn next_timeout(&self) -> Option<Time> {
        self.withdrawing
    }

    fn as_raw_fd(&self) -> Option<RawFd> {
        None
    }
}
