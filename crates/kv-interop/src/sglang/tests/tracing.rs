//! What a listener is told of a worker among SGLang's workers.

use super::sending::asked;
use super::*;
use kv_core::BootstrapError;

/// The names of the events since the last look: those of the session, and all others.
fn told(rig: &mut Rig, session: SessionId) -> (Vec<&'static str>, Vec<&'static str>) {
    let events: Vec<_> = std::iter::from_fn(|| rig.machine.poll_trace()).collect();
    let (own, others): (Vec<_>, Vec<_>) =
        events.into_iter().partition(|event| event.who.session == Some(session));
    let names = |events: Vec<kv_core::trace::Event<_>>| {
        events.iter().map(|event: &kv_core::trace::Event<kv_core::trace::KvWhat>| event.what.name()).collect()
    };
    (names(own), names(others))
}

#[test]
fn a_listener_is_told_of_a_receiver_from_its_opening_to_its_end() {
    let mut rig = Rig::decode(&args(tp(1, 0)));
    rig.machine.listen(true);
    let session = rig.open(1, 9);
    let (lookup, _) = rig.lookups.remove(0);
    rig.input(Input::LookupFailed { lookup, error: BootstrapError::TimedOut });
    rig.wait(Duration::from_secs(1));
    rig.answer(vec![rank(tp(1, 0), 7001, 5, plain())]);
    rig.connect();
    rig.init(session, &[3, 4], 5);
    rig.rows.lock().unwrap().insert(5, 9);
    rig.hear(&["KV_STATUS", "9"]);
    rig.hear(&["KV_STATUS", "9", "4", "7", ""]);
    rig.hear(&["KV_STATUS", "9", "4", "0", ""]);
    let (own, others) = told(&mut rig, session);
    let expected = ["opened", "asked", "state", "pages_given", "state", "ended", "pages_back", "closed"];
    assert_eq!(own, expected);
    assert_eq!(others, ["not_answered", "asked", "answered", "way_opened", "dropped", "dropped"]);
    // Pages in quarantine come back behind the end of the session, and the session is over with them.
    let aborted = rig.open(2, 10);
    rig.init(aborted, &[3], 0);
    rig.abort(aborted);
    assert_eq!(told(&mut rig, aborted).0, ["opened", "state", "pages_given", "state", "failed"]);
    rig.hear(&["ABORT_ACK", "10", "0", GENERATION]);
    assert_eq!(told(&mut rig, aborted).0, ["pages_back", "closed"]);
}

#[test]
fn a_listener_is_told_of_a_sender_and_of_its_posts_from_the_opening_to_the_end() {
    let mut rig = Rig::new(&args(tp(1, 0)), WorkerRole::Prefill);
    rig.machine.listen(true);
    let session = asked(&mut rig);
    rig.announce(session, 2, 1);
    rig.send(session, &[5, 6]);
    rig.end_posts(Ok(()));
    let (own, others) = told(&mut rig, session);
    let expected =
        ["opened", "receiver_came", "state", "chunk_given", "state", "ended", "pages_back", "closed"];
    assert_eq!(own, expected);
    assert_eq!(others, ["post_started", "post_ended"]);
    rig.machine.listen(false);
    let silent = rig.sender(2, 10);
    rig.abort(silent);
    assert_eq!(told(&mut rig, silent), (vec![], vec![]));
}
