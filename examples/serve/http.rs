//! HTTP/1.1 over TCP with bounds: on connections, on the time and size of requests, and on the time to end.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderValue, Response, StatusCode};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde_json::{Map, Value};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc, watch};

use crate::openai::ApiError;
use crate::patience::{Patient, bound_kept_bytes, hung_up};

/// How long a client may take to send the head of a request, and how long a connection without a request is kept.
const HEAD_WITHIN: Duration = Duration::from_secs(10);
/// How long a client may take to send the body of a request.
const BODY_WITHIN: Duration = Duration::from_secs(10);
/// Longest body, in bytes.
pub const MAX_BODY: usize = 1 << 20;
/// How long a client may take to read a long text, and to take a part of any answer.
const SENT_WITHIN: Duration = Duration::from_secs(30);
/// Bytes of a long text that are sent at a time.
const PIECE: usize = 64 << 10;
/// Bytes of a connection that wait to be read.
const BUFFER: usize = 64 << 10;
/// How long connections may go on after the server was told to stop.
const GRACE: Duration = Duration::from_secs(2);

/// Serves `app` until `stop` is true; then takes no more connections, and waits for the requests that are under way.
/// Connections beyond `connections` wait in the kernel's queue.
pub async fn serve(listener: TcpListener, app: Router, connections: u32, stop: watch::Receiver<bool>) {
    serve_within(SENT_WITHIN, listener, app, connections, stop).await;
}

/// The same; a connection ends whose client takes nothing of its answer for this long.
async fn serve_within(
    sent_within: Duration,
    listener: TcpListener,
    app: Router,
    connections: u32,
    mut stop: watch::Receiver<bool>,
) {
    bound_kept_bytes(&listener);
    let slots = Arc::new(Semaphore::new(connections as usize));
    let stopped = stop.clone();
    loop {
        let accepted = tokio::select! {
            () = told(&mut stop) => break,
            slot = Arc::clone(&slots).acquire_owned() => match slot {
                Ok(slot) => (slot, listener.accept()),
                Err(_) => break,
            },
        };
        let (slot, accept) = accepted;
        let stream = tokio::select! {
            () = told(&mut stop) => break,
            accepted = accept => match accepted {
                Ok((stream, _)) => stream,
                // No descriptors: wait for a connection to end.
                Err(_) => {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
        };
        let (app, mut stopped) = (app.clone(), stopped.clone());
        tokio::spawn(async move {
            let _slot = slot;
            let _ = stream.set_nodelay(true);
            let stream = Arc::new(stream);
            let service = TowerToHyperService::new(app);
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_WITHIN)
                .max_buf_size(BUFFER)
                .serve_connection(TokioIo::new(Patient::new(Arc::clone(&stream), sent_within)), service);
            let mut connection = std::pin::pin!(connection);
            tokio::select! {
                _ = connection.as_mut() => return,
                () = hung_up(stream) => return,
                () = told(&mut stopped) => {}
            }
            connection.as_mut().graceful_shutdown();
            let _ = tokio::time::timeout(GRACE, connection).await;
        });
    }
    // All slots are free when all connections have ended.
    let _ = tokio::time::timeout(GRACE, slots.acquire_many(connections)).await;
}

/// Waits until `stop` is true.
async fn told(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

/// The JSON object in the body of a request.
pub async fn read_object(body: Body) -> Result<Map<String, Value>, ApiError> {
    // A body that says so is refused before it comes.
    if hyper::body::Body::size_hint(&body).lower() > MAX_BODY as u64 {
        return Err(ApiError::too_large(MAX_BODY));
    }
    let read = tokio::time::timeout(BODY_WITHIN, Limited::new(body, MAX_BODY).collect()).await;
    let bytes = match read {
        Err(_) => return Err(ApiError::too_slow()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => return Err(ApiError::too_large(MAX_BODY)),
        Ok(Err(error)) => return Err(ApiError::malformed(error)),
        Ok(Ok(collected)) => collected.to_bytes(),
    };
    serde_json::from_slice(&bytes)
        .map_err(|error| ApiError::malformed(format_args!("the body is not a JSON object: {error}")))
}

/// A response with this JSON.
pub fn json(value: &Value) -> Response<Body> {
    let mut response = Response::new(Body::from(value.to_string()));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// A long text as a response. `until_sent` is dropped when the client has all of it, or has not taken all of it for
/// [`SENT_WITHIN`]: then the response breaks off. So a client that does not read costs the server one piece.
pub fn long_text<G: Send + 'static>(text: String, kind: &'static str, until_sent: G) -> Response<Body> {
    let length = text.len();
    let mut response = Response::new(in_pieces(text, SENT_WITHIN, until_sent));
    // A body that is shorter than this is an error for the client.
    response.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(length));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

fn in_pieces<G: Send + 'static>(text: String, within: Duration, until_sent: G) -> Body {
    let (sender, mut receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        let sent = async {
            for piece in text.as_bytes().chunks(PIECE) {
                // Copies, because a piece that waits must not keep the whole text.
                if sender.send(Bytes::copy_from_slice(piece)).await.is_err() {
                    return;
                }
            }
        };
        let _ = tokio::time::timeout(within, sent).await;
        drop((text, until_sent));
    });
    Body::from_stream(stream::poll_fn(move |context| receiver.poll_recv(context)).map(Ok::<_, Infallible>))
}

/// A client that keeps connections. Dropping a request that it has sent ends the connection of the request, so that
/// the server aborts the request.
pub type HttpClient = Client<HttpConnector, Full<Bytes>>;

/// A client.
pub fn client() -> HttpClient {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(Duration::from_secs(2)));
    Client::builder(TokioExecutor::new()).build(connector)
}

/// Most bytes of an answer of another process of this service.
pub const MAX_ANSWER: usize = 16 * MAX_BODY;

/// Reads the whole body of an answer of another process of this service.
pub async fn read_answer(body: Incoming) -> Option<Bytes> {
    let collected = Limited::new(body, MAX_ANSWER).collect().await;
    collected.ok().map(http_body_util::Collected::to_bytes)
}

/// How long another process of this service may take to say something of itself.
pub const ASK_WITHIN: Duration = Duration::from_secs(5);

/// Asks another process of this service for what it says at `path`; `None` if it does not answer.
pub async fn get_bytes(client: &HttpClient, addr: &str, path: &str) -> Option<Bytes> {
    let request = hyper::Request::get(format!("http://{addr}{path}")).body(Full::default()).ok()?;
    let asked = async {
        let response = client.request(request).await.ok()?;
        let answered = [StatusCode::OK, StatusCode::SERVICE_UNAVAILABLE].contains(&response.status());
        if answered { read_answer(response.into_body()).await } else { None }
    };
    tokio::time::timeout(ASK_WITHIN, asked).await.ok().flatten()
}

/// The same, as a JSON value.
pub async fn get_json(client: &HttpClient, addr: &str, path: &str) -> Option<Value> {
    serde_json::from_slice(&get_bytes(client, addr, path).await?).ok()
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;

    /// A server with one place, which an answer keeps that ends only with its connection; and a client that has said
    /// this, and whose request has the place.
    async fn endless(says: &[u8], streams: bool) -> (Arc<Semaphore>, TcpStream) {
        let places = Arc::new(Semaphore::new(1));
        let app = Router::new().fallback({
            let places = Arc::clone(&places);
            move || async move {
                let place = places.try_acquire_owned().unwrap();
                if !streams {
                    std::future::pending::<()>().await;
                }
                let piece = move || (Ok::<_, Infallible>(Bytes::from_static(&[b'x'; 1000])), &place).0;
                Response::new(Body::from_stream(stream::repeat_with(piece)))
            }
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        tokio::spawn(async move {
            let (_stop, stopped) = watch::channel(false);
            serve_within(WITHIN, listener, app, 4, stopped).await;
        });
        let mut client = TcpStream::connect(addr).await.unwrap();
        client.write_all(says).await.unwrap();
        while places.available_permits() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        (places, client)
    }

    const WITHIN: Duration = Duration::from_secs(1);
    const ASKS: &[u8] = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";

    #[tokio::test]
    async fn a_client_that_does_not_read_loses_its_place_and_one_that_reads_slowly_keeps_it() {
        let (places, unread) = endless(ASKS, true).await;
        let freed = tokio::time::timeout(20 * WITHIN, places.acquire()).await;
        assert!(freed.is_ok(), "a client that never reads keeps its place");
        drop(unread);
        for _ in 0..20 {
            let (kept, slowest) = keeps_its_place_reading_slowly().await;
            if kept {
                return;
            }
            // On a busy machine, a client can be so slow against the will of the test that the server is right.
            assert!(slowest >= WITHIN / 4, "the place is lost after reads that were {slowest:?} apart");
        }
        panic!("this machine lets no client read in time");
    }

    /// Whether a client keeps its place that reads for a while; and the longest time between two reads.
    async fn keeps_its_place_reading_slowly() -> (bool, Duration) {
        let (places, mut client) = endless(ASKS, true).await;
        let (begun, mut some, mut slowest) = (Instant::now(), vec![0; 100_000], Duration::ZERO);
        let mut last = begun;
        while begun.elapsed() < 4 * WITHIN {
            let read = tokio::time::timeout(20 * WITHIN, client.read_exact(&mut some)).await;
            let read = read.expect("the answer goes on, or the connection ends");
            slowest = slowest.max(last.elapsed());
            last = Instant::now();
            if read.is_err() || places.available_permits() > 0 {
                return (false, slowest);
            }
            tokio::time::sleep(WITHIN / 20).await;
        }
        (true, slowest)
    }

    #[tokio::test]
    async fn a_client_that_hangs_up_is_noticed_whatever_it_has_sent_after_its_request() {
        for more in [&b""[..], b"\r\n", ASKS, &[0; 100]] {
            let (places, client) = endless(&[ASKS, more].concat(), false).await;
            drop(client);
            let freed = tokio::time::timeout(20 * WITHIN, places.acquire()).await;
            assert!(freed.is_ok(), "after {more:?}");
        }
    }

    #[tokio::test]
    async fn a_long_text_is_let_go_when_the_client_does_not_read() {
        let places = Arc::new(Semaphore::new(1));
        let text: String = (0..4 * PIECE).map(|at| char::from(b'a' + (at % 23) as u8)).collect();
        let answer = |within: Duration| {
            let place = Arc::clone(&places).try_acquire_owned().unwrap();
            in_pieces(text.clone(), within, place)
        };
        let read = answer(Duration::MAX).collect().await.unwrap().to_bytes();
        assert_eq!(read, text.as_bytes());
        drop(places.acquire().await.unwrap());
        let unread = answer(Duration::ZERO);
        // Nobody reads, and the text is let go in spite of that.
        drop(places.acquire().await.unwrap());
        let rest = unread.collect().await.unwrap().to_bytes();
        assert_eq!(rest, text.as_bytes()[..PIECE]);
    }
}
