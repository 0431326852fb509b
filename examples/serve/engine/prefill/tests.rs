//! The moment in which a prompt is computed and its client is gone, both at once.

use std::time::{Duration, Instant};

use clap::Parser;
use kv_transfer::bootstrap::KvBootstrapServer;

use super::super::store::Store;
use super::*;
use crate::options::Options;

/// How long it may take until all pages are free again: the lease is far longer.
const PATIENCE: Duration = Duration::from_secs(10);

/// A prompt for the forward pass alone, with pages of its own; and what hears of its chunks.
async fn job(store: &Arc<Store>, len: u32) -> (Job, mpsc::UnboundedReceiver<Heard>) {
    let tokens: Arc<[u32]> = (0..len).collect();
    let taken = Arc::new(store.take(&tokens, tokens.len()).await);
    let (progress, chunks) = mpsc::unbounded_channel();
    (Job { taken, tokens, start: 0, progress }, chunks)
}

type Heard = Result<forward::Progress, EngineError>;

// On one thread: while the test does not await, the tasks of the prompts see neither the one nor the other.
#[tokio::test]
async fn a_computed_prompt_whose_answer_reaches_nobody_is_given_up_before_its_lease_ends() {
    let bootstrap = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let options = Options::parse_from(["serve", "--lease-seconds", "60"]).service;
    let spec = options.specs(&bootstrap.local_addr().to_string()).swap_remove(0);
    let prefill = PrefillEngine::new(Engine::start(spec).await.unwrap());
    let store = &prefill.engine.store;
    // The forward pass has something to do until all prompts are in its line.
    let (first, mut chunks) = job(store, 4000).await;
    prefill.forward.send(first).ok().unwrap();
    // Which of the two a task sees first is drawn: of so many, some see each.
    let mut answers: Vec<_> = (0..24)
        .map(|number: u32| {
            let (answer, answered) = oneshot::channel();
            let (room, tokens) = (Room::request(&ids::new()).unwrap(), (number..number + 40).collect());
            let prompt = Prompt { room, tokens, mode: TransferMode::Pull, paired: false, elsewhere: None };
            tokio::spawn(Arc::clone(&prefill).run(prompt, answer));
            answered
        })
        .collect();
    while store.counts().requests < 25 {
        tokio::task::yield_now().await;
    }
    let (last, mut computed) = job(store, 1).await;
    prefill.forward.send(last).ok().unwrap();
    while let Ok(chunk) = chunks.try_recv() {
        assert!(chunk.unwrap().computed < 4000, "the first prompt was computed too soon");
    }
    drop(chunks);
    while computed.try_recv().is_err() {
        std::thread::sleep(Duration::from_millis(1));
    }
    // All prompts are computed, and no task has seen it. Most clients hang up now, and the others
    // before they have taken an answer that was sent.
    let later = answers.split_off(16);
    drop(answers);
    while later.iter().any(oneshot::Receiver::is_empty) {
        tokio::task::yield_now().await;
    }
    drop(later);

    let patience = Instant::now() + PATIENCE;
    while store.counts().requests > 0 {
        assert!(Instant::now() < patience, "pages of answers that reached nobody: {:?}", store.counts());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    store.forget_prefixes();
    let counts = store.counts();
    assert_eq!((counts.free, counts.leaked()), (counts.capacity, 0));
    prefill.engine.stop().await;
    bootstrap.stop();
}
