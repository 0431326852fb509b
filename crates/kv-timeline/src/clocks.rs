//! The clocks of all workers, shifted into one.

use std::collections::BTreeMap;

use crate::pairs::{Bound, compare};
use crate::record::{PeerNote, Record};

/// By how much two clocks are taken to drift apart at most: one part in 5000, which is 200 µs a second. Two
/// quartzes of 100 ppm do, and no more than that is found in hosts whose clocks are disciplined.
const DRIFT: i128 = 5000;

/// How the clock of a worker is shifted into the clock of the timeline, which is that of one of the workers.
///
/// The clocks of two hosts differ by anything, and their difference is estimated from the conversation of their
/// workers, as NTP does: a message is heard after it was said, so that messages in one direction bound the
/// difference from above, and those in the other direction from below. The middle is the estimate, and half of
/// the distance its uncertainty; no assumption is made that both directions are equally fast. The difference may
/// change by 200 µs a second: a message bounds it less, the longer ago the message was. The uncertainty covers the
/// difference at the time of every message that the two have exchanged. Of two workers that have not spoken with
/// each other, the differences to a third are added up, and the uncertainties, too.
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
    /// True if a message was heard before it was said, whatever the shift, and however the clocks drift: one of
    /// them was set, its host was suspended, or a record is wrong. The uncertainty is then of no guarantee.
    pub contradicted: bool,
}

impl Clock {
    /// The clock of the timeline.
    const REFERENCE: Clock =
        Clock { shift: 0, uncertainty: Some(0), messages: 0, through: None, contradicted: false };
}

/// The estimate of one difference: its value, and by how much it may be wrong.
#[derive(Debug, Clone, Copy)]
struct Estimate {
    difference: i128,
    uncertainty: Option<u64>,
    contradicted: bool,
}

/// The difference of two clocks, from what all messages between them tell.
fn estimate(bounds: &mut [Bound]) -> Option<Estimate> {
    bounds.sort_unstable();
    let lowers = reach(bounds, |bound| Some(-bound.lower?));
    let uppers = reach(bounds, |bound| bound.upper);
    let known = lowers.iter().zip(&uppers).filter_map(|(&lower, &upper)| Some((-lower?, upper?)));
    // At the time of each message, the difference is between the two.
    let covered = known.fold(None, |covered: Option<(i128, i128, bool)>, (lower, upper)| {
        let (least, most) = (lower.min(upper), lower.max(upper));
        let (least_of_all, most_of_all, crossed) = covered.unwrap_or((least, most, false));
        Some((least.min(least_of_all), most.max(most_of_all), crossed || lower > upper))
    });
    if let Some((least, most, contradicted)) = covered {
        let (difference, uncertainty) = ((least + most).div_euclid(2), Some(half(least.abs_diff(most))));
        return Some(Estimate { difference, uncertainty, contradicted });
    }
    let lowest = bounds.iter().filter_map(|bound| bound.upper).min();
    let bound = lowest.or_else(|| bounds.iter().filter_map(|bound| bound.lower).max());
    bound.map(|difference| Estimate { difference, uncertainty: None, contradicted: false })
}

/// The least upper bound at the time of each message, of all messages before and after. The messages are in the order
/// of time.
fn reach(bounds: &[Bound], upper: impl Fn(&Bound) -> Option<i128>) -> Vec<Option<i128>> {
    let mut least: Vec<Option<i128>> = bounds.iter().map(upper).collect();
    let drift = |a: &Bound, b: &Bound| i128::from(a.at.abs_diff(b.at)).div_euclid(DRIFT) + 1;
    let carry = |least: &mut [Option<i128>], from: usize, to: usize| {
        let (Some(&Some(known)), Some(a), Some(b)) = (least.get(from), bounds.get(from), bounds.get(to))
        else {
            return;
        };
        if let Some(place) = least.get_mut(to) {
            let carried = known + if a.at == b.at { 0 } else { drift(a, b) };
            *place = Some(place.map_or(carried, |own| own.min(carried)));
        }
    };
    for to in 1..bounds.len() {
        carry(&mut least, to - 1, to);
    }
    for to in (1..bounds.len()).rev() {
        carry(&mut least, to, to - 1);
    }
    least
}

/// Half of a distance, rounded up.
fn half(distance: u128) -> u64 {
    u64::try_from(distance.div_ceil(2)).unwrap_or(u64::MAX)
}

/// The clocks of all workers, in the order of their records. The first worker with the most conversations gives the
/// clock of the timeline.
pub fn estimate_all(records: &[Record], node_of: impl Fn(&PeerNote) -> Option<usize>) -> Vec<Clock> {
    let mut between = compare(records, node_of);
    let mut peers: BTreeMap<usize, Vec<(usize, Estimate, usize)>> = BTreeMap::new();
    for (&(a, b), bounds) in &mut between {
        let Some(known) = estimate(bounds) else { continue };
        peers.entry(a).or_default().push((b, known, bounds.len()));
        let back = Estimate { difference: -known.difference, ..known };
        peers.entry(b).or_default().push((a, back, bounds.len()));
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
                contradicted: known.contradicted,
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
        contradicted: false,
    };
    let all = records.iter().enumerate();
    all.map(|(node, record)| clocks.get(&node).copied().unwrap_or_else(|| aligned(record))).collect()
}
