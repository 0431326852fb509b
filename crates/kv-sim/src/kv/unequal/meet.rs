//! Which ranks send what to which ranks, as it follows from layers and heads alone.

use super::place::Place;
use super::{Lane, Unequal};

impl Unequal {
    /// The prefill ranks from which a decode rank receives, in order. They are of the stages that have some
    /// of the decode rank's layers, have some of its heads, and hold some of its pages if pages are
    /// distributed over ranks.
    pub(crate) fn sources(&self, dest: u32) -> Vec<u32> {
        let [ours, theirs] = self.engines.each_ref().map(|engine| engine.tp / engine.context);
        let layers = self.layers_of(false, dest);
        let own = self.engines[1].place(dest);
        let first = own.replica * ours / theirs;
        let block = first..first + (ours / theirs).max(1);
        // Every second of the request meets every fourth, if they begin alike.
        let both = self.engines[0].context.min(self.engines[1].context);
        let meets = |place: Place| {
            let stage = &self.engines[0].stages[place.stage as usize];
            stage.start < layers.end
                && layers.start < stage.end
                && block.contains(&place.replica)
                && place.context % both == own.context % both
        };
        (0..self.engines[0].ranks() as u32).filter(|&rank| meets(self.engines[0].place(rank))).collect()
    }

    /// The prefill rank that sends a decode rank its aux row: the first source of the last stage.
    pub(crate) fn aux_source(&self, dest: u32) -> u32 {
        let stage = |source: u32| self.engines[0].place(source).stage;
        let sources = self.sources(dest).into_iter();
        sources.max_by_key(|&source| (stage(source), u32::MAX - source)).unwrap_or(0)
    }

    /// The number of bytes of a token that a prefill rank sends to a decode rank, if it sends any of that
    /// token. Heads that several ranks of a stage hold are sent by the first of them. Items of cache groups
    /// are sent by the first of the ranks that hold the same pages.
    pub(crate) fn bytes_per_token(&self, lane: Lane, source: u32, dest: u32) -> u64 {
        let sources = self.sources(dest);
        if !sources.contains(&source) {
            return 0;
        }
        let (here, there) = (self.lane_layers(true, source, lane), self.lane_layers(false, dest, lane));
        let layers = here.start.max(there.start)..here.end.min(there.end);
        let place = self.engines[0].place(source);
        if lane != Lane::Kv && place.cp > 0 {
            return 0;
        }
        let alike = |rank: u32| {
            let Place { stage, cp, context, .. } = self.engines[0].place(rank);
            (stage, cp, context) == (place.stage, place.cp, place.context)
        };
        let before = || sources.iter().filter(|&&rank| alike(rank) && rank < source);
        let heads = |layer: u32| {
            let has = |rank: u32, head: u32| self.heads_of(true, rank, lane, layer).contains(&head);
            let sent = |head: &u32| has(source, *head) && !before().any(|&rank| has(rank, *head));
            self.heads_of(false, dest, lane, layer).filter(sent).count() as u64
        };
        let heads: u64 = layers.map(heads).sum();
        let kinds = match lane {
            Lane::Kv if self.latent => 1,
            Lane::Kv => 2,
            Lane::Group(group) => u64::from(self.groups[group].kinds),
        };
        heads * kinds * u64::from(self.atom)
    }

    /// True if a prefill rank sends a decode rank bytes of a cache group.
    pub(crate) fn shares_group(&self, group: usize, source: u32, dest: u32) -> bool {
        self.bytes_per_token(Lane::Group(group), source, dest) > 0
    }
}
