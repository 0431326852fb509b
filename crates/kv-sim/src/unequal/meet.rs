//! Who sends what to whom: told from layers and heads.

use super::{Lane, Unequal};

impl Unequal {
    /// The prefill ranks that a decode rank has to do with, in order: those of the stages that have
    /// layers of its own, and of these the ones whose heads are its heads.
    pub(crate) fn sources(&self, dest: u32) -> Vec<u32> {
        let [ours, theirs] = [self.engines[0].tp, self.engines[1].tp];
        let layers = self.layers_of(false, dest);
        let first = dest % theirs * ours / theirs;
        let block = first..first + (ours / theirs).max(1);
        let stages = (0_u32..).zip(&self.engines[0].stages);
        let meets = stages.filter(|(_, stage)| stage.start < layers.end && layers.start < stage.end);
        meets.flat_map(|(stage, _)| block.clone().map(move |place| stage * ours + place)).collect()
    }

    /// The prefill rank whose aux row a decode rank gets: the first of the last stage that it meets.
    pub(crate) fn aux_source(&self, dest: u32) -> u32 {
        let tp = self.engines[0].tp;
        self.sources(dest).into_iter().max_by_key(|source| (source / tp, u32::MAX - source)).unwrap_or(0)
    }

    /// Bytes of a token that a prefill rank sends to a decode rank: of heads that several ranks of a
    /// stage have, the first one's.
    pub(crate) fn bytes_per_token(&self, lane: Lane, source: u32, dest: u32) -> u64 {
        let sources = self.sources(dest);
        if !sources.contains(&source) {
            return 0;
        }
        let (here, there) = (self.lane_layers(true, source, lane), self.lane_layers(false, dest, lane));
        let layers = here.end.min(there.end).saturating_sub(here.start.max(there.start));
        let tp = self.engines[0].tp;
        let before = || sources.iter().filter(|rank| **rank / tp == source / tp && **rank < source);
        let has = |rank: u32, head: u32| self.heads_of(true, rank, lane).contains(&head);
        let sent = |head: &u32| has(source, *head) && !before().any(|&rank| has(rank, *head));
        let heads = self.heads_of(false, dest, lane).filter(sent).count() as u64;
        let kinds = match lane {
            Lane::Kv if self.latent => 1,
            Lane::Kv => 2,
            Lane::Group(group) => u64::from(self.groups[group].kinds),
        };
        heads * kinds * u64::from(layers) * u64::from(self.atom)
    }

    /// True if bytes of a state group go from one rank to the other.
    pub(crate) fn shares_group(&self, group: usize, source: u32, dest: u32) -> bool {
        self.bytes_per_token(Lane::Group(group), source, dest) > 0
    }
}
