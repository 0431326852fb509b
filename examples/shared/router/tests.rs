use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;

use super::*;
use crate::control::{Accounting, Prefilled};
use crate::model::Sample;

const MINUTE: Duration = Duration::from_secs(60);

/// A rank on a thread of its own: `says` gives its events for each command, and whether it lives on.
fn rank(router: &mut Router, side: Side, says: impl Fn(&Command) -> (Vec<Event>, bool) + Send + 'static) {
    let (here, there) = UnixStream::pair().unwrap();
    router.add(side, here.try_clone().unwrap(), here, None);
    std::thread::spawn(move || {
        let say = |event: &Event| writeln!(&there, "{}", serde_json::to_string(event).unwrap()).unwrap();
        say(&Event::Ready { worker: side.to_string(), model: String::new(), page_bytes: 1, reach: None });
        for line in BufReader::new(&there).lines().map_while(Result::ok) {
            let (events, lives) = says(&serde_json::from_str(&line).unwrap());
            events.iter().for_each(&say);
            if !lives {
                return;
            }
        }
    });
}

/// A rank that computes a prompt at once, and gets the pages back at once.
fn prefill(command: &Command) -> (Vec<Event>, bool) {
    let events = match *command {
        Command::Prefill { room, .. } => vec![
            Event::Answer { room, params: Value::Null },
            Event::Prefilled(Prefilled { room, ..Prefilled::default() }),
        ],
        _ => vec![Event::Finished(Accounting { pages: 1, free_pages: 1 })],
    };
    (events, true)
}

/// Begins to read, and dies, or answers.
fn decode(command: &Command, lives: bool) -> (Vec<Event>, bool) {
    let events = match *command {
        Command::Decode { room, .. } if lives => {
            let samples = vec![Sample { token: 7, digest: 7 }];
            vec![Event::Decoded(Decoded { room, samples, ..Decoded::default() })]
        }
        Command::Decode { room, .. } => vec![Event::Reading { room }],
        _ => vec![Event::Finished(Accounting { pages: 1, free_pages: 1 })],
    };
    (events, lives)
}

/// One request, whose decode rank dies while it reads.
fn run(survivor: bool) -> Run {
    let mut router = Router::new();
    rank(&mut router, Side::Prefill, prefill);
    rank(&mut router, Side::Decode, |command| decode(command, false));
    if survivor {
        rank(&mut router, Side::Decode, |command| decode(command, true));
    }
    router.wait_ready().unwrap();
    let chats = [Chat { prompt: vec![1, 2, 3], follow_ups: Vec::new() }];
    let harm = PlannedHarm { harm: Harm::Kill, side: Side::Decode, at: None, resume: None };
    let plan = Plan {
        mode: Mode::Pull,
        bootstrap: "127.0.0.1:1".to_owned(),
        max_new_tokens: 1,
        deadline: MINUTE,
        lease: MINUTE,
        finish_within: MINUTE,
        bury_after: MINUTE,
        harm: Some(harm),
    };
    router.run(&chats, &plan, &Progress::new(1, false)).unwrap()
}

#[test]
fn a_request_whose_decode_rank_died_after_the_pages_were_read_fails_by_name() {
    for _ in 0..50 {
        let run = run(false);
        let error = run.requests[0].orphaned.as_ref().expect("the router says what became of it");
        assert_eq!((error.name.as_str(), error.text.as_str()), ("RankKilled", "decode/0 was killed"));
        assert_eq!((run.requests.len(), run.requests[0].again), (1, None));
    }
}

#[test]
fn a_request_that_lost_its_decode_rank_is_routed_again_to_a_survivor() {
    let run = run(true);
    assert_eq!(run.requests[0].again, Some(1));
    let again = &run.requests[1];
    assert_eq!((again.chat, again.turn, again.decode), (0, 0, 2));
    assert_eq!(again.purpose, Purpose::AnswerAgain { attempt: 2 });
    assert_ne!(again.room, run.requests[0].room);
    let tokens = |request: &Routed| request.decoded.as_ref().map(|decoded| decoded.samples.len());
    assert_eq!((tokens(&run.requests[0]), tokens(again)), (None, Some(1)));
    // And the survivor shows that it serves.
    assert_eq!((run.requests[2].purpose, tokens(&run.requests[2])), (Purpose::Proof, Some(1)));
}
