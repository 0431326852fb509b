//! Entrances for fuzzing: the messages of both dialects, as foreign engines send them and as our machines do.

use bytes::Bytes;

use crate::message::{Message, Way};
use crate::sglang::{MAX_REASON, SglangMessage};
use crate::vllm::{self, NixlAgentMetadata, NixlHandshakePayload, Notification, PushRegistration};

/// The parts of a message in bytes of any kind. In front of each part stands its length: one byte, or 255 and two
/// bytes. A part that is cut off has what is left.
pub fn parts(mut bytes: &[u8]) -> Vec<Bytes> {
    let mut parts = Vec::new();
    while let Some((&first, rest)) = bytes.split_first() {
        let (len, rest) = match (first, rest.split_first_chunk()) {
            (255, Some((len, rest))) => (usize::from(u16::from_le_bytes(*len)), rest),
            _ => (usize::from(first), rest),
        };
        let (part, rest) = rest.split_at(len.min(rest.len()));
        parts.push(Bytes::copy_from_slice(part));
        bytes = rest;
    }
    parts
}

/// Reads a notification of a vLLM agent. Asserts that an accepted notification, written again, means the same.
pub fn vllm_notification(bytes: &[u8]) -> bool {
    let Ok(found) = Notification::decode(bytes) else { return false };
    assert_eq!(Notification::decode(&vllm::written_again(&found)), Ok(found));
    true
}

/// The registration of a vLLM receiver for a request: the receiver's engine with the host, port and
/// tensor-parallel ranks of the engine, the receiver's blocks, and the writer's engine with its ranks.
pub fn vllm_registration(
    request_id: String,
    (decode_engine_id, decode_host, decode_port, decode_tp_size): (String, String, u16, u32),
    blocks: Vec<u32>,
    (remote_engine_id, remote_tp_size): (String, u32),
) -> Bytes {
    let registration = PushRegistration {
        request_id,
        decode_engine_id,
        decode_host,
        decode_port,
        decode_tp_size,
        local_block_ids: vec![blocks],
        remote_engine_id,
        remote_host: "10.0.0.9".to_owned(),
        remote_port: 5601,
        remote_tp_size,
        remote_pp_size: 1,
    };
    registration.encode()
}

/// Reads what a vLLM engine's side channel answers. The first byte says what the others are: the parts of an answer,
/// the payload alone, or the metadata of the agent alone. Asserts that what is accepted, written again, is the same.
pub fn vllm_answer(bytes: &[u8]) -> bool {
    let Some((&how, bytes)) = bytes.split_first() else { return false };
    let payload = match how % 3 {
        0 => vllm::answer(&parts(bytes)).map(|(payload, _)| payload),
        1 => NixlHandshakePayload::decode(bytes),
        _ => return agent_metadata(bytes),
    };
    let Ok(payload) = payload else { return false };
    assert_eq!(NixlHandshakePayload::decode(&payload.encode()).as_ref(), Ok(&payload));
    agent_metadata(&payload.agent_metadata_bytes)
}

fn agent_metadata(bytes: &[u8]) -> bool {
    let Ok(metadata) = NixlAgentMetadata::decode(bytes) else { return false };
    assert_eq!(NixlAgentMetadata::decode(&metadata.encode()), Ok(metadata));
    true
}

/// Reads a message of an SGLang worker, in the form of [`parts`]. Asserts that an accepted message, written again,
/// means the same.
pub fn sglang_message(bytes: &[u8]) -> bool {
    let Ok(mut found) = SglangMessage::decode(&parts(bytes)) else { return false };
    match &mut found {
        // Workers of this library have no state components, and their messages name none.
        SglangMessage::Registration(registration) => registration.has_state = false,
        SglangMessage::Request(request) => {
            request.has_state = false;
            if request.dummy {
                request.pages.clear();
            }
        }
        // Letters that are not UTF-8 grow when they are replaced.
        SglangMessage::Status(status) if status.reason.len() > MAX_REASON => status.reason.clear(),
        _ => {}
    }
    assert_eq!(SglangMessage::decode(&found.encode()), Ok(found));
    true
}

/// What a machine has said to a foreign engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Said {
    /// vLLM: the question for the metadata of a rank.
    Question,
    /// vLLM: a notification that names these requests.
    Notification(Vec<String>),
    /// vLLM: the blocks of a request, into which every rank writes that gets this registration.
    Blocks {
        /// The receiver's id of the request.
        request: String,
        /// The blocks.
        blocks: Vec<u32>,
    },
    /// vLLM: one of `count` ranks has written, or read, a request.
    Done {
        /// The id of the request.
        request: String,
        /// How many tensor-parallel ranks the speaker's engine has.
        count: u32,
    },
    /// SGLang: this worker's memory.
    Registration,
    /// SGLang: the pages of a room, into which the prefill rank writes unless the rank is a dummy.
    Pages {
        /// The room.
        room: u64,
        /// The pages.
        pages: Vec<u32>,
        /// True if the prefill rank writes nothing.
        dummy: bool,
    },
    /// SGLang: a room is given up. The number is that which the acknowledgement repeats.
    Abort {
        /// The room.
        room: u64,
        /// The number of the abort.
        generation: Option<u64>,
    },
    /// SGLang: the end of a room, or the acknowledgement of an abort.
    End {
        /// The room.
        room: u64,
        /// The prefill rank that speaks.
        rank: u32,
    },
}

/// What vLLM reads of a frame that a machine sends by this way; `None` if vLLM would not write these bytes.
pub fn said_by_vllm(way: &Way, frame: &[u8]) -> Option<Said> {
    match way {
        Way::Request { .. } => match &Message::decode(frame)?.0[..] {
            [question] => {
                let (pp_rank, tp_rank) = vllm::asked(question)?;
                (vllm::question(pp_rank, tp_rank) == question).then_some(Said::Question)
            }
            _ => None,
        },
        Way::Agent { .. } => {
            let found = Notification::decode(frame).ok()?;
            (vllm::written_again(&found) == frame).then(|| match found {
                Notification::Registration(found) => Said::Blocks {
                    request: found.request_id,
                    blocks: found.local_block_ids.into_iter().flatten().collect(),
                },
                found => Said::Notification(found.requests()),
            })
        }
        Way::Push { .. } => None,
    }
}

/// What vLLM's agents say that ends a write or a read; `None` for everything else.
pub fn heard_by_vllm(bytes: &Bytes) -> Option<Said> {
    match Notification::decode(bytes) {
        Ok(Notification::Done { request, count }) => Some(Said::Done { request: request.to_owned(), count }),
        _ => None,
    }
}

/// What SGLang reads of a frame that a machine sends by this way; `None` if SGLang would not write these bytes.
pub fn said_by_sglang(way: &Way, frame: &[u8]) -> Option<Said> {
    let (Way::Push { .. }, Message(parts)) = (way, Message::decode(frame)?) else { return None };
    let found = SglangMessage::decode(&parts).ok().filter(|found| found.encode() == parts)?;
    // The numbers of parts are those of SGLang 0.5.23, whatever the codec here would write and read.
    let count = match &found {
        SglangMessage::Registration(_) => 25,
        SglangMessage::Request(_) => 11,
        SglangMessage::Status(_) => 5,
        SglangMessage::Abort(abort) => 4 + usize::from(abort.generation.is_some()),
        SglangMessage::AbortAck(ack) => 3 + usize::from(ack.generation.is_some()),
    };
    (parts.len() == count).then(|| said(&found))
}

/// What SGLang reads of a message that has come; `None` if the message is none of SGLang's.
pub fn heard_by_sglang(parts: &[Bytes]) -> Option<Said> {
    SglangMessage::decode(parts).ok().map(|found| said(&found))
}

fn said(message: &SglangMessage) -> Said {
    match message {
        SglangMessage::Registration(_) => Said::Registration,
        SglangMessage::Request(request) => {
            Said::Pages { room: request.room, pages: request.pages.clone(), dummy: request.dummy }
        }
        SglangMessage::Abort(abort) => Said::Abort { room: abort.room, generation: abort.generation },
        SglangMessage::Status(status) => Said::End { room: status.room, rank: status.rank },
        SglangMessage::AbortAck(ack) => Said::End { room: ack.room, rank: ack.rank },
    }
}
