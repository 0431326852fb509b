//! [`Objects`]: what libfabric makes for one transport (fabric, domain, address table, completion queue and
//! endpoint), and what the provider promises.

mod closing;
mod providers;

use std::ffi::c_void;
use std::os::fd::RawFd;
use std::ptr::{self, NonNull};

use super::{Library, Settings, call, sys};
use crate::error::FabricError;
use providers::{ask, device, text};

pub(crate) use providers::{Usable, usable};

/// A peer's endpoint in the address table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Address(pub(super) u64);

/// What the provider does, and what it demands of registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Promises {
    /// Ranges of one write or read.
    pub(crate) ranges: usize,
    /// Bytes of data that a write may carry to the peer's completion queue: 0, 4 or more.
    pub(crate) immediate: usize,
    /// Messages of so many bytes are taken.
    pub(crate) message: usize,
    /// Memory modes, `FI_MR_…`.
    pub(super) modes: u64,
    /// Bytes of a memory key.
    pub(super) key: usize,
    /// The format of addresses is that of sockets, which begin with a family.
    pub(crate) sockets: bool,
    /// The bytes of writes are copied out of sockets by this process.
    pub(crate) copies: bool,
    /// Operations that may be under way; beyond that there is no room.
    pub(crate) under_way: usize,
}

impl Promises {
    /// What both do; `None` if they address memory in different ways.
    pub(crate) fn with(self, other: Promises) -> Option<Promises> {
        let all = Promises {
            ranges: self.ranges.min(other.ranges),
            immediate: self.immediate.min(other.immediate),
            message: self.message.min(other.message),
            sockets: self.sockets && other.sockets,
            copies: self.copies || other.copies,
            under_way: self.under_way.min(other.under_way),
            ..self
        };
        (self.modes == other.modes && self.key == other.key).then_some(all)
    }
}

/// The levels of service that are asked for, the best one first: data with writes, and writes whose end means that
/// the bytes are in the peer's memory.
const WANTED: [usize; 2] = [4, 0];
/// Memory modes that this crate honours.
const MODES: u32 = sys::FI_MR_LOCAL
    | sys::FI_MR_VIRT_ADDR
    | sys::FI_MR_ALLOCATED
    | sys::FI_MR_PROV_KEY
    | sys::FI_MR_RMA_EVENT
    | sys::FI_MR_ENDPOINT;
/// Entries of the completion queue.
const QUEUE: usize = 16 << 10;
/// Longest name of an endpoint.
const NAME: usize = 256;

/// The objects of one endpoint. Each is null until it is made.
#[derive(Debug)]
pub(super) struct Objects {
    pub(super) library: &'static Library,
    info: *mut sys::fi_info,
    pub(super) fabric: *mut sys::fid_fabric,
    pub(super) domain: *mut sys::fid_domain,
    pub(super) av: *mut sys::fid_av,
    pub(super) cq: *mut sys::fid_cq,
    pub(super) ep: *mut sys::fid_ep,
    pub(super) regions: Vec<NonNull<sys::fid_mr>>,
    /// Regions that belong to the endpoint are closed before it.
    regions_first: bool,
    /// The descriptor of the completion queue, if it has one.
    pub(super) fd: Option<RawFd>,
    /// The endpoint's connections are sockets.
    copies: bool,
}

// SAFETY: the domain's threading is FI_THREAD_DOMAIN: one thread at a time, whichever. Nothing else has the pointers.
unsafe impl Send for Objects {}

impl Objects {
    /// Opens an endpoint of the provider. Its name and what the provider promises are returned with it.
    pub(super) fn open(
        library: &'static Library,
        settings: &Settings,
    ) -> Result<(Objects, Vec<u8>, Promises), FabricError> {
        let mut objects = Objects {
            library,
            info: ptr::null_mut(),
            fabric: ptr::null_mut(),
            domain: ptr::null_mut(),
            av: ptr::null_mut(),
            cq: ptr::null_mut(),
            ep: ptr::null_mut(),
            regions: Vec::new(),
            regions_first: false,
            fd: None,
            copies: false,
        };
        let promises = objects.find(settings)?;
        objects.copies = promises.copies;
        objects.make()?;
        let name = objects.name()?;
        Ok((objects, name, promises))
    }

    /// Asks libfabric for the provider.
    fn find(&mut self, settings: &Settings) -> Result<Promises, FabricError> {
        let mut last = 0;
        for immediate in WANTED {
            match ask(self.library, Some(settings), immediate) {
                Ok(info) => {
                    self.info = info;
                    return Ok(self.promises(immediate));
                }
                Err(code) => last = code,
            }
        }
        let status = self.library.text(last);
        Err(FabricError::Provider { provider: settings.provider.clone(), code: last, status })
    }

    fn promises(&mut self, immediate: usize) -> Promises {
        // SAFETY: `find` has got the info, whose attributes libfabric fills in.
        unsafe {
            let (tx, domain) = (&*(*self.info).tx_attr, &*(*self.info).domain_attr);
            let modes = u64::from(domain.mr_mode as u32);
            self.regions_first = modes & u64::from(sys::FI_MR_ENDPOINT) != 0;
            let format = (*self.info).addr_format;
            let provider = text((*(*self.info).fabric_attr).prov_name).to_ascii_lowercase();
            Promises {
                ranges: tx.iov_limit.min(tx.rma_iov_limit).max(1),
                immediate: if immediate == 0 { 0 } else { domain.cq_data_size },
                message: (*(*self.info).ep_attr).max_msg_size,
                modes,
                key: domain.mr_key_size,
                sockets: [sys::FI_SOCKADDR, sys::FI_SOCKADDR_IN, sys::FI_SOCKADDR_IN6].contains(&format),
                copies: provider.split(';').any(|part| ["tcp", "sockets", "udp", "net"].contains(&part)),
                under_way: tx.size,
            }
        }
    }

    /// Makes the objects, in their order.
    fn make(&mut self) -> Result<(), FabricError> {
        // SAFETY: each call gets objects that were made before it, and attributes that outlive it. What was made is
        // closed by `drop`, also after an error.
        unsafe {
            let attributes = (*self.info).fabric_attr;
            let made = (self.library.fabric)(attributes, &raw mut self.fabric, ptr::null_mut());
            self.check("fi_fabric", made)?;
            let made = call!(self.fabric => ops, domain(self.fabric, self.info, &raw mut self.domain, ptr::null_mut()));
            self.check("fi_domain", made)?;
            let mut table: sys::fi_av_attr = std::mem::zeroed();
            table.type_ = (*(*self.info).domain_attr).av_type;
            let made = call!(self.domain => ops, av_open(self.domain, &raw mut table, &raw mut self.av, ptr::null_mut()));
            self.check("fi_av_open", made)?;
            self.fd = self.make_queue()?;
            let made = call!(self.domain => ops, endpoint(self.domain, self.info, &raw mut self.ep, ptr::null_mut()));
            self.check("fi_endpoint", made)?;
            let ep = &raw mut (*self.ep).fid;
            let bound = call!(ep => ops, bind(ep, &raw mut (*self.av).fid, 0));
            self.check("fi_ep_bind", bound)?;
            let both = sys::FI_TRANSMIT as u64 | sys::FI_RECV as u64;
            let bound = call!(ep => ops, bind(ep, &raw mut (*self.cq).fid, both));
            self.check("fi_ep_bind", bound)?;
            let enabled = call!(ep => ops, control(ep, sys::FI_ENABLE as i32, ptr::null_mut()));
            self.check("fi_enable", enabled)
        }
    }

    /// Makes the completion queue, with a descriptor to sleep on where the provider has one.
    ///
    /// # Safety
    ///
    /// The domain has been made.
    unsafe fn make_queue(&mut self) -> Result<Option<RawFd>, FabricError> {
        let mut last = 0;
        for wait in [sys::FI_WAIT_FD, sys::FI_WAIT_NONE] {
            // SAFETY: the domain is there; the attributes outlive the call.
            unsafe {
                let mut attributes: sys::fi_cq_attr = std::mem::zeroed();
                attributes.size = QUEUE;
                attributes.format = sys::FI_CQ_FORMAT_DATA;
                attributes.wait_obj = wait;
                let made = call!(self.domain => ops,
                    cq_open(self.domain, &raw mut attributes, &raw mut self.cq, ptr::null_mut()));
                if made != 0 {
                    last = made;
                    continue;
                }
                let mut fd: RawFd = -1;
                let cq = &raw mut (*self.cq).fid;
                let got = wait == sys::FI_WAIT_FD
                    && call!(cq => ops, control(cq, sys::FI_GETWAIT as i32, (&raw mut fd).cast::<c_void>()))
                        == 0;
                return Ok((got && fd >= 0).then_some(fd));
            }
        }
        self.check("fi_cq_open", last).map(|()| None)
    }

    fn name(&self) -> Result<Vec<u8>, FabricError> {
        let mut name = vec![0; NAME];
        let mut len = NAME;
        // SAFETY: the endpoint is enabled, and the buffer has the length that is said.
        let got = unsafe {
            call!(self.ep => cm, getname(&raw mut (*self.ep).fid, name.as_mut_ptr().cast(), &raw mut len))
        };
        self.check("fi_getname", got)?;
        name.truncate(len);
        Ok(name)
    }

    /// libfabric's name of the device, and its PCI function, if the provider tells it.
    pub(super) fn device(&self) -> (String, Option<String>) {
        // SAFETY: libfabric has filled the info in.
        unsafe { device(self.info) }
    }

    /// The error of a call that has not returned zero.
    pub(super) fn check(&self, call: &'static str, result: i32) -> Result<(), FabricError> {
        if result == 0 {
            return Ok(());
        }
        Err(FabricError::Call { call, status: self.library.text(result), code: result.wrapping_abs() })
    }
}
