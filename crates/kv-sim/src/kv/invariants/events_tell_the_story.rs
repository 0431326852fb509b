//! The trace events of a session are a story that can be true: the session is opened, ends once, and is
//! closed, and nothing happens to it before or after. And the trace agrees with the posts and frames that the
//! simulator has seen.

use std::collections::{BTreeMap, BTreeSet};

use kv_core::trace::{Event, KvWhat};
use kv_core::{PostId, SessionId};

use crate::kv::fact::{Fact, KvFact, View};
use crate::kv::invariant::{Invariant, Verdict};
use crate::net::lives::LifeId;

#[derive(Default, Clone)]
pub(crate) struct EventsTellTheStory {
    lives: BTreeMap<LifeId, Told>,
}

/// What the trace of one life has reported so far.
#[derive(Default, Clone)]
struct Told {
    sessions: BTreeMap<SessionId, Stage>,
    quarantined: BTreeSet<SessionId>,
    /// The posts that have not ended, each with its session.
    posts: BTreeMap<PostId, SessionId>,
    frames_dropped: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Open,
    Ended,
    Closed,
}

impl Invariant for EventsTellTheStory {
    fn observe(&mut self, _: &View<'_>, fact: &Fact<'_>) -> Verdict {
        match fact {
            Fact::Own(KvFact::Told { life, event }) => {
                let told = self.lives.entry(*life).or_default().hear(event);
                told.map_err(|what| format!("life {life} tells \"{event}\", but {what}"))
            }
            Fact::Stepped { life, gauges, .. } => {
                let Some(told) = self.lives.get(life) else { return Ok(()) };
                let counts = (told.posts.len(), told.frames_dropped);
                let holds = (gauges.posts, gauges.dropped.total());
                if counts != holds {
                    let ((posts, dropped), (held, ignored)) = (counts, holds);
                    return Err(format!(
                        "life {life} has told of {posts} posts in flight and {dropped} dropped frames, \
                         and holds {held} and has dropped {ignored}"
                    ));
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

impl Told {
    fn hear(&mut self, event: &Event<KvWhat>) -> Verdict {
        if event.missed > 0 {
            return Err("events are lost".to_owned());
        }
        match event.what {
            KvWhat::PostStarted { post, .. } => {
                let session = event.who.session.ok_or("no session is named")?;
                if self.posts.insert(post, session).is_some() {
                    return Err("that post was started before".to_owned());
                }
            }
            KvWhat::PostEnded { post, .. } => {
                self.posts.remove(&post).ok_or("that post is not in flight")?;
            }
            KvWhat::Dropped(_) => self.frames_dropped += 1,
            _ => {}
        }
        event.who.session.map_or(Ok(()), |session| self.go_on(session, &event.what))
    }

    /// Checks an event of a session against the stage that the session has reached.
    fn go_on(&mut self, session: SessionId, what: &KvWhat) -> Verdict {
        let stage = self.sessions.get(&session).copied();
        let next = match (stage, what) {
            // What is given to a session that nobody opened comes back at once.
            (None, KvWhat::PagesBack { .. } | KvWhat::ItemsBack { .. }) => return Ok(()),
            (None, KvWhat::Opened { .. }) => Stage::Open,
            (Some(Stage::Open), KvWhat::Ended | KvWhat::Failed(_)) => Stage::Ended,
            (Some(Stage::Ended), KvWhat::Closed) => Stage::Closed,
            (Some(stage), what) if may_happen(stage, what) => stage,
            (stage, _) => return Err(format!("the session is {stage:?}")),
        };
        let legal = match what {
            KvWhat::QuarantineBegan { .. } => self.quarantined.insert(session),
            KvWhat::QuarantineEnded { .. } => self.quarantined.remove(&session),
            KvWhat::Closed => {
                !self.quarantined.contains(&session) && !self.posts.values().any(|of| *of == session)
            }
            _ => true,
        };
        self.sessions.insert(session, next);
        if legal { Ok(()) } else { Err("its pages or posts tell something else".to_owned()) }
    }
}

/// True if the event may happen to a session in this stage without ending the stage.
fn may_happen(stage: Stage, what: &KvWhat) -> bool {
    match what {
        KvWhat::Opened { .. } | KvWhat::Ended | KvWhat::Failed(_) | KvWhat::Closed => false,
        // What a session is given too late comes back at once.
        KvWhat::PagesBack { .. } | KvWhat::ItemsBack { .. } => true,
        KvWhat::QuarantineBegan { .. } | KvWhat::QuarantineEnded { .. } => stage == Stage::Ended,
        KvWhat::Said(_) | KvWhat::Heard(_) | KvWhat::PostEnded { .. } => stage != Stage::Closed,
        _ => stage == Stage::Open,
    }
}
