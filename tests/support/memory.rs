//! A cache in shared memory, and an oracle that knows what every byte of it must be.

use kv_conformance::Random;
use kv_transfer::{Region, RegionRole};

use super::store::{Store, TransportKind};

/// The number of bytes between regions, which nothing may touch. It is odd, so that nothing is aligned by
/// chance.
const GAP: usize = 193;
/// Bytes of an aux row in each aux region.
pub const ROW: usize = 72;

/// How a cache lies in memory.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub pages: u32,
    /// Tensors (keys and values of each layer) that a page has a piece of.
    pub tensors: usize,
    /// The size of one such piece, in bytes.
    pub piece: usize,
    /// True for one region with whole pages; false for a region for each tensor.
    pub page_major: bool,
    pub rows: u32,
    pub aux_regions: usize,
}

impl Shape {
    /// A shape with a region for each tensor.
    pub fn layer_major(pages: u32, tensors: usize, piece: usize) -> Shape {
        Shape { pages, tensors, piece, page_major: false, rows: 64, aux_regions: 2 }
    }

    /// A shape with one region for all tensors.
    pub fn page_major(pages: u32, tensors: usize, piece: usize) -> Shape {
        Shape { page_major: true, aux_regions: 1, ..Shape::layer_major(pages, tensors, piece) }
    }

    /// Bytes of a page in all regions together.
    pub fn page_len(&self) -> usize {
        self.tensors * self.piece
    }

    /// Bytes of an aux row in all regions together.
    pub fn row_len(&self) -> usize {
        self.aux_regions * ROW
    }
}

/// The memory of one worker. `image` is a copy of what the memory must hold.
pub struct Memory {
    pub shape: Shape,
    pub store: Store,
    image: Vec<u8>,
    kv: Vec<Place>,
    aux: Vec<Place>,
}

/// The place of a region in the memory.
#[derive(Debug, Clone, Copy)]
struct Place {
    start: usize,
    item: usize,
}

impl Memory {
    /// Memory full of noise: zeroes would hide a copy of zeroes.
    pub fn new(shape: Shape, transport: TransportKind) -> Memory {
        let (pages, rows) = (shape.pages as usize, shape.rows as usize);
        let (regions, item) =
            if shape.page_major { (1, shape.page_len()) } else { (shape.tensors, shape.piece) };
        let mut end = GAP;
        let mut place = |item: usize, items: usize| {
            let start = end;
            end += item * items + GAP;
            Place { start, item }
        };
        let kv = (0..regions).map(|_| place(item, pages)).collect();
        let aux_regions = if rows == 0 { 0 } else { shape.aux_regions };
        let aux = (0..aux_regions).map(|_| place(ROW, rows)).collect();
        let image = Random::from_seed(end as u64).bytes(end);
        let store = Store::new(transport, end);
        store.write(0, &image);
        Memory { shape, store, image, kv, aux }
    }

    /// The regions that a worker registers.
    pub fn regions(&self) -> Vec<Region> {
        let region = |role, place: &Place, items: u32| {
            let addr = self.store.addr() + place.start as u64;
            let len = place.item as u64 * u64::from(items);
            Region::dram(role, addr, len, place.item as u64).memory(self.store.kind(), 0)
        };
        let kv = self.kv.iter().map(|place| region(RegionRole::Kv, place, self.shape.pages));
        kv.chain(self.aux.iter().map(|place| region(RegionRole::Aux, place, self.shape.rows))).collect()
    }

    /// Writes a page, as its owner.
    pub fn write_page(&mut self, page: u32, bytes: &[u8]) {
        put(&self.store, &self.kv, page, bytes);
        set(&mut self.image, &self.kv, page, bytes);
    }

    /// Writes an aux row, as its owner.
    pub fn write_row(&mut self, row: u32, bytes: &[u8]) {
        put(&self.store, &self.aux, row, bytes);
        set(&mut self.image, &self.aux, row, bytes);
    }

    /// The present content of a page.
    pub fn page(&self, page: u32) -> Vec<u8> {
        get(&self.store, &self.kv, page)
    }

    /// The present content of an aux row.
    pub fn row(&self, row: u32) -> Vec<u8> {
        get(&self.store, &self.aux, row)
    }

    /// Notes that a transfer has reported the page as written.
    pub fn page_arrived(&mut self, page: u32, bytes: &[u8], what: &dyn std::fmt::Display) {
        assert!(self.page(page) == bytes, "{what}: page {page} has wrong bytes");
        set(&mut self.image, &self.kv, page, bytes);
    }

    /// Notes that a transfer has reported the aux row as written.
    pub fn row_arrived(&mut self, row: u32, bytes: &[u8], what: &dyn std::fmt::Display) {
        assert!(self.row(row) == bytes, "{what}: aux row {row} has wrong bytes");
        set(&mut self.image, &self.aux, row, bytes);
    }

    /// Notes that a transfer has failed that would have written the page: each byte must be the old or the
    /// new one.
    pub fn page_failed(&mut self, page: u32, bytes: &[u8], what: &dyn std::fmt::Display) {
        settle(&self.store, &mut self.image, &self.kv, page, bytes, what);
    }

    /// Notes the same of an aux row.
    pub fn row_failed(&mut self, row: u32, bytes: &[u8], what: &dyn std::fmt::Display) {
        settle(&self.store, &mut self.image, &self.aux, row, bytes, what);
    }

    /// Checks that a page is as its owner left it.
    pub fn check_page(&self, page: u32, what: &dyn std::fmt::Display) {
        let len = self.kv.iter().map(|place| place.item).max().unwrap_or(0);
        assert!(!self.differs(page, len), "{what}: page {page} was touched");
    }

    /// True if something other than the owner has written into the first bytes of the page.
    pub fn is_touched(&self, page: u32) -> bool {
        self.differs(page, 64)
    }

    /// True if the first bytes of some piece of the page differ from what they must be.
    fn differs(&self, page: u32, most: usize) -> bool {
        let mut bytes = vec![0; most];
        self.kv.iter().any(|place| {
            let (start, bytes) =
                (place.start + page as usize * place.item, &mut bytes[..most.min(place.item)]);
            self.store.read(start, bytes);
            *bytes != self.image[start..start + bytes.len()]
        })
    }

    /// Checks every byte, also those between the regions.
    pub fn check_all(&self, what: &str) {
        let mut bytes = vec![0; self.image.len()];
        self.store.read(0, &mut bytes);
        // The comparison of slices is fast also in a test that is not optimised. The walk is for the message.
        let first_wrong = || bytes.iter().zip(&self.image).position(|(is, must)| is != must);
        let wrong = if bytes == self.image { None } else { first_wrong() };
        assert_eq!(wrong, None, "{what}: first wrong byte of {} ({:?})", bytes.len(), self.shape);
    }
}

fn put(store: &Store, places: &[Place], item: u32, bytes: &[u8]) {
    let mut rest = bytes;
    for place in places {
        let (piece, after) = rest.split_at(place.item);
        store.write(place.start + item as usize * place.item, piece);
        rest = after;
    }
    assert!(rest.is_empty());
}

fn get(store: &Store, places: &[Place], item: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    for place in places {
        let at = bytes.len();
        bytes.resize(at + place.item, 0);
        store.read(place.start + item as usize * place.item, &mut bytes[at..]);
    }
    bytes
}

fn set(image: &mut [u8], places: &[Place], item: u32, bytes: &[u8]) {
    let mut rest = bytes;
    for place in places {
        let (piece, after) = rest.split_at(place.item);
        image[place.start + item as usize * place.item..][..place.item].copy_from_slice(piece);
        rest = after;
    }
}

fn of(image: &[u8], places: &[Place], item: u32) -> Vec<u8> {
    let piece = |place: &Place| image[place.start + item as usize * place.item..][..place.item].to_vec();
    places.iter().flat_map(piece).collect()
}

fn settle(
    store: &Store,
    image: &mut [u8],
    places: &[Place],
    item: u32,
    new: &[u8],
    what: &dyn std::fmt::Display,
) {
    let (is, old) = (get(store, places, item), of(image, places, item));
    let first = || is.iter().zip(old.iter().zip(new)).position(|(is, (old, new))| is != old && is != new);
    let strange = if is == old || is == new { None } else { first() };
    assert_eq!(strange, None, "{what}: a byte of item {item} is neither old nor new");
    set(image, places, item, &is);
}

/// The content of the page at `position` of a request.
pub fn page_content(content: u64, position: usize, len: usize) -> Vec<u8> {
    Random::from_seed(content.wrapping_mul(0x1_0001).wrapping_add(position as u64 + 1)).bytes(len)
}

/// The content of the aux row of a request.
pub fn row_content(content: u64, len: usize) -> Vec<u8> {
    Random::from_seed(!content).bytes(len)
}
