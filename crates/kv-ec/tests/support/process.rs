//! Hosts in processes of their own, which are told what to do line by line and can be killed.
//!
//! A child is the test's own program, which runs nothing but its test `child`. It ends with its input.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use kv_core::{TransferMode, Transport};
use kv_ec::host::HostClient;
use kv_ec::{EcPoll, EcRegion, Fetch, FetchFailure, Want};

use super::{BLOCK, Host, PATIENCE, content, hash, until};

const ROLE: &str = "KV_EC_TEST_PROCESS";
const SAYS: &str = "child says: ";

/// Another process, which is killed when the value is dropped.
pub struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Process {
    /// A host whose entries peers find at this bootstrap server.
    pub fn producer(addr: &str, blocks: u64) -> Process {
        Process::start(&format!("host {blocks} {addr}"))
    }

    /// A host that only fetches.
    pub fn consumer(blocks: u64) -> Process {
        Process::start(&format!("host {blocks} -"))
    }

    /// A rank that saves one entry through the socket of the host's region.
    pub fn rank(address: &str, seed: u64, blocks: u64) -> Process {
        Process::start(&format!("rank {seed} {blocks} {address}"))
    }

    fn start(role: &str) -> Process {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut process = Process { child, input, output: BufReader::new(output) };
        assert_eq!(process.hears(), "ready");
        process
    }

    /// Gives an order, and waits for the answer.
    pub fn does(&mut self, order: &str) -> String {
        self.tell(order);
        self.hears()
    }

    /// Gives an order.
    pub fn tell(&mut self, order: &str) {
        writeln!(self.input, "{order}").unwrap();
    }

    /// The next answer.
    pub fn hears(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the other process has ended");
            if let Some((_, said)) = line.split_once(SAYS) {
                return said.trim_end().to_owned();
            }
        }
    }

    /// Ends the process by SIGKILL.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The body of the other processes; nothing for the test runner.
pub fn child<T: Transport + Send + 'static>(transport: impl FnOnce(&EcRegion) -> T) {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    match words[..] {
        ["host", blocks, addr] => {
            let region = EcRegion::create(blocks.parse().unwrap(), BLOCK as u32).unwrap();
            let transport = transport(&region);
            // A process that comes after a dead one takes the dead one's place at the bootstrap server.
            let host = Host::over("child", region, transport, |config| {
                config.publish = (addr != "-").then(|| addr.to_owned());
            });
            obey(&host);
        }
        ["rank", seed, blocks, address] => {
            let (seed, bytes) = (seed.parse().unwrap(), blocks.parse::<u64>().unwrap() * BLOCK);
            let rank = HostClient::connect(&address.parse().unwrap(), "", PATIENCE).unwrap();
            let reservation = rank.reserve(&hash(seed), bytes).unwrap();
            reservation.write(0, &content(seed, bytes)).unwrap();
            reservation.commit().unwrap();
            say("ready");
            for _ in std::io::stdin().lines() {}
        }
        _ => panic!("{role}"),
    }
}

fn say(line: &str) {
    println!("{SAYS}{line}");
    std::io::stdout().flush().unwrap();
}

fn obey(host: &Host) {
    let mut fetches: BTreeMap<u64, (Fetch, u64)> = BTreeMap::new();
    say("ready");
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        match words[0] {
            "save" => {
                host.save(number(1), number(2) * BLOCK);
                say("saved");
            }
            "want" => {
                let (seed, bytes) = (number(1), number(2) * BLOCK);
                let mode: TransferMode = mode(words[4]);
                let want = Want::new(hash(seed), bytes, words[3]).with(|want| want.mode = Some(mode));
                fetches.insert(seed, (host.deferred(want), bytes));
                say("wanted");
            }
            "end" => {
                let (mut fetch, bytes) = fetches.remove(&number(1)).unwrap();
                say(&ended(host, &mut fetch, number(1), bytes));
            }
            "books" => {
                let cache = host.connector.gauges().cache;
                say(&format!("{} {}", cache.cached, cache.pinned + cache.filling));
            }
            _ => panic!("{line}"),
        }
    }
}

/// How a fetch has ended: in words, or `right` if every byte is.
pub fn ended(host: &Host, fetch: &mut Fetch, seed: u64, bytes: u64) -> String {
    until("the end", || matches!(fetch.poll(), EcPoll::Failed | EcPoll::Ready));
    match (fetch.entry(), fetch.failure()) {
        (Some(entry), _) if host.bytes(&entry) == content(seed, bytes) => "right".to_owned(),
        (Some(_), _) => "wrong bytes".to_owned(),
        (None, Some(FetchFailure::Machine(error))) => error.to_string(),
        (None, failure) => panic!("{failure:?}"),
    }
}

pub fn mode(text: &str) -> TransferMode {
    [TransferMode::Push, TransferMode::Pull, TransferMode::Auto]
        .into_iter()
        .find(|mode| mode.to_string() == text)
        .unwrap()
}

/// A budget that no working transfer needs.
pub const BUDGET: Duration = Duration::from_secs(30);
