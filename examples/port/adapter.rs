//! The adapter: the operations of a hand-written transfer, made of sessions. [`Client`] is D, [`Server`] is P.
//!
//! D sends a prompt to P as a line of JSON, and opens a receiver that will read the blocks. P keeps the blocks of a
//! prefilled sequence under a lease until D has read them, so D takes blocks of its own only when there is KV for
//! them. No call waits: lines go through bounded queues to threads of their own ([`lines`](super::lines)).
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::Duration;

use kv_transfer::allocator::PageAllocator;
use kv_transfer::queue::AuxRow;
use kv_transfer::{AuxIndex, EngineGroup, EngineReceiver, EngineSender, Incarnation, KvManager, KvPoll};
use kv_transfer::{KvReceiver, KvSender, KvSession, OpenError, Pages, Room, SessionOptions, TransferMode};
use serde::{Deserialize, Serialize};

use super::cache::KvCache;
use super::lines::{self, Heard};

/// What the two sides tell each other; KV, first tokens and failures go with the sessions instead.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Line {
    /// P → D: the bootstrap server of P's ranks, and how many tokens P has room for. First, and after each change.
    Capacity { bootstrap: String, tokens: usize },
    /// D → P: compute the KV of this prompt.
    Prefill { room: Room, tokens: Vec<u32> },
    /// P → D: the KV of the prompt may be read.
    Finished { room: Room },
}

/// The aux row of a request has the number of its first block.
fn row_of(pages: &Pages) -> AuxIndex {
    AuxIndex(pages.list().iter().next().unwrap_or_default())
}

/// What D knows of a prompt that it has sent to P.
#[derive(Debug)]
pub enum Remote {
    /// P computes, or D has no blocks for the result yet, or the blocks are being read.
    Waiting,
    /// The KV is in these blocks. The row has the first token, and how many tokens P had in its prefix cache.
    Received(AuxRow, Pages),
    /// There will be no KV, for this reason: D computes the prompt itself.
    Lost(String),
}

struct Request {
    p: usize,
    receiver: EngineReceiver,
    tokens: usize,
    finished: bool,
    given: bool,
}

/// D: lets other processes prefill.
pub struct Client {
    ranks: EngineGroup,
    cache: Arc<KvCache>,
    life: Incarnation,
    deadline: Duration,
    heard: Receiver<(usize, Heard)>,
    /// The servers that are there: how to talk to each, its bootstrap server, the tokens that it has room for.
    ps: HashMap<usize, (SyncSender<Line>, String, usize)>,
    requests: HashMap<u64, Request>,
    ended: Vec<Request>,
    sent: u64,
}

impl Client {
    /// A client of the servers at these addresses, which may come and go. `life` is that of one of the workers.
    pub fn new(
        ranks: EngineGroup,
        life: Incarnation,
        cache: Arc<KvCache>,
        addrs: &[String],
        deadline: Duration,
    ) -> Self {
        let (heard, ps, requests, ended) = (lines::dial(addrs), HashMap::new(), HashMap::new(), Vec::new());
        Client { ranks, cache, life, deadline, heard, ps, requests, ended, sent: 0 }
    }

    /// How many servers are there.
    pub fn servers(&self) -> usize {
        self.ps.len()
    }

    /// Sends a prompt to the P with the most room; false if D must compute the prompt itself.
    pub fn transfer_prefill(&mut self, id: u64, tokens: &[u32]) -> bool {
        let most = self.ps.iter_mut().max_by_key(|(_, (.., available))| *available);
        let Some((&p, (lines, bootstrap, available))) = most else { return false };
        // Named by this life of D: an id may be used again, after a restart too, and never means another's KV.
        let room = Room::request(&format!("{}.{}.{}", self.ranks.args().worker(), self.life, self.sent));
        let options = SessionOptions::default().with(|options| {
            (options.mode, options.deadline) = (Some(TransferMode::Pull), Some(self.deadline));
        });
        let (Ok(room), true) = (room, *available > tokens.len()) else { return false };
        let Ok(receiver) = self.ranks.receiver(bootstrap, room.clone(), options) else { return false };
        if lines.try_send(Line::Prefill { room, tokens: tokens.to_vec() }).is_err() {
            return false; // and the receiver, which is dropped, ends
        }
        (self.sent, *available) = (self.sent + 1, *available - tokens.len());
        let request = Request { p, receiver, tokens: tokens.len(), finished: false, given: false };
        self.ended.extend(self.requests.insert(id, request));
        true
    }

    /// True once P has computed the prompt, or the request is lost: `receive_kv_cache` has something to do.
    pub fn check_prefill_finished(&self, id: u64) -> bool {
        let over = |request: &Request| request.finished || request.receiver.poll() == KvPoll::Failed;
        self.requests.get(&id).is_none_or(over)
    }

    /// Takes blocks and reads the KV into them. Called again until the result is not `Waiting`.
    pub fn receive_kv_cache(&mut self, id: u64, blocks: &mut impl PageAllocator) -> Remote {
        let Some(request) = self.requests.get_mut(&id) else { return Remote::Lost("no such request".into()) };
        let state = request.receiver.poll();
        if request.finished && !request.given && state == KvPoll::WaitingForInput {
            // Without room here, the heartbeats of the receiver keep the blocks at P, until D's deadline.
            let Some(pages) = blocks.allocate(self.cache.blocks_of(request.tokens)) else {
                return Remote::Waiting;
            };
            let row = row_of(&pages);
            match request.receiver.init(pages, Some(row)) {
                Ok(()) => request.given = true,
                Err(refused) => drop(blocks.free(refused.0)),
            }
        } else if state == KvPoll::Failed {
            let cause =
                request.receiver.failure().map_or_else(String::new, |failure| failure.cause.to_string());
            self.release(id);
            return Remote::Lost(cause);
        } else if state == KvPoll::Success
            && let Some(back) = request.receiver.reclaim()
        {
            let read = self.cache.read_row(row_of(&back.pages), request.receiver.room());
            self.requests.remove(&id);
            match read {
                Ok(row) => return Remote::Received(row, back.pages),
                // KV that is perhaps another request's, too.
                Err(error) => {
                    drop(blocks.free(back.pages));
                    return Remote::Lost(error.to_string());
                }
            }
        }
        Remote::Waiting
    }

    /// Gives a request up: P hears of it, and the blocks come back once nothing writes into them.
    pub fn release(&mut self, id: u64) {
        if let Some(mut request) = self.requests.remove(&id) {
            request.receiver.abort();
            self.ended.push(request);
        }
    }

    /// Hears what P says, and frees the blocks of requests that were given up. Called once per step.
    pub fn step(&mut self, blocks: &mut impl PageAllocator) {
        self.ranks.drain(|_| {});
        while let Ok((p, heard)) = self.heard.try_recv() {
            match heard {
                Heard::Line(Line::Capacity { bootstrap, tokens }, lines) => {
                    self.ps.insert(p, (lines, bootstrap, tokens));
                }
                Heard::Line(Line::Finished { room }, _) => {
                    let of_room = self.requests.values_mut().find(|request| *request.receiver.room() == room);
                    of_room.into_iter().for_each(|request| request.finished = true);
                }
                Heard::Gone => {
                    self.ps.remove(&p);
                    let lost =
                        self.requests.values_mut().filter(|request| request.p == p && !request.finished);
                    lost.for_each(|request| request.receiver.abort());
                }
                _ => {}
            }
        }
        self.ended.retain_mut(|request| {
            request.receiver.reclaim().is_none_or(|back| blocks.free(back.pages).is_err())
        });
    }
}

struct Task {
    d: usize,
    sender: EngineSender,
    /// The number of blocks was announced, which is done once.
    announced: bool,
    /// True while D has to be told that the KV may be read.
    untold: bool,
}

/// P: prefills for other processes.
pub struct Server {
    ranks: EngineGroup,
    cache: Arc<KvCache>,
    bootstrap: String,
    heard: Receiver<(usize, Heard)>,
    /// A prompt for which the ring of commands had no room.
    held: Option<(usize, Heard)>,
    ds: HashMap<usize, SyncSender<Line>>,
    tasks: BTreeMap<u64, Task>,
    next: u64,
    available: usize,
}

impl Server {
    /// A server whose clients connect to `listener`, and whose ranks are registered at `bootstrap`.
    pub fn new(
        ranks: EngineGroup,
        cache: Arc<KvCache>,
        bootstrap: String,
        listener: std::net::TcpListener,
    ) -> Self {
        let (heard, ds, tasks) = (lines::listen(listener), HashMap::new(), BTreeMap::new());
        Server { ranks, cache, bootstrap, heard, held: None, ds, tasks, next: 0, available: 0 }
    }

    /// The next prompt to compute, with P's own number for it. Clients hear how many tokens there is room for.
    pub fn try_receive_prefill(&mut self, available: usize) -> Option<(u64, Vec<u32>)> {
        let capacity = Line::Capacity { bootstrap: self.bootstrap.clone(), tokens: available };
        if std::mem::replace(&mut self.available, available) != available {
            self.ds.values().for_each(|d| drop(d.try_send(capacity.clone())));
        }
        while let Some((d, heard)) = self.held.take().or_else(|| self.heard.try_recv().ok()) {
            match heard {
                Heard::New(lines) => {
                    let _ = lines.try_send(capacity.clone());
                    self.ds.insert(d, lines);
                }
                Heard::Line(Line::Prefill { room, tokens }, lines) => {
                    let options = SessionOptions::default().with(|o| o.mode = Some(TransferMode::Pull));
                    let sender = match self.ranks.sender(&self.bootstrap, room.clone(), &[], options) {
                        Ok(sender) => sender,
                        Err(OpenError::Backpressure) => {
                            self.held = Some((d, Heard::Line(Line::Prefill { room, tokens }, lines)));
                            return None; // and the next step tries again
                        }
                        // A worker with too many sessions takes no more, and D computes the prompt at its deadline.
                        Err(_) => continue,
                    };
                    self.next += 1;
                    self.tasks.insert(self.next, Task { d, sender, announced: false, untold: false });
                    return Some((self.next, tokens));
                }
                Heard::Gone => {
                    self.ds.remove(&d);
                    self.tasks.values_mut().filter(|task| task.d == d).for_each(|task| task.sender.abort());
                }
                Heard::Line(..) => {}
            }
        }
        None
    }

    /// Hands the blocks of a computed prompt over. If they come back, the caller tries again later.
    pub fn transfer_kv_cache(&mut self, id: u64, pages: Pages, first: &AuxRow) -> Result<(), Pages> {
        let Some(task) = self.tasks.get_mut(&id) else { return Err(pages) };
        let row = row_of(&pages);
        if self.cache.write_row(row, task.sender.room(), first).is_err() {
            task.sender.abort(); // and D computes the prompt itself
            return Err(pages);
        }
        if !task.announced && task.sender.init(pages.len(), Some(row)).is_err() {
            return Err(pages);
        }
        task.announced = true;
        task.sender.send(pages).map_err(|refused| refused.0)?;
        task.untold = true;
        Ok(())
    }

    /// Gives a prompt up that P will not compute: D hears of it, and computes the prompt itself.
    pub fn refuse(&mut self, id: u64) {
        self.tasks.get_mut(&id).into_iter().for_each(|task| task.sender.abort());
    }

    /// The sequences that are over, with the blocks that were handed over: D has read them, or never will. Called
    /// once per step.
    pub fn released(&mut self) -> Vec<(u64, Pages)> {
        self.ranks.drain(|_| {});
        let mut released = Vec::new();
        self.tasks.retain(|&id, task| {
            if let (true, Some(d)) = (task.untold, self.ds.get(&task.d)) {
                task.untold = d.try_send(Line::Finished { room: task.sender.room().clone() }).is_err();
            }
            let Some(back) = task.sender.reclaim() else { return true };
            released.push((id, back.pages));
            false
        });
        released
    }
}
