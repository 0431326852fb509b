//! KV moves between the candle tensors of two workers, byte by byte as it was; and what cannot be a cache is refused.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use kv_candle::{CandleError, KvTensors, Place};
use kv_transfer::prelude::*;
use kv_transfer::{ArgsError, MemoryKind};

const LAYERS: usize = 2;
const BLOCKS: usize = 6;
const SHAPE: [usize; 4] = [BLOCKS, 16, 3, 8];

type Cache = Vec<(Tensor, Tensor)>;

/// A tensor of numbers that bf16 holds exactly, in another order for each `salt`.
fn tensor(salt: u32) -> Tensor {
    let len = SHAPE.iter().product::<usize>() as u32;
    let bits = (0..len).map(|at| f32::from_bits((0x3f80 + (at * 7 + salt * 101) % 0x800) << 16));
    let tensor = Tensor::from_iter(bits, &Device::Cpu).unwrap();
    tensor.to_dtype(DType::BF16).unwrap().reshape(&SHAPE).unwrap()
}

fn cache(of: impl Fn(u32) -> Tensor) -> Cache {
    (0..LAYERS as u32).map(|layer| (of(2 * layer), of(2 * layer + 1))).collect()
}

fn zeros() -> Tensor {
    Tensor::zeros(&SHAPE, DType::BF16, &Device::Cpu).unwrap()
}

fn block(tensor: &Tensor, block: usize) -> Vec<f32> {
    let block = tensor.get(block).unwrap().flatten_all().unwrap();
    block.to_dtype(DType::F32).unwrap().to_vec1().unwrap()
}

fn worker(tensors: &KvTensors, engine: &str, role: WorkerRole, addr: &str) -> Worker {
    let args = tensors.describe(KvArgs::builder(engine, 0)).build().unwrap();
    let mut transport =
        LocalTransport::new(LocalConfig::default().with(|config| config.permit_tracing = true)).unwrap();
    // SAFETY: the tensors outlive the worker, and are looked at when its sessions have ended.
    unsafe { transport.adopt_regions(args.regions()) }.unwrap();
    let config = WorkerConfig::new(args, role).with(|config| config.bootstrap = Some(addr.to_owned()));
    let client = HttpBootstrapClient::new(ClientConfig::default()).unwrap();
    Worker::start(config, transport, Box::new(client)).unwrap()
}

fn reclaimed(session: &mut impl KvSession) -> Pages {
    loop {
        if let Some(back) = session.reclaim() {
            assert_eq!(session.failure(), None);
            return back.pages;
        }
        std::thread::yield_now();
    }
}

#[test]
fn blocks_move_between_the_tensors_of_two_workers_and_no_other_block_changes() {
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let addr = server.local_addr().to_string();
    let (from, to) = (cache(tensor), cache(|_| zeros()));
    let (kept_from, kept_to) = (KvTensors::new(&from).unwrap(), KvTensors::new(&to).unwrap());
    let prefill = worker(&kept_from, "prefill", WorkerRole::Prefill, &addr);
    let decode = worker(&kept_to, "decode", WorkerRole::Decode, &addr);
    let (sent, received) = (PagePool::new(BLOCKS as u32), PagePool::new(BLOCKS as u32));
    let pages = |pool: &PagePool, pages: [u32; 3]| pool.adopt(PageList::from_pages(pages).unwrap()).unwrap();

    let mut sender =
        prefill.manager().sender(&addr, Room::Number(1), &[], SessionOptions::default()).unwrap();
    sender.init(3, None).unwrap();
    sender.send(pages(&sent, [4, 0, 1])).unwrap();
    let mut receiver = decode.manager().receiver(&addr, Room::Number(1), SessionOptions::default()).unwrap();
    receiver.init(pages(&received, [2, 3, 5]), None).unwrap();
    received.release(reclaimed(&mut receiver)).unwrap();
    sent.release(reclaimed(&mut sender)).unwrap();
    assert_eq!((sent.num_out(), received.num_out()), (0, 0));

    for (from, to) in from.iter().zip(&to).flat_map(|(from, to)| [(&from.0, &to.0), (&from.1, &to.1)]) {
        for (number, expected) in [(2, Some(4)), (3, Some(0)), (5, Some(1)), (0, None), (1, None), (4, None)]
        {
            let expected = expected.map_or_else(|| vec![0.0; 16 * 3 * 8], |number| block(from, number));
            assert_eq!(block(to, number), expected, "block {number}");
        }
    }
    for worker in [prefill, decode] {
        assert_eq!(worker.stop(Duration::from_secs(2)).pages_quarantined, 0);
    }
    drop((kept_from, kept_to));
}

#[test]
fn the_arguments_say_of_the_tensors_what_they_are() {
    let (cache, tensors) = (cache(tensor), |cache: &Cache| KvTensors::new(cache));
    let args = tensors(&cache).unwrap().describe(KvArgs::builder("engine", 0)).build().unwrap();
    let geometry = args.geometry();
    assert_eq!((geometry.num_pages, geometry.page_size), (6, 16));
    assert_eq!((geometry.dtype.as_str(), geometry.kv_heads, geometry.head_dim), ("bf16", 3, 8));
    let regions: Vec<_> = args.regions().iter().map(|region| (region.layer, region.item_len)).collect();
    assert_eq!(regions, [(Some(0), 768), (Some(0), 768), (Some(1), 768), (Some(1), 768)]);
    // A view of blocks 2 to 3 begins two blocks later in the same storage.
    let view = cache[0].0.narrow(0, 2, 2).unwrap();
    let part = KvTensors::new(&[(view, cache[0].1.narrow(0, 0, 2).unwrap())]).unwrap();
    assert_eq!(part.regions()[0].addr, args.regions()[0].addr + 2 * 768);
    assert_eq!(part.regions()[0].len, 2 * 768);
    // The same tensor twice is an overlap, which the arguments refuse.
    let twice = KvTensors::new(&[(cache[0].0.clone(), cache[0].0.clone())]).unwrap();
    let refused = twice.describe(KvArgs::builder("engine", 0)).build();
    assert_eq!(refused.map(|_| ()), Err(ArgsError::RegionOverlap { first: 0, second: 1 }));
}

#[test]
fn tensors_that_are_no_cache_are_refused_with_the_tensor_and_both_values() {
    let refused =
        |keys: Tensor, values: Tensor| KvTensors::new(&[(tensor(0), tensor(1)), (keys, values)]).unwrap_err();
    let turned = tensor(2).transpose(1, 2).unwrap();
    let shape = refused(tensor(2), turned).to_string();
    assert_eq!(shape, "the shape of caches[1].1 is [6, 3, 16, 8], and that of caches[0].0 is [6, 16, 3, 8]");
    let dtype = refused(tensor(2).to_dtype(DType::F16).unwrap(), tensor(3)).to_string();
    assert_eq!(dtype, "the dtype of caches[1].0 is f16, and that of caches[0].0 is bf16");
    let square = || Tensor::zeros((4, 8, 8, 2), DType::BF16, &Device::Cpu).unwrap();
    let view = KvTensors::new(&[(square(), square().transpose(1, 2).unwrap())]).unwrap_err();
    let (shape, strides) = (vec![4, 8, 8, 2], vec![128, 2, 16, 1]);
    assert_eq!(view, CandleError::NotContiguous { field: "caches[0].1".into(), shape, strides });
    let flat = square().flatten_all().unwrap();
    let flat = KvTensors::new(&[(flat.clone(), flat)]).unwrap_err();
    assert_eq!(flat, CandleError::Shape { field: "caches[0].0".into(), got: vec![512] });
    assert!(matches!(KvTensors::new(&[]), Err(CandleError::Layers { .. })));
}

#[test]
fn a_server_may_say_itself_where_its_tensors_lie() {
    let memory = MemoryKind::Vram;
    let place = |field: &str, _: &Tensor| {
        let addr = if field.ends_with('0') { 1 << 32 } else { 2 << 32 };
        Ok(Place { addr, memory, device: 3 })
    };
    let tensors = KvTensors::placed(&[(tensor(0), tensor(1))], place).unwrap();
    let places: Vec<_> = tensors.regions().iter().map(|r| (r.addr, r.memory, r.device)).collect();
    assert_eq!(places, [(1 << 32, memory, 3), (2 << 32, memory, 3)]);
}
