//! Memory that a transport reaches, and the transport that reaches it.

use std::net::SocketAddr;
#[cfg(any(feature = "nixl", feature = "ucx", feature = "fabric"))]
use std::time::Duration;

#[cfg(any(feature = "nixl", feature = "ucx"))]
use kv_conformance::{Gpu, Vram};
use kv_transfer::MemoryKind;
#[cfg(feature = "nixl")]
use kv_transfer::nixl::{Nixl, NixlConfig, NixlTransport};
use kv_transfer::prelude::*;
use kv_transfer::tcp::{HostMemory, TcpConfig, TcpTransport};
use kv_transfer::ways::{Member, Ways};

#[cfg(any(feature = "nixl", feature = "ucx", feature = "fabric"))]
use super::netns;
use super::overheard::{Log, Overheard};

/// The transport that moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransportKind {
    Local,
    /// Two local transports as one: `near`, which is preferred, and `local`.
    Several,
    /// TCP on an address of the test's choice, alone or beside local.
    Placed(Place),
    Tcp,
    #[cfg(feature = "nixl")]
    Nixl,
    /// Not in the process of NIXL, which brings another copy of UCX.
    #[cfg(feature = "ucx")]
    Ucx,
    #[cfg(feature = "fabric")]
    Fabric,
    /// NIXL, and pages in the memory of a GPU.
    #[cfg(feature = "nixl")]
    NixlGpu,
    /// UCX, and pages in the memory of a GPU.
    #[cfg(feature = "ucx")]
    UcxGpu,
}

/// Where a worker's transports listen, where peers are told to find them, and which transports there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub bind: SocketAddr,
    pub advertised: SocketAddr,
    pub members: Members,
}

/// The transports of a worker, the preferred one first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Members {
    Tcp,
    TcpLocal,
    LocalTcp,
    /// As `LocalTcp`, with memory that local has adopted.
    AdoptedTcp,
    /// NIXL with UCX, over TCP only, as between hosts without other cards.
    #[cfg(feature = "nixl")]
    Nixl,
    /// UCX, over TCP only.
    #[cfg(feature = "ucx")]
    Ucx,
    /// libfabric's provider for TCP.
    #[cfg(feature = "fabric")]
    Fabric,
    /// The same with a device on each of two links.
    #[cfg(feature = "fabric")]
    FabricTwice,
}

impl Members {
    const ALL: &[Members] = &[
        Members::Tcp,
        Members::TcpLocal,
        Members::LocalTcp,
        Members::AdoptedTcp,
        #[cfg(feature = "nixl")]
        Members::Nixl,
        #[cfg(feature = "ucx")]
        Members::Ucx,
        #[cfg(feature = "fabric")]
        Members::Fabric,
        #[cfg(feature = "fabric")]
        Members::FabricTwice,
    ];
}

impl Place {
    /// Peers are told the address of the bind.
    pub fn at(bind: SocketAddr, members: Members) -> Place {
        Place { bind, advertised: bind, members }
    }

    /// The place in a word, for the environment of a child.
    pub fn word(self) -> String {
        format!("Placed|{}|{}|{:?}", self.bind, self.advertised, self.members)
    }

    /// The place that such a word means.
    pub fn of_word(word: &str) -> Option<Place> {
        let mut parts = word.strip_prefix("Placed|")?.split('|');
        let mut address = || parts.next()?.parse().ok();
        let (bind, advertised) = (address()?, address()?);
        let named = parts.next()?;
        let members = Members::ALL.iter().find(|members| format!("{members:?}") == named)?;
        Some(Place { bind, advertised, members: *members })
    }

    /// The transports, over this arena.
    pub fn transport(self, arena: &Arena) -> Ways {
        let tcp = || {
            let config = TcpConfig::new(self.bind).with(|config| config.advertise = vec![self.advertised]);
            let mut tcp = TcpTransport::new(config).unwrap();
            tcp.add_memory(arena).unwrap();
            Member::new(Box::new(tcp))
        };
        let local = || Member::new(Box::new(local(arena)));
        Ways::new(match self.members {
            Members::Tcp => vec![tcp()],
            Members::TcpLocal => vec![tcp(), local()],
            Members::LocalTcp => vec![local(), tcp()],
            Members::AdoptedTcp => {
                let mut adopting = LocalTransport::new(LocalConfig::default()).unwrap();
                // SAFETY: the store keeps the arena until its worker has stopped, and reads and writes it by
                // address.
                unsafe { adopting.adopt(arena.addr(), arena.len() as u64) }.unwrap();
                vec![Member::new(Box::new(adopting)), tcp()]
            }
            #[cfg(feature = "nixl")]
            Members::Nixl => {
                let config = NixlConfig::default().with(|config| {
                    config.devices = vec![netns::device(self.bind).to_owned()];
                    config.backend_params = vec![("engine_config".to_owned(), "TLS=tcp".to_owned())];
                    config.settle = SETTLE;
                });
                let nixl = nixl().expect("nothing is tested over NIXL where it is not installed");
                let mut transport = NixlTransport::new(nixl, config).unwrap();
                transport.add_memory(arena).unwrap();
                vec![Member::new(Box::new(transport))]
            }
            #[cfg(feature = "ucx")]
            Members::Ucx => {
                use kv_transfer::ucx::{Ucx, UcxConfig, UcxTransport};
                let config = UcxConfig::default().with(|config| {
                    config.devices = vec![netns::device(self.bind).to_owned()];
                    config.transports = vec!["tcp".to_owned()];
                    config.settle = SETTLE;
                });
                let ucx = Ucx::load(None).expect("nothing is tested over UCX where it is not installed");
                let mut transport = UcxTransport::new(ucx, config).unwrap();
                transport.add_memory(arena).unwrap();
                vec![Member::new(Box::new(transport))]
            }
            #[cfg(feature = "fabric")]
            Members::Fabric | Members::FabricTwice => {
                use kv_transfer::fabric::{FabricConfig, FabricDevice, FabricTransport};
                let config = FabricConfig::new(self.bind.ip()).with(|config| {
                    config.silence = SILENCE;
                    if self.members == Members::FabricTwice {
                        config.devices.push(FabricDevice::at(netns::second(self.bind.ip())));
                    }
                });
                let mut transport = FabricTransport::new(config).unwrap();
                transport.add_memory(arena).unwrap();
                vec![Member::new(Box::new(transport))]
            }
        })
        .unwrap()
    }
}

impl Members {
    /// Whether the hosts need a link for each of two devices.
    pub fn has_two_links(self) -> bool {
        #[cfg(feature = "fabric")]
        return self == Members::FabricTwice;
        #[cfg(not(feature = "fabric"))]
        false
    }
}

/// How long what a failed connection has left may still be on its way, in tests with a link that is cut.
#[cfg(any(feature = "nixl", feature = "ucx"))]
const SETTLE: Duration = Duration::from_secs(1);
/// After so long without an answer, libfabric's peers are lost.
#[cfg(feature = "fabric")]
const SILENCE: Duration = Duration::from_secs(3);

/// Memory that a transport reaches.
pub enum Store {
    Local(Arena),
    /// Memory for two transports as one, with notes on how peers are reached.
    Several(Arena, Log),
    /// Memory for TCP on an address of the test's choice, and the same notes.
    Placed(Arena, Place, Log),
    Tcp(HostMemory),
    #[cfg(feature = "nixl")]
    Nixl(HostMemory),
    #[cfg(feature = "ucx")]
    Ucx(HostMemory),
    #[cfg(feature = "fabric")]
    Fabric(HostMemory),
    #[cfg(feature = "nixl")]
    NixlGpu(Vram),
    #[cfg(feature = "ucx")]
    UcxGpu(Vram),
}

impl TransportKind {
    /// Whether its workers read from each other: UCX over TCP refuses to.
    pub fn reads(self) -> bool {
        #[cfg(feature = "ucx")]
        if matches!(self, TransportKind::Ucx | TransportKind::UcxGpu) {
            return false;
        }
        true
    }

    /// By the name that `Debug` prints.
    pub fn named(name: &str) -> TransportKind {
        match name {
            "Local" => TransportKind::Local,
            "Several" => TransportKind::Several,
            "Tcp" => TransportKind::Tcp,
            #[cfg(feature = "nixl")]
            "Nixl" => TransportKind::Nixl,
            #[cfg(feature = "ucx")]
            "Ucx" => TransportKind::Ucx,
            #[cfg(feature = "fabric")]
            "Fabric" => TransportKind::Fabric,
            #[cfg(feature = "nixl")]
            "NixlGpu" => TransportKind::NixlGpu,
            #[cfg(feature = "ucx")]
            "UcxGpu" => TransportKind::UcxGpu,
            _ => panic!("no such transport in this binary: {name}"),
        }
    }
}

impl Store {
    pub fn new(transport: TransportKind, len: usize) -> Store {
        match transport {
            TransportKind::Local => Store::Local(Arena::new(len).unwrap()),
            TransportKind::Several => Store::Several(Arena::new(len).unwrap(), Log::default()),
            TransportKind::Placed(place) => Store::Placed(Arena::new(len).unwrap(), place, Log::default()),
            TransportKind::Tcp => Store::Tcp(HostMemory::new(len).unwrap()),
            #[cfg(feature = "nixl")]
            TransportKind::Nixl => Store::Nixl(HostMemory::new(len).unwrap()),
            #[cfg(feature = "ucx")]
            TransportKind::Ucx => Store::Ucx(HostMemory::new(len).unwrap()),
            #[cfg(feature = "fabric")]
            TransportKind::Fabric => Store::Fabric(HostMemory::new(len).unwrap()),
            #[cfg(feature = "nixl")]
            TransportKind::NixlGpu => Store::NixlGpu(vram(len)),
            #[cfg(feature = "ucx")]
            TransportKind::UcxGpu => Store::UcxGpu(vram(len)),
        }
    }

    /// The kind of the memory.
    pub fn kind(&self) -> MemoryKind {
        match self {
            #[cfg(feature = "nixl")]
            Store::NixlGpu(_) => MemoryKind::Vram,
            #[cfg(feature = "ucx")]
            Store::UcxGpu(_) => MemoryKind::Vram,
            _ => MemoryKind::Dram,
        }
    }

    pub fn addr(&self) -> u64 {
        match self {
            Store::Local(arena) | Store::Several(arena, _) | Store::Placed(arena, ..) => arena.addr(),
            Store::Tcp(memory) => memory.addr(),
            #[cfg(feature = "nixl")]
            Store::Nixl(pool) => pool.addr(),
            #[cfg(feature = "ucx")]
            Store::Ucx(pool) => pool.addr(),
            #[cfg(feature = "fabric")]
            Store::Fabric(pool) => pool.addr(),
            #[cfg(feature = "nixl")]
            Store::NixlGpu(memory) => memory.addr(),
            #[cfg(feature = "ucx")]
            Store::UcxGpu(memory) => memory.addr(),
        }
    }

    pub fn read(&self, offset: usize, out: &mut [u8]) {
        match self {
            Store::Local(arena) | Store::Several(arena, _) | Store::Placed(arena, ..) => {
                arena.read(offset, out).unwrap()
            }
            Store::Tcp(memory) => memory.read(offset, out).unwrap(),
            #[cfg(feature = "nixl")]
            Store::Nixl(pool) => pool.read(offset, out).unwrap(),
            #[cfg(feature = "ucx")]
            Store::Ucx(pool) => pool.read(offset, out).unwrap(),
            #[cfg(feature = "fabric")]
            Store::Fabric(pool) => pool.read(offset, out).unwrap(),
            #[cfg(feature = "nixl")]
            Store::NixlGpu(memory) => memory.read(offset, out),
            #[cfg(feature = "ucx")]
            Store::UcxGpu(memory) => memory.read(offset, out),
        }
    }

    pub fn write(&self, offset: usize, bytes: &[u8]) {
        match self {
            Store::Local(arena) | Store::Several(arena, _) | Store::Placed(arena, ..) => {
                arena.write(offset, bytes).unwrap()
            }
            Store::Tcp(memory) => memory.write(offset, bytes).unwrap(),
            #[cfg(feature = "nixl")]
            Store::Nixl(pool) => pool.write(offset, bytes).unwrap(),
            #[cfg(feature = "ucx")]
            Store::Ucx(pool) => pool.write(offset, bytes).unwrap(),
            #[cfg(feature = "fabric")]
            Store::Fabric(pool) => pool.write(offset, bytes).unwrap(),
            #[cfg(feature = "nixl")]
            Store::NixlGpu(memory) => memory.write(offset, bytes),
            #[cfg(feature = "ucx")]
            Store::UcxGpu(memory) => memory.write(offset, bytes),
        }
    }

    /// Starts a worker over a transport that reaches the memory.
    pub fn start(&self, config: WorkerConfig, client: HttpBootstrapClient) -> Worker {
        match self {
            Store::Local(arena) => Worker::start(config, local(arena), Box::new(client)).unwrap(),
            Store::Several(arena, log) => {
                let near = Member::named("near", Box::new(local(arena)));
                let ways = Ways::new(vec![near, Member::new(Box::new(local(arena)))]).unwrap();
                let transport = Overheard { inner: ways, log: log.clone() };
                Worker::start(config, transport, Box::new(client)).unwrap()
            }
            Store::Placed(arena, place, log) => {
                let transport = Overheard { inner: place.transport(arena), log: log.clone() };
                Worker::start(config, transport, Box::new(client)).unwrap()
            }
            Store::Tcp(memory) => {
                let address = "127.0.0.1:0".parse().unwrap();
                let mut transport = TcpTransport::new(TcpConfig::new(address)).unwrap();
                transport.add_memory(memory).unwrap();
                Worker::start(config, transport, Box::new(client)).unwrap()
            }
            #[cfg(feature = "nixl")]
            Store::Nixl(pool) => {
                let nixl = nixl().expect("nothing is tested over NIXL where it is not installed");
                let mut transport = NixlTransport::new(nixl, NixlConfig::default()).unwrap();
                transport.add_memory(pool).unwrap();
                Worker::start(config, transport, Box::new(client)).unwrap()
            }
            #[cfg(feature = "ucx")]
            Store::Ucx(pool) => {
                use kv_transfer::ucx::{Ucx, UcxConfig, UcxTransport};
                let ucx = Ucx::load(None).expect("nothing is tested over UCX where it is not installed");
                let mut transport = UcxTransport::new(ucx, UcxConfig::default()).unwrap();
                transport.add_memory(pool).unwrap();
                Worker::start(config, transport, Box::new(client)).unwrap()
            }
            #[cfg(feature = "fabric")]
            Store::Fabric(pool) => {
                use kv_transfer::fabric::{FabricConfig, FabricTransport};
                let address = "127.0.0.1".parse().unwrap();
                let mut transport = FabricTransport::new(FabricConfig::new(address)).unwrap();
                transport.add_memory(pool).unwrap();
                Worker::start(config, transport, Box::new(client)).unwrap()
            }
            #[cfg(feature = "nixl")]
            Store::NixlGpu(memory) => {
                let nixl = nixl().expect("nothing is tested over NIXL where it is not installed");
                let mut transport = NixlTransport::new(nixl, NixlConfig::default()).unwrap();
                // SAFETY: the store keeps the memory until its worker has stopped.
                unsafe { transport.adopt_device(0, memory.addr(), memory.len() as u64) }.unwrap();
                Worker::start(config, transport, Box::new(client)).unwrap()
            }
            #[cfg(feature = "ucx")]
            Store::UcxGpu(memory) => {
                use kv_transfer::ucx::{Ucx, UcxConfig, UcxTransport};
                let ucx = Ucx::load(None).expect("nothing is tested over UCX where it is not installed");
                let mut transport = UcxTransport::new(ucx, UcxConfig::default()).unwrap();
                // SAFETY: as above.
                unsafe { transport.adopt_device(0, memory.addr(), memory.len() as u64) }.unwrap();
                Worker::start(config, transport, Box::new(client)).unwrap()
            }
        }
    }
}

#[cfg(any(feature = "nixl", feature = "ucx"))]
fn vram(len: usize) -> Vram {
    Vram::new(Gpu::first().expect("nothing is tested in GPU memory where there is no GPU"), len)
}

fn local(arena: &Arena) -> LocalTransport {
    let mut transport = LocalTransport::new(LocalConfig::default()).unwrap();
    transport.add_arena(arena).unwrap();
    transport
}

/// The NIXL library if it is installed; otherwise prints why not and how to install it.
#[cfg(feature = "nixl")]
pub fn nixl() -> Option<&'static Nixl> {
    use kv_transfer::nixl::Search;
    static NIXL: std::sync::OnceLock<Option<Nixl>> = std::sync::OnceLock::new();
    NIXL.get_or_init(|| kv_conformance::needed("NIXL", Nixl::load(&Search::default()))).as_ref()
}
