//! A scripted vLLM engine that receives in push mode: what it registers, and what its side channel answers.

use std::time::Duration;

use bytes::Bytes;
use kv_core::machine::{Input, Output};
use kv_core::{Directions, PeerId, Post, SessionOptions, TransferMode, TransportError, WayEnd, WriteFence};

use crate::message::{Message, Way};
use crate::vllm::geometry::tests::{args, metadata};
use crate::vllm::metadata::{NixlAgentMetadata, NixlHandshakePayload, clock, question};
use crate::vllm::notification::PushRegistration;
use crate::vllm::notification::tests::registration;
use crate::vllm::rig::Rig;

pub(super) const HASH: &str = "the hash of the fleet";

/// A machine of rank `tp.1` of `tp.0`, in push mode.
pub(super) fn rig(tp: (u32, u32)) -> Rig {
    Rig::new(args(tp, false), |config| {
        config.compatibility = crate::vllm::Compatibility::Hash(HASH.to_owned());
    })
}

pub(super) fn push() -> SessionOptions {
    SessionOptions::default().with(|options| options.mode = Some(TransferMode::Push))
}

/// The registration of a request at a receiver of `tp_size` ranks.
pub(super) fn of(request: &str, tp_size: u32, blocks: &[u32]) -> PushRegistration {
    PushRegistration {
        request_id: request.to_owned(),
        decode_tp_size: tp_size,
        local_block_ids: vec![blocks.to_vec()],
        remote_engine_id: "d-0".to_owned(),
        ..registration()
    }
}

/// The metadata of a NIXL agent with this name, as far as a machine looks at them.
pub(super) fn blob(agent: &str) -> Bytes {
    let len = (agent.len() as u64).to_le_bytes();
    [b"nixlSerDes|Agent", &len[..], agent.as_bytes(), b"|"].concat().into()
}

/// What rank `tp.1` of `tp.0` tells of itself. Its agent is called `agent`.
pub(super) fn told(tp: (u32, u32), agent: &str) -> NixlAgentMetadata {
    let mut told = metadata(tp, false);
    told.engine_id = "D-engine".to_owned();
    told.agent_metadata = blob(agent);
    told
}

impl Rig {
    pub(super) fn register(&mut self, agent: &str, registration: &PushRegistration) {
        self.notify(agent, registration.encode());
    }

    /// The ways that were opened to side channels since the last call, each with the rank that was asked for.
    pub(super) fn asked(&mut self) -> Vec<(PeerId, u32)> {
        let mut asked = Vec::new();
        for out in &self.out {
            if let Output::Connect { peer, transport } = out
                && let Some(Way::Request { addr }) = Way::of(transport)
            {
                assert_eq!(addr, "127.0.0.1:15601");
                asked.push(*peer);
            }
        }
        let rank = |peer: PeerId| {
            let said = self.out.iter().find_map(|out| match out {
                Output::Send { peer: to, frame } if *to == peer => Message::decode(frame),
                _ => None,
            });
            let said = said.expect("a side channel is asked at once").0;
            (0..99).find(|rank| said == [question(0, *rank)]).expect("a question of vLLM")
        };
        let asked = asked.into_iter().map(|peer| (peer, rank(peer))).collect();
        self.out.clear();
        asked
    }

    pub(super) fn answer(&mut self, channel: PeerId, hash: &str, told: &NixlAgentMetadata) {
        let payload =
            NixlHandshakePayload { compatibility_hash: hash.to_owned(), agent_metadata_bytes: told.encode() };
        self.reply(channel, vec![payload.encode(), clock(Duration::from_secs(5))]);
    }

    /// The agent that was connected last.
    pub(super) fn agent(&mut self) -> PeerId {
        let agents = self.out.iter().filter_map(|out| match out {
            Output::Connect { peer, transport } => {
                matches!(Way::of(transport), Some(Way::Agent { .. })).then_some(*peer)
            }
            _ => None,
        });
        agents.last().expect("an agent is connected")
    }

    pub(super) fn connected(&mut self, peer: PeerId) {
        let fence = WriteFence::Revocable;
        self.input(Input::Connected { peer, directions: Directions::BOTH, fence });
        let permitted = |out: &_| matches!(out, Output::Permit { peer: to, .. } if *to == peer);
        assert!(self.out.iter().any(permitted), "writes are allowed for good");
    }

    /// Answers for all ranks that were asked, whose agents are called `d-0`, `d-1` and so on. Returns the agents.
    pub(super) fn shake_hands(&mut self, tp_size: u32) -> Vec<PeerId> {
        let mut agents = Vec::new();
        for (channel, rank) in self.asked() {
            self.answer(channel, HASH, &told((tp_size, rank), &format!("d-{rank}")));
            agents.push(self.agent());
        }
        for agent in &agents {
            self.connected(*agent);
        }
        agents
    }

    /// The posts since the last call, each with its peer.
    pub(super) fn posts(&mut self) -> Vec<(PeerId, Post)> {
        let posts = |out| match out {
            Output::Post { peer, post } => Some((peer, post)),
            _ => None,
        };
        std::mem::take(&mut self.out).into_iter().filter_map(posts).collect()
    }

    pub(super) fn posted(&mut self, post: &Post, result: Result<(), TransportError>) {
        self.input(Input::Posted { post: post.id, result });
    }

    /// All posts end well, and those that follow them. Returns how many bytes each peer got, and what it was told.
    pub(super) fn write_all(&mut self) -> Vec<(PeerId, u64, Option<Bytes>)> {
        let mut written = Vec::new();
        loop {
            let posts = self.posts();
            if posts.is_empty() {
                return written;
            }
            for (peer, post) in posts {
                let bytes = post.descriptors.iter().map(|descriptor| descriptor.len).sum();
                written.push((peer, bytes, post.notify.clone()));
                self.posted(&post, Ok(()));
            }
        }
    }

    /// The notifications that were sent apart from posts since the last call, each with its peer.
    pub(super) fn notified(&mut self) -> Vec<(PeerId, Bytes)> {
        let sent = |out| match out {
            Output::Send { peer, frame } => Some((peer, frame)),
            _ => None,
        };
        std::mem::take(&mut self.out).into_iter().filter_map(sent).collect()
    }

    pub(super) fn gone(&mut self, peer: PeerId) {
        self.input(Input::PeerGone { peer, end: WayEnd::Lost });
    }

    pub(super) fn disconnected(&self, peer: PeerId) -> bool {
        self.out.iter().any(|out| matches!(out, Output::Disconnect { peer: to } if *to == peer))
    }
}
