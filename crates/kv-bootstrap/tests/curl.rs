//! The real `curl`, where it is installed.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod support;

use std::process::Command;

use kv_bootstrap::KvBootstrapServer;
use support::{rank, rank_json};

/// Status and body, or `None` without curl.
fn curl(arguments: &[&str]) -> Option<(String, String)> {
    let shown = ["-sS", "--max-time", "30", "--noproxy", "*", "-w", "\n%{http_code}"];
    let output = match Command::new("curl").args(shown).args(arguments).output() {
        Ok(output) => output,
        Err(error) => {
            eprintln!("skipped: curl cannot be run ({error})");
            return None;
        }
    };
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text} {}", String::from_utf8_lossy(&output.stderr));
    let (body, status) = text.rsplit_once('\n').unwrap();
    Some((status.to_owned(), body.to_owned()))
}

#[test]
fn curl_gets_every_kind_of_answer() {
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let at = |path: &str| format!("http://{}{path}", server.local_addr());
    let Some(health) = curl(&[&at("/health")]) else { return };
    assert_eq!(health, ("200".into(), "OK".into()));
    assert_eq!(curl(&["-0", &at("/health")]).unwrap().0, "200");
    assert_eq!(curl(&["-I", &at("/health")]).unwrap().0, "200");
    assert_eq!(curl(&[&at("/route")]).unwrap().0, "400");
    assert_eq!(curl(&["-X", "PUT", &at("/route")]).unwrap().0, "411");
    // Both addresses over one connection, the body with `Expect: 100-continue`.
    let record = rank("p", (1, 0), 1);
    let body = rank_json(&record, 60_000);
    let put = ["-X", "PUT", "-H", "Expect: 100-continue", "-d", &body, &at("/v1/ranks")];
    assert_eq!(curl(&put).unwrap(), ("200".into(), "{\"lease_ms\":60000}".into()));
    let chunked = ["-X", "PUT", "-H", "Transfer-Encoding: chunked", "-d", &body, &at("/v1/ranks")];
    assert_eq!(curl(&chunked).unwrap().0, "200");
    let (status, found) = curl(&[&at("/v1/ranks?role=prefill&modulo=%35")]).unwrap();
    assert_eq!(status, "200");
    assert!(found.contains("\"engine\":\"p\""), "{found}");
}
