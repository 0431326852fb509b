use std::error::Error;

use kv_transfer::nixl::{HostMemory, Nixl, NixlConfig, NixlTransport, Search};
use kv_transfer::prelude::*;

/// A cache of 8 pages of 4 KiB in memory that NIXL registers, and the worker that moves its pages.
fn start(engine: &str, role: WorkerRole, bootstrap: &str) -> Result<(Worker, HostMemory), Box<dyn Error>> {
    let pool = HostMemory::new(8 * 4096)?;
    let region = Region::dram(RegionRole::Kv, pool.addr(), 8 * 4096, 4096);
    let args = KvArgs::builder(engine, 0).pages(8, 16).region(region).build()?;
    let nixl = Nixl::load(&Search::default())?;
    let mut transport = NixlTransport::new(&nixl, NixlConfig::default())?;
    transport.add_memory(&pool)?;
    let client = HttpBootstrapClient::new(ClientConfig::default())?;
    let config = WorkerConfig::new(args, role).with(|config| config.bootstrap = Some(bootstrap.to_owned()));
    Ok((Worker::start(config, transport, Box::new(client))?, pool))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let server = KvBootstrapServer::start("127.0.0.1:0")?;
    let bootstrap = server.local_addr().to_string();
    let (prefill, computed) = start("prefill", WorkerRole::Prefill, &bootstrap)?;
    let (decode, cache) = start("decode", WorkerRole::Decode, &bootstrap)?;
    let (prefill_pages, decode_pages) = (PagePool::new(8), PagePool::new(8));

    computed.write(3 * 4096, &[7; 2 * 4096])?; // the forward pass has filled pages 3 and 4
    let (room, options) = (Room::Number(42), SessionOptions::default());
    // It is found through the bootstrap server, and learns from its receiver how many decode ranks will come.
    let mut sender = prefill.manager().sender(&bootstrap, room.clone(), &[], options.clone())?;
    sender.init(2, None)?;
    sender.send(prefill_pages.adopt(PageList::from_pages([3, 4])?)?)?;
    let mut receiver = decode.manager().receiver(&bootstrap, room, options)?;
    receiver.init(decode_pages.adopt(PageList::from_pages([6, 0])?)?, None)?;

    let (received, sent) = tokio::join!(receiver.finished(), sender.finished());
    (received?, sent?);
    let mut page = [0; 4096];
    cache.read(6 * 4096, &mut page)?;
    println!("{:?}, the bytes are right: {}", receiver.poll(), page == [7; 4096]);
    Ok(())
}
