//! The clocks of all workers, shifted into one.

use std::collections::BTreeMap;

use crate::pairs::{Bounds, compare};
use crate::record::{PeerNote, Record};

/// How the clock of a worker is shifted into the clock of the timeline, which is that of one of the workers.
///
/// The clocks of two hosts differ by anything, and their difference is estimated from the conversation of their
/// workers, as NTP does: a message is heard after it was said, so that messages in one direction bound the
/// difference from above, and those in the other direction from below. The middle is the estimate, and half of
/// the distance its uncertainty; no assumption is made that both directions are equally fast. Of two workers that
/// have not spoken with each other, the differences to a third are added up, and the uncertainties, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clock {
    /// Nanoseconds to be added to a time of the worker.
    pub shift: i128,
    /// The true shift differs from `shift` by at most this, in nanoseconds; `None` if the messages bound it on
    /// one side only, or if there are none.
    pub uncertainty: Option<u64>,
    /// How many messages between the worker and the one through which its clock is known were compared.
    pub messages: usize,
    /// The worker through which the clock is known: its position among the records. `None` for the worker whose
    /// clock is that of the timeline, and for workers that have spoken with no other.
    pub through: Option<usize>,
    /// True if a message was heard before it was said, whatever the shift: the clocks have drifted apart by twice
    /// the uncertainty in the time of the record.
    pub drifted: bool,
}

impl Clock {
    /// The clock of the timeline.
    const REFERENCE: Clock =
        Clock { shift: 0, uncertainty: Some(0), messages: 0, through: None, drifted: false };
}

/// The estimate of one difference: its value, and by how much it may be wrong.
#[derive(Debug, Clone, Copy)]
struct Estimate {
    difference: i128,
    uncertainty: Option<u64>,
    drifted: bool,
}

fn estimate(bounds: Bounds) -> Option<Estimate> {
    Some(match (bounds.lower, bounds.upper) {
        (Some(lower), Some(upper)) => Estimate {
            difference: (lower + upper).div_euclid(2),
            uncertainty: Some(half(lower.abs_diff(upper))),
            drifted: lower > upper,
        },
        (Some(bound), None) | (None, Some(bound)) => {
            Estimate { difference: bound, uncertainty: None, drifted: false }
        }
        (None, None) => return None,
    })
}

/// Half of a distance, rounded up.
fn half(distance: u128) -> u64 {
    u64::try_from(distance.div_ceil(2)).unwrap_or(u64::MAX)
}

/// The clocks of all workers, in the order of their records. The first worker with the most conversations gives the
/// clock of the timeline.
pub fn estimate_all(records: &[Record], node_of: impl Fn(&PeerNote) -> Option<usize>) -> Vec<Clock> {
    let between = compare(records, node_of);
    let mut peers: BTreeMap<usize, Vec<(usize, Estimate, usize)>> = BTreeMap::new();
    for (&(a, b), &bounds) in &between {
        let Some(known) = estimate(bounds) else { continue };
        peers.entry(a).or_default().push((b, known, bounds.messages));
        let back = Estimate { difference: -known.difference, ..known };
        peers.entry(b).or_default().push((a, back, bounds.messages));
    }
    let spoken = |node: &usize| peers.get(node).map_or(0, Vec::len);
    let reference = (0..records.len()).rev().max_by_key(spoken).unwrap_or(0);
    let mut clocks: BTreeMap<usize, Clock> = BTreeMap::new();
    // The least uncertain of the workers that are reached next, until all that can be reached are.
    let mut reached = BTreeMap::from([(reference, Clock::REFERENCE)]);
    let cost = |clock: &Clock| (clock.uncertainty.is_none(), clock.uncertainty);
    while let Some((&node, &clock)) = reached.iter().min_by_key(|(_, clock)| cost(clock)) {
        reached.remove(&node);
        clocks.insert(node, clock);
        for &(peer, known, messages) in peers.get(&node).into_iter().flatten() {
            if clocks.contains_key(&peer) {
                continue;
            }
            let through = Clock {
                // The peer's clock is ahead by the difference.
                shift: clock.shift - known.difference,
                uncertainty: clock.uncertainty.zip(known.uncertainty).map(|(a, b)| a.saturating_add(b)),
                messages,
                through: Some(node),
                drifted: known.drifted,
            };
            let better = reached.get(&peer).is_none_or(|other| cost(&through) < cost(other));
            if better {
                reached.insert(peer, through);
            }
        }
    }
    let begin = |record: &Record| record.all_notes().map(|note| note.at).min().map_or(0, i128::from);
    let start = records.get(reference).map_or(0, begin);
    let aligned = |record: &Record| Clock {
        shift: start - begin(record),
        uncertainty: None,
        messages: 0,
        through: None,
        drifted: false,
    };
    let all = records.iter().enumerate();
    all.map(|(node, record)| clocks.get(&node).copied().unwrap_or_else(|| aligned(record))).collect()
}
