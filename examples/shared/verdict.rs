//! The run and what it is compared with, side by side.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::error::ExampleError;
use super::model::{Model, Sample};
use super::monolithic;
use super::progress::Progress;
use super::prompts::Request;
use super::router::{Plan, Router, Run};

/// Runs all requests through the ranks, and at the same time through `model` in this process.
pub fn compare(
    mut router: Router,
    model: &Model,
    requests: Vec<Request>,
    plan: &Plan,
    progress: &Progress,
) -> Result<(Run, Vec<Vec<Sample>>), ExampleError> {
    let prompts: Vec<Vec<u32>> = requests.iter().map(|request| request.prompt.clone()).collect();
    let failed = AtomicBool::new(false);
    let outcome = std::thread::scope(|scope| {
        let monolithic = scope.spawn(|| {
            let generate = |prompt: &Vec<u32>| {
                let samples = monolithic::generate(model, prompt, plan.max_new_tokens);
                progress.monolithic.inc(1);
                samples
            };
            let prompts = prompts.iter().take_while(|_| !failed.load(Relaxed));
            prompts.map(generate).collect::<Result<Vec<Vec<Sample>>, ExampleError>>()
        });
        let run = router.wait_ready().and_then(|()| router.run(requests, plan, progress));
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

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use kv_transfer::bootstrap::KvBootstrapServer;

    use super::*;
    use crate::shared::cli::{CacheOptions, PageLayout, PlaneKind};
    use crate::shared::decode::DecodeRank;
    use crate::shared::link::Link;
    use crate::shared::loading::ModelOptions;
    use crate::shared::prefill::PrefillRank;
    use crate::shared::rank::RankSpec;
    use crate::shared::report::{Outcome, Report};
    use crate::shared::router::Side;

    /// Two prefill ranks and a decode rank, each on a thread of its own.
    fn service(layout: PageLayout, pages: u32, requests: usize, max_new_tokens: usize) -> Report {
        let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
        let bootstrap = server.local_addr().to_string();
        let model = ModelOptions {
            seed: 5,
            #[cfg(feature = "checkpoint")]
            model: None,
        };
        let mut router = Router::new();
        for (side, number, of) in [(Side::Prefill, 0, 2), (Side::Prefill, 1, 2), (Side::Decode, 0, 1)] {
            let cache = CacheOptions { plane: PlaneKind::Local, layout, pages };
            let (bootstrap, model) = (bootstrap.clone(), model.clone());
            let spec = RankSpec { side, number, of, bootstrap, model, cache, chunk_tokens: 20 };
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
        let prompts = model.prompts(&loaded, requests, 70).unwrap();
        let plan = Plan { bootstrap, max_new_tokens, deadline: Duration::from_secs(120), kill: None };
        let progress = Progress::new(requests, false);
        let (run, monolithic) = compare(router, &loaded, prompts, &plan, &progress).unwrap();
        server.stop();
        Report::new(&run, &monolithic, false)
    }

    #[test]
    fn every_token_is_right_and_no_page_is_lost_in_both_layouts() {
        for layout in [PageLayout::LayerMajor, PageLayout::PageMajor] {
            let report = service(layout, 64, 5, 6);
            assert!(report.problems.is_empty(), "{layout:?}: {report:#?}");
            assert!(report.requests.iter().all(|request| request.outcome == Outcome::Ok));
        }
    }

    /// The decode rank admits more than it has pages for, and has to take some back: those requests
    /// compute their KV anew, and nobody sees it in their tokens.
    #[test]
    fn requests_retracted_from_a_full_cache_lose_no_token() {
        let report = service(PageLayout::LayerMajor, 24, 4, 200);
        assert!(report.problems.is_empty(), "{report:#?}");
        assert!(report.totals.retractions > 0, "the cache was never full: {report:#?}");
        assert_eq!(report.requests.iter().map(|request| request.tokens_compared).sum::<usize>(), 800);
    }
}
