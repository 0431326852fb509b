//! Unmodified vLLM workers and this transport, as foreign agents to each other: a decode worker of vLLM
//! reads our pages, and we read those of a prefill worker of vLLM.
//!
//! vLLM and its driver are no part of this project: `KV_PEERS` names the folder of the driver,
//! `vllm_pair.py`, and `PEER` the folder in which its `setup.sh` has installed vLLM. Without them there is
//! nothing to test. This is a process of its own, because UCX takes its network from the environment.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod decode;
mod prefill;
#[path = "../workers/mod.rs"]
mod workers;

use std::env;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Once;
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use kv_core::{Plane, Region, RegionRole};
use kv_nixl::{HostPool, Nixl, NixlConfig, NixlPlane};
use serde_json::Value;

/// vLLM has a region for each layer, in which blocks of 16 tokens lie one after the other.
const LAYERS: usize = 4;
const BLOCKS: usize = 200;
const BLOCK_TOKENS: usize = 16;
/// Keys and values of one head of 128 elements of two bytes.
const BLOCK_BYTES: usize = BLOCK_TOKENS * 2 * 128 * 2;

fn nixl() -> Option<&'static Nixl> {
    static SET: Once = Once::new();
    // SAFETY: the other tests of this process wait here, and UCX has not started.
    SET.call_once(|| unsafe { env::set_var("UCX_NET_DEVICES", "lo") });
    workers::nixl()
}

/// The fill by which the driver and these tests know every block of every region.
fn block(region: usize, block: usize) -> Vec<u8> {
    let constant = ((block as u32) << 8).wrapping_add(region as u32 + 977);
    let word = |at: u32| at.wrapping_mul(2_654_435_761).wrapping_add(constant);
    (0..BLOCK_BYTES as u32 / 4).flat_map(|at| word(at).to_le_bytes()).collect()
}

/// Where a block of a region lies in our pool.
fn offset(region: usize, block: usize) -> usize {
    (region * BLOCKS + block) * BLOCK_BYTES
}

/// A KV cache on our plane, as vLLM lays it out.
struct Cache {
    plane: NixlPlane,
    pool: HostPool,
}

impl Cache {
    fn new() -> Option<Cache> {
        let pool = HostPool::new(LAYERS * BLOCKS * BLOCK_BYTES).unwrap();
        let config = NixlConfig { foreign_bytes: 16 << 20, ..NixlConfig::default() };
        let mut plane = NixlPlane::new(nixl()?, config).unwrap();
        plane.add_pool(&pool).unwrap();
        for layer in 0..LAYERS {
            let (addr, len) = (pool.addr() + offset(layer, 0) as u64, (BLOCKS * BLOCK_BYTES) as u64);
            plane.register(&Region::dram(RegionRole::Kv, addr, len, BLOCK_BYTES as u64)).unwrap();
        }
        Some(Cache { plane, pool })
    }
}

/// A process of vLLM. It ends with its owner.
struct Vllm {
    process: Child,
    /// What its driver says, by lines.
    lines: Receiver<Value>,
}

impl Vllm {
    /// Starts a worker with these arguments of the driver; `None` where there is no vLLM.
    fn start(args: &[impl AsRef<OsStr>]) -> Option<Vllm> {
        let (driver, installed) = (folder("KV_PEERS")?, folder("PEER")?);
        let mut command = Command::new(installed.join("nx/bin/python"));
        command.arg("-u").arg(driver.join("vllm_pair.py")).args(["--heads", "1"]).args(args);
        for (name, number) in [("--layers", LAYERS), ("--nblocks", BLOCKS), ("--my-port", free_port())] {
            command.arg(name).arg(number.to_string());
        }
        command.env("PEER", installed).env("UCX_NET_DEVICES", "lo");
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (tell, lines) = channel();
        let stdout = BufReader::new(process.stdout.take().unwrap());
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                println!("vLLM: {line}");
                if let Ok(line) = serde_json::from_str(&line) {
                    let _ = tell.send(line);
                }
            }
        });
        Some(Vllm { process, lines })
    }
}

impl Drop for Vllm {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn folder(name: &str) -> Option<PathBuf> {
    let folder = env::var_os(name).map(PathBuf::from).filter(|folder| folder.is_dir());
    if folder.is_none() {
        println!("SKIPPED: {name} names no folder; this test needs vLLM and its driver, see its header");
    }
    folder?.canonicalize().ok()
}

/// A port that nobody listens at.
fn free_port() -> usize {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    usize::from(listener.local_addr().unwrap().port())
}
