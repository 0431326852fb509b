//! The entry point for fuzzing: what a stranger's packet passes through first. Not a public API.

use kv_core::{ContentHash, PageList};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::{HostError, Refusal};
use super::message::{self, Answer, Ask, Greeting, Reply, Request, Welcome};

/// Decodes a packet as each of the messages that it may be. Asserts that an accepted message stays the same
/// when it is encoded and decoded again. True if it is one of them.
pub fn messages(bytes: &[u8]) -> bool {
    let greeting = message::decode_greeting(bytes);
    if let Ok(greeting) = &greeting {
        let again = message::encode_greeting(greeting).and_then(|bytes| message::decode_greeting(&bytes));
        assert_eq!(again.as_ref(), Ok(greeting));
    }
    let is_request = stays_the_same::<Request>(bytes);
    stays_the_same::<Reply>(bytes) || is_request || greeting.is_ok()
}

fn stays_the_same<T: DeserializeOwned + Serialize + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> bool {
    let Ok(read) = message::decode::<T>(bytes) else { return false };
    let again = message::encode(&read).and_then(|bytes| message::decode::<T>(&bytes));
    assert_eq!(again.as_ref(), Ok(&read));
    true
}

/// Every kind of message, written by this crate's own encoder.
pub fn samples(hash: &ContentHash, blocks: &PageList) -> Result<Vec<Vec<u8>>, HostError> {
    let asks = [
        Ask::Reserve { hash: hash.clone(), bytes: 10_000 },
        Ask::Commit(4),
        Ask::Discard(4),
        Ask::Pin(hash.clone()),
        Ask::Unpin(4),
        Ask::Runs { handle: 4, from: 1 },
    ];
    let answers = [
        Ok(Answer::Held { handle: 4, bytes: 8000, total: 2, runs: blocks.clone() }),
        Ok(Answer::Runs(blocks.clone())),
        Ok(Answer::Done),
        Err(Refusal::NotHeld { handle: 4 }),
    ];
    let welcome = Welcome { blocks: 64, block_bytes: 4096, compatibility: "one model".to_owned() };
    let greetings = [Greeting::Welcome(welcome), Greeting::Refused(Refusal::TooManyConnections { max: 3 })];
    let asks = asks.into_iter().map(|ask| message::encode(&Request { number: 1, ask }));
    let answers = answers.into_iter().map(|answer| message::encode(&Reply { number: 9, answer }));
    asks.chain(answers).chain(greetings.iter().map(message::encode_greeting)).collect()
}
