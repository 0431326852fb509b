//! A headless Chromium, driven over its debugging pipe.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use base64::Engine;
use serde_json::{Value, json};

/// A page in a browser, which ends with this value.
pub struct Browser {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    session: Option<String>,
    last: u64,
    /// Exceptions, and errors that the browser has logged.
    pub errors: Vec<String>,
    _profile: Profile,
}

/// A directory that is removed at the end.
struct Profile(PathBuf);

impl Drop for Profile {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The folder `target` of the workspace.
pub fn target() -> PathBuf {
    // The test is target/debug/deps/….
    std::env::current_exe().unwrap().ancestors().nth(3).unwrap().to_owned()
}

/// Where a Chromium is: `KV_CHROMIUM`, or the one that `scripts/setup-chromium.sh` has installed. If there is none,
/// says so; with `KV_CHROMIUM_REQUIRED`, that is an error.
pub fn chromium() -> Option<PathBuf> {
    let named = std::env::var_os("KV_CHROMIUM").map(PathBuf::from);
    let found = named.or_else(|| Some(target().join("chromium/chromium")).filter(|path| path.exists()));
    if found.is_none() {
        println!("SKIPPED: there is no Chromium: run scripts/setup-chromium.sh, or set KV_CHROMIUM");
        assert!(std::env::var_os("KV_CHROMIUM_REQUIRED").is_none(), "a Chromium is required");
    }
    found
}

impl Browser {
    /// Starts the browser and opens a page of this size.
    pub fn open(program: &Path, page: &Path, (width, height): (u32, u32), dark: bool) -> Browser {
        let profile = target().join(format!("chromium-profile-{}-{}", std::process::id(), dark));
        std::fs::create_dir_all(&profile).unwrap();
        // The browser reads commands from descriptor 3, and writes answers to descriptor 4.
        let mut child = Command::new("sh")
            .args(["-c", "exec \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1", "sh"])
            .arg(program)
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
            ])
            .args(["--remote-debugging-pipe", "--hide-scrollbars", "--disable-background-networking"])
            .arg(format!("--user-data-dir={}", profile.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (commands, answers) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let (session, last, errors, _profile) = (None, 0, Vec::new(), Profile(profile));
        let mut browser = Browser { child, commands, answers, session, last, errors, _profile };
        let tab = browser.call("Target.createTarget", json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": tab["targetId"], "flatten": true });
        let session = browser.call("Target.attachToTarget", attach);
        browser.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page.enable", "Runtime.enable", "Log.enable", "Network.enable"] {
            browser.call(domain, json!({}));
        }
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        browser.call("Emulation.setDeviceMetricsOverride", size);
        let scheme = if dark { "dark" } else { "light" };
        let media = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        browser.call("Emulation.setEmulatedMedia", media);
        browser.call("Page.navigate", json!({ "url": format!("file://{}", page.display()) }));
        browser.until("Page.loadEventFired");
        browser
    }

    /// The value of an expression in the page; what a promise resolves to.
    pub fn value(&mut self, expression: &str) -> Value {
        let params = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let mut answer = self.call("Runtime.evaluate", params);
        assert!(answer.get("exceptionDetails").is_none(), "{expression}: {answer:#}");
        answer["result"]["value"].take()
    }

    /// The text of the first element that a selector names.
    pub fn text(&mut self, selector: &str) -> String {
        let selector = serde_json::to_string(selector).unwrap();
        let value = self.value(&format!("document.querySelector({selector}).innerText"));
        value.as_str().unwrap().to_owned()
    }

    /// Waits until the page has drawn what was asked for.
    pub fn drawn(&mut self) {
        self.value(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))",
        );
    }

    /// Moves the mouse, or presses and releases its left button.
    pub fn mouse(&mut self, (x, y): (f64, f64), click: bool) {
        let kinds: &[&str] = if click { &["mousePressed", "mouseReleased"] } else { &["mouseMoved"] };
        for kind in kinds {
            let (button, count) = if click { ("left", 1) } else { ("none", 0) };
            let event = json!({ "type": kind, "x": x, "y": y, "button": button, "clickCount": count });
            self.call("Input.dispatchMouseEvent", event);
        }
        self.drawn();
    }

    /// Saves a picture of the whole page as PNG.
    pub fn screenshot(&mut self, path: &Path) {
        let params = json!({ "format": "png", "captureBeyondViewport": true });
        let answer = self.call("Page.captureScreenshot", params);
        let png = base64::prelude::BASE64_STANDARD.decode(answer["data"].as_str().unwrap()).unwrap();
        assert!(png.starts_with(b"\x89PNG") && png.len() > 10_000, "{} bytes", png.len());
        std::fs::write(path, png).unwrap();
    }

    fn call(&mut self, method: &str, params: Value) -> Value {
        self.last += 1;
        let mut command = json!({ "id": self.last, "method": method, "params": params });
        if let Some(session) = &self.session {
            command["sessionId"] = json!(session);
        }
        let mut line = serde_json::to_vec(&command).unwrap();
        line.push(0);
        self.commands.write_all(&line).unwrap();
        loop {
            let mut message = self.receive();
            if message["id"] == self.last {
                assert!(message.get("error").is_none(), "{method}: {message:#}");
                return message["result"].take();
            }
        }
    }

    fn until(&mut self, method: &str) {
        while self.receive()["method"] != method {}
    }

    fn receive(&mut self) -> Value {
        let mut bytes = Vec::new();
        self.answers.read_until(0, &mut bytes).unwrap();
        assert_eq!(bytes.pop(), Some(0), "the browser has ended");
        let message: Value = serde_json::from_slice(&bytes).unwrap();
        let params = &message["params"];
        match message["method"].as_str() {
            Some("Runtime.exceptionThrown") => self.errors.push(params["exceptionDetails"].to_string()),
            Some("Log.entryAdded") if params["entry"]["level"] == "error" => {
                self.errors.push(params["entry"]["text"].to_string());
            }
            // The page itself, and nothing else.
            Some("Network.requestWillBeSent") if params["type"] != "Document" => {
                self.errors.push(format!("loads {}", params["request"]["url"]));
            }
            _ => {}
        }
        message
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
