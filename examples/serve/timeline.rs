//! What every request did, as a picture: `/timeline` of the router, made of what each process has recorded.
//!
//! Each worker has a [`Recorder`], and each process tells what its recorders hold at `/record`. The router asks all
//! processes, joins their records into one clock, and shows the latest requests: as a page at `/timeline`, and as a
//! trace for <https://ui.perfetto.dev> at `/timeline.json`. `?requests=500` asks for more or fewer of them. What a
//! process knew that has died is lost; the other side of its requests is shown.

use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Response, Uri};
use axum::routing::get;
use futures_util::future::join_all;
use kv_timeline::{Record, RecordError, Recorder, Timeline};
use kv_transfer::{Incarnation, Room, WorkerId};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::fleet::Fleet;
use crate::http::{self, HttpClient};
use crate::openai::ApiError;

/// How many requests a timeline shows if nothing else is said, and most that it shows.
const REQUESTS: (usize, usize) = (200, 2000);
/// The memory of the recorder of one worker, in bytes: that of twice as many requests as a timeline shows, or more. A load
/// fills it in its warm-up.
const RECORDER_BYTES: usize = 4 << 20;
/// Most texts that are made or on their way to clients. A text is as long as a few megabytes.
const TEXTS: usize = 8;
/// Most workers in one process.
const MAX_WORKERS: usize = 64;

/// The recorders of the workers of one process.
#[derive(Clone)]
pub struct Recorders {
    all: Arc<Mutex<Vec<(Recorder, Incarnation)>>>,
    texts: Arc<Semaphore>,
}

impl Default for Recorders {
    fn default() -> Recorders {
        Recorders { all: Arc::default(), texts: Arc::new(Semaphore::new(TEXTS)) }
    }
}

impl Recorders {
    /// A recorder for a worker that is about to start; its listener belongs into the worker's configuration.
    pub fn recorder(worker: &WorkerId) -> Recorder {
        Recorder::with_bytes(worker, RECORDER_BYTES)
    }

    /// The worker of this recorder has started.
    pub fn started(&self, recorder: Recorder, incarnation: Incarnation) {
        self.all.lock().unwrap_or_else(PoisonError::into_inner).push((recorder, incarnation));
    }

    /// What the workers have recorded of their latest sessions: a line for each worker. Of fewer sessions, if the
    /// router would not read a text of so many.
    fn lines(&self, mut sessions: usize) -> Result<String, RecordError> {
        loop {
            let lines = self.all_lines(sessions)?;
            if lines.len() <= http::MAX_ANSWER || sessions <= 1 {
                return Ok(lines);
            }
            sessions /= 2;
        }
    }

    fn all_lines(&self, sessions: usize) -> Result<String, RecordError> {
        let recorders = self.all.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut lines = String::new();
        for (recorder, incarnation) in recorders {
            lines.push_str(&recorder.latest(incarnation, sessions).to_json()?);
            lines.push('\n');
        }
        Ok(lines)
    }
}

/// The route of a process: `/record`.
pub fn of_rank<S>(recorders: Recorders) -> Router<S> {
    Router::new().route("/record", get(record)).with_state(recorders)
}

/// The routes of the router: `/timeline` and `/timeline.json`.
pub fn of_router<S>(fleet: Arc<Fleet>, client: HttpClient) -> Router<S> {
    let joining = Arc::new(Joining::new(fleet, client));
    Router::new().route("/timeline", get(page)).route("/timeline.json", get(trace)).with_state(joining)
}

struct Joining {
    fleet: Arc<Fleet>,
    client: HttpClient,
    /// One timeline is made at a time, so that many who ask take no more memory than one.
    turn: Arc<Semaphore>,
    /// Those that wait for their turn or for their client.
    texts: Arc<Semaphore>,
}

impl Joining {
    fn new(fleet: Arc<Fleet>, client: HttpClient) -> Joining {
        let [turn, texts] = [1, TEXTS].map(|places| Arc::new(Semaphore::new(places)));
        Joining { fleet, client, turn, texts }
    }

    /// Makes a text of the timeline of the latest requests, without keeping other requests waiting.
    async fn make(
        &self,
        requests: usize,
        text: fn(&Timeline) -> serde_json::Result<String>,
    ) -> Result<String, ApiError> {
        let turn = Arc::clone(&self.turn).acquire_owned().await;
        let path = format!("/record?requests={requests}");
        let up = self.fleet.addrs().into_iter().filter_map(|(_, addr)| addr);
        let asked = up.map(|addr| {
            let path = &path;
            async move { http::get_bytes(&self.client, &addr, path).await }
        });
        let answers = join_all(asked).await;
        let made = tokio::task::spawn_blocking(move || {
            // The work goes on if the client has hung up, and so its turn does.
            let _turn = turn;
            let read = |lines: bytes::Bytes| Record::from_lines(&lines, MAX_WORKERS);
            // A process of which nothing can be read is shown as one without a record.
            let records = answers.into_iter().flatten().flat_map(|lines| read(lines).unwrap_or_default());
            let timeline = timeline(records.collect(), requests).map_err(ApiError::unavailable)?;
            text(&timeline).map_err(ApiError::unavailable)
        });
        made.await.map_err(ApiError::unavailable)?
    }
}

fn timeline(records: Vec<Record>, requests: usize) -> Result<Timeline, kv_timeline::JoinError> {
    let mut timeline = Timeline::join_latest(records, requests)?;
    if timeline.requests().len() == requests {
        timeline.remark(format!(
            "These are the latest {requests} requests; /timeline?requests={} shows the most.",
            REQUESTS.1
        ));
    }
    let rooms: Vec<Room> = timeline.requests().iter().map(|request| request.room.clone()).collect();
    for (first, again) in rooms.iter().filter_map(|room| Some((first_try(room)?, room))) {
        timeline.retried(&first, again);
    }
    Ok(timeline)
}

/// The id of a try of a request: the first has the name of the request, later ones add their number.
pub fn try_id(name: &str, tried: usize) -> String {
    if tried == 1 { name.to_owned() } else { format!("{name}.{tried}") }
}

/// The room of the try before, if this is the room of a later one.
fn first_try(room: &Room) -> Option<Room> {
    let Room::Request(id) = room else { return None };
    let (name, tried) = id.as_str().rsplit_once('.')?;
    Room::request(&try_id(name, tried.parse::<usize>().ok()?.checked_sub(1).filter(|&tried| tried > 0)?)).ok()
}

async fn record(State(recorders): State<Recorders>, uri: Uri) -> Result<Response<Body>, ApiError> {
    let requests = requests(&uri)?;
    let permit = room(&recorders.texts)?;
    // The work goes on if the client has hung up, and keeps its place.
    let lines = tokio::task::spawn_blocking(move || (recorders.lines(requests), permit)).await;
    let (lines, permit) = lines.map_err(ApiError::unavailable)?;
    let lines = lines.map_err(ApiError::unavailable)?;
    Ok(http::long_text(lines, "application/jsonl", permit))
}

async fn page(State(joining): State<Arc<Joining>>, uri: Uri) -> Result<Response<Body>, ApiError> {
    let (requests, permit) = (requests(&uri)?, room(&joining.texts)?);
    Ok(http::long_text(joining.make(requests, Timeline::html).await?, "text/html; charset=utf-8", permit))
}

async fn trace(State(joining): State<Arc<Joining>>, uri: Uri) -> Result<Response<Body>, ApiError> {
    let (requests, permit) = (requests(&uri)?, room(&joining.texts)?);
    Ok(http::long_text(joining.make(requests, Timeline::perfetto).await?, "application/json", permit))
}

/// A place among the texts that are on their way.
fn room(texts: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, ApiError> {
    let place = Arc::clone(texts).try_acquire_owned();
    place.map_err(|_| {
        ApiError::unavailable(format_args!("{TEXTS} of these texts are on their way, which is the limit"))
    })
}

/// How many requests are asked for.
fn requests(uri: &Uri) -> Result<usize, ApiError> {
    let (usual, most) = REQUESTS;
    let named = uri.query().into_iter().flat_map(|query| query.split('&'));
    let Some(asked) = named.filter_map(|pair| pair.strip_prefix("requests=")).next_back() else {
        return Ok(usual);
    };
    let count = asked.parse().ok().filter(|count| (1..=most).contains(count));
    count.ok_or_else(|| {
        ApiError::field("requests", format_args!("{asked:.40}"), format_args!("a number from 1 to {most}"))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Condvar, Mutex};
    use std::time::Duration;

    use kv_transfer::trace::{Half, KvWhat, Log};
    use kv_transfer::{ChunkId, EngineId, Op, PostId, SessionId, Time};

    use super::*;

    /// What a server of four tensor-parallel ranks has recorded after thousands of requests with long prompts.
    #[test]
    fn the_record_of_a_process_is_not_longer_than_the_router_reads() {
        let recorders = Recorders::default();
        for rank in 0..4 {
            let worker = WorkerId { engine: EngineId::new("prefill").unwrap(), rank };
            let recorder = Recorders::recorder(&worker);
            let mut log = Log::default();
            log.listen(true);
            let mut tell = |session: u64, what: KvWhat| {
                log.tell(Time::ZERO + Duration::from_secs(session), SessionId(session), || what);
                recorder.hear(&log.next().unwrap());
            };
            for session in 0..3000 {
                tell(session, KvWhat::Opened { room: Room::from(session), half: Half::Sender });
                for chunk in 0..40 {
                    tell(session, KvWhat::ChunkGiven { chunk: ChunkId(chunk), pages: 4 });
                    let (post, bytes, op) = (PostId(session * 40 + u64::from(chunk)), 1 << 20, Op::Write);
                    tell(session, KvWhat::PostStarted { post, op, bytes, descriptors: 4 });
                    let took = Duration::from_micros(70);
                    tell(session, KvWhat::PostEnded { post, bytes, took, error: None });
                }
                tell(session, KvWhat::Closed);
            }
            recorders.started(recorder, Incarnation::from_random(7));
        }
        let lines = recorders.lines(REQUESTS.1).unwrap();
        assert!(lines.len() <= http::MAX_ANSWER, "{} bytes", lines.len());
        let records = Record::from_lines(lines.as_bytes(), MAX_WORKERS).unwrap();
        assert_eq!(records.len(), 4);
        for record in records {
            assert!(record.sessions.len() > 50, "{} sessions", record.sessions.len());
            assert_eq!(record.sessions.last().unwrap().session, 2999);
            assert!(record.lost.sessions > 0);
        }
    }

    static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);
    static MOST: AtomicUsize = AtomicUsize::new(0);
    /// No text is ready before this is true.
    static READY: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());

    fn slow_text(_: &Timeline) -> serde_json::Result<String> {
        MOST.fetch_max(1 + UNDER_WAY.fetch_add(1, Ordering::SeqCst), Ordering::SeqCst);
        let (ready, changed) = &READY;
        // A test that has failed does not wait for its threads without end.
        let most = Duration::from_secs(60);
        drop(changed.wait_timeout_while(ready.lock().unwrap(), most, |ready| !*ready).unwrap());
        UNDER_WAY.fetch_sub(1, Ordering::SeqCst);
        Ok(String::new())
    }

    #[tokio::test]
    async fn one_timeline_is_made_at_a_time_whoever_hangs_up_meanwhile() {
        let joining = Joining::new(Fleet::new(Vec::new()), http::client());
        for _ in 0..4 {
            let impatient = tokio::time::timeout(Duration::from_millis(50), joining.make(1, slow_text));
            assert!(impatient.await.is_err());
        }
        *READY.0.lock().unwrap() = true;
        READY.1.notify_all();
        assert_eq!(joining.make(1, slow_text).await.unwrap(), "");
        assert_eq!(MOST.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn the_room_of_a_later_try_names_the_try_before() {
        let room = |id: &str| Room::request(id).unwrap();
        let name = crate::ids::new();
        assert_eq!(first_try(&room(&try_id(&name, 1))), None);
        assert_eq!(first_try(&room(&try_id(&name, 2))), Some(room(&name)));
        assert_eq!(first_try(&room(&try_id(&name, 3))), Some(room(&try_id(&name, 2))));
        for other in ["x.", "x.0", "x.y", "x.-1", "x.99999999999999999999999"] {
            assert_eq!(first_try(&room(other)), None, "{other}");
        }
    }
}
