//! What each rank of a group is told of a command: the rank's part of the same pages and layers.

use std::ops::Range;

use kv_core::proto::Command;
use kv_core::{CacheGroupItems, Pages, RequestCacheGroups};

use super::deal::Deal;

/// The commands for the ranks after the first, `None` where there is nothing to tell. The first rank is told
/// the command itself.
pub(super) fn copies(command: &Command, deal: &Deal, ranks: usize) -> Vec<Option<Command>> {
    (1..ranks).map(|rank| copy(command, deal, rank)).collect()
}

fn copy(command: &Command, deal: &Deal, rank: usize) -> Option<Command> {
    Some(match command {
        Command::InitSender { session, num_pages, aux } => {
            Command::InitSender { session: *session, num_pages: deal.count(rank, *num_pages), aux: *aux }
        }
        Command::Send { session, chunk } => {
            let (session, pages) = (*session, chunk.len());
            let chunk = first(deal.next(rank, chunk.list()).len(), chunk);
            match deal.would_withhold(rank, pages) {
                true => Command::BeginChunk { session, chunk },
                false => Command::Send { session, chunk },
            }
        }
        Command::BeginChunk { session, chunk } => {
            let chunk = first(deal.next(rank, chunk.list()).len(), chunk);
            Command::BeginChunk { session: *session, chunk }
        }
        Command::InitReceiver { session, pages, aux } => {
            let pages = first(deal.all(rank, pages.list()).len(), pages);
            Command::InitReceiver { session: *session, pages, aux: *aux }
        }
        Command::RequestCacheGroups { session, groups } => {
            Command::RequestCacheGroups { session: *session, groups: copy_groups(groups)? }
        }
        _ => return None,
    })
}

/// The layers of an announcement that each rank holds, `None` for a rank that holds none of them. If some
/// layer is held by no rank, the first rank is told of all layers, and fails the request with the reason.
pub(super) fn shares(
    layers: Option<Range<u32>>,
    held: &[Option<(u32, u32)>],
) -> Vec<Option<Option<Range<u32>>>> {
    let Some(layers) = layers else { return vec![Some(None); held.len()] };
    let share = |held: &Option<(u32, u32)>| match *held {
        Some((first, end)) => layers.start.max(first)..layers.end.min(end),
        None => layers.clone(),
    };
    let shares: Vec<Range<u32>> = held.iter().map(share).collect();
    let covered = |layer: u32| shares.iter().any(|share| share.contains(&layer));
    let bound = shares.iter().map(|share| share.end).max().unwrap_or(0);
    if layers.is_empty() || bound < layers.end || !layers.clone().all(covered) {
        let first = Some(Some(layers.clone()));
        return [first].into_iter().chain(held.iter().skip(1).map(|_| None)).collect();
    }
    shares.into_iter().map(|share| (!share.is_empty()).then_some(Some(share))).collect()
}

/// The first of these pages, of another rank's cache.
fn first(len: usize, pages: &Pages) -> Pages {
    let mut mirror = pages.mirror();
    drop(mirror.split_off(len));
    mirror
}

fn copy_groups(groups: &RequestCacheGroups) -> Option<RequestCacheGroups> {
    let mut copies = RequestCacheGroups::none();
    for CacheGroupItems { group, first, items, .. } in groups.iter() {
        copies.push(CacheGroupItems::from_number(*group, *first, items.mirror())).ok()?;
    }
    Some(copies)
}

#[cfg(test)]
mod tests {
    use kv_core::PageList;

    use super::*;

    #[test]
    fn other_ranks_get_the_same_items_of_the_same_groups() {
        let pages =
            |list: &[u32]| Pages::unpooled(PageList::from_pages(list.iter().copied()).unwrap()).unwrap();
        let mut groups = RequestCacheGroups::none();
        groups.push(CacheGroupItems::new(0, pages(&[7]))).unwrap();
        groups.push(CacheGroupItems::from_number(3, 12, pages(&[5, 1, 2]))).unwrap();
        assert_eq!(copy_groups(&groups), Some(groups));
    }

    #[test]
    fn each_stage_of_a_pipeline_is_told_of_its_layers() {
        let stages = [Some((0, 4)), Some((0, 4)), Some((4, 8))];
        assert_eq!(shares(None, &stages), [Some(None), Some(None), Some(None)]);
        assert_eq!(shares(Some(2..5), &stages), [Some(Some(2..4)), Some(Some(2..4)), Some(Some(4..5))]);
        assert_eq!(shares(Some(6..7), &stages), [None, None, Some(Some(6..7))]);
        // Nobody has them: the first rank says what is wrong.
        for wrong in [Some(7..9), Some(3..3), Some(8..20)] {
            assert_eq!(shares(wrong.clone(), &stages), [Some(wrong), None, None]);
        }
        assert_eq!(shares(Some(1..2), &[None, None]), [Some(Some(1..2)), Some(Some(1..2))]);
    }
}
