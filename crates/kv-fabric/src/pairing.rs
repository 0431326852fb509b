//! [`pairs`]: which device of this side moves bytes to and from which endpoint of a peer.

use std::cmp::Reverse;

use crate::config::MAX_DEVICES;

/// Most pairs of devices.
pub(crate) const MAX_LANES: usize = 2 * MAX_DEVICES;

/// Pairs of a device here and an endpoint there, given their NUMA nodes. Every device and every endpoint is in one pair at
/// least, as nobody else uses it. The first two are a pair, which carries the messages, too. Others are with one of their
/// own NUMA node, if they can: where hosts are alike, such devices hang on one rail of the network, and serve the same GPUs.
/// Else their position decides.
pub(crate) fn pairs(ours: &[Option<u16>], theirs: &[Option<u16>]) -> Vec<(usize, usize)> {
    let mut pairs = vec![(0, 0)];
    for (device, node) in ours.iter().enumerate().skip(1) {
        let used = |endpoint: usize| pairs.iter().filter(|(_, other)| *other == endpoint).count();
        let best = best(theirs, *node, used);
        pairs.push((device, best));
    }
    for (endpoint, node) in theirs.iter().enumerate().skip(1) {
        if pairs.iter().all(|(_, used)| *used != endpoint) {
            let used = |device: usize| pairs.iter().filter(|(other, _)| *other == device).count();
            let best = best(ours, *node, used);
            pairs.push((best, endpoint));
        }
    }
    pairs
}

/// The best other end for one of this node: of the same node if there is one, and then the first that is in the fewest pairs.
fn best(others: &[Option<u16>], node: Option<u16>, used: impl Fn(usize) -> usize) -> usize {
    let cost = |other: usize, its: Option<u16>| (Reverse(node.is_some() && its == node), used(other));
    let others = others.iter().enumerate();
    others.min_by_key(|(other, its)| cost(*other, **its)).map_or(0, |(other, _)| other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_unknown_places_are_paired_by_their_positions() {
        let unknown = |count| vec![None; count];
        assert_eq!(pairs(&unknown(1), &unknown(1)), [(0, 0)]);
        assert_eq!(pairs(&unknown(3), &unknown(3)), [(0, 0), (1, 1), (2, 2)]);
        assert_eq!(pairs(&unknown(4), &unknown(2)), [(0, 0), (1, 1), (2, 0), (3, 1)]);
        assert_eq!(pairs(&unknown(1), &unknown(3)), [(0, 0), (0, 1), (0, 2)]);
    }

    #[test]
    fn devices_are_paired_within_their_numa_node_as_far_as_that_goes() {
        let (zero, one) = (Some(0), Some(1));
        assert_eq!(pairs(&[zero, zero, one, one], &[zero, one, zero, one]), [(0, 0), (1, 2), (2, 1), (3, 3)]);
        // Two of node 1 share the peer's one; the rest goes by position.
        assert_eq!(pairs(&[zero, one, one], &[zero, one]), [(0, 0), (1, 1), (2, 1)]);
        assert_eq!(pairs(&[zero, one], &[None, zero]), [(0, 0), (1, 1)]);
    }

    #[test]
    fn every_device_and_every_endpoint_is_in_a_pair() {
        for (ours, theirs) in (1..=8).flat_map(|ours| (1..=8).map(move |theirs| (ours, theirs))) {
            for nodes in 1..=3_u16 {
                let node = |end: usize| Some(end as u16 % nodes);
                let (here, there): (Vec<_>, Vec<_>) =
                    ((0..ours).map(node).collect(), (0..theirs).map(|end| node(end / 2)).collect());
                let pairs = pairs(&here, &there);
                assert_eq!(pairs[0], (0, 0));
                assert!((0..ours).all(|device| pairs.iter().any(|pair| pair.0 == device)), "{pairs:?}");
                assert!((0..theirs).all(|endpoint| pairs.iter().any(|pair| pair.1 == endpoint)), "{pairs:?}");
                assert!(pairs.len() < (ours + theirs).min(MAX_LANES), "{pairs:?}");
            }
        }
    }
}
