//! The bootstrap servers of SGLang's prefill engines, one for each engine.

use kv_core::machine::Input;
use kv_core::{BootstrapError, LookupId};

use super::world::{Event, World};
use super::{LifeId, hosts};

impl World {
    /// Takes a lookup, which is answered later.
    pub(super) fn lookup(&mut self, life: LifeId, lookup: LookupId, addr: &str) {
        let engine = addr.strip_prefix("bootstrap-").and_then(|rest| rest.split(':').next()?.parse().ok());
        let delay = self.rng.tail(self.params.channel_delay.0, self.params.channel_delay.1);
        let asked = self.now;
        match engine.filter(|engine| *engine < self.engines.len()) {
            Some(engine) => self.enter(delay, Event::Answer { life, lookup, engine, asked }),
            None => {
                let error = BootstrapError::Address(addr.to_owned());
                let input = Input::LookupFailed { lookup, error };
                self.enter(delay, Event::Told { life, what: "lookup failed", input });
            }
        }
    }

    /// Answers a lookup that was made at `asked` with the ranks of an engine.
    pub(super) fn answer_lookup(&mut self, life: LifeId, lookup: LookupId, engine: usize, asked: u64) {
        let fails = !self.healed && self.rng.chance(self.params.lookup_fail);
        let stale = !self.healed && self.rng.chance(self.params.lookup_stale);
        let lives = self.engines[engine].lives.clone();
        let known = |life: &LifeId| {
            let record = &self.lives[*life];
            record.alive || stale || record.died_at.is_some_and(|died| died > asked)
        };
        let ranks: Vec<_> = lives
            .into_iter()
            .filter(known)
            .filter_map(|life| hosts::record(self.lives[life].place, life))
            .collect();
        let expected = self.params.prefill_tp as usize;
        if fails || ranks.len() < expected {
            let error = if fails {
                BootstrapError::Status(503)
            } else {
                BootstrapError::NotReady { registered: ranks.len() as u32, expected: expected as u32 }
            };
            return self.tell(life, "lookup failed", Input::LookupFailed { lookup, error });
        }
        self.tell(life, "found", Input::Found { lookup, ranks });
    }
}
