//! The memory of a registry: the JSON texts of records, counted for as long as the registry or an unsent
//! answer holds them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use bytes::Bytes;

use super::error::RegisterError;
use crate::client_addr::ClientAddr;
use crate::config::RegistryConfig;

/// Bytes of all records, and of the records of each client.
#[derive(Debug, Default)]
pub(super) struct Memory {
    all: Arc<AtomicUsize>,
    clients: BTreeMap<ClientAddr, Weak<AtomicUsize>>,
    /// From how many clients on the clients without bytes are removed.
    sweep_at: usize,
}

/// A record's JSON text, and the bytes that are counted for it.
#[derive(Debug)]
struct Kept {
    text: Vec<u8>,
    cost: usize,
    all: Arc<AtomicUsize>,
    client: Arc<AtomicUsize>,
}

impl Memory {
    /// Bytes that all records take: an upper bound.
    pub(super) fn bytes(&self) -> usize {
        self.all.load(Ordering::Relaxed)
    }

    #[cfg(test)]
    pub(super) fn clients(&self) -> usize {
        self.clients.len()
    }

    /// Refuses `cost` more bytes of a client that exceed a bound. `old` is the record that will be replaced:
    /// its client and its bytes.
    pub(super) fn check(
        &mut self,
        config: &RegistryConfig,
        client: ClientAddr,
        cost: usize,
        old: Option<(ClientAddr, usize)>,
    ) -> Result<(), RegisterError> {
        let own = old.filter(|(holder, _)| *holder == client).map_or(0, |(_, bytes)| bytes);
        let would_be = (self.share(client).load(Ordering::Relaxed) + cost).saturating_sub(own);
        let max = config.max_bytes_per_client;
        if would_be > max {
            return Err(RegisterError::ClientFull { field: "bytes", would_be, max });
        }
        let would_be = (self.bytes() + cost).saturating_sub(old.map_or(0, |(_, bytes)| bytes));
        let max = config.max_bytes;
        if would_be > max {
            return Err(RegisterError::Full { field: "bytes", would_be, max });
        }
        Ok(())
    }

    /// Counts `cost` bytes for a client until the last handle of the returned text is dropped.
    pub(super) fn keep(&mut self, client: ClientAddr, text: Vec<u8>, cost: usize) -> Bytes {
        let kept = Kept { text, cost, all: Arc::clone(&self.all), client: self.share(client) };
        kept.all.fetch_add(cost, Ordering::Relaxed);
        kept.client.fetch_add(cost, Ordering::Relaxed);
        Bytes::from_owner(kept)
    }

    /// The counter of a client's bytes.
    fn share(&mut self, client: ClientAddr) -> Arc<AtomicUsize> {
        if let Some(share) = self.clients.get(&client).and_then(Weak::upgrade) {
            return share;
        }
        if self.clients.len() >= self.sweep_at {
            self.clients.retain(|_, share| share.strong_count() > 0);
            self.sweep_at = (2 * self.clients.len()).max(64);
        }
        let share = Arc::default();
        self.clients.insert(client, Arc::downgrade(&share));
        share
    }
}

impl AsRef<[u8]> for Kept {
    fn as_ref(&self) -> &[u8] {
        &self.text
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.all.fetch_sub(self.cost, Ordering::Relaxed);
        self.client.fetch_sub(self.cost, Ordering::Relaxed);
    }
}
