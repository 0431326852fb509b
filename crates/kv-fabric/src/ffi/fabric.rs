//! [`Objects`]: what libfabric makes for one transport (fabric, domain, address table, completion queue and
//! endpoint), and what the provider promises.

use std::ffi::{CStr, CString, c_char, c_void};
use std::os::fd::RawFd;
use std::ptr::{self, NonNull};
use std::time::{Duration, Instant};

use super::{Library, Settings, call, sockets, sys};
use crate::error::FabricError;

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
/// How long the ends of an endpoint's connections are awaited. What is in their sockets takes no time but this process's.
const ENDING: Duration = Duration::from_secs(5);

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

impl Drop for Objects {
    fn drop(&mut self) {
        if self.copies && !self.ep.is_null() && !self.end_connections() {
            // What is left stays open until the process ends. Nothing touches any memory without progress.
            return;
        }
        // SAFETY: each object is closed once, users before what they use; nothing has the pointers afterwards.
        unsafe {
            if self.regions_first {
                self.close_regions();
            }
            close(self.ep.cast());
            self.close_regions();
            close(self.av.cast());
            close(self.cq.cast());
            close(self.domain.cast());
            close(self.fabric.cast());
            if !self.info.is_null() {
                (self.library.freeinfo)(self.info);
            }
        }
    }
}

impl Objects {
    /// Ends the endpoint's connections, as if the peers had; false if some are still open after a while.
    ///
    /// libfabric 1.17 crashes when it closes a connection by which half of a peer's write with data has come, or half of
    /// the answer to a read: it reports the end of an operation without a context. It does not if it reads the end of the
    /// connection. So the sockets are shut down, and libfabric reads what is in them.
    fn end_connections(&mut self) -> bool {
        let Some(fd) = self.fd else { return false };
        let begun = Instant::now();
        loop {
            match sockets::connections(fd) {
                Ok(open) if open.is_empty() => return true,
                Ok(open) if begun.elapsed() < ENDING => open.into_iter().for_each(sockets::shut_down),
                _ => return false,
            }
            // SAFETY: the queue is open. There is room for one entry in its format; the error's entry is zeroed, so that
            // the provider copies no data into a buffer.
            unsafe {
                let mut done: sys::fi_cq_data_entry = std::mem::zeroed();
                let count = call!(self.cq => ops, read(self.cq, (&raw mut done).cast(), 1));
                if count == -(sys::FI_EAVAIL as isize) {
                    let mut error: sys::fi_cq_err_entry = std::mem::zeroed();
                    call!(self.cq => ops, readerr(self.cq, &raw mut error, 0));
                }
            }
        }
    }

    /// Closes the region that was made last. Nobody knows it yet.
    pub(super) fn close_last(&mut self) {
        if let Some(region) = self.regions.pop() {
            // SAFETY: open, and forgotten here; no operation has been begun with it.
            unsafe { close(region.as_ptr().cast()) };
        }
    }

    /// # Safety
    ///
    /// No operation of this side uses the regions any more, or the endpoint's end ends them.
    unsafe fn close_regions(&mut self) {
        for region in self.regions.drain(..) {
            // SAFETY: open, and forgotten here.
            unsafe { close(region.as_ptr().cast()) };
        }
    }
}

/// Asks libfabric for endpoints that have what a transport needs: those of these settings, or all. They are the caller's
/// to free.
fn ask(library: &Library, settings: Option<&Settings>, immediate: usize) -> Result<*mut sys::fi_info, i32> {
    let text = |text: &str| CString::new(text).map_err(|_| libc::EINVAL);
    let provider = settings.map(|settings| text(&settings.provider)).transpose()?;
    let device = settings.and_then(|settings| settings.device.as_deref()).map(text).transpose()?;
    let address = settings.and_then(|settings| settings.address);
    let node = address.map(|address| text(&address.to_string())).transpose()?;
    // SAFETY: the hints are libfabric's own, complete and zeroed; strings in them are freed with them, by `free`.
    unsafe {
        let hints = (library.dupinfo)(ptr::null());
        if hints.is_null() {
            return Err(libc::ENOMEM);
        }
        (*hints).caps = u64::from(sys::FI_MSG | sys::FI_RMA);
        (*hints).mode = sys::FI_CONTEXT as u64 | sys::FI_CONTEXT2 as u64;
        (*(*hints).ep_attr).type_ = sys::FI_EP_RDM;
        if let Some(provider) = &provider {
            (*(*hints).fabric_attr).prov_name = libc::strdup(provider.as_ptr());
        }
        (*(*hints).tx_attr).msg_order = sys::FI_ORDER_SAS as u64;
        (*(*hints).rx_attr).msg_order = sys::FI_ORDER_SAS as u64;
        (*(*hints).tx_attr).op_flags = sys::FI_DELIVERY_COMPLETE as u64;
        let domain = (*hints).domain_attr;
        (*domain).mr_mode = MODES as i32;
        (*domain).threading = sys::FI_THREAD_DOMAIN;
        (*domain).control_progress = sys::FI_PROGRESS_MANUAL;
        (*domain).data_progress = sys::FI_PROGRESS_MANUAL;
        (*domain).resource_mgmt = sys::FI_RM_ENABLED;
        (*domain).cq_data_size = immediate;
        if let Some(device) = &device {
            (*domain).name = libc::strdup(device.as_ptr());
        }
        let (node, flags) =
            node.as_ref().map_or((ptr::null(), 0), |node| (node.as_ptr(), sys::FI_SOURCE as u64));
        let mut info = ptr::null_mut();
        let found = (library.getinfo)(library.interface(), node, ptr::null(), flags, hints, &raw mut info);
        (library.freeinfo)(hints);
        let info = device.as_ref().map_or(info, |device| only(library, info, device));
        match found {
            0 if !info.is_null() => {
                // Asked for to learn that writes may have it. Messages need no such proof.
                (*(*info).tx_attr).op_flags = 0;
                Ok(info)
            }
            0 => Err(libc::ENODATA),
            code => Err(-code),
        }
    }
}

/// The endpoint of a list that is of this device, and null if none is: providers that stand on others, as `ofi_rxm`
/// does, offer all devices, whichever was asked for.
///
/// # Safety
///
/// Null, or libfabric's list, of which nothing else is used.
unsafe fn only(library: &Library, list: *mut sys::fi_info, device: &CStr) -> *mut sys::fi_info {
    let mut info = list;
    // SAFETY: libfabric's list, whose names end with a zero; a copy of one entry stands by itself.
    unsafe {
        while !info.is_null() {
            let name = (*(*info).domain_attr).name;
            if !name.is_null() && CStr::from_ptr(name) == device {
                break;
            }
            info = (*info).next;
        }
        let found = if info.is_null() { info } else { (library.dupinfo)(info) };
        if !list.is_null() {
            (library.freeinfo)(list);
        }
        found
    }
}

/// A provider that has what a transport needs, on one of its devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Usable {
    pub(crate) provider: String,
    pub(crate) device: String,
    /// The device's PCI function, if the provider tells it.
    pub(crate) pci: Option<String>,
}

/// The providers that have what a transport needs, each with its devices, in libfabric's order.
pub(crate) fn usable(library: &Library) -> Vec<Usable> {
    let mut found = Vec::new();
    for immediate in WANTED {
        let Ok(first) = ask(library, None, immediate) else { continue };
        let mut info = first;
        // SAFETY: libfabric's list, whose names end with a zero, and which is freed once, at the end.
        unsafe {
            while !info.is_null() {
                let (provider, (device, pci)) = (text((*(*info).fabric_attr).prov_name), device(info));
                let usable = Usable { provider, device, pci };
                if !found.contains(&usable) {
                    found.push(usable);
                }
                info = (*info).next;
            }
            (library.freeinfo)(first);
        }
    }
    found
}

/// The name of a device, and its PCI function, if the provider tells it.
///
/// # Safety
///
/// libfabric has filled the info in.
unsafe fn device(info: *const sys::fi_info) -> (String, Option<String>) {
    // SAFETY: pointers of an info are null or lead to what libfabric has filled in, and its names end with a zero. The
    // attributes of a bus of PCI are those of PCI.
    unsafe {
        let nic = (*info).nic;
        let bus = if nic.is_null() { ptr::null() } else { (*nic).bus_attr.cast_const() };
        let pci = (!bus.is_null() && (*bus).bus_type == sys::FI_BUS_PCI).then(|| (*bus).attr.pci);
        let pci = pci.map(|pci| {
            let sys::fi_pci_attr { domain_id, bus_id, device_id, function_id } = pci;
            format!("{domain_id:04x}:{bus_id:02x}:{device_id:02x}.{function_id:x}")
        });
        (text((*(*info).domain_attr).name), pci)
    }
}

/// # Safety
///
/// Null, or a string that ends with a zero.
unsafe fn text(text: *const c_char) -> String {
    match text.is_null() {
        true => String::new(),
        // SAFETY: not null.
        false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
    }
}

/// # Safety
///
/// Null, or an object that is open, and that is not used again.
unsafe fn close(object: *mut sys::fid) {
    if !object.is_null() {
        // SAFETY: every object begins with its `fid`.
        unsafe { call!(object => ops, close(object)) };
    }
}
