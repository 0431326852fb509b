//! The server shows what its requests did while it serves: a page and a trace, joined from the records of its
//! processes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[allow(dead_code)] // Of the other tests.
mod support;

use kv_timeline::Record;
use serde_json::Value;
use support::{Reply, Serve, ask, completion, get, post};

const COMPLETIONS: &str = "/v1/completions";

/// The data of a page.
fn data(page: &Reply) -> Value {
    assert_eq!(page.status, 200, "{}", String::from_utf8_lossy(&page.body));
    assert!(page.head.contains("text/html"), "{}", page.head);
    let html = String::from_utf8(page.body.clone()).unwrap();
    let (_, data) = html.split_once("id=\"data\">").unwrap();
    serde_json::from_str(data.split_once("</script>").unwrap().0).unwrap()
}

#[test]
fn the_timeline_joins_both_sides_of_the_latest_requests_while_serving() {
    let serve = Serve::start(&["--decode-ranks", "2"]);
    assert_eq!(data(&get(&serve.addr, "/timeline"))["requests"], Value::Array(Vec::new()));
    for number in 0..5 {
        ask(&serve.addr, COMPLETIONS, &completion(&[number, 7, 7], 4));
    }
    serve.quiet();
    let all = data(&get(&serve.addr, "/timeline"));
    let requests = all["requests"].as_array().unwrap();
    assert_eq!(requests.len(), 5);
    for request in requests {
        let lanes = request["lanes"].as_array().unwrap();
        let sides: Vec<(&Value, &Value)> =
            lanes.iter().map(|lane| (&lane["sends"], &lane["outcome"])).collect();
        assert_eq!(
            sides,
            [(&Value::Bool(true), &Value::from("ok")), (&Value::Bool(false), &Value::from("ok"))]
        );
        let moved: u64 = lanes.iter().map(|lane| lane["bytes"].as_u64().unwrap()).sum();
        assert!(moved > 0, "{request}");
    }
    let names: Vec<&Value> =
        all["workers"].as_array().unwrap().iter().map(|worker| &worker["name"]).collect();
    assert_eq!(names, ["decode/0", "decode/1", "prefill/0"]);
    // The latest two, which are the last of all.
    let two = data(&get(&serve.addr, "/timeline?requests=2"));
    let rooms = |data: &Value| -> Vec<String> {
        data["requests"].as_array().unwrap().iter().map(|request| request["room"].to_string()).collect()
    };
    assert_eq!(rooms(&two), rooms(&all)[3..]);

    let trace = get(&serve.addr, "/timeline.json").json();
    let events = trace["traceEvents"].as_array().unwrap();
    let named = events.iter().filter(|event| event["name"] == "process_name");
    assert_eq!(named.map(|event| &event["args"]["name"]).collect::<Vec<_>>(), names);

    let addr = serve.rank("prefill/0")["addr"].as_str().unwrap().to_owned();
    let records = Record::from_lines(&get(&addr, "/record?requests=3").body, 8).unwrap();
    let [record] = &records[..] else { panic!("one worker has one record") };
    assert_eq!((record.worker.to_string().as_str(), record.sessions.len()), ("prefill/0", 3));
    assert!(record.lost.sessions >= 2);
}

#[test]
fn a_timeline_without_a_number_or_of_a_dead_process_says_so() {
    let serve = Serve::start(&[]);
    for wrong in ["0", "-1", "x", "2001", "99999999999999999999", ""] {
        let reply = get(&serve.addr, &format!("/timeline?requests={wrong}"));
        assert_eq!(reply.status, 400);
        assert_eq!(reply.error(), format!("requests is {wrong}; expected a number from 1 to 2000"));
    }
    assert_eq!(post(&serve.addr, "/timeline", "").status, 405);
    ask(&serve.addr, COMPLETIONS, &completion(&[1, 2, 3], 4));
    serve.quiet();
    let pid = serve.rank("prefill/0")["pid"].clone();
    serve.kill("prefill/0");
    let patience = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while [&pid, &Value::Null].contains(&&serve.rank("prefill/0")["pid"]) {
        assert!(std::time::Instant::now() < patience, "the process was not started again");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    ask(&serve.addr, COMPLETIONS, &completion(&[1, 2, 3], 4));
    serve.quiet();
    let all = data(&get(&serve.addr, "/timeline"));
    let lives: Vec<(&Value, bool)> = all["workers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|worker| (&worker["name"], worker["record"].is_object()))
        .collect();
    let [decode, prefill] = ["decode/0", "prefill/0"].map(Value::from);
    // The killed life of the prefill process is known to the decode process only.
    assert_eq!(lives, [(&decode, true), (&prefill, true), (&prefill, false)]);
    let [first, second] = &all["requests"].as_array().unwrap()[..] else { panic!("two requests: {all}") };
    assert_eq!(first["lanes"].as_array().unwrap().len(), 1);
    assert_eq!(first["unrecorded"][0][0], 2);
    assert_eq!(second["lanes"].as_array().unwrap().len(), 2);
}
