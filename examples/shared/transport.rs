//! The transport of a rank, and the memory that it reaches. All differences between transports are here.

use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

use kv_transfer::bootstrap::HttpBootstrapClient;
use kv_transfer::local::{Arena, LocalConfig, LocalTransport};
use kv_transfer::tcp::{HostMemory, TcpConfig, TcpTransport};
use kv_transfer::ways::{Member, Standing, Ways};
use kv_transfer::{Transport, Worker, WorkerConfig};

use super::cli::{Pace, TransportKind};
use super::error::ExampleError;
use super::heartbeats::Heartbeats;
use super::wire::{TimedTransport, WireLog};

/// Loads what the transport needs, first in `main`: while there is one thread, NIXL can be given all settings of UCX.
/// Beside other threads it loads, too, and `Nixl::warnings` names the settings that could not be made.
pub fn prepare(kind: TransportKind) -> Result<(), ExampleError> {
    match kind {
        TransportKind::Local | TransportKind::Tcp => Ok(()),
        #[cfg(feature = "nixl")]
        TransportKind::Nixl => {
            kv_transfer::nixl::Nixl::load(&kv_transfer::nixl::Search::default())?;
            Ok(())
        }
        #[cfg(not(feature = "nixl"))]
        TransportKind::Nixl => Err(ExampleError::NotBuilt { feature: "nixl" }),
        TransportKind::Auto => {
            // Where NIXL cannot be loaded, `several` says so and goes without it.
            #[cfg(feature = "nixl")]
            drop(kv_transfer::nixl::Nixl::load(&kv_transfer::nixl::Search::default()));
            Ok(())
        }
        #[cfg(feature = "ucx")]
        TransportKind::Ucx => load_ucx().map(drop),
        #[cfg(not(feature = "ucx"))]
        TransportKind::Ucx => Err(ExampleError::NotBuilt { feature: "ucx" }),
        #[cfg(feature = "fabric")]
        TransportKind::Fabric => Ok(kv_transfer::fabric::installed().map(drop)?),
        #[cfg(not(feature = "fabric"))]
        TransportKind::Fabric => Err(ExampleError::NotBuilt { feature: "fabric" }),
    }
}

/// Memory that a transport reaches. Clones share the same memory.
#[derive(Debug, Clone)]
pub enum Memory {
    /// Memory for kv-local, which peers map.
    Arena(Arena),
    /// Memory for kv-tcp.
    Host(HostMemory),
    /// Memory for NIXL.
    #[cfg(feature = "nixl")]
    Pool(HostMemory),
    /// Memory for every transport that there is, and the arena that the memory is, unless the host has none.
    Any(kv_transfer::tcp::Memory, Option<Arena>),
    /// Memory for kv-ucx.
    #[cfg(feature = "ucx")]
    Ucx(HostMemory),
    /// Memory for kv-fabric.
    #[cfg(feature = "fabric")]
    Fabric(HostMemory),
}

impl Memory {
    /// Allocates memory for a transport of this kind.
    pub fn new(kind: TransportKind, len: usize) -> Result<Memory, ExampleError> {
        match kind {
            TransportKind::Local => Ok(Memory::Arena(Arena::new(len)?)),
            TransportKind::Tcp => Ok(Memory::Host(HostMemory::new(len)?)),
            #[cfg(feature = "nixl")]
            TransportKind::Nixl => Ok(Memory::Pool(HostMemory::new(len)?)),
            #[cfg(not(feature = "nixl"))]
            TransportKind::Nixl => Err(ExampleError::NotBuilt { feature: "nixl" }),
            TransportKind::Auto => Ok(match Arena::new(len) {
                Ok(arena) => Memory::Any(arena.memory().clone(), Some(arena)),
                // Where shared memory is not to be had, other transports may still do.
                Err(_) => Memory::Any(HostMemory::new(len)?.memory().clone(), None),
            }),
            #[cfg(feature = "ucx")]
            TransportKind::Ucx => Ok(Memory::Ucx(HostMemory::new(len)?)),
            #[cfg(not(feature = "ucx"))]
            TransportKind::Ucx => Err(ExampleError::NotBuilt { feature: "ucx" }),
            #[cfg(feature = "fabric")]
            TransportKind::Fabric => Ok(Memory::Fabric(HostMemory::new(len)?)),
            #[cfg(not(feature = "fabric"))]
            TransportKind::Fabric => Err(ExampleError::NotBuilt { feature: "fabric" }),
        }
    }

    /// The address of the first byte.
    pub fn addr(&self) -> u64 {
        match self {
            Memory::Arena(arena) => arena.addr(),
            Memory::Any(memory, _) => memory.addr(),
            Memory::Host(memory) => memory.addr(),
            #[cfg(feature = "nixl")]
            Memory::Pool(pool) => pool.addr(),
            #[cfg(feature = "ucx")]
            Memory::Ucx(pool) => pool.addr(),
            #[cfg(feature = "fabric")]
            Memory::Fabric(pool) => pool.addr(),
        }
    }

    /// Copies bytes out of the memory.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), ExampleError> {
        match self {
            Memory::Arena(arena) => Ok(arena.read(offset, out)?),
            Memory::Any(memory, _) => Ok(memory.read(offset, out)?),
            Memory::Host(memory) => Ok(memory.read(offset, out)?),
            #[cfg(feature = "nixl")]
            Memory::Pool(pool) => Ok(pool.read(offset, out)?),
            #[cfg(feature = "ucx")]
            Memory::Ucx(pool) => Ok(pool.read(offset, out)?),
            #[cfg(feature = "fabric")]
            Memory::Fabric(pool) => Ok(pool.read(offset, out)?),
        }
    }

    /// Copies bytes into the memory.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), ExampleError> {
        match self {
            Memory::Arena(arena) => Ok(arena.write(offset, bytes)?),
            Memory::Any(memory, _) => Ok(memory.write(offset, bytes)?),
            Memory::Host(memory) => Ok(memory.write(offset, bytes)?),
            #[cfg(feature = "nixl")]
            Memory::Pool(pool) => Ok(pool.write(offset, bytes)?),
            #[cfg(feature = "ucx")]
            Memory::Ucx(pool) => Ok(pool.write(offset, bytes)?),
            #[cfg(feature = "fabric")]
            Memory::Fabric(pool) => Ok(pool.write(offset, bytes)?),
        }
    }
}

/// Starts a worker over the transport of this memory, and tells over which of several transports its peers are connected:
/// nothing of a worker with one. With `notes`, the transport notes what it moves and which readers it hears; the notes grow
/// until they are taken.
pub fn start(
    memory: &Memory,
    config: WorkerConfig,
    notes: Option<(&WireLog, &Heartbeats)>,
    client: HttpBootstrapClient,
    pace: Pace,
) -> Result<(Worker, Standing), ExampleError> {
    let worker = match memory {
        Memory::Arena(arena) => {
            let mut transport = local(pace)?;
            transport.add_arena(arena)?;
            start_over(transport, config, notes, client)
        }
        Memory::Host(memory) => {
            let mut transport = tcp(pace)?;
            transport.add_memory(memory)?;
            start_over(transport, config, notes, client)
        }
        #[cfg(feature = "nixl")]
        Memory::Pool(pool) => {
            let mut transport = nixl(pace)?;
            transport.add_memory(pool)?;
            start_over(transport, config, notes, client)
        }
        Memory::Any(memory, arena) => {
            let ways = several(memory, arena.as_ref(), pace)?;
            let standing = ways.standing();
            return Ok((start_over(ways, config, notes, client)?, standing));
        }
        #[cfg(feature = "ucx")]
        Memory::Ucx(pool) => {
            let mut transport = ucx(pace)?;
            transport.add_memory(pool)?;
            start_over(transport, config, notes, client)
        }
        #[cfg(feature = "fabric")]
        Memory::Fabric(pool) => {
            let mut transport = fabric(pace)?;
            transport.add_memory(pool)?;
            start_over(transport, config, notes, client)
        }
    };
    Ok((worker?, Standing::default()))
}

fn start_over<P: Transport + Send + 'static>(
    transport: P,
    config: WorkerConfig,
    notes: Option<(&WireLog, &Heartbeats)>,
    client: HttpBootstrapClient,
) -> Result<Worker, ExampleError> {
    let client = Box::new(client);
    Ok(match notes {
        Some((log, heartbeats)) => {
            Worker::start(config, TimedTransport::new(transport, log.clone(), heartbeats.clone()), client)?
        }
        None => Worker::start(config, transport, client)?,
    })
}

/// A transport between processes of this host, without memory.
pub fn local(pace: Pace) -> Result<LocalTransport, ExampleError> {
    let config = LocalConfig::default();
    let handshake_timeout = pace.at_most_a_second(config.handshake_timeout);
    Ok(LocalTransport::new(config.with(|config| config.handshake_timeout = handshake_timeout))?)
}

/// Every transport that there is, as one over the same memory: peers on this host by kv-local if the memory is an
/// arena, others by NIXL, or else UCX, where it is installed and reads as well as it writes (RDMA), by libfabric where
/// `KV_FABRIC_PROVIDER` names a provider, and else by TCP. One whose settings cannot be used here is left out.
pub fn several(
    memory: &kv_transfer::tcp::Memory,
    arena: Option<&Arena>,
    pace: Pace,
) -> Result<Ways, ExampleError> {
    let mut members = Vec::new();
    if let Some(arena) = arena {
        let mut local = local(pace)?;
        local.add_arena(arena)?;
        members.push(Member::new(Box::new(local)));
    }
    #[cfg(feature = "ucx")]
    let before = members.len();
    #[cfg(feature = "nixl")]
    if let Some(nixl) = or_without("nixl", || {
        let mut transport = nixl(pace)?;
        transport.add_memory(memory)?;
        Ok(transport)
    }) {
        members.push(Member::new(Box::new(nixl)));
    }
    // NIXL brings a UCX, and a process has one.
    #[cfg(feature = "ucx")]
    if members.len() == before
        && let Some(ucx) = or_without("ucx", || {
            let mut transport = ucx(pace)?;
            transport.add_memory(memory)?;
            Ok(transport)
        })
    {
        members.push(Member::new(Box::new(ucx)));
    }
    // Not by itself: over sockets, kv-tcp is better.
    #[cfg(feature = "fabric")]
    if std::env::var_os(FABRIC_PROVIDER).is_some()
        && let Some(fabric) = or_without("fabric", || {
            let mut transport = fabric(pace)?;
            transport.add_memory(memory)?;
            Ok(transport)
        })
    {
        members.push(Member::new(Box::new(fabric)));
    }
    if let Some(tcp) = or_without("tcp", || {
        let mut transport = tcp(pace)?;
        transport.add_memory(memory)?;
        Ok(transport)
    }) {
        members.push(Member::new(Box::new(tcp)));
    }
    Ok(Ways::new(members)?)
}

/// A transport if it can be had; otherwise prints why not, once in a process.
#[allow(clippy::print_stderr)] // For whoever has started the example.
fn or_without<P>(name: &'static str, transport: impl FnOnce() -> Result<P, ExampleError>) -> Option<P> {
    static TOLD: Mutex<Vec<&str>> = Mutex::new(Vec::new());
    let error = match transport() {
        Ok(transport) => return Some(transport),
        Err(error) => error,
    };
    let mut told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
    if !told.contains(&name) {
        told.push(name);
        eprintln!("going on without {name}: {error}");
    }
    None
}

/// The variable with the address on which this host's processes listen for TCP, port 0 for any port.
const TCP_ADDRESS: &str = "KV_TCP_ADDRESS";
/// The variable with the addresses by which peers reach them, separated by commas, where these are others.
const TCP_ADVERTISE: &str = "KV_TCP_ADVERTISE";

/// A transport over TCP, without memory: on the address in `KV_TCP_ADDRESS`, or between processes of this host; encrypted
/// if there are variables with certificates.
pub fn tcp(pace: Pace) -> Result<TcpTransport, ExampleError> {
    let address = std::env::var(TCP_ADDRESS).unwrap_or_else(|_| "127.0.0.1:0".to_owned());
    let bad = |_| ExampleError::Variable { variable: TCP_ADDRESS, got: address.clone() };
    let config = TcpConfig::new(address.parse().map_err(bad)?);
    let advertise = std::env::var(TCP_ADVERTISE).unwrap_or_default();
    let parsed = advertise.split(',').filter(|address| !address.is_empty()).map(str::parse).collect();
    let bad = |_| ExampleError::Variable { variable: TCP_ADVERTISE, got: advertise.clone() };
    let advertise: Vec<SocketAddr> = Result::map_err(parsed, bad)?;
    let config = config.with(|config| config.advertise = advertise);
    let handshake_timeout = pace.at_most_a_second(config.handshake_timeout);
    let config = encrypted(config)?;
    Ok(TcpTransport::new(config.with(|config| config.handshake_timeout = handshake_timeout))?)
}

/// The variables with the paths of this process's certificate, its key, and the certificates of the authorities that
/// sign those of its peers, all PEM. With them, TCP is encrypted.
const TLS_FILES: [&str; 3] = ["KV_TCP_TLS_CERT", "KV_TCP_TLS_KEY", "KV_TCP_TLS_CA"];

/// The variable with the name in the certificates of all peers; without it, they have the peers' addresses.
const TLS_NAME: &str = "KV_TCP_TLS_NAME";

fn encrypted(config: TcpConfig) -> Result<TcpConfig, ExampleError> {
    let files = TLS_FILES.map(std::env::var_os);
    // Whoever sets only the name wants TLS: no plain text by mistake.
    if files.iter().all(Option::is_none) && std::env::var_os(TLS_NAME).is_none() {
        return Ok(config);
    }
    let missing = TLS_FILES.iter().zip(&files).find(|(_, file)| file.is_none());
    if let Some((variable, _)) = missing {
        return Err(ExampleError::TlsFile { variable });
    }
    #[cfg(feature = "tls")]
    {
        let [certificate, key, authorities] = files.map(Option::unwrap_or_default);
        let mut tls = kv_transfer::tcp::Tls::from_pem_files(certificate, key, authorities)?;
        if let Ok(name) = std::env::var(TLS_NAME) {
            tls = tls.peer_name(&name)?;
        }
        Ok(config.with(|config| config.tls = Some(tls)))
    }
    #[cfg(not(feature = "tls"))]
    Err(ExampleError::NotBuilt { feature: "tls" })
}

/// What to tell whoever starts a process over TCP that other hosts cannot reach: no address of this host was named, and the
/// bootstrap server is not on this host alone.
pub fn note_of_loopback(kind: TransportKind, bootstrap: &str) -> Option<String> {
    let by_tcp = matches!(kind, TransportKind::Tcp | TransportKind::Auto);
    let host = bootstrap.rsplit_once(':').map_or(bootstrap, |(host, _)| host);
    let is_loopback = |server: SocketAddr| server.ip().is_loopback();
    let is_far = !(host.is_empty() || host == "localhost" || bootstrap.parse().is_ok_and(is_loopback));
    (by_tcp && is_far && std::env::var_os(TCP_ADDRESS).is_none()).then(|| {
        format!(
            "{TCP_ADDRESS} is not set: only processes of this host reach this one by TCP. For others: \
             {TCP_ADDRESS}=ADDRESS_OF_THIS_HOST:0"
        )
    })
}

/// A transport over NIXL, without memory.
#[cfg(feature = "nixl")]
pub fn nixl(pace: Pace) -> Result<kv_transfer::nixl::NixlTransport, ExampleError> {
    use kv_transfer::nixl::{Nixl, NixlTransport, Search};
    Ok(NixlTransport::new(&Nixl::load(&Search::default())?, nixl_config(pace))?)
}

/// The settings of a transport over NIXL at this pace.
#[cfg(feature = "nixl")]
pub fn nixl_config(pace: Pace) -> kv_transfer::nixl::NixlConfig {
    let config = kv_transfer::nixl::NixlConfig::default();
    let settle = pace.at_most_a_second(config.settle);
    config.with(|config| config.settle = settle)
}

/// A transport over UCX, without memory.
#[cfg(feature = "ucx")]
pub fn ucx(pace: Pace) -> Result<kv_transfer::ucx::UcxTransport, ExampleError> {
    let config = kv_transfer::ucx::UcxConfig::default();
    let handshake_timeout = pace.at_most_a_second(config.handshake_timeout);
    let settle = pace.at_most_a_second(config.settle);
    let config =
        config.with(|config| (config.handshake_timeout, config.settle) = (handshake_timeout, settle));
    Ok(kv_transfer::ucx::UcxTransport::new(load_ucx()?, config)?)
}

#[cfg(feature = "ucx")]
fn load_ucx() -> Result<kv_transfer::ucx::Ucx, ExampleError> {
    Ok(kv_transfer::ucx::Ucx::load(None).map_err(kv_transfer::ucx::UcxError::Load)?)
}

/// The variables with libfabric's provider, with its devices, and with the addresses by which this host's processes are
/// reached over them, both separated by commas; and with the PCI address of the GPU whose nearest devices are taken.
#[cfg(feature = "fabric")]
const FABRIC_PROVIDER: &str = "KV_FABRIC_PROVIDER";
#[cfg(feature = "fabric")]
const FABRIC_DEVICE: &str = "KV_FABRIC_DEVICE";
#[cfg(feature = "fabric")]
const FABRIC_ADDRESS: &str = "KV_FABRIC_ADDRESS";
#[cfg(feature = "fabric")]
const FABRIC_GPU: &str = "KV_FABRIC_GPU";

/// A transport over libfabric, without memory: over what the variables name, or between processes of this host.
#[cfg(feature = "fabric")]
pub fn fabric(pace: Pace) -> Result<kv_transfer::fabric::FabricTransport, ExampleError> {
    Ok(kv_transfer::fabric::FabricTransport::new(fabric_config(pace)?)?)
}

/// The settings of a transport over libfabric at this pace.
#[cfg(feature = "fabric")]
pub fn fabric_config(pace: Pace) -> Result<kv_transfer::fabric::FabricConfig, ExampleError> {
    use kv_transfer::fabric::{FabricConfig, FabricDevice, installed};
    let [provider, names, addresses, gpu] = [FABRIC_PROVIDER, FABRIC_DEVICE, FABRIC_ADDRESS, FABRIC_GPU]
        .map(|variable| std::env::var(variable).ok());
    let list = |text: &Option<String>| -> Vec<String> {
        text.iter().flat_map(|text| text.split(',')).map(|part| part.trim().to_owned()).collect()
    };
    let (names, addresses) = (list(&names), list(&addresses));
    if !names.is_empty() && !addresses.is_empty() && names.len() != addresses.len() {
        return Err(ExampleError::Devices { names: names.len(), addresses: addresses.len() });
    }
    let mut devices: Vec<FabricDevice> = names.into_iter().map(FabricDevice::named).collect();
    devices.resize(devices.len().max(addresses.len()), FabricDevice::default());
    for (device, got) in devices.iter_mut().zip(addresses) {
        match got.parse() {
            Ok(address) => device.address = Some(address),
            Err(_) => return Err(ExampleError::BareAddress { variable: FABRIC_ADDRESS, got }),
        }
    }
    if devices.is_empty() {
        let usual = FabricConfig::default().provider;
        devices = match gpu {
            Some(gpu) => installed()?.nearest(provider.as_ref().unwrap_or(&usual), &gpu)?,
            None if provider.is_none() => vec![FabricDevice::at(std::net::Ipv4Addr::LOCALHOST.into())],
            // The provider's choice: not every provider has addresses.
            None => vec![FabricDevice::default()],
        };
    }
    Ok(FabricConfig::default().with(|config| {
        config.provider = provider.unwrap_or_else(|| config.provider.clone());
        config.devices = devices;
        config.handshake_timeout = pace.at_most_a_second(config.handshake_timeout);
        config.silence = pace.at_most_a_second(config.silence);
    }))
}
