//! How the processes of the service begin and end.

use std::io::{IsTerminal, Read, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use kv_examples::error::ExampleError;
use kv_transfer::bootstrap::KvBootstrapServer;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{oneshot, watch};

use crate::engine::{DecodeEngine, Engine, PrefillEngine, RankSpec, Side};
use crate::fleet::Fleet;
use crate::http;
use crate::metrics;
use crate::options::{ServiceOptions, limits};
use crate::rank::Rank;
use crate::router::{Router, RouterConfig};

/// Most connections of the router.
const CONNECTIONS: u32 = 4096;

/// How long requests may go on after a signal. Meanwhile, further requests get status 503.
const DRAIN_WITHIN: Duration = Duration::from_secs(20);

/// Runs the router and all processes until a signal comes.
pub async fn run(options: ServiceOptions) -> Result<(), ExampleError> {
    let server = KvBootstrapServer::start("127.0.0.1:0")?;
    let bootstrap = server.local_addr().to_string();
    let specs = options.specs(&bootstrap);
    let vocab_size = options.engine.model.load()?.config().vocab_size;
    let Some(first) = specs.first() else { return Ok(()) };
    let config = RouterConfig {
        limits: limits(first, vocab_size)?,
        max_requests: options.max_requests as usize,
        mode: first.hand_over.mode,
        deadline: first.deadline,
        bootstrap,
    };
    let model = config.limits.model.clone();
    metrics::install("router")?;
    tokio::spawn(metrics::gather());
    let listener = bind(&options.listen).await?;
    let addr = listener.local_addr().map_err(ExampleError::io("listen"))?;
    let mut signals = Signals::new()?;
    let (end_processes, end) = watch::channel(false);
    let fleet = Fleet::new(specs);
    let processes = tokio::spawn(Arc::clone(&fleet).run(end));
    let ready = tokio::select! {
        ready = fleet.ready() => ready,
        () = signals.next() => false,
    };
    let (stop, stopped) = watch::channel(false);
    if ready {
        let router = Router::new(fleet, config);
        let serving = tokio::spawn(http::serve(listener, router.routes(), CONNECTIONS, stopped));
        announce(&format!(
            "listening on http://{addr}\nmodel {model}; try:\n  curl -N http://{addr}/v1/completions \
             -d '{{\"prompt\": \"once upon a time\", \"max_tokens\": 24, \"stream\": true}}'"
        ));
        signals.next().await;
        let _ = writeln!(std::io::stderr(), "ending the requests that are under way");
        router.drain();
        let ended = async {
            let _ = tokio::time::timeout(DRAIN_WITHIN, router.idle()).await;
            let _ = stop.send(true);
            let _ = serving.await;
        };
        tokio::select! {
            () = ended => {}
            // A second signal: at once.
            () = signals.next() => {}
        }
    }
    let _ = end_processes.send(true);
    let _ = processes.await;
    server.stop();
    if ready { Ok(()) } else { Err(ExampleError::LinkClosed) }
}

/// Runs one process until a signal comes, and says where it takes requests.
pub async fn alone(spec: RankSpec) -> Result<ExitCode, ExampleError> {
    let mut signals = Signals::new()?;
    serve_engine(spec, async move { signals.next().await }).await
}

/// Runs one process of a service until its standard input ends.
pub async fn rank(spec: RankSpec) -> Result<ExitCode, ExampleError> {
    let (ended, end) = oneshot::channel::<()>();
    std::thread::spawn(move || {
        let _ = std::io::stdin().lock().read(&mut [0]);
        drop(ended);
    });
    serve_engine(spec, async move {
        let _ = end.await;
    })
    .await
}

async fn serve_engine(spec: RankSpec, end: impl Future<Output = ()>) -> Result<ExitCode, ExampleError> {
    metrics::install(&spec.name())?;
    tokio::spawn(metrics::gather());
    let listener = bind(&spec.listen).await?;
    let addr = listener.local_addr().map_err(ExampleError::io("listen"))?;
    let engine = Engine::start(spec.clone()).await?;
    let limits = limits(&spec, engine.model.config().vocab_size)?;
    let rank = match spec.side {
        Side::Prefill => Rank::prefill(PrefillEngine::new(engine), limits),
        Side::Decode => Rank::decode(DecodeEngine::new(engine), limits),
    };
    let (stop, stopped) = watch::channel(false);
    let serving = tokio::spawn(http::serve(listener, rank.routes(), CONNECTIONS, stopped));
    if std::io::stdout().is_terminal() {
        announce(&format!("{} takes requests on http://{addr}", spec.name()));
    } else {
        announce(&addr.to_string());
    }
    end.await;
    rank.drain();
    let _ = tokio::time::timeout(DRAIN_WITHIN, rank.idle()).await;
    let _ = stop.send(true);
    let _ = serving.await;
    rank.stop().await;
    Ok(ExitCode::SUCCESS)
}

/// Says something on standard output. Whoever has started the process may read the first line only.
fn announce(text: &str) {
    let mut stdout = std::io::stdout().lock();
    let _ = writeln!(stdout, "{text}").and_then(|()| stdout.flush());
}

async fn bind(addr: &str) -> Result<TcpListener, ExampleError> {
    TcpListener::bind(addr).await.map_err(ExampleError::io("listen"))
}

/// SIGINT and SIGTERM.
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> Result<Signals, ExampleError> {
        let listen = |kind| signal(kind).map_err(ExampleError::io("listen for signals"));
        Ok(Signals {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
