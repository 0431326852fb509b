//! One registration of a worker with one server, which the client keeps alive.

use std::time::Duration;

use bytes::Bytes;
use kv_core::{BootstrapError, RankRecord, Time};
use serde::Serialize;

use super::sglang;
use crate::config::ClientConfig;
use crate::http::Response;
use crate::record::{GrantJson, LeaseJson, RankJson};
use crate::secret::Secret;
use crate::sglang::SglangRank;

/// Most bytes of a server's refusal that are passed on in an error.
const MAX_REASON: usize = 256;

/// Shortest time between two steps, however short the granted lease is.
const MIN_PAUSE: Duration = Duration::from_millis(10);

/// A registration, its state, and its next step.
///
/// | state | next step | then |
/// |---|---|---|
/// | `Absent` | register | `Present` on 200 |
/// | `Present` | renew, every third of the lease | `Absent` on 404 |
/// | `Unlisted` | register by `PUT /route` | `Listed` on 200, `Absent` on 404 |
/// | `Listed` | `GET /route` for the own rank at every heartbeat | `Unlisted` if the server has lost the rank |
///
/// `Absent` is left for `Unlisted` on 404, if the record has an offer for SGLang's decode workers: the server is
/// SGLang's own, which has neither `/v1/ranks` nor leases. That server counts registrations, so that a rank that
/// registers twice makes an incomplete engine ready: a rank registers again only if the server does not answer, is
/// complete without the rank, or has a smaller count than before, and so has restarted.
///
/// After any other answer, or no answer, the state stays, and the step is repeated after a growing pause.
#[derive(Debug)]
pub(crate) struct Publication {
    /// Tells this registration from an earlier one of the same worker at the same server.
    pub(crate) serial: u64,
    register: Bytes,
    /// The registration of a rank that has left.
    leave: Bytes,
    left: Left,
    renew: Bytes,
    withdraw: Bytes,
    /// The registration and the heartbeat at SGLang's own server, for a record with an offer for it.
    route: Option<(Bytes, Bytes)>,
    /// Registrations that SGLang's own server is known to have counted.
    listed: u32,
    state: State,
    announced: bool,
    /// True if the server may have received the registration.
    sent: bool,
    step_due: Option<Time>,
    pause: Duration,
}

/// Whether the worker awaits further peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    No,
    /// The worker awaits no more, and the server was not told yet.
    Asked,
    /// Every registration says so.
    Told,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Absent,
    Present,
    Unlisted,
    Listed,
}

/// What an answer changed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Answered {
    /// Nothing that the owner must be told: the registration continues.
    Quiet,
    /// The worker is registered for the first time.
    Published,
    /// The worker could not be registered, or its registration could not be renewed.
    Failed { error: BootstrapError, retry_in: Duration },
}

impl Publication {
    /// A registration whose first step is due at once; `None` if the record cannot be written as JSON.
    pub(crate) fn new(
        serial: u64,
        now: Time,
        host: &str,
        record: &RankRecord,
        config: &ClientConfig,
    ) -> Option<Publication> {
        let lease_ms = Some(u64::try_from(config.lease.as_millis()).unwrap_or(u64::MAX).max(1));
        let secret = config.secret.as_ref();
        let key =
            |lease_ms| LeaseJson { worker: record.worker.clone(), incarnation: record.incarnation, lease_ms };
        Some(Publication {
            serial,
            register: request("PUT /v1/ranks", host, secret, &RankJson::new(record, lease_ms))?,
            leave: request(
                "PUT /v1/ranks",
                host,
                secret,
                &RankJson { left: true, ..RankJson::new(record, lease_ms) },
            )?,
            left: Left::No,
            renew: request("POST /v1/ranks/renew", host, secret, &key(lease_ms))?,
            withdraw: request("DELETE /v1/ranks", host, secret, &key(None))?,
            route: SglangRank::of(record)
                .and_then(Result::ok)
                .map(|rank| (sglang::put_route(host, &rank), sglang::get_route(host, &rank))),
            listed: 0,
            state: State::Absent,
            announced: false,
            sent: false,
            step_due: Some(now),
            pause: config.retry_first,
        })
    }

    /// When the next step is due; `None` while a step is under way.
    pub(crate) fn due(&self) -> Option<Time> {
        self.step_due
    }

    /// The request of the step that is due now, if one is.
    pub(crate) fn step(&mut self, now: Time) -> Option<Bytes> {
        if self.step_due.is_none_or(|due| due > now) {
            return None;
        }
        self.step_due = None;
        self.sent = true;
        Some(match (self.state, &self.route) {
            (State::Present, _) => self.renew.clone(),
            (State::Unlisted, Some((register, _))) => register.clone(),
            (State::Listed, Some((_, health))) => health.clone(),
            _ if self.left == Left::No => self.register.clone(),
            _ => {
                self.left = Left::Told;
                self.leave.clone()
            }
        })
    }

    /// The worker awaits no further peers: the server is told with the next step, and again whenever it has lost
    /// the registration. SGLang's own server cannot be told.
    pub(crate) fn leave(&mut self, now: Time) {
        if self.left != Left::No {
            return;
        }
        self.left = Left::Asked;
        if self.step_due.is_some() && self.state == State::Present {
            self.register_again(now);
        }
    }

    fn register_again(&mut self, now: Time) {
        self.state = State::Absent;
        self.step_due = Some(now);
    }

    /// The request that ends the registration, if the server may have received it. SGLang's own server has no such
    /// request.
    pub(crate) fn withdraw(&self) -> Option<Bytes> {
        let leased = matches!(self.state, State::Absent | State::Present);
        (self.sent && leased).then(|| self.withdraw.clone())
    }

    /// Takes the answer to the step whose request was made at `asked`.
    pub(crate) fn answered(
        &mut self,
        now: Time,
        asked: Time,
        answer: Result<Response, BootstrapError>,
        config: &ClientConfig,
    ) -> Answered {
        let error = match answer {
            Ok(response) if response.status == 200 && self.state == State::Unlisted => {
                self.step_due = Some(now + config.heartbeat);
                self.state = State::Listed;
                self.listed = 1;
                self.pause = config.retry_first;
                return self.announce();
            }
            answer if self.state == State::Listed => {
                match sglang::listed(&answer).filter(|listed| *listed >= self.listed) {
                    Some(listed) => {
                        self.listed = listed;
                        self.step_due = Some(now + config.heartbeat);
                    }
                    None => {
                        self.state = State::Unlisted;
                        self.step_due = Some(now);
                    }
                }
                return Answered::Quiet;
            }
            Ok(response) if response.status == 404 && self.route.is_some() && self.state == State::Absent => {
                self.state = State::Unlisted;
                self.step_due = Some(now);
                return Answered::Quiet;
            }
            Ok(response) if response.status == 200 => {
                match serde_json::from_slice::<GrantJson>(&response.body) {
                    Ok(grant) => {
                        // The lease began when the server received the request, which was not before `asked`.
                        let lease = Duration::from_millis(grant.lease_ms).min(config.lease);
                        self.step_due = Some(asked + (lease / 3).max(MIN_PAUSE));
                        self.state = State::Present;
                        self.pause = config.retry_first;
                        if self.left == Left::Asked {
                            self.register_again(now);
                        }
                        return self.announce();
                    }
                    Err(_) => BootstrapError::Malformed("it grants a registration without lease_ms"),
                }
            }
            Ok(response) if response.status == 404 && self.state == State::Present => {
                self.state = State::Absent;
                self.step_due = Some(now);
                return Answered::Quiet;
            }
            Ok(response) if response.status == 401 => BootstrapError::Unauthorized,
            Ok(Response { status: status @ 400..=499, body, .. }) => {
                BootstrapError::Refused { status, reason: line(&body) }
            }
            Ok(response) => BootstrapError::Status(response.status),
            Err(error) => error,
        };
        if self.state == State::Unlisted && matches!(error, BootstrapError::Refused { status: 404, .. }) {
            self.state = State::Absent;
        }
        let retry_in = self.pause.max(MIN_PAUSE);
        self.step_due = Some(now + retry_in);
        self.pause = (self.pause * 2).min(config.retry_max.max(config.retry_first));
        Answered::Failed { error, retry_in }
    }

    fn announce(&mut self) -> Answered {
        let first = !std::mem::replace(&mut self.announced, true);
        if first { Answered::Published } else { Answered::Quiet }
    }
}

/// A request as bytes. `None` if the body cannot be written as JSON.
fn request(what: &str, host: &str, secret: Option<&Secret>, body: &impl Serialize) -> Option<Bytes> {
    let secret = secret.map(Secret::field).unwrap_or_default();
    let body = serde_json::to_vec(body).ok()?;
    let mut bytes = format!(
        "{what} HTTP/1.1\r\nHost: {host}\r\n{secret}Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    bytes.extend_from_slice(&body);
    Some(Bytes::from(bytes))
}

/// The body of a server's refusal as one line without control characters, for logs.
fn line(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body.get(..MAX_REASON).unwrap_or(body));
    text.trim().chars().map(|char| if char.is_control() { ' ' } else { char }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::record;

    fn answer(status: u16, body: &str) -> Result<Response, BootstrapError> {
        Ok(Response { status, body: body.as_bytes().to_vec(), keep_alive: true })
    }

    #[test]
    fn a_registration_is_renewed_and_made_again_when_forgotten() {
        let config = ClientConfig::default();
        let record = record("p", 0, 1, (1, 0), (1, 0), (1, 0));
        let mut publication = Publication::new(1, Time::ZERO, "h:1", &record, &config).unwrap();
        assert_eq!(publication.withdraw(), None);
        assert!(publication.step(Time::ZERO).unwrap().starts_with(b"PUT /v1/ranks "));
        assert_eq!(publication.step(Time::MAX), None, "one step at a time");
        let granted = || answer(200, r#"{"lease_ms":3000}"#);
        let published = publication.answered(Time::ZERO, Time::ZERO, granted(), &config);
        assert_eq!(published, Answered::Published);
        let second = Time::ZERO + Duration::from_secs(1);
        assert_eq!(publication.due(), Some(second));
        assert!(publication.step(second).unwrap().starts_with(b"POST /v1/ranks/renew "));
        assert_eq!(publication.answered(second, second, answer(404, ""), &config), Answered::Quiet);
        assert!(publication.step(second).unwrap().starts_with(b"PUT /v1/ranks "));
        assert_eq!(publication.answered(second, second, granted(), &config), Answered::Quiet);
        assert!(publication.withdraw().unwrap().starts_with(b"DELETE /v1/ranks "));
    }

    #[test]
    fn a_rank_that_leaves_says_so_with_its_next_step_and_whenever_it_registers_again() {
        let config = ClientConfig::default();
        let record = record("p", 0, 1, (1, 0), (1, 0), (1, 0));
        let left = |bytes: &Bytes| bytes.ends_with(br#""left":true}"#);
        let granted = || answer(200, r#"{"lease_ms":3000}"#);
        for under_way in [false, true] {
            let mut publication = Publication::new(1, Time::ZERO, "h:1", &record, &config).unwrap();
            assert!(!left(&publication.step(Time::ZERO).unwrap()));
            if under_way {
                publication.leave(Time::ZERO);
                assert_eq!(publication.step(Time::MAX), None, "one step at a time");
            }
            publication.answered(Time::ZERO, Time::ZERO, granted(), &config);
            publication.leave(Time::ZERO);
            let told = publication.step(Time::ZERO).unwrap();
            assert!(told.starts_with(b"PUT /v1/ranks ") && left(&told), "at once: {told:?}");
            publication.answered(Time::ZERO, Time::ZERO, answer(500, ""), &config);
            let again = publication.due().unwrap();
            assert!(left(&publication.step(again).unwrap()), "until the server has heard");
            publication.answered(again, again, granted(), &config);
            publication.leave(again);
            let renewal = publication.due().unwrap();
            assert!(renewal > again, "once");
            assert!(publication.step(renewal).unwrap().starts_with(b"POST /v1/ranks/renew "));
            publication.answered(renewal, renewal, answer(404, ""), &config);
            assert!(left(&publication.step(renewal).unwrap()), "the server has forgotten the rank");
        }
    }

    #[test]
    fn a_rank_registers_again_with_sglangs_own_server_only_if_that_has_lost_the_rank() {
        let config = ClientConfig::default();
        let mut record = record("p", 0, 1, (1, 0), (1, 0), (1, 0));
        record.offers.push(SglangRank::new("10.0.0.1", 7000, 16).offer());
        let count = |count: u32| {
            let text = format!("Prefill server not fully registered yet ({count} workers registered).");
            answer(503, &text)
        };
        let whole = || answer(200, "{}");
        let unreachable = || Err(BootstrapError::TimedOut);
        for (answers, kept) in [
            (vec![count(1), count(3), count(3), whole(), whole()], true),
            (vec![count(3), count(2)], false),
            (vec![count(0)], false),
            (vec![whole(), count(3)], false),
            (vec![whole(), answer(404, "")], false),
            (vec![answer(503, "")], false),
            (vec![whole(), unreachable()], false),
        ] {
            let mut publication = Publication::new(1, Time::ZERO, "h:1", &record, &config).unwrap();
            let mut now = Time::ZERO;
            for (step, answered) in [("PUT /v1/ranks ", answer(404, "")), ("PUT /route ", answer(200, "OK"))]
            {
                assert!(publication.step(now).unwrap().starts_with(step.as_bytes()));
                publication.answered(now, now, answered, &config);
            }
            for answer in answers {
                now = now + config.heartbeat;
                assert!(publication.step(now).unwrap().starts_with(b"GET /route?prefill_dp_rank=0&"));
                assert_eq!(publication.answered(now, now, answer, &config), Answered::Quiet);
            }
            assert_eq!(publication.withdraw(), None);
            let due = if kept { now + config.heartbeat } else { now };
            assert_eq!(publication.due(), Some(due));
            let next = publication.step(due).unwrap();
            assert_eq!(next.starts_with(b"PUT /route "), !kept);
            // A server of this crate's without SGLang's routes may have taken the address.
            if !kept {
                publication.answered(due, due, answer(404, ""), &config);
                let due = publication.due().unwrap();
                assert!(publication.step(due).unwrap().starts_with(b"PUT /v1/ranks "));
            }
        }
    }

    #[test]
    fn a_server_that_grants_more_or_less_than_asked_changes_the_pace_within_bounds() {
        let config = ClientConfig::default();
        let record = record("p", 0, 1, (1, 0), (1, 0), (1, 0));
        for (granted, pause) in [(u64::MAX, config.lease / 3), (0, MIN_PAUSE), (3000, Duration::from_secs(1))]
        {
            let mut publication = Publication::new(1, Time::ZERO, "h:1", &record, &config).unwrap();
            publication.step(Time::ZERO).unwrap();
            let body = format!("{{\"lease_ms\":{granted}}}");
            publication.answered(Time::ZERO, Time::ZERO, answer(200, &body), &config);
            assert_eq!(publication.due(), Some(Time::ZERO + pause), "{granted}");
        }
    }

    #[test]
    fn pauses_grow_to_their_bound_and_start_over_after_success() {
        let config = ClientConfig::default();
        let record = record("p", 0, 1, (1, 0), (1, 0), (1, 0));
        let mut publication = Publication::new(1, Time::ZERO, "h:1", &record, &config).unwrap();
        let (mut now, mut pauses) = (Time::ZERO, Vec::new());
        for status in [500, 409, 404, 500, 500, 500, 500] {
            publication.step(now).unwrap();
            match publication.answered(now, now, answer(status, "no\n"), &config) {
                Answered::Failed { error, retry_in } => {
                    let refused = BootstrapError::Refused { status, reason: "no".to_owned() };
                    let expected = if status < 500 { refused } else { BootstrapError::Status(status) };
                    assert_eq!(error, expected);
                    pauses.push(retry_in.as_millis());
                    now = now + retry_in;
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 2000, 2000]);
        publication.step(now).unwrap();
        publication.answered(now, now, answer(200, r#"{"lease_ms":1}"#), &config);
        now = now + Duration::from_secs(1);
        publication.step(now).unwrap();
        let failed = publication.answered(now, now, Err(BootstrapError::TimedOut), &config);
        assert_eq!(
            failed,
            Answered::Failed { error: BootstrapError::TimedOut, retry_in: config.retry_first }
        );
    }
}
