//! One receiver of a sending session, from its registration or acquire message until the session
//! owes it nothing.
//!
//! | state | from | when |
//! |---|---|---|
//! | `Served` | – | the receiver has registered, or has asked for a lease |
//! | `AbortAsked` | `Served` | the receiver aborts, and waits for an acknowledgement |
//! | `Over` | `Served` | all parts are in place, or the reader has released the pages |
//! | `Over` | `Served`, `AbortAsked` | the session has failed, no post is in flight, and no lease runs that the receiver could still rely on |

use super::given::Given;
use crate::groups::CacheGroupLists;
use crate::id::{Attempt, AuxIndex, PeerId};
use crate::layout::Geometry;
use crate::meter::step;
use crate::page_list::PageList;
use crate::plan::{Plan, PlanError};
use crate::proto::conversation::Peer;
use crate::proto::groups::CacheGroupPlans;
use crate::proto::run_set::RunSet;
use crate::time::Time;
use crate::transport::Descriptor;
use crate::wire::ConversationId;

/// A receiver that has registered, or has asked for a lease.
#[derive(Debug, Clone)]
pub(super) struct Target {
    pub(super) peer: PeerId,
    pub(super) attempt: Attempt,
    /// The conversation in which the receiver has registered.
    pub(super) conversation: ConversationId,
    pub(super) role: Role,
    state: State,
}

/// Which side moves the bytes.
#[derive(Debug, Clone)]
// Nearly all receivers of a worker are of one kind.
#[allow(clippy::large_enum_variant)]
pub(super) enum Role {
    /// This worker writes into the receiver's pages.
    Written(Written),
    /// The receiver reads this worker's pages.
    Reads(Reads),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Served,
    AbortAsked,
    Over,
}

/// A receiver that is written to.
#[derive(Debug, Clone, Default)]
pub(super) struct Written {
    pages: PageList,
    /// The number in the request of the first page that the receiver has registered here.
    first_page: usize,
    /// How many pages the request has at the receiver in all.
    total_pages: usize,
    aux: Option<AuxIndex>,
    /// True if this worker fills the receiver's aux row.
    aux_here: bool,
    groups: CacheGroupLists,
    /// The plans of the cache groups, in reverse order; `None` until the request is complete.
    group_plans: Option<Vec<Plan>>,
    /// Groups that the receiver has registered and this worker leaves out.
    skipped: Vec<u16>,
    queued: bool,
    /// The first announcement of final layers that is not planned yet.
    next_final: usize,
    aux_planned: bool,
    /// What is left of the plan of the last announcement.
    plan: Option<Plan>,
    next_part: u32,
    /// How many parts there are in all; `None` until the last part is posted.
    total: Option<u32>,
    /// Parts whose bytes are in place.
    done: RunSet,
    outstanding: u32,
}

/// A receiver that reads.
#[derive(Debug, Clone)]
pub(super) struct Reads {
    /// The number of the receiver's last acquire message.
    pub(super) number: u64,
    /// True once the receiver does not need the pages any more.
    pub(super) released: bool,
    /// If the session has failed after the lease was given: when the last lease of which the reader
    /// may know is over.
    pub(super) fence: Option<Time>,
}

/// The next part of a write.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) number: u32,
    /// The descriptors to write; empty if the last part only tells the number of parts.
    pub(super) descriptors: Vec<Descriptor>,
    /// How many parts there are in all, if this is the last part.
    pub(super) total: Option<u32>,
    /// True if more can be posted afterwards.
    pub(super) more: bool,
}

impl Target {
    pub(super) fn new(peer: PeerId, attempt: Attempt, conversation: ConversationId, role: Role) -> Target {
        Target { peer, attempt, conversation, role, state: State::Served }
    }

    pub(super) fn is_over(&self) -> bool {
        self.state == State::Over
    }

    pub(super) fn is_abort_asked(&self) -> bool {
        self.state == State::AbortAsked
    }

    /// Notes that the receiver waits for an acknowledgement of its abort.
    pub(super) fn ask_abort(&mut self) {
        if self.state == State::Served {
            self.state = State::AbortAsked;
        }
    }

    /// The session owes the receiver nothing any more.
    pub(super) fn end(&mut self) {
        self.state = State::Over;
    }

    /// True while a post, or a lease on which the receiver could still rely, keeps a failed target.
    pub(super) fn is_held(&self, now: Time) -> bool {
        match &self.role {
            Role::Written(written) => written.outstanding > 0,
            Role::Reads(reads) => {
                let leased = reads.fence.is_some_and(|fence| fence > now);
                leased && !reads.released && self.state == State::Served
            }
        }
    }

    /// How many posts to the target have not ended.
    pub(super) fn outstanding(&self) -> u32 {
        self.written().map_or(0, |written| written.outstanding)
    }

    pub(super) fn written(&self) -> Option<&Written> {
        match &self.role {
            Role::Written(written) => Some(written),
            Role::Reads(_) => None,
        }
    }

    pub(super) fn written_mut(&mut self) -> Option<&mut Written> {
        match &mut self.role {
            Role::Written(written) => Some(written),
            Role::Reads(_) => None,
        }
    }

    pub(super) fn reads(&self) -> Option<&Reads> {
        match &self.role {
            Role::Reads(reads) => Some(reads),
            Role::Written(_) => None,
        }
    }

    pub(super) fn reads_mut(&mut self) -> Option<&mut Reads> {
        match &mut self.role {
            Role::Reads(reads) => Some(reads),
            Role::Written(_) => None,
        }
    }
}

impl Written {
    pub(super) fn new(
        (pages, first_page, total_pages): (PageList, usize, usize),
        (aux, aux_here): (Option<AuxIndex>, bool),
        groups: CacheGroupLists,
    ) -> Written {
        Written { pages, first_page, total_pages, aux, aux_here, groups, ..Written::default() }
    }

    /// How many pages the request has at the receiver in all.
    pub(super) fn total_pages(&self) -> usize {
        self.total_pages
    }

    /// True if the receiver has an aux row.
    pub(super) fn has_aux(&self) -> bool {
        self.aux.is_some()
    }

    pub(super) fn groups(&self) -> &CacheGroupLists {
        &self.groups
    }

    /// True once the cache groups are planned.
    pub(super) fn has_group_plans(&self) -> bool {
        self.group_plans.is_some()
    }

    /// Takes the plans of the cache groups. Of the groups that are left out, only those count that
    /// the receiver has registered.
    pub(super) fn plan_groups(&mut self, CacheGroupPlans { plans, mut skipped }: CacheGroupPlans) {
        skipped.retain(|&group| self.groups.get(group).is_some());
        self.group_plans = Some(plans);
        self.skipped = skipped;
    }

    /// True if the target waits for its turn to post.
    pub(super) fn is_queued(&self) -> bool {
        self.queued
    }

    /// Lets the target wait for its turn, if there may be something to post. False if the target
    /// waits already, or has posted everything.
    pub(super) fn queue(&mut self) -> bool {
        let queues = !self.queued && self.total.is_none();
        self.queued |= queues;
        queues
    }

    /// The target's turn has come. False if everything is posted.
    pub(super) fn take_turn(&mut self) -> bool {
        self.queued = false;
        self.total.is_none()
    }

    /// The parts that are in place, the number of all parts, and the groups left out; `None` before
    /// the first part is in place.
    pub(super) fn progress(&self) -> Option<(&RunSet, Option<u32>, &[u16])> {
        (self.done.len() > 0).then_some((&self.done, self.total, self.skipped()))
    }

    /// The groups that are left out; empty until the last part is posted.
    pub(super) fn skipped(&self) -> &[u16] {
        if self.total.is_some() { &self.skipped } else { &[] }
    }

    /// How many parts there are, once all of them are in place; otherwise `None`.
    pub(super) fn all_in_place(&self) -> Option<u32> {
        self.total.filter(|&total| self.done.len() == u64::from(total))
    }

    /// True once the last part is posted.
    pub(super) fn is_posted(&self) -> bool {
        self.total.is_some()
    }

    /// A part is in place: its post has ended, or it needed none.
    pub(super) fn in_place(&mut self, part: u32) {
        self.done.insert(u64::from(part), 1);
    }

    pub(super) fn post_started(&mut self) {
        self.outstanding += 1;
    }

    pub(super) fn post_ended(&mut self) {
        self.outstanding = self.outstanding.saturating_sub(1);
    }

    /// Plans the next part, of at most this many descriptors and bytes. `None` if there is nothing
    /// to post or to tell now.
    pub(super) fn next_part(
        &mut self,
        (peer, here): (&mut Peer, &Geometry),
        given: &Given,
        (max_sge, max_bytes): (usize, u64),
    ) -> Result<Option<Part>, PlanError> {
        let aux = given.aux().filter(|_| given.is_complete());
        let mut descriptors: Vec<Descriptor> = Vec::new();
        let mut bytes = 0;
        while descriptors.len() < max_sge && bytes < max_bytes {
            step(1);
            if self.plan.is_none() {
                self.plan = self.next_plan((peer, here), given, aux)?;
            }
            let Some(plan) = &mut self.plan else { break };
            let room = max_sge - descriptors.len();
            let progress = plan.fill(&mut descriptors, room, max_bytes - bytes);
            bytes += progress.bytes;
            if progress.done {
                self.plan = None;
            } else if progress.descriptors == 0 {
                break;
            }
        }
        let planned_all = self.has_planned_all(given, aux);
        let last = planned_all && given.is_complete();
        if descriptors.is_empty() && !last {
            return Ok(None);
        }
        let number = self.next_part;
        self.next_part += 1;
        self.total = last.then_some(self.next_part);
        self.queued = !planned_all;
        Ok(Some(Part { number, descriptors, total: self.total, more: self.queued }))
    }

    /// The plan of the next announcement; after the last announcement, the plans of the cache
    /// groups and of the aux row.
    fn next_plan(
        &mut self,
        (peer, here): (&mut Peer, &Geometry),
        given: &Given,
        aux: Option<AuxIndex>,
    ) -> Result<Option<Plan>, PlanError> {
        if let Some(writable) = given.writable(self.next_final) {
            self.next_final += 1;
            let Some(map) = peer.maps_mut().out_of_layers(here, writable.layers) else { return Ok(None) };
            let local = (writable.pages, writable.first);
            return Plan::suffix(map, local, (&self.pages, self.first_page)).map(Some);
        }
        if let Some(plan) = self.group_plans.as_mut().and_then(Vec::pop) {
            return Ok(Some(plan));
        }
        match (aux, self.aux, peer.maps().out()) {
            (Some(local), Some(remote), Some(map)) if self.aux_here && !self.aux_planned => {
                self.aux_planned = true;
                Plan::aux(map, local, remote).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn has_planned_all(&self, given: &Given, aux: Option<AuxIndex>) -> bool {
        self.plan.is_none()
            && self.next_final == given.finals()
            && self.group_plans.as_ref().is_none_or(Vec::is_empty)
            && (aux.is_none() || self.aux_planned || !self.aux_here)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(role: Role) -> Target {
        Target::new(PeerId(1), Attempt(1), ConversationId::new(1, 1), role)
    }

    /// The table at the top: what holds a failed target, and what does not.
    #[test]
    fn a_failed_target_is_held_by_its_posts_or_by_a_lease_that_counts() {
        let now = Time::from_nanos(5);
        let mut written = target(Role::Written(Written::default()));
        assert!(!written.is_held(now));
        written.written_mut().unwrap().post_started();
        written.ask_abort();
        assert!(written.is_held(now) && written.is_abort_asked(), "an abort does not stop a post");
        written.written_mut().unwrap().post_ended();
        assert!(!written.is_held(now));

        let reads = |released: bool, fence: Option<u64>| {
            target(Role::Reads(Reads { number: 1, released, fence: fence.map(Time::from_nanos) }))
        };
        assert!(!reads(false, None).is_held(now) && !reads(false, Some(5)).is_held(now));
        assert!(!reads(true, Some(6)).is_held(now), "a reader that released relies on nothing");
        let mut reader = reads(false, Some(6));
        assert!(reader.is_held(now));
        reader.ask_abort();
        assert!(!reader.is_held(now), "nor does one that aborts");
        reader.end();
        reader.ask_abort();
        assert!(reader.is_over() && !reader.is_abort_asked(), "what is over stays over");
    }

    #[test]
    fn a_written_target_waits_for_its_turn_once_and_never_after_its_last_part() {
        let mut written = Written::default();
        assert!(written.queue() && !written.queue());
        assert!(written.take_turn() && written.queue());
        written.take_turn();
        written.total = Some(2);
        assert!(!written.queue() && !written.take_turn());
        written.in_place(0);
        assert_eq!(written.all_in_place(), None);
        written.in_place(1);
        assert_eq!(written.all_in_place(), Some(2));
    }
}
