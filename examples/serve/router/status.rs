//! What the router says of itself and of all processes.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::body::Body;
use axum::extract::State;
use axum::http::Response;
use futures_util::future::join_all;
use http_body_util::Full;
use serde_json::json;

use super::Router;
use crate::http;
use crate::metrics;
use crate::rank;

/// The list of models.
pub async fn models(State(router): State<Arc<Router>>) -> Response<Body> {
    http::json(&rank::models_json(&router.limits))
}

/// Whether all processes are up, and what each says of itself.
pub async fn health(State(router): State<Arc<Router>>) -> Response<Body> {
    let asked = router.fleet.addrs().into_iter().map(|(name, addr)| {
        let client = &router.client;
        async move {
            let health = match &addr {
                Some(addr) => http::get_json(client, addr, "/health").await,
                None => None,
            };
            let mut health = health.unwrap_or_else(|| json!({ "status": "down", "rank": name }));
            health["addr"] = addr.into();
            health
        }
    });
    let ranks = join_all(asked).await;
    let draining = router.draining.load(Ordering::Relaxed);
    let up = !draining && ranks.iter().all(|rank| rank["status"] == "ok");
    let requests = router.max_requests - router.slots.available_permits();
    let status = if draining {
        "draining"
    } else if up {
        "ok"
    } else {
        "degraded"
    };
    let mut response = http::json(&json!({
        "status": status, "pid": std::process::id(), "requests": requests, "ranks": ranks,
    }));
    if !up {
        *response.status_mut() = axum::http::StatusCode::SERVICE_UNAVAILABLE;
    }
    response
}

/// The numbers of the router and of all processes that are up.
pub async fn all_metrics(State(router): State<Arc<Router>>) -> String {
    let addrs = router.fleet.addrs().into_iter().filter_map(|(_, addr)| addr);
    let asked = addrs.map(|addr| {
        let client = &router.client;
        async move { http::get_bytes(client, &addr, "/metrics").await }
    });
    let texts = join_all(asked).await.into_iter().flatten();
    let texts = texts.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let all: Vec<String> = std::iter::once(metrics::render()).chain(texts).collect();
    metrics::merged(&all)
}

/// Has all processes give up the prefixes that they keep. A process that does not answer is not waited for.
pub async fn reset_prefix_cache(State(router): State<Arc<Router>>) -> Response<Body> {
    let up = router.fleet.addrs().into_iter().filter_map(|(_, addr)| addr);
    let asked = up.filter_map(|addr| {
        let request = hyper::Request::post(format!("http://{addr}/reset_prefix_cache"));
        let request = request.body(Full::default()).ok()?;
        Some(tokio::time::timeout(http::ASK_WITHIN, router.client.request(request)))
    });
    join_all(asked).await;
    http::json(&json!({}))
}
