//! The memory of a rank, in which every byte knows which one of the model's it is.

use std::ops::Range;

use kv_core::{Axis, Descriptor, Geometry, Holds, Op, Parallel, RegionRole, RegionShape};

use crate::engine::{Engine, Lists, Model, Request};

/// The name of a byte: lane (KV, groups), kind, layer, token, head, place.
type Name = (u8, u8, u8, u16, u8, u8);

/// Bytes of an aux row.
pub const AUX_LEN: u64 = 8;

/// By region.
pub struct Memory(Vec<Vec<Option<Name>>>);

impl Memory {
    pub fn empty(geometry: &Geometry) -> Memory {
        Memory(geometry.regions.iter().map(|region| vec![None; region.len as usize]).collect())
    }

    /// No memory.
    pub fn none() -> Memory {
        Memory(Vec::new())
    }

    /// Marks an aux row as that of a rank.
    pub fn fill_aux(&mut self, geometry: &Geometry, row: usize) {
        let Parallel { tp_rank, pp_rank, pcp_rank, .. } = geometry.parallel;
        let name = (255, pp_rank as u8, tp_rank as u8, pcp_rank as u16, 0, 0);
        self.aux_row(geometry, row).fill(Some(name));
    }

    /// Of which stage an aux row is; empties it. All its bytes must be of one rank, the first of its
    /// context-parallel group.
    pub fn take_aux(&mut self, geometry: &Geometry, row: usize) -> u8 {
        let row = self.aux_row(geometry, row);
        let name = row[0].unwrap();
        assert!(name.0 == 255 && name.3 == 0 && row.iter().all(|byte| *byte == Some(name)));
        row.fill(None);
        name.1
    }

    fn aux_row(&mut self, geometry: &Geometry, row: usize) -> &mut [Option<Name>] {
        let start = row * AUX_LEN as usize;
        &mut self.0[geometry.aux_regions().start][start..start + AUX_LEN as usize]
    }

    /// Every token that the pages of a request have room for.
    pub fn filled(model: &Model, geometry: &Geometry, lists: &Lists) -> Memory {
        let mut memory = Memory::empty(geometry);
        for_each(model, geometry, lists, |region, offset, name| {
            let byte = &mut memory.0[region][offset];
            assert_eq!(*byte, None, "two bytes of the model in one place: the oracle is wrong");
            *byte = Some(name);
        });
        memory
    }

    /// Carries out a descriptor between this memory and that of a source.
    pub fn take(&mut self, source: &Memory, descriptor: &Descriptor, op: Op) {
        let ends = [
            (descriptor.local_region, descriptor.local_offset),
            (descriptor.remote_region, descriptor.remote_offset),
        ];
        let [from, to] = if op == Op::Write { ends } else { [ends[1], ends[0]] };
        let range = |offset: u64| offset as usize..(offset + descriptor.len) as usize;
        let bytes = &source.0[from.0 as usize][range(from.1)];
        self.0[to.0 as usize][range(to.1)].copy_from_slice(bytes);
    }

    /// What the forward pass does: writes the KV of some layers and tokens of a request.
    pub fn compute(&mut self, truth: &Memory, layers: &Range<u32>, tokens: impl Fn(usize) -> bool) {
        for (region, truth) in self.0.iter_mut().zip(&truth.0) {
            for (byte, name) in region.iter_mut().zip(truth) {
                let computed = |name: &Name| {
                    name.0 == 0 && layers.contains(&u32::from(name.2)) && tokens(usize::from(name.3))
                };
                if name.as_ref().is_some_and(computed) {
                    *byte = *name;
                }
            }
        }
    }

    /// What the forward pass leaves behind: the items of all cache groups.
    pub fn compute_groups(&mut self, truth: &Memory) {
        for (byte, name) in self.0.iter_mut().flatten().zip(truth.0.iter().flatten()) {
            if name.as_ref().is_some_and(|name| (1..255).contains(&name.0)) {
                *byte = *name;
            }
        }
    }

    /// Compares with what a decode rank must have; how many bytes that is.
    pub fn compare(
        &self,
        model: &Model,
        prefill: &Engine,
        geometry: &Geometry,
        request: &Request,
        rank: usize,
    ) -> u64 {
        let lists = &request.decode[rank];
        // Whole pages are moved, so all tokens for which both sides have room.
        let pages = request.tokens.div_ceil(prefill.page_size as usize);
        let room = pages * prefill.page_size as usize;
        let prefix = request.prefix[rank];
        let mut expected = Memory::empty(geometry);
        let mut count = 0;
        for_each(model, geometry, lists, |region, offset, name| {
            let token = usize::from(name.3);
            let wanted = if name.0 == 0 {
                let page = token / geometry.page_size as usize;
                page / geometry.layout.dcp_size as usize >= prefix && token < room
            } else {
                let group = usize::from(name.0) - 1;
                let size = prefill.group_pages[group] as usize;
                let window = request.windows[group];
                let own = geometry.layout.groups[group].page_size as usize;
                let sent = if request.keeps_all { 0 } else { window / size * size };
                token >= sent.max(window / own * own)
                    && token < request.group_tokens[group].div_ceil(size) * size
            };
            if wanted {
                expected.0[region][offset] = Some(name);
                count += 1;
            }
        });
        for (number, (got, wanted)) in self.0.iter().zip(&expected.0).enumerate() {
            for (offset, (got, wanted)) in got.iter().zip(wanted).enumerate() {
                assert_eq!(got, wanted, "region {number}, byte {offset}");
            }
        }
        count
    }
}

/// Every byte of a request on a rank: its region, its offset, its name.
fn for_each(model: &Model, geometry: &Geometry, lists: &Lists, mut see: impl FnMut(usize, usize, Name)) {
    for (number, region) in geometry.regions.iter().enumerate() {
        let group = usize::from(region.group);
        let (lane, pages, page_size, kernel) = match region.role {
            RegionRole::Aux => continue,
            RegionRole::Kv => (0, &lists.pages, geometry.page_size, geometry.kernel_page_size()),
            _ => {
                let size = geometry.layout.groups[group].page_size;
                (1 + group as u8, &lists.groups[group], size, size)
            }
        };
        let heads = heads(model, geometry, region);
        let kinds: Vec<u8> = match region.holds {
            Holds::KeyValue => vec![0, 1],
            Holds::Value => vec![1],
            Holds::State(number) => vec![10 + number],
            Holds::Index => vec![3],
            _ => vec![0],
        };
        let layers: Vec<u32> = region.layer_range().collect();
        let head_dim = match lane {
            0 => model.shape(layers[0]).1,
            _ => model.head_dim,
        };
        let (first, end) = region.form.elements.unwrap_or((0, head_dim));
        let axes = geometry.axes_of(region);
        // The place of an element: its pack along the axis, and its place in the pack.
        let count = u64::from(end - first);
        let pack = if axes.dim_is_innermost() { count } else { u64::from(axes.pack()) };
        for (position, page) in pages.iter().enumerate() {
            let context = if lane == 0 { geometry.layout.dcp_size as usize } else { 1 };
            let place = if lane == 0 { geometry.layout.dcp_rank as usize } else { 0 };
            let whole = position * context + place;
            for within in 0..page_size {
                let token = whole * page_size as usize + within as usize;
                let physical = u64::from(*page) * u64::from(page_size / kernel) + u64::from(within / kernel);
                for (l, layer) in layers.iter().enumerate() {
                    for (p, kind) in kinds.iter().enumerate() {
                        for (h, head) in heads.clone().enumerate() {
                            for d in 0..count / pack {
                                let mut piece = physical;
                                for axis in axes.order() {
                                    let (index, extent) = match axis {
                                        Axis::Layer => (l, layers.len()),
                                        Axis::Part => (p, kinds.len()),
                                        Axis::Token => ((within % kernel) as usize, kernel as usize),
                                        Axis::Head => (h, heads.len()),
                                        Axis::Dim => (d as usize, (count / pack) as usize),
                                    };
                                    piece = piece * extent as u64 + index as u64;
                                }
                                let bytes = pack * model.element;
                                let of_head = (u64::from(first) + d * pack) * model.element;
                                for byte in 0..bytes {
                                    let place = (of_head + byte) as u8;
                                    let name = (lane, *kind, *layer as u8, token as u16, head as u8, place);
                                    see(number, (piece * bytes + byte) as usize, name);
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// The heads of the model in a region: a rank has its share, or one that some neighbours have too.
fn heads(model: &Model, geometry: &Geometry, region: &RegionShape) -> std::ops::Range<u32> {
    let total = match region.role {
        RegionRole::Kv if region.holds.is_replicated() => return 0..1,
        RegionRole::Kv => model.shape(region.layer.unwrap_or(0)).0,
        _ => model.groups[usize::from(region.group)].heads,
    };
    let (ranks, rank) = (geometry.parallel.tp_size, geometry.parallel.tp_rank);
    if total >= ranks {
        let share = total / ranks;
        rank * share..(rank + 1) * share
    } else {
        let head = rank / (ranks / total);
        head..head + 1
    }
}
