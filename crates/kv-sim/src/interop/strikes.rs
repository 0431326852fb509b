//! Faults with a moment, and their end.

use super::LifeId;
use super::world::{Event, World};
use crate::clock::{MS, SEC};
use crate::planted::Planted;

/// A fault that begins or ends.
#[derive(Debug, Clone, Copy)]
pub(super) enum Strike {
    /// The processes of an engine are killed, the first one first.
    Kill {
        engine: usize,
        down: u64,
    },
    /// One of the processes dies.
    Die {
        life: LifeId,
    },
    /// An engine starts at the addresses of its forerunner.
    Boot {
        engine: usize,
    },
    /// A host is stopped, and continues after a while.
    Stop {
        engine: usize,
        rank: usize,
        span: u64,
    },
    Continue {
        life: LifeId,
    },
    /// Two engines cannot reach each other for a while.
    Part {
        engines: (usize, usize),
        span: u64,
    },
    Join {
        engines: (usize, usize),
    },
    /// A connection of a side channel breaks.
    Break,
    /// The thread that serves an engine's side channel ends, and the port refuses connections. The process lives.
    Deafen {
        engine: usize,
    },
}

impl World {
    pub(super) fn plan_strikes(&mut self) {
        let span = self.params.fault_span;
        let engines = self.engines.len();
        for _ in 0..self.params.kills {
            let engine = self.rng.index(engines);
            let down = self.rng.pick(&[MS, SEC, 10 * SEC, 40 * SEC]);
            let at = self.rng.below(span);
            self.enter(at, Event::Strike(Strike::Kill { engine, down }));
        }
        for _ in 0..self.params.stops {
            let (engine, rank) = (self.rng.index(engines), self.rng.index(2));
            let length = self.rng.pick(&[SEC, 10 * SEC, 60 * SEC]);
            let at = self.rng.below(span);
            self.enter(at, Event::Strike(Strike::Stop { engine, rank, span: length }));
        }
        for _ in 0..self.params.partitions {
            let prefill = self.rng.index(self.params.prefills);
            let decode = self.params.prefills + self.rng.index(self.params.decodes);
            let length = self.rng.pick(&[SEC, 10 * SEC, 60 * SEC]);
            let at = self.rng.below(span);
            self.enter(at, Event::Strike(Strike::Part { engines: (prefill, decode), span: length }));
        }
        for _ in 0..self.params.breaks {
            let at = self.rng.below(span);
            self.enter(at, Event::Strike(Strike::Break));
        }
        for _ in 0..self.params.deafs {
            let engine = self.rng.index(engines);
            let at = self.rng.below(span);
            self.enter(at, Event::Strike(Strike::Deafen { engine }));
        }
    }

    pub(super) fn strike(&mut self, strike: Strike) {
        self.trace.note(self.now, || format!("{strike:?}"));
        match strike {
            Strike::Kill { engine, down } if !self.healed => self.kill(engine, down),
            Strike::Die { life } => self.die(life),
            Strike::Boot { engine } => {
                let dead = self.engines[engine].lives.iter().all(|life| !self.lives[*life].alive);
                if dead {
                    self.boot(engine);
                }
            }
            Strike::Stop { engine, rank, span } if !self.healed => {
                let lives = &self.engines[engine].lives;
                let life = lives[rank % lives.len()];
                if self.lives[life].alive && !self.lives[life].stopped {
                    self.counters.stops += 1;
                    self.lives[life].stopped = true;
                    self.enter(span, Event::Strike(Strike::Continue { life }));
                }
            }
            Strike::Continue { life } => self.resume(life),
            Strike::Part { engines, span } if !self.healed => {
                self.counters.partitions += 1;
                let until = self.now + span;
                let entry = self.parted.entry(engines).or_default();
                *entry = until.max(*entry);
                self.enter(span, Event::Strike(Strike::Join { engines }));
            }
            Strike::Join { engines } => {
                if self.parted.get(&engines).is_some_and(|until| *until <= self.now) {
                    self.parted.remove(&engines);
                }
            }
            Strike::Break if !self.healed => {
                let open = self.open_channels();
                if !open.is_empty() {
                    self.counters.breaks += 1;
                    let channel = open[self.rng.index(open.len())];
                    self.break_channel(channel);
                }
            }
            Strike::Deafen { engine } if !self.healed => self.deafen(engine),
            Strike::Kill { .. }
            | Strike::Stop { .. }
            | Strike::Part { .. }
            | Strike::Break
            | Strike::Deafen { .. } => {}
        }
    }

    /// Kills all processes of an engine. Those of later ranks may live on for a while.
    fn kill(&mut self, engine: usize, down: u64) {
        let lives = self.engines[engine].lives.clone();
        if lives.iter().any(|life| !self.lives[*life].alive) {
            return;
        }
        self.counters.kills += 1;
        let mut last = 0;
        for (rank, life) in lives.into_iter().enumerate() {
            let after = if rank == 0 { 0 } else { self.rng.below(self.params.outlive + 1) };
            last = last.max(after);
            self.enter(after, Event::Strike(Strike::Die { life }));
        }
        self.enter(last + down, Event::Strike(Strike::Boot { engine }));
    }

    /// Ends the thread of an engine's side channel.
    fn deafen(&mut self, engine: usize) {
        let first = self.engines[engine].lives[0];
        if self.lives[first].alive && !std::mem::replace(&mut self.lives[first].deaf, true) {
            self.counters.deafs += 1;
            self.break_channels(first);
        }
    }

    fn die(&mut self, life: LifeId) {
        if !self.lives[life].alive {
            return;
        }
        self.lives[life].alive = false;
        self.lives[life].died_at = Some(self.now);
        self.lives[life].peers.clear();
        self.break_channels(life);
        self.lose_agent(life);
        self.scheduler_dies(life);
    }

    /// Faults stop: ways are open, stopped hosts go on, and every engine runs and can be asked for its metadata.
    pub(super) fn heal(&mut self) {
        if self.violation.is_some() {
            return;
        }
        self.trace.note(self.now, || "faults stop".to_owned());
        self.healed = true;
        if self.planted != Some(Planted::WaysStayParted) {
            self.parted.clear();
        } else {
            for prefill in 0..self.params.prefills {
                for decode in 0..self.params.decodes {
                    self.parted.insert((prefill, self.params.prefills + decode), u64::MAX);
                }
            }
        }
        for life in 0..self.lives.len() {
            self.resume(life);
        }
        // An engine that nobody can ask for metadata any more serves only after a restart.
        for engine in 0..self.engines.len() {
            let lives = self.engines[engine].lives.clone();
            if self.lives[lives[0]].alive && self.lives[lives[0]].deaf {
                lives.into_iter().for_each(|life| self.die(life));
                self.enter(SEC, Event::Strike(Strike::Boot { engine }));
            }
        }
    }

    /// All prefill engines are killed, and come back at once.
    pub(super) fn restart_prefills(&mut self) {
        if self.violation.is_some() {
            return;
        }
        for engine in 0..self.params.prefills {
            for life in self.engines[engine].lives.clone() {
                self.die(life);
            }
            self.enter(SEC, Event::Strike(Strike::Boot { engine }));
        }
    }
}
