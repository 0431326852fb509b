//! The ways by which decode workers are told what has become of their requests.

use std::collections::BTreeMap;

use bytes::Bytes;
use kv_core::PeerId;

use crate::effects::Effects;
use crate::message::{Way, host_port};

/// The address of a decode worker's PULL socket.
pub(super) type Endpoint = (String, u16);

/// Ways to PULL sockets, opened when something is to be said.
#[derive(Debug)]
pub(super) struct Pushes {
    open: BTreeMap<Endpoint, PeerId>,
    peers: BTreeMap<PeerId, Endpoint>,
    max: usize,
}

impl Pushes {
    pub(super) fn new(max: usize) -> Pushes {
        Pushes { open: BTreeMap::new(), peers: BTreeMap::new(), max }
    }

    /// Opens the way to an endpoint, if there is none.
    pub(super) fn open(&mut self, effects: &mut Effects, endpoint: &Endpoint) -> PeerId {
        if let Some(peer) = self.open.get(endpoint) {
            return *peer;
        }
        if self.open.len() >= self.max
            && let Some((oldest, _)) = self.peers.first_key_value()
        {
            let oldest = *oldest;
            self.gone(oldest);
            effects.disconnect(oldest);
        }
        let peer = effects.connect(&Way::Push { addr: host_port(&endpoint.0, endpoint.1) });
        self.open.insert(endpoint.clone(), peer);
        self.peers.insert(peer, endpoint.clone());
        peer
    }

    pub(super) fn say(&mut self, effects: &mut Effects, endpoint: &Endpoint, parts: Vec<Bytes>) {
        let peer = self.open(effects, endpoint);
        effects.say(peer, parts);
    }

    /// The endpoint to which a way led that has ended.
    pub(super) fn gone(&mut self, peer: PeerId) -> Option<Endpoint> {
        let endpoint = self.peers.remove(&peer)?;
        self.open.remove(&endpoint);
        Some(endpoint)
    }
}
