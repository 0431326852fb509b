//! The caches of Rust servers as they are in memory move between unequal engines, over kv-local: paged caches with
//! packed keys and transposed values, layers that differ, latents in two tensors, and the scales of fp8. The oracle
//! is the server's own index arithmetic; every byte of both sides is compared.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod engine;

use kv_transfer::layout::{Axes, Constant, HDN, HND, NHD};
use kv_transfer::prelude::*;
use kv_transfer::{CacheGroup, Cause, Holds, Layout, Phase, TransferMode};

use engine::{BLOCKS, Engine, Index, Request, SLOTS, Tensor, end, hand_over, plain};

/// How a server lays out keys and values, with the words for the worker and the arithmetic of its kernels.
#[derive(Debug, Clone, Copy)]
enum Style {
    /// vllm.rs with flash attention: `[blocks, block, heads, head_dim]`.
    Flash,
    /// vllm.rs with paged attention, and candle-vllm: keys `[blocks, heads, head_dim / 8, block, 8]`, values
    /// `[blocks, heads, head_dim, block]`.
    Paged,
    /// `[blocks, heads, block, head_dim]`.
    HeadMajor,
}

fn flash([_, heads, dims]: [usize; 3], [token, head, dim]: [usize; 3]) -> usize {
    (token * heads + head) * dims + dim
}

fn packed_keys([block, _, dims]: [usize; 3], [token, head, dim]: [usize; 3]) -> usize {
    ((head * (dims / 8) + dim / 8) * block + token) * 8 + dim % 8
}

fn transposed_values([block, _, dims]: [usize; 3], [token, head, dim]: [usize; 3]) -> usize {
    (head * dims + dim) * block + token
}

fn head_major([block, _, dims]: [usize; 3], [token, head, dim]: [usize; 3]) -> usize {
    (head * block + token) * dims + dim
}

impl Style {
    /// Of keys and of values.
    fn of(self) -> [(Axes, Index); 2] {
        match self {
            Style::Flash => [(NHD, flash), (NHD, flash)],
            Style::Paged => [(HDN.packed(8), packed_keys), (HDN, transposed_values)],
            Style::HeadMajor => [(HND, head_major), (HND, head_major)],
        }
    }
}

/// The layers of a model: KV heads and elements of a head of each.
type Model = Vec<(usize, usize)>;

/// A tensor of a region with these axes, whose address is not known yet.
fn tensor(role: RegionRole, layer: usize, part: u64, block: usize, element: usize, index: Index) -> Tensor {
    let region = Region::dram(role, 0, 0, 0).layer(layer as u32);
    Tensor { region, part, block, heads: 0..1, dims: 0..1, element, index }
}

/// The same tensor with these heads and elements of each, and so with a length.
fn sized(mut tensor: Tensor, heads: std::ops::Range<usize>, dims: std::ops::Range<usize>) -> Tensor {
    let items = if tensor.region.role == RegionRole::Kv { BLOCKS } else { SLOTS };
    tensor.region.item_len = (tensor.block * heads.len() * dims.len() * tensor.element) as u64;
    tensor.region.len = u64::from(items) * tensor.region.item_len;
    Tensor { heads, dims, ..tensor }
}

/// The heads of a rank: its share, or one that some of its neighbours have, too.
fn share(total: usize, tp: usize, rank: usize) -> std::ops::Range<usize> {
    let first = rank * total / tp;
    first..first + (total / tp).max(1)
}

/// Keys and values of all layers, for each of `tp` ranks. Every region says its axes; those of layers that differ from
/// the first say their heads, too.
fn attention(
    model: &Model,
    tp: usize,
    block: usize,
    element: usize,
    style: impl Fn(usize) -> Style,
) -> Vec<Vec<Tensor>> {
    let of_rank = |rank| {
        let of_layer = |(layer, &(total, dim)): (usize, &(usize, usize))| {
            let heads = share(total, tp, rank);
            let parts = [Holds::Key, Holds::Value].into_iter().zip(style(layer).of());
            let tensors = (0..).zip(parts).map(|(part, (holds, (axes, index)))| {
                let mut tensor = tensor(RegionRole::Kv, layer, part, block, element, index);
                tensor.region = tensor.region.holds(holds).axes(axes);
                if model[layer] != model[0] {
                    tensor.region =
                        tensor.region.heads(heads.len() as u32, total as u32).head_dim(dim as u32);
                }
                sized(tensor, heads.clone(), 0..dim)
            });
            tensors.collect::<Vec<_>>()
        };
        model.iter().enumerate().flat_map(of_layer).collect()
    };
    (0..tp).map(of_rank).collect()
}

/// An engine of `tp` ranks that serves the model in bf16.
fn attention_engine(
    role: WorkerRole,
    addr: &str,
    model: &Model,
    tp: usize,
    block: usize,
    style: impl Fn(usize) -> Style,
) -> Engine {
    let (total, dim) = model[0];
    let layout = Layout::default().with(|layout| layout.total_kv_heads = total as u32);
    let describe = plain(block as u32, (share(total, tp, 0).len() as u32, dim as u32), "bf16", layout);
    Engine::start(role, addr, attention(model, tp, block, 2, style), describe)
}

const MODES: [(u64, TransferMode); 2] = [(1, TransferMode::Push), (2, TransferMode::Pull)];

/// Hands requests of 64 tokens over in both modes. The blocks of both sides are in no order.
fn both_modes(mut prefill: Engine, mut decode: Engine, addr: &str, [here, there]: [usize; 2]) {
    for session in MODES {
        let scattered = |block: usize, by: u32| {
            Request::blocks((0..64 / block as u32).map(move |n| (n * by + session.0 as u32) % BLOCKS))
        };
        let requests = [scattered(here, 5), scattered(there, 7)];
        hand_over([&mut prefill, &mut decode], addr, [&requests[0], &requests[1]], session);
    }
    prefill.stop();
    decode.stop();
}

fn server() -> (KvBootstrapServer, String) {
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let addr = server.local_addr().to_string();
    (server, addr)
}

#[test]
fn packed_keys_and_transposed_values_arrive_in_flash_layout_at_another_tensor_parallel_size() {
    let (_server, addr) = server();
    let model = vec![(8, 32); 2];
    for (tp, there) in [(2, 1), (1, 2), (2, 4)] {
        let prefill = attention_engine(WorkerRole::Prefill, &addr, &model, tp, 16, |_| Style::Paged);
        let decode = attention_engine(WorkerRole::Decode, &addr, &model, there, 8, |_| Style::Flash);
        both_modes(prefill, decode, &addr, [16, 8]);
    }
}

#[test]
fn flash_layout_arrives_in_packed_keys_and_transposed_values_of_larger_blocks() {
    let (_server, addr) = server();
    let model = vec![(4, 16); 2];
    let prefill = attention_engine(WorkerRole::Prefill, &addr, &model, 1, 16, |_| Style::Flash);
    let decode = attention_engine(WorkerRole::Decode, &addr, &model, 2, 32, |_| Style::Paged);
    both_modes(prefill, decode, &addr, [16, 32]);
}

#[test]
fn layers_that_differ_in_heads_head_size_and_layout_arrive_layer_by_layer() {
    let (_server, addr) = server();
    // Of six layers, every third has a quarter of the heads and heads twice as large: more ranks than heads.
    let model: Model = (0..6).map(|layer| if layer % 3 == 2 { (2, 32) } else { (8, 16) }).collect();
    let mixed = |layer| if layer % 3 == 2 { Style::Flash } else { Style::Paged };
    let turned = |layer| if layer % 2 == 0 { Style::HeadMajor } else { Style::Paged };
    let prefill = attention_engine(WorkerRole::Prefill, &addr, &model, 4, 16, mixed);
    let decode = attention_engine(WorkerRole::Decode, &addr, &model, 2, 16, turned);
    both_modes(prefill, decode, &addr, [16, 16]);
}

/// The latent of each layer, in tensors of these elements: the first, and one past the last.
fn latent(layers: usize, tp: usize, block: usize, tensors: &[(usize, usize)]) -> Vec<Vec<Tensor>> {
    let of_rank = |_| {
        let of_layer = |layer| {
            tensors.iter().map(move |&(start, end)| {
                let mut tensor = tensor(RegionRole::Kv, layer, 2, block, 2, flash);
                tensor.region = tensor.region.holds(Holds::Latent).elements(start as u32..end as u32);
                sized(tensor, 0..1, start..end)
            })
        };
        (0..layers).flat_map(of_layer).collect()
    };
    (0..tp).map(of_rank).collect()
}

#[test]
fn a_latent_in_two_tensors_of_a_layer_arrives_in_one_and_back() {
    let (_server, addr) = server();
    let (one, two) = ([(0, 36)], [(0, 32), (32, 36)]);
    for (here, there) in [(&two[..], &one[..]), (&one[..], &two[..]), (&two[..], &two[..])] {
        let engine = |role, tp, block, tensors| {
            let describe = plain(block as u32, (1, 36), "bf16", Layout::default());
            Engine::start(role, &addr, latent(3, tp, block, tensors), describe)
        };
        let prefill = engine(WorkerRole::Prefill, 2, 16, here);
        let decode = engine(WorkerRole::Decode, 1, 32, there);
        both_modes(prefill, decode, &addr, [16, 32]);
    }
}

/// An engine with an fp8 cache whose scales are fixed.
fn fixed_scales(role: WorkerRole, addr: &str, tp: usize, scales: [f32; 2]) -> Engine {
    let model = vec![(4, 16); 2];
    let constants = ["k_scale", "v_scale"].into_iter().zip(scales);
    let constants = constants.map(|(name, scale)| Constant::new(name, &scale.to_le_bytes())).collect();
    let layout = Layout::default().with(|layout| {
        layout.total_kv_heads = 4;
        layout.constants = constants;
    });
    let describe = plain(16, (share(4, tp, 0).len() as u32, 16), "fp8_e4m3", layout);
    Engine::start(role, addr, attention(&model, tp, 16, 1, |_| Style::Flash), describe)
}

#[test]
fn fixed_scales_that_differ_are_refused_by_name_and_equal_ones_are_served() {
    let (_server, addr) = server();
    let mut prefill = fixed_scales(WorkerRole::Prefill, &addr, 2, [0.5, 2.0]);
    let other = fixed_scales(WorkerRole::Decode, &addr, 1, [0.5, 0.25]);
    let request = Request::blocks([3, 1]);
    let receiver = other.receiver(&addr, 9, &request, SessionOptions::default());
    let (back, failure) = end([&other, &prefill], receiver);
    assert_eq!(back, (2, 0));
    let failure = failure.unwrap();
    assert_eq!(failure.phase, Phase::Handshake);
    let Cause::Incompatible(mismatch) = &failure.cause else { panic!("{failure}") };
    assert_eq!(mismatch.field, "layout.constants (v_scale)");
    let shown = |scale: f32| {
        let bytes = scale.to_le_bytes().map(|byte| format!("{byte:02x}")).concat();
        format!("4 bytes ({bytes})")
    };
    assert_eq!((&mismatch.ours, &mismatch.theirs), (&shown(0.25), &shown(2.0)));
    other.check("refused");
    other.stop();

    let mut decode = fixed_scales(WorkerRole::Decode, &addr, 1, [0.5, 2.0]);
    let requests = [Request::blocks([7, 2]), Request::blocks([0, 5])];
    hand_over([&mut prefill, &mut decode], &addr, [&requests[0], &requests[1]], MODES[0]);
    prefill.stop();
    decode.stop();
}

/// An engine with an fp8 cache, whose ranks measure the scales of their heads: an `f32` for each layer, for keys and for
/// values, and for each head.
fn measured_scales(role: WorkerRole, addr: &str, tp: usize) -> Engine {
    let model = vec![(4, 16); 3];
    let mut ranks = attention(&model, tp, 16, 1, |_| Style::Paged);
    for (rank, tensors) in ranks.iter_mut().enumerate() {
        for (layer, (part, holds)) in
            (0..model.len()).flat_map(|layer| [(layer, (0, Holds::Key)), (layer, (1, Holds::Value))])
        {
            let mut scales = tensor(RegionRole::State, layer, 16 + part, 1, 4, flash);
            scales.region = scales.region.holds(holds).group(0);
            tensors.push(sized(scales, share(4, tp, rank), 0..1));
        }
    }
    let heads = share(4, tp, 0).len() as u32;
    let layout = Layout::default().with(|layout| {
        layout.total_kv_heads = 4;
        layout.groups = vec![CacheGroup::slots(heads, 4)];
    });
    Engine::start(role, addr, ranks, plain(16, (heads, 16), "fp8_e4m3", layout))
}

#[test]
fn measured_scales_arrive_with_the_request_cut_as_the_heads_are() {
    let (_server, addr) = server();
    let mut prefill = measured_scales(WorkerRole::Prefill, &addr, 2);
    let mut decode = measured_scales(WorkerRole::Decode, &addr, 4);
    for (at, session) in (0..).zip(MODES) {
        let from = Request { slots: vec![3 - at], ..Request::blocks([4, 9, 1]) };
        let to = Request { slots: vec![at], ..Request::blocks([8, 6, 7]) };
        hand_over([&mut prefill, &mut decode], &addr, [&from, &to], session);
    }
    prefill.stop();
    decode.stop();
}
