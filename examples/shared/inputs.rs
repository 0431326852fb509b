//! The rows of prompts that are not only text, on their way to the forward pass of a prefill rank.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::model::InputRows;

/// Rows by the room of their request. Clones share the same rows.
///
/// Rows are put here before the rank is given the prompt, so that a prompt never waits in the queues of the
/// rank for an image.
#[derive(Debug, Clone, Default)]
pub struct Inputs(Arc<Mutex<BTreeMap<u64, Arc<[InputRows]>>>>);

impl Inputs {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<[InputRows]>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts the rows of the request in this room, which is about to be given to the rank.
    pub fn put(&self, room: u64, rows: Vec<InputRows>) {
        self.lock().insert(room, rows.into());
    }

    /// The rows of the request in this room, none if it is text. The entry is removed.
    pub fn take(&self, room: u64) -> Arc<[InputRows]> {
        self.lock().remove(&room).unwrap_or_default()
    }
}
