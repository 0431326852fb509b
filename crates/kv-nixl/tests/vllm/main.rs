//! Unmodified vLLM workers and this transport, as foreign agents to each other: a decode worker of vLLM
//! reads our pages, and we read those of a prefill worker of vLLM.
//!
//! vLLM and its driver are no part of this project: `KV_PEERS` names the folder of the driver,
//! `vllm_pair.py`, and `PEER` the folder in which its `setup.sh` has installed vLLM. Without them there is
//! nothing to test. `shape.rs` has the shapes that are tried. This is a process of its own, because UCX takes
//! its network from the environment.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod control;
mod decode;
mod prefill;
mod shape;
#[path = "../workers/mod.rs"]
mod workers;

use std::env;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Once;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use kv_core::{Region, RegionRole, Transport};
use kv_nixl::{HostMemory, Nixl, NixlConfig, NixlTransport};
use serde_json::Value;

use crate::shape::Shape;

fn nixl() -> Option<&'static Nixl> {
    static SET: Once = Once::new();
    // SAFETY: the other tests of this process wait here, and UCX has not started.
    SET.call_once(|| unsafe { env::set_var("UCX_NET_DEVICES", "lo") });
    workers::nixl()
}

/// A KV cache on our transport, as vLLM lays it out.
struct Cache {
    transport: NixlTransport,
    pool: HostMemory,
    shape: Shape,
}

impl Cache {
    fn new(shape: &Shape) -> Option<Cache> {
        let (block, region) = (shape.block_bytes(), shape.blocks * shape.block_bytes());
        let pool = HostMemory::new(shape.layers * region).unwrap();
        let config = NixlConfig::default().with(|config| config.foreign_bytes = 16 << 20);
        let mut transport = NixlTransport::new(nixl()?, config).unwrap();
        transport.add_memory(&pool).unwrap();
        for layer in 0..shape.layers {
            let addr = pool.addr() + shape.offset(layer, 0) as u64;
            transport.register(&Region::dram(RegionRole::Kv, addr, region as u64, block as u64)).unwrap();
        }
        Some(Cache { transport, pool, shape: shape.clone() })
    }
}

/// A process of vLLM. It ends with its owner.
struct Vllm {
    process: Child,
    /// What its driver says, by lines.
    lines: Receiver<Value>,
}

impl Vllm {
    /// Starts a worker in this role; `None` where there is no vLLM.
    fn start(role: &str, shape: &Shape) -> Option<Vllm> {
        let (driver, installed) = (folder("KV_PEERS")?, folder("PEER")?);
        let mut command = Command::new(installed.join("nx/bin/python"));
        command.arg("-u").arg(driver.join("vllm_pair.py")).args(["--role", role, "--ctl", "0"]);
        let sizes = [("--layers", shape.layers), ("--heads", shape.heads), ("--nblocks", shape.blocks)];
        for (name, number) in sizes.into_iter().chain([("--my-port", free_port())]) {
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

impl Vllm {
    /// The next line that the driver says.
    fn line(&self) -> Value {
        self.lines.recv_timeout(Duration::from_secs(240)).expect("vLLM starts, and says so")
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
