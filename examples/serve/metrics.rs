//! What each process counts of its requests, for Prometheus (`/metrics`).
//!
//! | name | kind | what |
//! |---|---|---|
//! | `serve_requests_total{route, status}` | counter | requests that were answered, by HTTP status |
//! | `serve_requests_running` | gauge | requests under way at the router |
//! | `serve_retries_total` | counter | requests that the router has sent to other engines after a failure |
//! | `serve_hang_ups_total` | counter | requests whose client has hung up before the answer began |
//! | `serve_time_to_first_token_seconds` | histogram | from the request to its first token |
//! | `serve_prompt_tokens_total`, `serve_cached_tokens_total` | counter | tokens of prompts, and those of them whose KV was kept |
//! | `serve_computed_tokens_total` | counter | tokens that a prefill engine has computed |
//! | `serve_generated_tokens_total` | counter | tokens that a decode engine has computed |
//! | `serve_batch_size` | gauge | requests in the running batch of a decode engine |
//! | `serve_pages{state}` | gauge | pages that are `free`, `cached` or `held` |

use std::sync::OnceLock;
use std::time::Duration;

use metrics::{counter, gauge, histogram};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};

use crate::engine::PageCounts;

/// Upper ends of the buckets of times, in seconds.
const SECONDS: [f64; 12] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

/// How often recorded times are put into their buckets.
const GATHER_EVERY: Duration = Duration::from_secs(2);

static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();

/// Makes this process count.
pub fn install() -> Result<(), BuildError> {
    let seconds = Matcher::Suffix("_seconds".to_owned());
    let handle = PrometheusBuilder::new().set_buckets_for_metric(seconds, &SECONDS)?.install_recorder()?;
    let _ = HANDLE.set(handle);
    Ok(())
}

/// Gathers what was recorded, so that it takes no memory until somebody looks. Never ends.
pub async fn gather() {
    loop {
        tokio::time::sleep(GATHER_EVERY).await;
        if let Some(handle) = HANDLE.get() {
            handle.run_upkeep();
        }
    }
}

/// A request has come to the router (1), or left it (-1).
pub fn running(change: f64) {
    gauge!("serve_requests_running").increment(change);
}

/// The router sends a request to other engines.
pub fn retry() {
    counter!("serve_retries_total").increment(1);
}

/// A client has hung up before its answer has begun.
pub fn hang_up() {
    counter!("serve_hang_ups_total").increment(1);
}

/// All numbers, in Prometheus' text form.
pub fn render() -> String {
    HANDLE.get().map(PrometheusHandle::render).unwrap_or_default()
}

/// A request was answered.
pub fn request(route: &'static str, status: u16) {
    counter!("serve_requests_total", "route" => route, "status" => status.to_string()).increment(1);
}

/// The first token of an answer has come.
pub fn first_token(after: Duration) {
    histogram!("serve_time_to_first_token_seconds").record(after.as_secs_f64());
}

/// A prompt was taken.
pub fn prompt_tokens(tokens: usize, cached: usize) {
    counter!("serve_prompt_tokens_total").increment(tokens as u64);
    counter!("serve_cached_tokens_total").increment(cached as u64);
}

/// Where the pages are now.
pub fn pages(pages: PageCounts) {
    for (state, count) in [("free", pages.free), ("cached", pages.cached), ("held", pages.held)] {
        gauge!("serve_pages", "state" => state).set(count as f64);
    }
}
