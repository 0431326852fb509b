//! The example `pd` writes a timeline of a run with a rank that hangs and is killed, expired leases and requests that
//! are sent again. A headless Chromium shows what happened, in words that can be read and in a picture.
//!
//! The program is the one that cargo builds beside the tests of the package: `cargo test --test timeline` alone builds
//! none, so `cargo build --examples` comes first. Where there is no Chromium, the test says so, and looks at the file.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

#[path = "../../crates/kv-timeline/tests/support/browser.rs"]
mod browser;

use std::path::Path;
use std::process::Command;

use browser::{Browser, chromium, target};
use serde_json::Value;

/// Runs `pd` with these options, and lets it write a timeline.
fn pd(options: &[&str], file: &Path) {
    let test = std::env::current_exe().unwrap();
    let program = test.parent().unwrap().with_file_name("examples").join("pd");
    assert!(program.exists(), "{} is missing: build the examples of the package first", program.display());
    let output = Command::new(program).args(options).arg("--timeline").arg(file).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stdout));
    assert!(said.contains("the timeline of all requests is in"), "{said}");
}

/// A decode rank is stopped while requests wait there for room: their leases expire, and the requests are sent again.
/// At the end, or after a minute, the router kills the rank. So many requests that some wait for longer than half a
/// lease on a fast machine, too.
const STOPPED: [&str; 15] = [
    "--mode",
    "pull",
    "--stop",
    "decode",
    "--lease-seconds",
    "2",
    "--pages",
    "12",
    "--prompt-tokens",
    "64",
    "--max-new-tokens",
    "90",
    "--requests",
    "24",
    "--json",
];

#[test]
fn the_page_of_a_run_with_a_rank_that_hangs_tells_what_happened() {
    let page = target().join("timeline-pd.html");
    pd(&STOPPED, &page);
    let html = std::fs::read_to_string(&page).unwrap();
    let (_, data) = html.split_once("id=\"data\">").unwrap();
    let data: Value = serde_json::from_str(data.split_once("</script>").unwrap().0).unwrap();
    assert!(
        data["remarks"][0].as_str().unwrap().starts_with("The router stopped decode/"),
        "{}",
        data["remarks"]
    );
    let kinds: Vec<&str> =
        data["incidents"].as_array().unwrap().iter().map(|one| one["kind"].as_str().unwrap()).collect();
    for kind in ["lease expired", "failed", "peer trouble"] {
        assert!(kinds.contains(&kind), "{kind} is not among {kinds:?}");
    }
    // A rank without pages for the killed one may end before it has seen the death.
    let seen_dead = kinds.contains(&"peer lost");
    assert!(data["requests"].as_array().unwrap().iter().any(|request| request["retry_of"].is_number()));
    // All ranks read the clock of one host.
    for record in data["workers"].as_array().unwrap().iter().filter_map(|worker| worker["record"].as_object())
    {
        let (shift, unsure) = (record["shift"].as_f64().unwrap(), record["unsure"].as_f64().unwrap());
        assert!(shift.abs() <= unsure, "shifted by {shift} µs, and sure to {unsure} µs");
    }
    let Some(program) = chromium() else { return };
    let mut browser = Browser::open(&program, &page, (1400, 1000), false);
    let remarks = browser.text("#remarks");
    assert!(remarks.starts_with("The router stopped decode/"), "{remarks}");
    let summary = browser.text("#summary");
    assert!(summary.contains("sent again") && summary.contains("(1 without a record)"), "{summary}");
    let incidents = browser.text("#incidents");
    let killed = remarks.split_whitespace().nth(3).unwrap().to_owned();
    for text in ["has expired", "sent again"] {
        assert!(incidents.contains(text), "{text} is not said: {incidents}");
    }
    assert_eq!(incidents.contains(&format!("{killed} is dead")), seen_dead, "{incidents}");
    let failures = browser.text("#failures");
    assert!(failures.contains("LeaseExpired"), "{failures}");
    assert!(browser.text("#workers").contains("no record"));
    // Uncertainty is shown for the clocks that were shifted.
    assert!(browser.text("#workers").contains("± "), "{}", browser.text("#workers"));

    // A request whose lease has expired: the pointer is told, and a click lists the events.
    let place = "(() => { const row = page.view.rows.find((one) => one.kind === 'lane' && one.lane.expired !== null);
        page.box.scrollTop = row.y - 100;
        const box = page.box.getBoundingClientRect();
        return [box.left + page.x(row.lane.expired), box.top + page.AXIS + row.y - page.box.scrollTop + 10]; })()";
    let place = browser.value(place);
    let place = (place[0].as_f64().unwrap(), place[1].as_f64().unwrap());
    browser.drawn();
    browser.mouse(place, false);
    let tip = browser.text("#tip");
    assert!(tip.contains("the lease has expired"), "{tip}");
    browser.mouse(place, true);
    assert!(browser.text("#detail-events").contains("the lease has expired"));

    // Zooming and moving change what is seen, and `0` shows everything again.
    let seen = |browser: &mut Browser| browser.value("[page.view.from, page.view.to]");
    let everything = seen(&mut browser);
    browser.value("document.getElementById('zoom-in').click()");
    let near = seen(&mut browser);
    assert!(near[1].as_f64().unwrap() - near[0].as_f64().unwrap() < everything[1].as_f64().unwrap());
    browser.value("document.getElementById('fit').click()");
    assert_eq!(seen(&mut browser), everything);
    browser.value("page.box.scrollTop = 0");
    browser.mouse((2.0, 2.0), false);
    browser.drawn();
    browser.screenshot(&target().join("timeline-pd.png"));
    assert_eq!(browser.errors, Vec::<String>::new());

    let mut dark = Browser::open(&program, &page, (1400, 1000), true);
    dark.drawn();
    dark.screenshot(&target().join("timeline-pd-dark.png"));
    assert_eq!(dark.errors, Vec::<String>::new());
}

#[test]
fn the_trace_of_a_run_with_a_killed_prefill_rank_has_both_sides() {
    let file = target().join("timeline-pd.json");
    pd(&["--kill", "prefill", "--requests", "6", "--json"], &file);
    let trace: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let names: Vec<&str> = events.iter().filter_map(|event| event["name"].as_str()).collect();
    for side in ["sends", "receives"] {
        assert!(names.iter().any(|name| name.starts_with("request 0") && name.ends_with(side)), "{side}");
    }
    assert!(names.iter().any(|name| name.contains("is dead")), "a peer was killed");
    let lost = events.iter().filter(|event| event["ph"] == "M" && event["name"] == "process_name");
    let lost: Vec<&Value> = lost.map(|event| &event["args"]["name"]).collect();
    assert!(lost.iter().any(|name| name.as_str().unwrap().ends_with("(no record)")), "{lost:?}");
}
