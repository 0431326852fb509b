//! The page in a headless Chromium: names that were chosen to break the page break nothing, and 10 000 requests are
//! drawn, scrolled and filtered. Where there is no Chromium, the tests say so, and what does not need one is tested
//! all the same. The page of a real run is tested with the example `pd`, which writes it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

#[path = "support/browser.rs"]
mod browser;
mod support;

use browser::{Browser, chromium, target};
use kv_core::Room;
use kv_timeline::{Failure, Message, Note, SessionNotes, Side, Text, Timeline, What};
use serde_json::Value;
use support::{HOUR, MS, START, pair, push};

/// Names that would end a script, begin an element, or overwrite what scripts rely on.
const HOSTILE: [&str; 8] = [
    "</script><script>document.title='taken'</script>",
    "<img src=x onerror=\"document.title='taken'\">",
    "<!--<script>",
    "__proto__",
    "\u{202e}txet desrever\u{2028}",
    "${document.title='taken'}`\\'\"",
    "/*SCRIPT*/",
    "&lt;b&gt;",
];

/// A timeline with a hostile name everywhere a peer or a client may choose one.
fn hostile() -> Timeline {
    let mut made = pair([HOUR, -HOUR]);
    let mut now = START;
    for (number, name) in (1..).zip(HOSTILE) {
        let room = Room::request(name).unwrap();
        now = push(&mut made, &room, number, now, [MS, MS]);
        made[0].other(Some(1), now, What::PeerRefuses { why: Text::new(name) });
        made[0].notes(number, Some((1, number)), now, What::Heard(Message::Abort { why: Text::new(name) }));
    }
    let records = made.into_iter().map(|made| made.record).collect();
    let mut timeline = Timeline::join(records).unwrap();
    for name in HOSTILE {
        timeline.remark(name);
        timeline.label(&Room::request(name).unwrap(), name);
    }
    timeline
}

#[test]
fn hostile_names_are_texts_in_the_page_and_nothing_else() {
    let html = hostile().html().unwrap();
    // Two scripts, which end once each: the data and the program.
    assert_eq!(html.matches("</script").count(), 2);
    assert_eq!(html.matches("<script").count(), 2);
    assert_eq!(html.matches("<img").count(), 0);
    let Some(program) = chromium() else { return };
    let path = target().join("timeline-hostile.html");
    std::fs::write(&path, html).unwrap();
    let mut browser = Browser::open(&program, &path, (1200, 900), true);
    assert_eq!(browser.value("document.documentElement.dataset.drawn"), "yes");
    assert_eq!(browser.value("document.title"), "KV transfers: what every request did");
    assert_eq!(browser.value("document.scripts.length"), 2);
    assert_eq!(browser.value("document.images.length"), 0);
    for (number, name) in HOSTILE.iter().enumerate() {
        let shown = browser.value(&format!("document.querySelectorAll('#remarks li')[{number}].textContent"));
        assert_eq!(shown, *name);
        browser.value(&format!("page.detail(page.data.requests[{number}])"));
        let title = browser.value("document.getElementById('detail-title').textContent");
        assert_eq!(title, format!("{name} · room {name}"));
    }
    browser.drawn();
    browser.screenshot(&target().join("timeline-hostile.png"));
    assert_eq!(browser.errors, Vec::<String>::new());
}

/// A record that was read may hold anything: sessions that end twice, and events that are centuries apart.
#[test]
fn a_record_that_no_worker_has_made_breaks_nothing_in_the_page() {
    let mut made = pair([0, 0]);
    let end = push(&mut made, &Room::Number(1), 1, START, [MS, MS]);
    let [name, why, advice] = ["PeerLost", "the peer was lost", "none"].map(Text::new);
    let failure = Failure { phase: kv_core::Phase::Transfer, peer: None, name, why, advice };
    made[0].notes(1, Some((1, 1)), START + MS, What::Failed(Box::new(failure)));
    made[0].notes(1, Some((1, 1)), end, What::Ended);
    for (session, times) in [(2, [0, u64::MAX]), (3, [u64::MAX - 3, u64::MAX - 1])] {
        let opened = What::Opened { room: Room::Number(session), side: Side::Sender };
        let note = |(at, what)| Note { at, peer: None, attempt: None, what };
        let notes = times.into_iter().zip([opened, What::Closed]).map(note).collect();
        made[0].record.sessions.push(SessionNotes { session, notes });
    }
    let timeline = Timeline::join(made.into_iter().map(|made| made.record).collect()).unwrap();
    let html = timeline.html().unwrap();
    let Some(program) = chromium() else { return };
    let path = target().join("timeline-strange.html");
    std::fs::write(&path, html).unwrap();
    let mut browser = Browser::open(&program, &path, (1200, 900), true);
    assert_eq!(browser.errors, Vec::<String>::new());
    assert_eq!(browser.value("document.documentElement.dataset.drawn"), "yes");
    // Every request, as near as it gets.
    for number in 0..3 {
        let near = format!(
            "(() => {{ const one = page.data.requests[{number}]; page.detail(one); page.span(one.from, one.to); \
             for (let times = 0; times < 20; times += 1) document.getElementById('zoom-in').click(); page.draw(); return 1; }})()"
        );
        assert_eq!(browser.value(&near), 1);
    }
    browser.drawn();
    assert_eq!(browser.errors, Vec::<String>::new());
}

#[test]
fn ten_thousand_requests_are_drawn_scrolled_and_filtered() {
    const REQUESTS: u64 = 10_000;
    let mut made = pair([3 * HOUR, 0]);
    let mut now = START;
    for number in 1..=REQUESTS {
        let end = push(&mut made, &Room::Number(number), number, now, [100_000, 150_000]);
        now += (end - now) / 4;
    }
    let records = made.into_iter().map(|made| made.record).collect();
    let timeline = Timeline::join(records).unwrap();
    assert_eq!(timeline.requests().len(), REQUESTS as usize);
    let html = timeline.html().unwrap();
    println!("{REQUESTS} requests: {} bytes", html.len());
    // 15 events of a request on two sides, with the phases and the data operation.
    assert!(html.len() < REQUESTS as usize * 1200, "{} bytes", html.len());
    let Some(program) = chromium() else { return };
    let path = target().join("timeline-10000.html");
    std::fs::write(&path, html).unwrap();
    let mut browser = Browser::open(&program, &path, (1400, 900), false);
    assert!(browser.text("#summary").starts_with("10000 requests · 0 failed"));
    assert!(browser.text("#shown").contains("10000 of 10000"));
    let timed = |browser: &mut Browser, what: &str| {
        let script = format!(
            "(() => {{ const start = performance.now(); {what}; return performance.now() - start; }})()"
        );
        println!("{what}: {} ms", browser.value(&script));
    };
    println!(
        "loaded after {} ms",
        browser.value("performance.timing.loadEventEnd - performance.timing.navigationStart")
    );
    timed(&mut browser, "page.draw()");
    // Only the rows that are seen are drawn.
    assert!(browser.value("page.visible().length").as_u64().unwrap() < 100);
    browser.value("document.getElementById('lanes').scrollTop = 1e9");
    browser.drawn();
    let last = browser.value("page.visible().at(-1).request.room");
    assert_eq!(last, "10000");
    timed(&mut browser, "page.draw()");
    timed(&mut browser, "page.span(1e6, 2e6), page.draw()");
    // The pointer is told of the request under it, and a click lists the events of both sides.
    browser.value("document.getElementById('picture').scrollIntoView()");
    let place = browser.value("(() => { const box = page.box.getBoundingClientRect(); return [box.left + 20, box.bottom - 20]; })()");
    let place = (place[0].as_f64().unwrap(), place[1].as_f64().unwrap());
    browser.mouse(place, false);
    assert!(
        browser.text("#tip").contains("room 10000: decode/0 receives from prefill/0"),
        "{}",
        browser.text("#tip")
    );
    browser.mouse(place, true);
    assert_eq!(browser.text("#detail-title"), "room 10000");
    let events = browser.text("#detail-events");
    assert!(events.contains("8192 bytes moved in 2ms") && events.contains("session closed"), "{events}");
    browser.value("{ const box = document.getElementById('filter'); box.value = 'room 4711'; box.dispatchEvent(new Event('input')); }");
    assert!(browser.text("#shown").contains("1 of 10000"));
    browser.screenshot(&target().join("timeline-10000.png"));
    assert_eq!(browser.errors, Vec::<String>::new());
}

#[test]
fn the_trace_has_the_form_that_perfetto_reads() {
    let mut timeline = hostile();
    timeline.remark("done");
    let trace: Value = serde_json::from_str(&timeline.perfetto().unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let of = |phase: &str| events.iter().filter(|event| event["ph"] == phase).count();
    assert_eq!((of("b"), of("M"), of("i")), (of("e"), 5, HOSTILE.len()));
    assert!(of("n") > 0 && of("C") > 0);
    let mut open: std::collections::BTreeMap<String, Vec<&Value>> = Default::default();
    for event in events {
        assert!(event["ts"].as_f64().is_some_and(|at| at >= 0.0), "{event}");
        assert!(event["pid"].as_u64().is_some_and(|pid| (1..=2).contains(&pid)), "{event}");
        // What begins on a track ends on the same track, the latest first.
        let track = format!("{} {} {}", event["pid"], event["cat"], event["id"]);
        match event["ph"].as_str().unwrap() {
            "b" => open.entry(track).or_default().push(event),
            "e" => {
                let begun = open.get_mut(&track).unwrap().pop().unwrap();
                assert_eq!(begun["name"], event["name"]);
                assert!(begun["ts"].as_f64() <= event["ts"].as_f64());
            }
            _ => {}
        }
    }
    assert!(open.values().all(Vec::is_empty));
    assert!(events.is_sorted_by(|a, b| a["ts"].as_f64() <= b["ts"].as_f64()));
    let named: Vec<&Value> =
        events.iter().filter(|event| event["ph"] == "M").map(|event| &event["args"]["name"]).collect();
    assert!(named.contains(&&Value::from("prefill/0")));
    let label = events.iter().find_map(|event| event["args"]["labels"].as_str()).unwrap();
    assert!(label.starts_with("clock ± 1.") && label.ends_with("ms"), "{label}");
    assert!(events.iter().any(|event| event["name"].as_str().unwrap().starts_with("WRITE of room")));
    assert_eq!(trace["otherData"]["clocks"].as_array().unwrap().len(), 2);
    // A session that a side has not ended is drawn to its last event.
    let mut made = pair([0, 0]);
    made[0].opens(1, &Room::Number(1), Side::Sender, START);
    let open = Timeline::join(made.into_iter().map(|made| made.record).collect()).unwrap();
    assert!(open.perfetto().unwrap().contains("open at the end of the record"));
}
