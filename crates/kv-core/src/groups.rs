//! Items of cache groups that a request uses beside its KV pages: lists that name items, and the types that
//! own them.

use std::fmt;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use crate::growing;
use crate::meter::step;
use crate::page_list::{MAX_PAGES, PageList};
use crate::pages::Pages;

/// Most cache groups that one request may name.
pub const MAX_REQUEST_CACHE_GROUPS: usize = 16;

/// A list of items of one cache group, as peers tell each other: slots, the last pages of a sliding
/// window, the pages of a draft model. Items are numbered within the group's own regions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheGroupList {
    /// The group, by its position in [`Layout::groups`](crate::Layout::groups).
    pub group: u16,
    /// The number of the first item in the request, counted in the group's items: a window of the last
    /// 4 of 10 pages begins with number 6. Slots begin with 0.
    pub first: u32,
    /// The items, in request order.
    pub items: PageList,
}

impl CacheGroupList {
    /// The place of these items in the request.
    pub fn span(&self) -> CacheGroupSpan {
        span(self.first, self.items.len())
    }
}

/// Lists of items of several cache groups, as peers tell each other.
///
/// Valid by construction: at most [`MAX_REQUEST_CACHE_GROUPS`], each group once, by rising number, and no
/// list begins beyond [`MAX_PAGES`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct CacheGroupLists(Vec<CacheGroupList>);

impl CacheGroupLists {
    /// The lists, by rising group number.
    pub fn iter(&self) -> impl Iterator<Item = &CacheGroupList> {
        self.0.iter()
    }

    /// The list of this group; `None` if the group is not named.
    pub fn get(&self, group: u16) -> Option<&CacheGroupList> {
        self.0.iter().find(|list| list.group == group)
    }

    /// True if no group is named.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many runs all lists have together, which is their cost in memory.
    pub fn runs(&self) -> usize {
        self.0.iter().map(|list| list.items.runs().len()).sum()
    }
}

impl<'de> Deserialize<'de> for CacheGroupLists {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<CacheGroupLists, D::Error> {
        CacheGroupLists::try_from(growing::up_to(from, MAX_REQUEST_CACHE_GROUPS + 1)?)
            .map_err(D::Error::custom)
    }
}

impl TryFrom<Vec<CacheGroupList>> for CacheGroupLists {
    type Error = RequestCacheGroupsError;

    fn try_from(lists: Vec<CacheGroupList>) -> Result<CacheGroupLists, RequestCacheGroupsError> {
        if lists.len() > MAX_REQUEST_CACHE_GROUPS {
            return Err(RequestCacheGroupsError::TooMany { got: lists.len() });
        }
        step(lists.len());
        if let Some(pair) = lists.windows(2).find(|pair| pair[0].group >= pair[1].group) {
            return Err(RequestCacheGroupsError::Order { group: pair[1].group, before: pair[0].group });
        }
        match lists.iter().find(|list| list.first > MAX_PAGES) {
            Some(list) => Err(RequestCacheGroupsError::First { group: list.group, first: list.first }),
            None => Ok(CacheGroupLists(lists)),
        }
    }
}

/// The items of a request that a list names: `len` items, from number `first` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheGroupSpan {
    /// The number of the first item in the request, counted in the group's items.
    pub first: u32,
    /// How many items the list names.
    pub len: u32,
}

impl fmt::Display for CacheGroupSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (from number {} on)", self.len, self.first)
    }
}

fn span(first: u32, len: usize) -> CacheGroupSpan {
    // A list names at most MAX_PAGES.
    CacheGroupSpan { first, len: len as u32 }
}

/// Why lists of groups are not accepted. No request can have such lists.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestCacheGroupsError {
    /// There are more groups than a request may name.
    #[error("{got} groups; a request may name at most {MAX_REQUEST_CACHE_GROUPS}")]
    TooMany {
        /// How many groups were given.
        got: usize,
    },
    /// A group is named twice.
    #[error("group {group} is named twice")]
    Twice {
        /// The number of the group in [`Layout::groups`](crate::Layout::groups).
        group: u16,
    },
    /// The groups in a frame are not in rising order.
    #[error("groups must rise, but group {group} follows group {before}")]
    Order {
        /// The number of the group that is out of order.
        group: u16,
        /// The number of the group before it.
        before: u16,
    },
    /// A list begins beyond the largest number of an item.
    #[error("group {group} begins with item {first}; at most {MAX_PAGES} is allowed")]
    First {
        /// The number of the group in [`Layout::groups`](crate::Layout::groups).
        group: u16,
        /// The number of the list's first item.
        first: u32,
    },
}

/// Ownership of items of one cache group, with their place in the request.
///
/// As with [`Pages`]: only who has this value may write the items and may free them.
#[must_use = "dropping items leaks them: give them back to their allocator"]
#[derive(Debug, PartialEq, Eq)]
#[cfg_attr(feature = "model", derive(Clone))]
#[non_exhaustive]
pub struct CacheGroupItems {
    /// The group, by its position in [`Layout::groups`](crate::Layout::groups).
    pub group: u16,
    /// The number of the first item in the request, counted in the group's items; 0 for slots.
    pub first: u32,
    /// The items, in request order. Their numbers are those of the group's own regions.
    pub items: Pages,
}

impl CacheGroupItems {
    /// Items from the beginning of the request on: its slots, or all pages of a draft model.
    pub fn new(group: u16, items: Pages) -> CacheGroupItems {
        CacheGroupItems { group, first: 0, items }
    }

    /// Items from number `first` of the request on: the last pages of a sliding window.
    pub fn from_number(group: u16, first: u32, items: Pages) -> CacheGroupItems {
        CacheGroupItems { group, first, items }
    }

    /// The place of these items in the request.
    pub fn span(&self) -> CacheGroupSpan {
        span(self.first, self.items.len())
    }
}

/// Items that could not be added to others, and the reason.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct CacheGroupRefused {
    /// The items, as they were given.
    pub items: CacheGroupItems,
    /// Why the items were not accepted.
    pub error: RequestCacheGroupsError,
}

/// Ownership of the items of several cache groups: the memory of a hybrid model's request beside
/// its KV pages. The value moves with the request and is never copied.
///
/// ```
/// use kv_core::{CacheGroupItems, PageList, PagePool, RequestCacheGroups};
///
/// // Each group has items of its own, so each has a pool of its own.
/// let (slots, window_pages) = (PagePool::new(8), PagePool::new(32));
/// let slot = slots.adopt(PageList::from_pages([7])?)?;
/// let window = window_pages.adopt(PageList::from_pages([30, 31, 12])?)?;
/// let mut groups = RequestCacheGroups::none();
/// groups.push(CacheGroupItems::new(0, slot))?;
/// // Pages 17, 18 and 19 of the request: the last three.
/// groups.push(CacheGroupItems::from_number(1, 17, window))?;
/// assert_eq!(groups.len(), 4);
/// assert_eq!(groups.take(0).map(|slot| slot.items.len()), Some(1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "dropping groups leaks their items: give them back to their allocators"]
#[derive(Debug, PartialEq, Eq, Default)]
#[cfg_attr(feature = "model", derive(Clone))]
pub struct RequestCacheGroups(Vec<CacheGroupItems>);

impl RequestCacheGroups {
    /// No items of any group.
    pub fn none() -> RequestCacheGroups {
        RequestCacheGroups::default()
    }

    /// Adds the items of one more group. The items come back in the error if the group is named
    /// already, if there are [`MAX_REQUEST_CACHE_GROUPS`] groups, or if the items begin beyond
    /// [`MAX_PAGES`].
    pub fn push(&mut self, items: CacheGroupItems) -> Result<(), CacheGroupRefused> {
        let group = items.group;
        let at = self.0.partition_point(|other| other.group < group);
        let error = if self.0.get(at).is_some_and(|other| other.group == group) {
            RequestCacheGroupsError::Twice { group }
        } else if self.0.len() >= MAX_REQUEST_CACHE_GROUPS {
            RequestCacheGroupsError::TooMany { got: self.0.len() + 1 }
        } else if items.first > MAX_PAGES {
            RequestCacheGroupsError::First { group, first: items.first }
        } else {
            self.0.insert(at, items);
            return Ok(());
        };
        Err(CacheGroupRefused { items, error })
    }

    /// Takes the items of one group out; `None` if the group is not named.
    pub fn take(&mut self, group: u16) -> Option<CacheGroupItems> {
        let at = self.0.iter().position(|items| items.group == group)?;
        Some(self.0.remove(at))
    }

    /// The items of each group, by rising group number.
    pub fn iter(&self) -> impl Iterator<Item = &CacheGroupItems> {
        self.0.iter()
    }

    /// The items of this group; `None` if the group is not named.
    pub fn get(&self, group: u16) -> Option<&CacheGroupItems> {
        self.0.iter().find(|items| items.group == group)
    }

    /// How many items there are in all groups together.
    pub fn len(&self) -> usize {
        self.0.iter().map(|items| items.items.len()).sum()
    }

    /// True if no group is named.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The same items as lists, for a frame.
    pub fn lists(&self) -> CacheGroupLists {
        let list = |items: &CacheGroupItems| CacheGroupList {
            group: items.group,
            first: items.first,
            items: items.items.list().clone(),
        };
        CacheGroupLists(self.0.iter().map(list).collect())
    }
}

impl IntoIterator for RequestCacheGroups {
    type Item = CacheGroupItems;
    type IntoIter = std::vec::IntoIter<CacheGroupItems>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn items(group: u16, pages: &[u32]) -> CacheGroupItems {
        let list = PageList::from_pages(pages.iter().copied()).unwrap();
        CacheGroupItems::new(group, Pages::unpooled(list).unwrap())
    }

    #[test]
    fn groups_are_kept_by_rising_number_and_each_once() {
        let mut groups = RequestCacheGroups::none();
        groups.push(items(3, &[1])).unwrap();
        groups.push(items(1, &[5, 6])).unwrap();
        let refused = groups.push(items(3, &[9])).unwrap_err();
        assert_eq!(
            (refused.items, refused.error),
            (items(3, &[9]), RequestCacheGroupsError::Twice { group: 3 })
        );
        assert_eq!(groups.iter().map(|items| items.group).collect::<Vec<_>>(), [1, 3]);
        assert_eq!((groups.len(), groups.lists().runs()), (3, 2));
        assert_eq!(groups.take(1), Some(items(1, &[5, 6])));
        assert_eq!(groups.take(1), None);
    }

    #[test]
    fn no_request_names_more_groups_than_the_bound() {
        let mut groups = RequestCacheGroups::none();
        for group in 0..16 {
            groups.push(items(group, &[0])).unwrap();
        }
        assert_eq!(
            groups.push(items(16, &[0])).unwrap_err().error,
            RequestCacheGroupsError::TooMany { got: 17 }
        );
        assert_eq!(groups.take(3), Some(items(3, &[0])));
        groups.push(CacheGroupItems { first: MAX_PAGES, ..items(20, &[]) }).unwrap();
        let late = CacheGroupItems { first: MAX_PAGES + 1, ..items(0, &[]) };
        assert_eq!(
            RequestCacheGroups::none().push(late).unwrap_err().error,
            RequestCacheGroupsError::First { group: 0, first: MAX_PAGES + 1 }
        );
    }

    #[test]
    fn wire_lists_are_validated() {
        let parse = |text: &str| serde_json::from_str::<CacheGroupLists>(text);
        let one = |group: u16| format!(r#"{{"group":{group},"first":0,"items":[[0,1]]}}"#);
        assert!(parse(&format!("[{},{}]", one(1), one(2))).is_ok());
        assert!(parse(&format!("[{},{}]", one(1), one(1))).is_err());
        assert!(parse(&format!("[{},{}]", one(2), one(1))).is_err());
        assert!(parse(r#"[{"group":0,"first":16777217,"items":[]}]"#).is_err());
        assert!(parse(r#"[{"group":0,"first":16777216,"items":[]}]"#).is_ok());
        let many: Vec<String> = (0..17).map(one).collect();
        assert!(parse(&format!("[{}]", many.join(","))).is_err());
        assert!(parse(&format!("[{}]", many[..16].join(","))).is_ok());
        assert!(parse("[]").unwrap().is_empty() && RequestCacheGroups::none().is_empty());
        assert!(!parse(&format!("[{}]", one(1))).unwrap().is_empty());
        let order = parse(&format!("[{},{}]", one(5), one(2))).unwrap_err();
        assert!(order.to_string().contains("group 2 follows group 5"), "{order}");
    }
}
