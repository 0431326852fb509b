//! The processes of the service: started, found, restarted when they end, and stopped.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kv_examples::error::ExampleError;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::{Notify, watch};

use crate::engine::{RankSpec, Side};

/// How long a process may take to come up: a checkpoint is read from disk.
const READY_WITHIN: Duration = Duration::from_secs(300);
/// How long after the end of a process another one is started.
const RESTART_AFTER: Duration = Duration::from_millis(500);
/// How long a process may take to end, before it is killed.
const STOP_WITHIN: Duration = Duration::from_secs(25);
/// How long a request waits for a process that can take it.
const PICK_WITHIN: Duration = Duration::from_secs(5);
/// How many more requests the preferred process may have than the idlest one.
const STICKY: usize = 8;

/// The processes of the service.
pub struct Fleet {
    members: Mutex<Vec<Member>>,
    changed: Notify,
}

struct Member {
    spec: RankSpec,
    /// Where it takes requests; `None` while it does not.
    addr: Option<String>,
    /// The number of requests that it was given and has not ended.
    requests: usize,
}

/// A process that was picked for a request. When this is dropped, the request has ended.
pub struct Picked {
    fleet: Arc<Fleet>,
    index: usize,
    /// Where the process takes requests.
    pub addr: String,
    /// The number of the process on its side.
    pub number: u32,
}

impl Fleet {
    /// Starts a process for each of `specs`. They end when `stop` becomes true; [`Fleet::run`] has to be polled.
    pub fn new(specs: Vec<RankSpec>) -> Arc<Fleet> {
        let member = |spec| Member { spec, addr: None, requests: 0 };
        let members = Mutex::new(specs.into_iter().map(member).collect());
        Arc::new(Fleet { members, changed: Notify::new() })
    }

    fn members(&self) -> MutexGuard<'_, Vec<Member>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts all processes, and keeps them running until `stop` is true. Then ends them.
    pub async fn run(self: Arc<Fleet>, stop: watch::Receiver<bool>) {
        let count = self.members().len();
        let running = (0..count).map(|index| Arc::clone(&self).keep(index, stop.clone()));
        futures_util::future::join_all(running).await;
    }

    /// Keeps one process running.
    async fn keep(self: Arc<Fleet>, index: usize, mut stop: watch::Receiver<bool>) {
        while !*stop.borrow() {
            let spec = self.members().get(index).map(|member| member.spec.clone());
            let Some(spec) = spec else { return };
            if let Ok(mut child) = spawn(&spec) {
                // The process ends with its standard input, which `wait` would close.
                let input = child.stdin.take();
                let addr = tokio::select! {
                    addr = tokio::time::timeout(READY_WITHIN, first_line(&mut child)) => addr.ok().flatten(),
                    _ = stop.wait_for(|stop| *stop) => None,
                };
                let ready = addr.is_some();
                self.set_addr(index, addr);
                if ready {
                    tokio::select! {
                        _ = child.wait() => {}
                        _ = stop.wait_for(|stop| *stop) => {}
                    }
                }
                self.set_addr(index, None);
                // Tells the process to end; one that has ended already does not care.
                drop(input);
                let patience = if ready { STOP_WITHIN } else { Duration::ZERO };
                let _ = tokio::time::timeout(patience, child.wait()).await;
                let _ = child.kill().await;
            }
            tokio::select! {
                () = tokio::time::sleep(RESTART_AFTER) => {}
                _ = stop.wait_for(|stop| *stop) => {}
            }
        }
    }

    fn set_addr(&self, index: usize, addr: Option<String>) {
        if let Some(member) = self.members().get_mut(index) {
            member.addr = addr;
        }
        self.changed.notify_waiters();
    }

    /// Waits until all processes take requests; false if that takes too long.
    pub async fn ready(&self) -> bool {
        let all = async {
            loop {
                let changed = self.changed.notified();
                if self.members().iter().all(|member| member.addr.is_some()) {
                    return;
                }
                changed.await;
            }
        };
        tokio::time::timeout(READY_WITHIN, all).await.is_ok()
    }

    /// A process of this side for a request; `None` if there is none for some seconds. Requests with the same `key`
    /// go to the same process, whose cache has their prefix, unless that one has much more to do than another.
    /// `but_not` is a process that has just failed: it is picked only if there is no other.
    pub async fn pick(self: &Arc<Fleet>, side: Side, key: impl Hash, but_not: Option<u32>) -> Option<Picked> {
        let waiting = async {
            loop {
                let changed = self.changed.notified();
                if let Some(picked) = self.try_pick(side, &key, but_not) {
                    return picked;
                }
                changed.await;
            }
        };
        tokio::time::timeout(PICK_WITHIN, waiting).await.ok()
    }

    fn try_pick(self: &Arc<Fleet>, side: Side, key: &impl Hash, but_not: Option<u32>) -> Option<Picked> {
        let mut members = self.members();
        let score = |number: u32| {
            let mut hasher = DefaultHasher::new();
            (key, number).hash(&mut hasher);
            hasher.finish()
        };
        let of_side = |(_, member): &(usize, &Member)| member.spec.side == side && member.addr.is_some();
        let up: Vec<(usize, &Member)> = members.iter().enumerate().filter(of_side).collect();
        let others = up.iter().filter(|(_, member)| Some(member.spec.number) != but_not);
        let others: Vec<_> = others.copied().collect();
        let candidates = if others.is_empty() { up } else { others };
        let preferred = candidates.iter().max_by_key(|(_, member)| score(member.spec.number))?;
        let idlest = candidates.iter().min_by_key(|(_, member)| member.requests)?;
        let sticks = preferred.1.requests <= idlest.1.requests + STICKY;
        let index = if sticks { preferred.0 } else { idlest.0 };
        let member = members.get_mut(index)?;
        member.requests += 1;
        let (addr, number) = (member.addr.clone()?, member.spec.number);
        Some(Picked { fleet: Arc::clone(self), index, addr, number })
    }

    /// The names of all processes, and where they take requests.
    pub fn addrs(&self) -> Vec<(String, Option<String>)> {
        self.members().iter().map(|member| (member.spec.name(), member.addr.clone())).collect()
    }
}

impl Drop for Picked {
    fn drop(&mut self) {
        if let Some(member) = self.fleet.members().get_mut(self.index) {
            member.requests = member.requests.saturating_sub(1);
        }
    }
}

/// Starts this program once more, as one process of the service. The process ends with its standard input.
fn spawn(spec: &RankSpec) -> Result<Child, ExampleError> {
    let failed = ExampleError::io("start a process");
    let program = std::env::current_exe().map_err(ExampleError::io("find this program"))?;
    let spec = serde_json::to_string(spec).map_err(ExampleError::Command)?;
    let mut command = Command::new(program);
    command.args(["rank", &spec]).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
    // An interrupt at the terminal is for the router, which ends the processes in order.
    command.process_group(0).spawn().map_err(failed)
}

/// The first line that a process writes: where it takes requests.
async fn first_line(child: &mut Child) -> Option<String> {
    let mut line = String::new();
    BufReader::new(child.stdout.take()?).read_line(&mut line).await.ok()?;
    Some(line.trim_end().to_owned()).filter(|line| !line.is_empty())
}
