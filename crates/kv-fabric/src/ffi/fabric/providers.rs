//! What the providers of libfabric offer: the endpoints that have what a transport needs.

use std::ffi::{CStr, CString, c_char};
use std::ptr;

use super::{MODES, WANTED};
use crate::ffi::{Library, Settings, sys};

/// Asks libfabric for endpoints that have what a transport needs: those of these settings, or all. They are the caller's
/// to free.
pub(super) fn ask(
    library: &Library,
    settings: Option<&Settings>,
    immediate: usize,
) -> Result<*mut sys::fi_info, i32> {
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
pub(super) unsafe fn device(info: *const sys::fi_info) -> (String, Option<String>) {
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
pub(super) unsafe fn text(text: *const c_char) -> String {
    match text.is_null() {
        true => String::new(),
        // SAFETY: not null.
        false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
    }
}
