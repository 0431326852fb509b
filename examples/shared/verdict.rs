//! Runs the requests over the ranks and in one process, to compare the results.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::error::ExampleError;
use super::model::{Model, Sample};
use super::monolithic;
use super::progress::Progress;
use super::router::{Plan, Router, Run};
use super::workload::Chat;

/// The tokens of each turn of each chat.
pub type Answers = Vec<Vec<Vec<Sample>>>;

/// Runs all chats through the ranks, and at the same time through `model` in this process. The second
/// result has the tokens of this process.
pub fn compare(
    mut router: Router,
    model: &Model,
    chats: &[Chat],
    plan: &Plan,
    progress: &Progress,
) -> Result<(Run, Answers), ExampleError> {
    let failed = AtomicBool::new(false);
    let outcome = std::thread::scope(|scope| {
        let monolithic = scope.spawn(|| {
            let talk = |chat: &Chat| {
                let mut prompt = chat.prompt.clone();
                let mut answers = vec![generate(model, &prompt, plan, progress)?];
                for follow_up in &chat.follow_ups {
                    let answer = answers.last().into_iter().flatten();
                    prompt.extend(answer.map(|sample| sample.token).chain(follow_up.iter().copied()));
                    answers.push(generate(model, &prompt, plan, progress)?);
                }
                Ok(answers)
            };
            let chats = chats.iter().take_while(|_| !failed.load(Relaxed));
            chats.map(talk).collect::<Result<Answers, ExampleError>>()
        });
        let run = router.wait_ready().and_then(|()| router.run(chats, plan, progress));
        // Nothing to compare with: no need to wait for it.
        failed.store(run.is_err(), Relaxed);
        let monolithic = match monolithic.join() {
            Ok(samples) => samples,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        Ok((run?, monolithic?))
    });
    progress.end();
    outcome
}

fn generate(
    model: &Model,
    prompt: &[u32],
    plan: &Plan,
    progress: &Progress,
) -> Result<Vec<Sample>, ExampleError> {
    let samples = monolithic::generate(model, prompt, &[], plan.max_new_tokens);
    progress.monolithic.inc(1);
    samples
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use kv_transfer::bootstrap::KvBootstrapServer;

    use super::*;
    use crate::cli::{CacheOptions, HandOver, Mode, Pace, PageLayout, Parallelism, TransportKind};
    use crate::control::History;
    use crate::decode::DecodeRank;
    use crate::dialect::DialectOptions;
    use crate::link::Link;
    use crate::loading::ModelOptions;
    use crate::prefill::PrefillRank;
    use crate::rank::RankSpec;
    use crate::report::{Outcome, Report, RequestReport};
    use crate::router::Side;
    use crate::workload::Workload;

    /// Two prefill ranks and a decode rank, each on a thread of its own.
    fn service(mode: Mode, cache: (PageLayout, u32), workload: Workload, max_new_tokens: usize) -> Report {
        let (layout, pages) = cache;
        uneven(mode, [(layout, 16, pages); 2], workload, max_new_tokens)
    }

    /// The same, with the layout, page size and number of pages of the prefill side and of the decode side.
    fn uneven(
        mode: Mode,
        caches: [(PageLayout, u32, u32); 2],
        workload: Workload,
        max_new_tokens: usize,
    ) -> Report {
        spread(mode, false, caches, [Parallelism::ONE; 2], workload, max_new_tokens)
    }

    /// The same, with the tensor-parallel ranks and pipeline stages of both sides.
    fn spread(
        mode: Mode,
        mla: bool,
        caches: [(PageLayout, u32, u32); 2],
        parallel: [Parallelism; 2],
        workload: Workload,
        max_new_tokens: usize,
    ) -> Report {
        let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
        let bootstrap = server.local_addr().to_string();
        let model = ModelOptions {
            seed: 5,
            mla,
            #[cfg(feature = "checkpoint")]
            model: None,
        };
        let mut router = Router::new();
        for (side, number, of) in [(Side::Prefill, 0, 2), (Side::Prefill, 1, 2), (Side::Decode, 0, 1)] {
            let [ours, theirs] = if side == Side::Prefill { caches } else { [caches[1], caches[0]] };
            let ((layout, page_size, pages), peer_page_size) = (ours, theirs.1);
            let cache = CacheOptions { transport: TransportKind::Local, layout, page_size, pages };
            let [here, there] = if side == Side::Prefill { [0, 1] } else { [1, 0] };
            let (parallelism, peer_page_size) = (parallel[here], peer_page_size * parallel[there].dcp);
            let (bootstrap, model) = (bootstrap.clone(), model.clone());
            let hand_over = HandOver { mode, lease_seconds: None, kept_seconds: None, timing: Pace::Normal };
            let (chunk_tokens, watch_pages) = (20, false);
            let spec = RankSpec {
                side,
                number,
                of,
                bootstrap,
                model,
                cache,
                parallelism,
                peer_page_size,
                hand_over,
                record: false,
                watch_pages,
                chunk_tokens,
                layer_wise: number == 0,
                dialect: DialectOptions::default(),
            };
            let (here, there) = UnixStream::pair().unwrap();
            router.add(side, here.try_clone().unwrap(), here, None);
            std::thread::spawn(move || {
                let link = Link::unix(there).unwrap();
                match spec.side {
                    Side::Prefill => PrefillRank::start(&spec).unwrap().run(link).unwrap(),
                    Side::Decode => DecodeRank::start(&spec).unwrap().run(link).unwrap(),
                }
            });
        }
        let loaded = model.load().unwrap();
        let chats = model.prompts(&loaded, workload).unwrap();
        let (deadline, lease) = (Duration::from_secs(120), Duration::from_secs(30));
        let plan = Plan {
            mode,
            bootstrap,
            max_new_tokens,
            deadline,
            lease,
            finish_within: Duration::from_secs(45),
            bury_after: lease,
            harm: None,
        };
        let progress = Progress::new(workload.count, false);
        let (run, monolithic) = compare(router, &loaded, &chats, &plan, &progress).unwrap();
        server.stop();
        Report::new(&run, &monolithic, false)
    }

    fn ranks(tp: u32, pp: u32) -> Parallelism {
        Parallelism { tp, pp, ..Parallelism::ONE }
    }

    fn requests(count: usize) -> Workload {
        Workload { count, tokens: 70, turns: 1, follow_up: 0 }
    }

    #[test]
    fn every_token_is_right_between_caches_of_different_shapes() {
        let (layers, pages) = (PageLayout::LayerMajor, PageLayout::PageMajor);
        for (mode, caches) in [
            (Mode::Push, [(layers, 16, 64), (pages, 16, 64)]),
            (Mode::Push, [(pages, 32, 40), (layers, 8, 128)]),
            (Mode::Pull, [(layers, 8, 128), (pages, 32, 40)]),
            (Mode::Pull, [(layers, 32, 40), (layers, 16, 64)]),
        ] {
            let report = uneven(mode, caches, requests(4), 6);
            assert!(report.problems.is_empty(), "{mode:?}, {caches:?}: {report:#?}");
        }
    }

    #[test]
    fn every_token_is_right_between_engines_of_any_size() {
        let (layers, pages, heads) = (PageLayout::LayerMajor, PageLayout::PageMajor, PageLayout::HeadMajor);
        let same = |layout| [(layout, 16, 64); 2];
        for (mode, mla, caches, parallel) in [
            (Mode::Push, false, same(layers), [ranks(4, 1), ranks(2, 1)]),
            (Mode::Pull, false, same(heads), [ranks(2, 1), ranks(4, 1)]),
            (Mode::Auto, false, same(pages), [ranks(4, 1), ranks(1, 1)]),
            // Each head on two ranks of the one side, or of the other.
            (Mode::Pull, false, same(layers), [ranks(8, 1), ranks(2, 1)]),
            (Mode::Push, false, same(pages), [ranks(1, 1), ranks(8, 1)]),
            (Mode::Push, false, [(heads, 32, 40), (pages, 8, 128)], [ranks(2, 2), ranks(1, 1)]),
            (Mode::Pull, false, [(pages, 8, 128), (layers, 16, 64)], [ranks(1, 4), ranks(2, 2)]),
            (Mode::Push, true, same(layers), [ranks(4, 1), ranks(2, 1)]),
            (Mode::Pull, true, [(pages, 16, 64), (layers, 32, 40)], [ranks(2, 2), ranks(4, 1)]),
            // Each has all pages and sends a range of them, or each has every second or fourth page.
            (Mode::Push, false, same(layers), [Parallelism { cp: 3, ..ranks(2, 1) }, ranks(1, 1)]),
            (
                Mode::Pull,
                false,
                [(pages, 8, 128), (heads, 16, 64)],
                [Parallelism { cp: 2, ..ranks(1, 2) }, ranks(2, 1)],
            ),
            (Mode::Push, true, same(layers), [ranks(1, 1), Parallelism { dcp: 4, ..ranks(4, 1) }]),
            (
                Mode::Pull,
                true,
                same(pages),
                [Parallelism { dcp: 2, ..ranks(2, 1) }, Parallelism { dcp: 4, ..ranks(4, 1) }],
            ),
            (
                Mode::Push,
                true,
                same(pages),
                [Parallelism { dcp: 4, ..ranks(4, 1) }, Parallelism { dcp: 2, ..ranks(2, 2) }],
            ),
            (Mode::Auto, true, same(heads), [Parallelism { cp: 2, dcp: 2, ..ranks(4, 1) }, ranks(2, 1)]),
        ] {
            let report = spread(mode, mla, caches, parallel, requests(4), 6);
            assert!(report.problems.is_empty(), "{mode:?} {mla} {caches:?} {parallel:?}: {report:#?}");
            assert!(report.requests.iter().all(|request| request.outcome == Outcome::Ok));
        }
    }

    #[test]
    fn a_conversation_goes_on_between_engines_of_different_sizes() {
        let workload = Workload { turns: 2, follow_up: 9, ..requests(4) };
        let caches = [(PageLayout::LayerMajor, 16, 96), (PageLayout::PageMajor, 16, 96)];
        let dealt = Parallelism { dcp: 2, ..ranks(4, 1) };
        for (mla, parallel) in [
            (false, [Parallelism { cp: 2, ..ranks(4, 1) }, ranks(2, 2)]),
            (true, [dealt, Parallelism { dcp: 2, ..ranks(2, 1) }]),
        ] {
            let report = spread(Mode::Pull, mla, caches, parallel, workload, 6);
            assert!(report.problems.is_empty(), "{report:#?}");
            let pulled = |request: &&RequestReport| matches!(request.history, Some(History::PulledBack { tokens }) if tokens > 64);
            assert_eq!(report.requests.iter().filter(pulled).count(), 4, "{report:#?}");
        }
    }

    #[test]
    fn every_token_is_right_and_no_page_is_lost_in_every_mode_and_layout() {
        for (mode, layout) in [
            (Mode::Push, PageLayout::LayerMajor),
            (Mode::Push, PageLayout::PageMajor),
            (Mode::Pull, PageLayout::LayerMajor),
            (Mode::Pull, PageLayout::PageMajor),
            (Mode::Auto, PageLayout::LayerMajor),
        ] {
            let report = service(mode, (layout, 64), requests(5), 6);
            assert!(report.problems.is_empty(), "{mode:?}, {layout:?}: {report:#?}");
            assert!(report.requests.iter().all(|request| request.outcome == Outcome::Ok));
        }
    }

    /// The decode rank admits more requests than it has pages for, and has to take some pages back. These
    /// requests compute their KV again, and their tokens are the same.
    #[test]
    fn requests_retracted_from_a_full_cache_lose_no_token() {
        for mode in [Mode::Push, Mode::Pull] {
            let report = service(mode, (PageLayout::LayerMajor, 24), requests(4), 200);
            assert!(report.problems.is_empty(), "{mode:?}: {report:#?}");
            assert!(report.totals.retractions > 0, "the cache was never full: {report:#?}");
            assert_eq!(report.requests.iter().map(|request| request.tokens_compared).sum::<usize>(), 800);
        }
    }

    #[test]
    fn a_conversation_goes_on_with_the_cache_that_the_decode_rank_kept() {
        let workload = Workload { turns: 3, follow_up: 9, ..requests(4) };
        let report = service(Mode::Pull, (PageLayout::LayerMajor, 96), workload, 6);
        assert!(report.problems.is_empty(), "{report:#?}");
        assert_eq!(report.requests.len(), 12);
        for request in &report.requests {
            let pulled = matches!(request.history, Some(History::PulledBack { tokens }) if tokens > 64);
            assert_eq!(pulled, request.turn > 1, "{request:#?}");
            assert_eq!(request.outcome, Outcome::Ok);
        }
    }

    /// Fewer than 64 tokens are computed again, and the pages kept of them are free at once.
    #[test]
    fn a_short_conversation_is_computed_again() {
        let workload = Workload { tokens: 30, turns: 2, follow_up: 9, ..requests(3) };
        let report = service(Mode::Pull, (PageLayout::LayerMajor, 64), workload, 6);
        assert!(report.problems.is_empty(), "{report:#?}");
        let second: Vec<_> = report.requests.iter().filter(|request| request.turn == 2).collect();
        assert_eq!(second.len(), 3);
        for request in second {
            let why = "below 64 tokens".to_owned();
            assert_eq!(request.history, Some(History::Recomputed { why }), "{request:#?}");
        }
    }
}
