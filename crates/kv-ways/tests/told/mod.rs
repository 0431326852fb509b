//! A member that reports what a test tells it to, and notes what it is asked.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use kv_core::{
    Directions, Origin, PeerId, Post, PostId, Region, Time, Transport, TransportError, TransportEvent,
    TransportWait, WriteFence,
};

/// The test's end of a member.
#[derive(Clone, Default)]
pub struct Wire(Arc<Mutex<State>>);

/// The member.
pub struct Told(pub Wire);

#[derive(Default)]
struct State {
    calls: Vec<String>,
    polls: usize,
    waits: usize,
    reports: VecDeque<TransportEvent>,
    refused_regions: Option<TransportError>,
    refused_connects: Option<TransportError>,
    refused_posts: Option<TransportError>,
    fence: Option<WriteFence>,
    directions: Option<Directions>,
    wait: Option<TransportWait>,
    name: &'static str,
}

impl Wire {
    /// Of a member with these words in its metadata.
    pub fn named(name: &'static str) -> Wire {
        let wire = Wire::default();
        wire.open().name = name;
        wire
    }

    fn open(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    fn note(&self, call: String) {
        self.open().calls.push(call);
    }

    /// What it was asked, in order; neither polls nor questions.
    pub fn calls(&self) -> Vec<String> {
        self.open().calls.clone()
    }

    pub fn polls(&self) -> usize {
        self.open().polls
    }

    pub fn waits(&self) -> usize {
        self.open().waits
    }

    /// Is reported by the next poll.
    pub fn report(&self, event: TransportEvent) {
        self.open().reports.push_back(event);
    }

    pub fn refuse_regions(&self, error: TransportError) {
        self.open().refused_regions = Some(error);
    }

    pub fn refuse_connects(&self, error: TransportError) {
        self.open().refused_connects = Some(error);
    }

    pub fn refuse_posts(&self, error: Option<TransportError>) {
        self.open().refused_posts = error;
    }

    pub fn set_fence(&self, fence: WriteFence) {
        self.open().fence = Some(fence);
    }

    pub fn set_directions(&self, directions: Directions) {
        self.open().directions = Some(directions);
    }

    pub fn set_wait(&self, wait: TransportWait) {
        self.open().wait = Some(wait);
    }
}

impl Transport for Told {
    fn name(&self) -> &'static str {
        "told"
    }

    fn register(&mut self, _: &Region) -> Result<(), TransportError> {
        self.0.open().refused_regions.clone().map_or(Ok(()), Err)
    }

    fn metadata(&self) -> Result<Bytes, TransportError> {
        Ok(Bytes::from(format!("memory by {}", self.0.open().name)))
    }

    fn connect(&mut self, _: PeerId, metadata: &[u8]) -> Result<(), TransportError> {
        if let Some(error) = self.0.open().refused_connects.clone() {
            return Err(error);
        }
        self.0.note(format!("connect {}", String::from_utf8_lossy(metadata)));
        Ok(())
    }

    fn may_speak_for(&self, from: Origin, _: &[u8]) -> bool {
        from == Origin(3)
    }

    fn disconnect(&mut self, _: PeerId) {
        self.0.note("disconnect".to_owned());
    }

    fn send(&mut self, _: PeerId, _: Bytes) -> Result<(), TransportError> {
        self.0.note("send".to_owned());
        Ok(())
    }

    fn rouse(&mut self, _: PeerId, bytes: u64) {
        self.0.note(format!("rouse {bytes}"));
    }

    fn begin_handling(&mut self) {
        self.0.note("begin handling".to_owned());
    }

    fn post(&mut self, _: PeerId, post: Post) -> Result<(), TransportError> {
        if let Some(error) = self.0.open().refused_posts.clone() {
            return Err(error);
        }
        self.0.note(format!("post {}", post.id.0));
        Ok(())
    }

    fn cancel(&mut self, post: PostId) {
        self.0.note(format!("cancel {}", post.0));
    }

    fn permit(&mut self, _: PeerId, _: Time) {
        self.0.note("permit".to_owned());
    }

    fn write_fence(&self, _: PeerId) -> WriteFence {
        self.0.open().fence.unwrap_or(WriteFence::AtDeath)
    }

    fn revoke(&mut self, _: PeerId) {
        self.0.note("revoke".to_owned());
    }

    fn poll(&mut self, _: Time, events: &mut Vec<TransportEvent>) {
        let state = &mut *self.0.open();
        state.polls += 1;
        events.extend(state.reports.drain(..));
    }

    fn wait(&self) -> TransportWait {
        let state = &mut *self.0.open();
        state.waits += 1;
        state.wait.clone().unwrap_or(TransportWait::Readable(Vec::new()))
    }

    fn directions(&self, _: Option<PeerId>) -> Directions {
        self.0.open().directions.unwrap_or(Directions::BOTH)
    }
}
