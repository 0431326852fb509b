//! What each process counts, for Prometheus (`/metrics`). Every number has the label `process` (`router`, `prefill/0` …);
//! the router's `/metrics` has the numbers of all processes, and that of each process its own.
//!
//! The numbers of transfers (`kv_transfer_…`) are those of `docs/METRICS.md`, and `docs/grafana.json` shows them. Beside
//! them, of requests:
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
//! | `serve_pulled_back_tokens_total` | counter | tokens whose KV a prefill engine has read back from a decode engine |
//! | `serve_generated_tokens_total` | counter | tokens that a decode engine has computed |
//! | `serve_batch_size` | gauge | requests in the running batch of a decode engine |
//! | `serve_pages{state}` | gauge | pages that are `free`, `cached` or `held` |

use std::sync::OnceLock;
use std::time::Duration;

use kv_examples::error::ExampleError;
use kv_observe::{Kind, METRICS};
use metrics::{counter, gauge, histogram};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};

use crate::engine::PageCounts;

/// Upper ends of the buckets of times, in seconds.
const SECONDS: [f64; 12] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

/// How often recorded times are put into their buckets.
const GATHER_EVERY: Duration = Duration::from_secs(2);

static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();

/// Makes this process count. The name of the process is the label `process` of all its numbers.
pub fn install(process: &str) -> Result<(), ExampleError> {
    let installed = || -> Result<PrometheusHandle, BuildError> {
        let mut builder = PrometheusBuilder::new().add_global_label("process", process);
        builder = builder.set_buckets_for_metric(Matcher::Prefix("serve_".to_owned()), &SECONDS)?;
        for metric in METRICS.iter().filter(|metric| metric.kind == Kind::Histogram) {
            builder =
                builder.set_buckets_for_metric(Matcher::Full(metric.name.to_owned()), metric.buckets)?;
        }
        builder.install_recorder()
    };
    let handle = installed().map_err(|error| ExampleError::io("metrics")(std::io::Error::other(error)))?;
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

/// The numbers of several processes as one text: each family once, with the samples of all processes. What is in none
/// of the families, such as the comment at the end of a text, is left out.
pub fn merged(texts: &[String]) -> String {
    // In the order of their first lines; `# TYPE` begins a family, and `# HELP` may come before it.
    let mut families: Vec<(&str, Vec<&str>, Vec<&str>)> = Vec::new();
    for text in texts {
        let mut family = None;
        for line in text.lines() {
            let described = line.strip_prefix("# HELP ").or_else(|| line.strip_prefix("# TYPE "));
            if let Some(name) = described.and_then(|rest| rest.split(' ').next()) {
                let known = families.iter().position(|(known, ..)| *known == name);
                let index = known.unwrap_or_else(|| {
                    families.push((name, Vec::new(), Vec::new()));
                    families.len() - 1
                });
                family = Some(index);
                if let Some((_, head, _)) =
                    families.get_mut(index).filter(|(_, head, _)| !head.contains(&line))
                {
                    head.push(line);
                }
            } else if let Some((.., samples)) = family.and_then(|index| families.get_mut(index))
                && !line.is_empty()
            {
                samples.push(line);
            }
        }
    }
    let lines = families.iter().flat_map(|(_, head, samples)| head.iter().chain(samples));
    lines.flat_map(|line| [*line, "\n"]).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_several_processes_become_one_text_with_each_family_once() {
        let of = |process: &str, more: &str| {
            format!(
                "# HELP a how many\n# TYPE a counter\na{{process=\"{process}\"}} 1\n\n{more}# TYPE b gauge\nb{{process=\"{process}\"}} 2\n\n"
            )
        };
        let texts = [
            of("p", ""),
            of("d", "# TYPE c histogram\nc_sum{process=\"d\"} 3\nc_count{process=\"d\"} 4\n\n"),
        ];
        let expected = "# HELP a how many\n# TYPE a counter\na{process=\"p\"} 1\na{process=\"d\"} 1\n\
            # TYPE b gauge\nb{process=\"p\"} 2\nb{process=\"d\"} 2\n\
            # TYPE c histogram\nc_sum{process=\"d\"} 3\nc_count{process=\"d\"} 4\n";
        assert_eq!(merged(&texts), expected);
    }
}
