//! Random models, the engines that serve them, and a request that both have.

use std::ops::Range;

use kv_core::layout::{Axes, Form};
use kv_core::{Axis, CacheGroup, Geometry, Holds, KvArgs, Layout, Parallel, Region, RegionRole};

use crate::memory::AUX_LEN;
use crate::rng::Rng;

/// Sizes of heads that packs of 1, 2 and 4 divide, as far as they are not larger.
const HEAD_DIMS: &[u32] = &[1, 1, 1, 2, 2, 4, 8, 12];

/// What both engines serve.
#[derive(Debug, Clone)]
pub struct Model {
    pub layers: u32,
    pub heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// The heads and their elements in the layers that differ from the others.
    pub other: Vec<Option<(u32, u32)>>,
    /// Kinds of bytes of each layer.
    pub kinds: Vec<Holds>,
    /// Bytes of an element.
    pub element: u64,
    pub groups: Vec<Group>,
}

/// A cache group of the model.
#[derive(Debug, Clone)]
pub struct Group {
    pub slots: bool,
    pub heads: u32,
    pub kinds: Vec<Holds>,
    /// The layers that have it: perhaps none of some pipeline stage.
    pub layers: Range<u32>,
}

impl Model {
    pub fn random(rng: &mut Rng) -> Model {
        let kinds = match rng.below(5) {
            0 => vec![Holds::Latent],
            1 => vec![Holds::Latent, Holds::Index],
            _ => vec![Holds::Key, Holds::Value],
        };
        let layers = 1 + rng.below(4) as u32;
        let some_layers = |rng: &mut Rng| {
            let first = if rng.chance(2) { 0 } else { rng.below(layers as usize) as u32 };
            let count = 1 + rng.below((layers - first) as usize) as u32;
            if rng.chance(2) { 0..layers } else { first..first + count }
        };
        let mut groups = Vec::new();
        if rng.chance(3) {
            // The states of recurrent layers, or the scales of keys and values.
            let kinds = match rng.below(3) {
                0 => vec![Holds::Key, Holds::Value],
                states => (0..states as u8).map(Holds::State).collect(),
            };
            groups.push(Group { slots: true, heads: 8, kinds, layers: some_layers(rng) });
            if rng.chance(2) {
                let heads = rng.pick(&[1, 2, 8]);
                let kinds = vec![Holds::Key, Holds::Value];
                groups.push(Group { slots: false, heads, kinds, layers: some_layers(rng) });
            }
        }
        let (heads, head_dim) = (rng.pick(&[1, 2, 4, 8, 3]), rng.pick(HEAD_DIMS));
        let mixed = rng.chance(3);
        let other = (0..layers)
            .map(|_| (mixed && rng.chance(2)).then(|| (rng.pick(&[1, 2, 4, heads]), rng.pick(HEAD_DIMS))));
        let other = other.collect();
        Model { layers, heads, head_dim, other, kinds, element: 1 + u64::from(rng.chance(4)), groups }
    }

    /// The heads of a layer, and the elements of each.
    pub fn shape(&self, layer: u32) -> (u32, u32) {
        self.other[layer as usize].unwrap_or((self.heads, self.head_dim))
    }

    fn is_latent(&self) -> bool {
        self.kinds.contains(&Holds::Latent)
    }
}

/// All ranks of an engine.
#[derive(Debug, Clone)]
pub struct Engine {
    pub ranks: Vec<Geometry>,
    pub args: Vec<KvArgs>,
    pub page_size: u32,
    pub num_pages: u32,
    pub context: u32,
    pub group_pages: Vec<u32>,
}

impl Engine {
    pub fn random(rng: &mut Rng, model: &Model, peer: Option<&Engine>) -> Engine {
        let fits = |tp: &u32| {
            let even = |heads: u32| heads.is_multiple_of(*tp) || tp.is_multiple_of(heads);
            let groups = model.groups.iter().all(|group| even(group.heads));
            let layers = (0..model.layers).all(|layer| even(model.shape(layer).0));
            groups && (model.is_latent() || (even(model.heads) && layers))
        };
        let mut sizes: Vec<u32> = [1, 2, 3, 4, 6, 8].into_iter().filter(fits).collect();
        if let Some(peer) = peer {
            let there = peer.ranks[0].parallel.tp_size;
            sizes.retain(|here| here.is_multiple_of(there) || there.is_multiple_of(*here));
        }
        // Most engines of one deployment are configured alike.
        if let Some(peer) = peer.filter(|_| rng.chance(6)) {
            return peer.clone();
        }
        let mut tp = rng.pick(&sizes);
        let pp = 1 + rng.below(model.layers.min(3) as usize) as u32;
        let mut context = 1;
        let mut page_size = rng.pick(&[1, 2, 3, 4, 6, 8]);
        let dealt = model.is_latent() && model.groups.is_empty();
        if let Some(peer) = peer {
            if peer.context > 1 || (dealt && rng.chance(4)) {
                page_size = peer.page_size;
                context = rng.pick(&[1, 2, 4]);
                let ranks = peer.ranks[0].parallel.tp_size / peer.context;
                tp = context * ranks;
            }
        } else if dealt && rng.chance(3) {
            context = rng.pick(&[1, 2]);
            tp = context * rng.pick(&[1, 2]);
        }
        let pcp_size = rng.pick(&[1, 1, 1, 2, 3]);
        let kernel = rng.pick(&divisors(page_size));
        // An engine may have the elements of its heads innermost, as most have, or anywhere.
        let any_axes = rng.chance(2);
        let axes = axes(rng, any_axes, model.head_dim);
        let style = Style::random(rng, any_axes, axes);
        let mut cuts: Vec<u32> = rng.shuffled((1..model.layers).collect());
        cuts.truncate(pp as usize - 1);
        cuts.sort_unstable();
        let starts = [0].into_iter().chain(cuts.iter().copied());
        let ends = cuts.iter().copied().chain([model.layers]);
        let stages: Vec<(u32, u32)> = starts.zip(ends).collect();
        let num_pages = 24 + rng.below(8) as u32;
        let group_pages: Vec<u32> =
            model.groups.iter().map(|group| if group.slots { 1 } else { rng.pick(&[1, 2, 4]) }).collect();
        let layout = Layout::default().with(|layout| {
            layout.axes = axes;
            layout.total_kv_heads = if model.is_latent() { 0 } else { model.heads };
            layout.kernel_page_size = if kernel == page_size { 0 } else { kernel };
            layout.dcp_size = context;
            // Of one stage, everything is known without.
            layout.stages = if pp == 1 && rng.chance(2) { Vec::new() } else { stages.clone() };
        });
        let mut all = Vec::new();
        for (pp_rank, stage) in (0..).zip(&stages) {
            let shape = |layer| model.shape(layer);
            let cells = cells(rng, &style, &model.kinds, stage.0..stage.1, &shape);
            let layers_of = |group: &Group| group.layers.start.max(stage.0)..group.layers.end.min(stage.1);
            let of_group = |group: &Group| {
                let shape = |_| (group.heads, model.head_dim);
                self::cells(rng, &style, &group.kinds, layers_of(group), &shape)
            };
            let groups: Vec<_> = model.groups.iter().map(of_group).collect();
            for (pcp_rank, tp_rank) in (0..pcp_size).flat_map(|cp| (0..tp).map(move |tp| (cp, tp))) {
                let (tp_size, pp_size) = (tp, pp);
                let parallel = Parallel::default().with(|parallel| {
                    parallel.tp_size = tp_size;
                    parallel.tp_rank = tp_rank;
                    parallel.pp_size = pp_size;
                    parallel.pp_rank = pp_rank;
                    parallel.pcp_size = pcp_size;
                    parallel.pcp_rank = pcp_rank;
                });
                let number = (pp_rank * pcp_size + pcp_rank) * tp + tp_rank;
                let mut layout = layout.clone().with(|layout| layout.dcp_rank = tp_rank % context);
                let heads = if model.is_latent() { 1 } else { (model.heads / tp).max(1) };
                let mut builder = KvArgs::builder("e", number);
                builder = builder.pages(num_pages, page_size).heads(heads, model.head_dim);
                let mut addr = 0;
                let mut region = |role, items: u32, item_len: u64, cell: &Cell| {
                    addr += 1 << 32;
                    let mut region = Region::dram(role, addr, u64::from(items) * item_len, item_len);
                    region.form = cell.form;
                    region.layers(cell.layers.clone()).holds(cell.holds)
                };
                for cell in &cells {
                    let (total, head_dim) = model.shape(cell.layers.start);
                    let heads = if cell.holds.is_replicated() { 1 } else { (total / tp).max(1) };
                    let item = cell.elements() * u64::from(page_size * heads) * model.element;
                    let mut region = region(RegionRole::Kv, num_pages, item, cell);
                    // What is as in the rest of the cache may be said nevertheless.
                    if !cell.holds.is_replicated() && (total != model.heads || style.says_all) {
                        region = region.heads((total / tp).max(1), total);
                    }
                    if head_dim != model.head_dim || style.says_all {
                        region = region.head_dim(head_dim);
                    }
                    builder = builder.region(region);
                }
                for (number, group) in (0..).zip(&model.groups) {
                    let heads = (group.heads / tp).max(1);
                    let tokens = group_pages[usize::from(number)];
                    layout.groups.push(CacheGroup::pages(tokens, heads, group.heads));
                    for cell in &groups[usize::from(number)] {
                        let item = cell.elements() * u64::from(tokens * heads) * model.element;
                        builder = builder.region(region(RegionRole::State, 12, item, cell).group(number));
                    }
                }
                let rows = Region::dram(RegionRole::Aux, 1 << 50, 4 * AUX_LEN, AUX_LEN);
                all.push(builder.parallel(parallel).layout(layout).region(rows).build().unwrap());
            }
        }
        let ranks = all.iter().map(|args| args.geometry().clone()).collect();
        Engine { ranks, args: all, page_size, num_pages, context, group_pages }
    }
}

fn divisors(number: u32) -> Vec<u32> {
    (1..=number).filter(|divisor| number.is_multiple_of(*divisor)).chain([number]).collect()
}

/// The axes in any order: the elements of a head innermost, or in packs.
fn axes(rng: &mut Rng, anywhere: bool, elements: u32) -> Axes {
    let mut all = rng.shuffled(vec![Axis::Layer, Axis::Part, Axis::Token, Axis::Head]);
    if !anywhere || rng.chance(3) {
        return Axes::new([all[0], all[1], all[2], all[3]]);
    }
    all.insert(rng.below(5), Axis::Dim);
    let packs: Vec<u32> = [1, 2, 4].into_iter().filter(|pack| elements.is_multiple_of(*pack)).collect();
    Axes::with_dim([all[0], all[1], all[2], all[3], all[4]]).packed(rng.pick(&packs))
}

/// How the regions of an engine differ from each other.
struct Style {
    /// Every region may have its own axes.
    own_axes: bool,
    any_axes: bool,
    /// The axes of the layout.
    axes: Axes,
    /// Heads of at least 8 elements may be in several regions.
    cuts_heads: bool,
    says_all: bool,
}

impl Style {
    fn random(rng: &mut Rng, any_axes: bool, axes: Axes) -> Style {
        let (own_axes, cuts_heads, says_all) = (rng.chance(3), rng.chance(4), rng.chance(8));
        Style { own_axes, any_axes, axes, cuts_heads, says_all }
    }
}

/// What a region holds.
#[derive(Debug, Clone)]
struct Cell {
    layers: Range<u32>,
    holds: Holds,
    form: Form,
    /// How many elements of a head.
    count: u32,
}

impl Cell {
    fn elements(&self) -> u64 {
        self.layers.len() as u64 * u64::from(self.holds.parts() * self.count)
    }
}

/// Regions for some layers: one each, one for all, or several for some; keys and values apart or not; all
/// elements of a head, or some.
fn cells(
    rng: &mut Rng,
    style: &Style,
    kinds: &[Holds],
    layers: Range<u32>,
    shape: &dyn Fn(u32) -> (u32, u32),
) -> Vec<Cell> {
    let packed = kinds == [Holds::Key, Holds::Value] && rng.chance(2);
    let kinds = if packed { vec![Holds::KeyValue] } else { kinds.to_vec() };
    let several = rng.below(3);
    let mut cells = Vec::new();
    for holds in kinds {
        let mut start = layers.start;
        while start < layers.end {
            let alike = (start..layers.end).take_while(|layer| shape(*layer) == shape(start)).count() as u32;
            let count = match several {
                0 => 1,
                1 => alike,
                _ => 1 + rng.below(alike as usize) as u32,
            };
            let head_dim = shape(start).1;
            for elements in parts_of_heads(rng, style, head_dim) {
                let form = form(rng, style, head_dim, &elements);
                let count_of = elements.end - elements.start;
                cells.push(Cell { layers: start..start + count, holds, form, count: count_of });
            }
            start += count;
        }
    }
    rng.shuffled(cells)
}

fn parts_of_heads(rng: &mut Rng, style: &Style, head_dim: u32) -> Vec<Range<u32>> {
    let mut cuts = vec![0, head_dim];
    if style.cuts_heads && head_dim >= 8 && !rng.chance(3) {
        cuts.insert(1, 4 * (1 + rng.below(head_dim as usize / 4 - 1) as u32));
    }
    cuts.windows(2).map(|cut| cut[0]..cut[1]).collect()
}

fn form(rng: &mut Rng, style: &Style, head_dim: u32, elements: &Range<u32>) -> Form {
    let mut form = Form::default();
    let count = elements.end - elements.start;
    // The axes of the layout may have packs that this region's elements are no multiple of.
    if !count.is_multiple_of(style.axes.pack()) || (style.own_axes && rng.chance(2)) {
        form.axes = Some(axes(rng, style.any_axes, count));
    }
    if count != head_dim || style.says_all {
        form.elements = Some((elements.start, elements.end));
    }
    form
}

/// The pages and items of a request on one rank.
#[derive(Debug, Clone, Default)]
pub struct Lists {
    pub pages: Vec<u32>,
    pub groups: Vec<Vec<u32>>,
}

/// A request, on all ranks of both engines.
#[derive(Debug, Clone)]
pub struct Request {
    pub tokens: usize,
    pub group_tokens: Vec<usize>,
    /// The token with which the window of each group begins.
    pub windows: Vec<usize>,
    /// The prefill side has the items before the windows, too.
    pub keeps_all: bool,
    pub prefill: Vec<Lists>,
    pub decode: Vec<Lists>,
    /// Pages that each decode rank has already.
    pub prefix: Vec<usize>,
}

impl Request {
    pub fn random(rng: &mut Rng, model: &Model, prefill: &Engine, decode: &Engine) -> Request {
        let tokens = rng.below(20 * prefill.page_size.min(decode.page_size) as usize + 1).min(40);
        let group_tokens: Vec<usize> =
            model.groups.iter().map(|group| if group.slots { 1 } else { 1 + rng.below(10) }).collect();
        let mut lists = |engine: &Engine| -> Vec<Lists> {
            let whole = tokens.div_ceil(engine.page_size as usize);
            let contexts: Vec<Vec<u32>> = (0..engine.context as usize)
                .map(|place| {
                    let count = (whole + engine.context as usize - 1 - place) / engine.context as usize;
                    rng.pages(engine.num_pages, count)
                })
                .collect();
            let groups: Vec<Vec<u32>> = group_tokens
                .iter()
                .zip(&engine.group_pages)
                .map(|(tokens, size)| rng.pages(12, tokens.div_ceil(*size as usize)))
                .collect();
            let of = |rank: &Geometry| Lists {
                pages: contexts[rank.layout.dcp_rank as usize].clone(),
                groups: groups.clone(),
            };
            engine.ranks.iter().map(of).collect()
        };
        let (prefill, decode) = (lists(prefill), lists(decode));
        let share = if rng.chance(2) { 0 } else { rng.below(100) };
        let prefix = decode.iter().map(|lists| lists.pages.len() * share / 100).collect();
        let windows = vec![0; group_tokens.len()];
        Request { tokens, group_tokens, windows, keeps_all: false, prefill, decode, prefix }
    }

    /// True if some rank may have nothing to send for want of pages.
    pub fn is_short(&self) -> bool {
        let short = |lists: &Lists| lists.pages.len() < 3;
        self.decode.iter().chain(&self.prefill).any(short)
            || self.prefix.iter().zip(&self.decode).any(|(prefix, lists)| lists.pages.len() - prefix < 5)
    }
}
