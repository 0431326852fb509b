//! Where devices are: their NUMA nodes, and which are nearest to a GPU. The kernel tells it in /sys.

use std::fs;
use std::path::{Path, PathBuf};

/// Where the kernel tells of devices.
pub(crate) const SYS: &str = "/sys";
/// The form of a PCI function's address.
const PCI: &str = "0000:17:00.0";

/// The place of a device in its host.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Location {
    /// The NUMA node, where it is known.
    pub(crate) node: Option<u16>,
    /// The bridges above the device, the outermost first, and the device itself. Empty for a device without hardware.
    bridges: PathBuf,
}

impl Location {
    /// The place of a device with this name of its domain, which has the name of an interface or of an RDMA device in it;
    /// of the PCI function `pci`, if the provider tells it.
    pub(crate) fn of(sys: &Path, name: &str, pci: Option<&str>) -> Location {
        // A domain of `efa` is a device with the kind of its endpoints: `rdmap0s6-rdm`.
        let device = name.rsplit_once('-').map_or(name, |(device, _)| device);
        let names = [("class/net", name), ("class/infiniband", name), ("class/infiniband", device)];
        let by_name = names.map(|(class, name)| sys.join(class).join(name).join("device"));
        let by_pci = pci.map(|pci| sys.join("bus/pci/devices").join(pci));
        let is_whole = |name: &str| !name.is_empty() && !name.contains('/') && name != "..";
        let by_name = by_name.into_iter().filter(|_| is_whole(name));
        let found = by_pci.into_iter().chain(by_name).find_map(|path| fs::canonicalize(path).ok());
        found.map_or_else(Location::default, Location::at)
    }

    /// The place of the PCI function with this address, with four zeros at the begin, or with as many zeros as `nvidia-smi` has.
    pub(crate) fn of_pci(sys: &Path, pci: &str) -> Option<Location> {
        let pci = pci.strip_prefix("0000").filter(|rest| rest.len() == PCI.len()).unwrap_or(pci);
        let is_address =
            pci.len() == PCI.len() && pci.chars().all(|char| char.is_ascii_hexdigit() || ":.".contains(char));
        let path = is_address.then(|| sys.join("bus/pci/devices").join(pci.to_ascii_lowercase()))?;
        fs::canonicalize(path).ok().map(Location::at)
    }

    fn at(bridges: PathBuf) -> Location {
        let text = fs::read_to_string(bridges.join("numa_node")).unwrap_or_default();
        // The kernel says -1 where it does not know.
        Location { node: text.trim().parse().ok(), bridges }
    }

    /// How near two devices are: the number of bridges that both are behind. Devices behind one switch are nearer than
    /// those of one socket, and those nearer than all others.
    pub(crate) fn nearness(&self, other: &Location) -> usize {
        let shared = self.bridges.iter().zip(&other.bridges).take_while(|(one, two)| one == two).count();
        let same_node = self.node.is_some() && self.node == other.node;
        2 * shared + usize::from(same_node)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A host of two sockets: a network card beside a GPU behind each of two switches on node 0, and one card on node 1.
    struct Sys(PathBuf);

    impl Sys {
        fn new(test: &str) -> Sys {
            let root = std::env::temp_dir().join(format!("kv-fabric-{test}-{}", std::process::id()));
            let devices = [
                ("pci0000:00/0000:00:01.0/0000:01:00.0", "0", Some(("infiniband", "mlx5_0"))),
                ("pci0000:00/0000:00:01.0/0000:02:00.0", "0", None),
                ("pci0000:00/0000:00:02.0/0000:03:00.0", "0", Some(("infiniband", "rdmap3s0"))),
                ("pci0000:00/0000:00:02.0/0000:04:00.0", "0", None),
                ("pci0000:80/0000:80:01.0/0000:81:00.0", "1", Some(("net", "eth0"))),
                ("pci0000:80/0000:80:02.0/0000:82:00.0", "-1", Some(("net", "eth1"))),
            ];
            fs::create_dir_all(root.join("bus/pci/devices")).unwrap();
            for (path, node, name) in devices {
                let device = root.join("devices").join(path);
                fs::create_dir_all(&device).unwrap();
                fs::write(device.join("numa_node"), format!("{node}\n")).unwrap();
                symlink(&device, root.join("bus/pci/devices").join(path.rsplit('/').next().unwrap()))
                    .unwrap();
                if let Some((class, name)) = name {
                    let place = root.join("class").join(class).join(name);
                    fs::create_dir_all(&place).unwrap();
                    symlink(&device, place.join("device")).unwrap();
                }
            }
            Sys(root)
        }
    }

    impl Drop for Sys {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_node_of_a_device_is_found_by_every_name_that_providers_give() {
        let sys = Sys::new("names");
        let node = |name, pci| Location::of(&sys.0, name, pci).node;
        assert_eq!(node("eth0", None), Some(1));
        assert_eq!(node("mlx5_0", None), Some(0));
        assert_eq!(node("rdmap3s0-rdm", None), Some(0));
        assert_eq!(node("any", Some("0000:81:00.0")), Some(1));
        assert_eq!(node("eth1", None), None, "the kernel does not know");
        for nothing in ["lo", "", "..", "../net/eth0"] {
            assert_eq!(Location::of(&sys.0, nothing, None), Location::default(), "{nothing}");
        }
    }

    #[test]
    fn a_device_behind_the_switch_of_a_gpu_is_nearest_to_it_and_then_one_of_its_socket() {
        let sys = Sys::new("gpus");
        let names = ["mlx5_0", "rdmap3s0-rdm", "eth0", "lo"];
        let near = |gpu| {
            let gpu = Location::of_pci(&sys.0, gpu).unwrap();
            names.map(|name| Location::of(&sys.0, name, None).nearness(&gpu))
        };
        let [beside, socket, other, none] = near("0000:02:00.0");
        assert!(beside > socket && socket > other && other > none, "{beside} {socket} {other} {none}");
        let [socket, beside, ..] = near("0000:04:00.0");
        assert!(beside > socket);
        let short = Location::of_pci(&sys.0, "0000:02:00.0");
        assert_eq!(Location::of_pci(&sys.0, "00000000:02:00.0"), short, "nvidia-smi's form");
        assert_eq!(Location::of_pci(&sys.0, "0000:99:00.0"), None);
        assert_eq!(Location::of_pci(&sys.0, "../../devices"), None);
    }
}
