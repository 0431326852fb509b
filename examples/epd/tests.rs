//! The whole service, with a thread in place of each process.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use super::*;
use crate::messages::Way;
use crate::report::Outcome;

/// The router's end of a connection. A thread cannot be killed: it ends when its router hangs up.
struct Commands(UnixStream);

impl Write for Commands {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl Drop for Commands {
    fn drop(&mut self) {
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

/// Runs the example with these arguments.
fn service(arguments: &[&str]) -> Report {
    let small =
        ["epd", "--requests", "4", "--image-tokens", "12", "--prompt-tokens", "30", "--chunk-tokens", "16"];
    let options = Options::parse_from(small.iter().chain(["--max-new-tokens", "5"].iter()).chain(arguments));
    let scratch = Scratch::new().unwrap();
    let images = options.images(&scratch).unwrap();
    let model = options.model.load().unwrap();
    let requests = options.requests(&model, &images).unwrap();
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let bootstrap = server.local_addr().to_string();
    let mut router = Router::new();
    for (role, spec) in options.specs(&bootstrap) {
        let (here, there) = UnixStream::pair().unwrap();
        router.add(role, here.try_clone().unwrap(), Commands(here), None);
        std::thread::spawn(move || start(&spec, Link::unix(there).unwrap()).unwrap());
    }
    let progress = Progress::new(&requests, options.rounds as usize, false);
    let plan = options.plan(bootstrap);
    let work = Work { requests: &requests, plan: &plan, progress: &progress };
    let (run, expected) = compare(router, &model, &options.tower(&model), &work).unwrap();
    server.stop();
    Report::new(&run, &requests, &expected, options.rules())
}

#[test]
fn split_over_processes_every_token_is_that_of_one_process_and_repeats_are_local_hits() {
    let report = service(&[]);
    assert!(report.problems.is_empty(), "{report:#?}");
    assert_eq!(report.totals.tokens_compared, 2 * 4 * 5);
    assert_eq!(report.totals.transfers, report.totals.distinct_images);
    assert_eq!(report.totals.blocks_leaked, 0);
    let [first, second] = &report.rounds[..] else { panic!("{report:#?}") };
    assert_eq!((first.images, first.local_hits + first.joined + first.transfers), (7, 7));
    assert_eq!((second.images, second.local_hits, second.encoder_hits), (7, 7, 7));
}

#[test]
fn a_cache_with_room_for_no_image_makes_every_image_be_encoded_here() {
    let report = service(&["--blocks", "1", "--rounds", "1"]);
    assert!(report.requests.iter().all(|request| request.outcome == Outcome::Ok), "{report:#?}");
    let images = report.requests.iter().flat_map(|request| &request.images);
    assert!(images.filter_map(|image| image.arrived.as_ref()).all(|arrived| arrived.way == Way::EncodedHere));
}

/// The error names of the requests that failed, and the number of those that were answered.
fn ends(report: &Report) -> (BTreeSet<&str>, usize) {
    let mut names = BTreeSet::new();
    let mut answered = 0;
    for request in &report.requests {
        match &request.outcome {
            Outcome::Ok => answered += 1,
            Outcome::Failed(error) => drop(names.insert(error.name.as_str())),
            other => panic!("{other:?} in {report:#?}"),
        }
    }
    (names, answered)
}

#[test]
fn without_an_encoder_every_request_is_encoded_here_or_fails_by_name() {
    // The transfer in whose middle the encoder is killed may just end.
    let encodes_here = || {
        let report = service(&["--kill", "encoder"]);
        assert!(report.problems.is_empty(), "{report:#?}");
        assert_eq!(ends(&report), (BTreeSet::new(), 8));
        report.rounds.iter().any(|round| round.encoded_here > 0)
    };
    assert!((0..5).any(|_| encodes_here()), "five kills, and no image was encoded here");

    let report = service(&["--kill", "encoder", "--no-encode-here"]);
    assert!(report.problems.is_empty(), "{report:#?}");
    let encoded_here: usize = report.rounds.iter().map(|round| round.encoded_here).sum();
    // Each other outcome than an answer or a named error panics here.
    assert_eq!((ends(&report).1 <= 8, encoded_here), (true, 0), "{report:#?}");
}

#[test]
fn without_the_prefill_process_every_request_fails_by_name() {
    let report = service(&["--kill", "prefill"]);
    assert!(report.problems.is_empty(), "{report:#?}");
    let (names, answered) = ends(&report);
    assert!(names.contains("RankKilled") && answered < 4, "{names:?} {report:#?}");
    assert_eq!(report.rounds.len(), 1);
}
