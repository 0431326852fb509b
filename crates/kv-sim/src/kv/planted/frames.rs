//! Planted bugs in frames, as they are sent and as they arrive.

use bytes::Bytes;
use kv_core::wire::{
    AbortAck, Body, ConversationId, Delivery, Failed, Frame, Heartbeat, HeartbeatAck, Register,
};
use kv_core::{Attempt, Room};

use crate::kv::ledger::Ledger;
use crate::kv::sabotage::Registered;
use crate::kv::service::KvWorld;
use crate::net::calendar::Event;
use crate::net::lives::LifeId;
use crate::planted::Planted;

impl KvWorld {
    /// Changes a frame as it is sent; `None` loses the frame.
    pub(crate) fn sabotage_frame(&mut self, from: LifeId, to: LifeId, bytes: Bytes) -> Option<Bytes> {
        let Some(planted) = self.planted else { return Some(bytes) };
        let Ok(frame) = Frame::decode(&bytes) else { return Some(bytes) };
        if frame.conversation != ConversationId::NONE {
            self.service.sabotage.conversations.insert((to, from), frame.conversation);
        }
        self.note_number(from, &frame.body);
        if let Body::Failed(_)
        | Body::Granted(_)
        | Body::Heartbeat(_)
        | Body::HeartbeatAck(_)
        | Body::Abort(_) = frame.body
            && !matches!(planted, Planted::Hushed | Planted::SaidInVain | Planted::NothingRepeated)
        {
            return self.sabotage_answer(planted, (from, to), frame, bytes);
        }
        match (planted, frame.body) {
            (Planted::Hushed, Body::Failed(_) | Body::Abort(_) | Body::AbortAck(_)) => None,
            (Planted::SaidInVain, Body::Abort(mut abort)) => {
                abort.failed_ms_ago = abort.failed_ms_ago.and(Some(u64::MAX));
                Frame { conversation: frame.conversation, body: Body::Abort(abort) }.encode().ok()
            }
            (Planted::Hushed, Body::Heartbeat(mut heartbeat)) => {
                heartbeat.asked.clear();
                Frame { conversation: frame.conversation, body: Body::Heartbeat(heartbeat) }.encode().ok()
            }
            (Planted::NothingRepeated, Body::Register(Register { attempt, .. })) => {
                let first = self.service.sabotage.registered.insert((from, frame.conversation.0, attempt.0));
                first.then_some(bytes)
            }
            (Planted::NothingRepeated, Body::Heartbeat(asks)) => {
                (asks.writes || !asks.leases.is_empty()).then_some(bytes)
            }
            (Planted::AuxOfFirstStage, Body::Register(mut register)) => {
                if let Delivery::Write(wanted) = &mut register.delivery {
                    wanted.aux_here = self.is_first_source(to, from);
                }
                Frame { conversation: frame.conversation, body: Body::Register(register) }.encode().ok()
            }
            (
                Planted::RangeOneShort
                | Planted::FirstNotShifted
                | Planted::AuxOfLastSibling
                | Planted::SiblingsSendAll,
                Body::Register(mut register),
            ) => {
                self.ask_wrongly(planted, (from, to), &mut register);
                Frame { conversation: frame.conversation, body: Body::Register(register) }.encode().ok()
            }
            (Planted::OneSourceEnough | Planted::OneSiblingEnough, Body::Register(register)) => {
                let (attempt, room) = (register.attempt, register.room);
                self.service.sabotage.rooms.push(Registered { receiver: from, source: to, attempt, room });
                Some(bytes)
            }
            (Planted::RoomsConfused, Body::Register(mut register)) => {
                register.room = self.twin_of(&register.room);
                Frame { conversation: frame.conversation, body: Body::Register(register) }.encode().ok()
            }
            _ => Some(bytes),
        }
    }

    /// The same for frames that grant a time, or report that something is over.
    fn sabotage_answer(
        &mut self,
        planted: Planted,
        (from, to): (LifeId, LifeId),
        frame: Frame,
        bytes: Bytes,
    ) -> Option<Bytes> {
        match (planted, frame.body) {
            (Planted::QuietLie, Body::Failed(failed)) => {
                let body = Body::Failed(Failed { quiet: true, ..failed });
                Frame { conversation: frame.conversation, body }.encode().ok()
            }
            (Planted::LeaseInflated, Body::Granted(mut granted)) => {
                granted.lease_ms *= 4;
                Frame { conversation: frame.conversation, body: Body::Granted(granted) }.encode().ok()
            }
            (Planted::LeaseInflated, Body::HeartbeatAck(mut ack)) => {
                ack.lease_ms *= 4;
                Frame { conversation: frame.conversation, body: Body::HeartbeatAck(ack) }.encode().ok()
            }
            (Planted::HeartbeatForged, Body::Heartbeat(heartbeat)) => {
                if let Some(&conversation) = self
                    .service
                    .sabotage
                    .conversations
                    .get(&(from, to))
                    .filter(|_| !heartbeat.leases.is_empty())
                {
                    let Heartbeat { number, leases, .. } = heartbeat;
                    let (low_watermark, lease_ms, permit_ms) = (Attempt(0), 20, 0);
                    let body = Body::HeartbeatAck(HeartbeatAck {
                        number,
                        low_watermark,
                        lease_ms,
                        leases,
                        permit_ms,
                    });
                    let bytes = Frame { conversation, body }.encode().ok()?;
                    self.calendar.enter(self.now + 1, Event::Frame { from: to, to: from, road: 0, bytes });
                }
                Some(bytes)
            }
            (Planted::AckBeforeQuiet, Body::Abort(abort)) => {
                if let Some(&conversation) = self.service.sabotage.conversations.get(&(from, to)) {
                    let body = Body::AbortAck(AbortAck { attempt: abort.attempt });
                    let bytes = Frame { conversation, body }.encode().ok()?;
                    self.calendar.enter(self.now + 1, Event::Frame { from: to, to: from, road: 0, bytes });
                }
                Some(bytes)
            }
            _ => Some(bytes),
        }
    }

    /// Another room that differs from this one only in its suffix.
    fn twin_of(&self, room: &Room) -> Room {
        let mut others = self.service.ledger.legs.iter().map(|leg| &leg.room);
        others.find(|other| *other != room && Ledger::rooms_match(other, room)).unwrap_or(room).clone()
    }

    /// Changes a frame for the life `to` as it arrives at the life `at`; `None` loses the frame.
    pub(crate) fn sabotage_delivery(
        &mut self,
        (from, to): (LifeId, LifeId),
        at: LifeId,
        bytes: Bytes,
    ) -> Option<Bytes> {
        let Some(planted) = self.planted else { return Some(bytes) };
        let bytes = self.mishear(planted, (from, at), bytes)?;
        if matches!(self.planted, Some(Planted::OneSourceEnough | Planted::OneSiblingEnough)) {
            self.forge_others(from, at, &bytes);
        }
        if self.planted != Some(Planted::FenceDropped) || to == at {
            return Some(bytes);
        }
        let Ok(mut frame) = Frame::decode(&bytes) else { return Some(bytes) };
        if let Body::Hello(hello) = &mut frame.body {
            // As if the one to whom it is said did not look whom it means.
            hello.to = self.hosts[at].incarnation;
        } else if let Some(&conversation) = self.service.sabotage.conversations.get(&(at, from)) {
            frame.conversation = conversation;
        }
        Some(frame.encode().unwrap_or(bytes))
    }
}
