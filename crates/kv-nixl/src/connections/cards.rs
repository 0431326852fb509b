//! The RDMA cards of which UCX may use one: a card that UCX does not use is no route to a peer.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, accessat};

use crate::connections::route::names;

/// Where the kernel shows its cards, and where it lets processes reach them.
#[derive(Debug)]
pub(crate) struct Cards {
    /// `/sys/class`, with `infiniband` and `infiniband_verbs`.
    class: PathBuf,
    /// `/dev/infiniband`.
    devices: PathBuf,
}

impl Cards {
    pub(crate) fn of_this_host() -> Cards {
        Cards { class: "/sys/class".into(), devices: "/dev/infiniband".into() }
    }

    /// True if this process can reach a card with an active port, and the list, as UCX writes its `NET_DEVICES`, has
    /// that port. A container often sees the cards of its host without a way to them.
    pub(crate) fn has_one_of(&self, list: Option<&str>) -> bool {
        let Ok(verbs) = fs::read_dir(self.class.join("infiniband_verbs")) else { return false };
        verbs.flatten().any(|verbs| {
            let (device, rights) = (self.devices.join(verbs.file_name()), Access::READ_OK | Access::WRITE_OK);
            let may_open = accessat(CWD, device, rights, AtFlags::EACCESS);
            let Ok(card) = fs::read_to_string(verbs.path().join("ibdev")) else { return false };
            may_open.is_ok() && self.ports(card.trim()).any(|port| has(list, card.trim(), &port))
        })
    }

    /// The active ports of a card, by their numbers.
    fn ports(&self, card: &str) -> impl Iterator<Item = String> + use<> {
        let ports = fs::read_dir(self.class.join("infiniband").join(card).join("ports"));
        let ports = ports.into_iter().flatten().flatten();
        ports
            .filter(|port| is_active(&port.path()))
            .map(|port| port.file_name().to_string_lossy().into_owned())
    }
}

fn is_active(port: &Path) -> bool {
    fs::read_to_string(port.join("state")).is_ok_and(|state| state.contains("ACTIVE"))
}

/// Whether a list of devices has the port of a card: `all`, or `card:port` of each device. A device may have no port,
/// which stands for all ports, and may have wildcards.
fn has(list: Option<&str>, card: &str, port: &str) -> bool {
    let Some((devices, forbids)) = names(list) else { return true };
    let has = devices.into_iter().any(|device| {
        let (name, number) =
            device.split_once(':').map_or((device, None), |(name, number)| (name, Some(number)));
        device == "all" || (fits(name, card) && number.is_none_or(|number| fits(number, port)))
    });
    has != forbids
}

/// Whether a name begins as a pattern does before the first wildcard, or is the pattern.
fn fits(pattern: &str, name: &str) -> bool {
    match pattern.find(['*', '?', '[']) {
        Some(end) => pattern.get(..end).is_some_and(|start| name.starts_with(start)),
        None => pattern == name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host with one card of two ports, of which the second is active.
    fn host(name: &str) -> (PathBuf, Cards) {
        let root = std::env::temp_dir().join(format!("kv-nixl-cards-{name}-{}", std::process::id()));
        let cards = Cards { class: root.join("class"), devices: root.join("dev") };
        let write = |path: PathBuf, content: &str| {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        };
        write(cards.class.join("infiniband_verbs/uverbs0/ibdev"), "mlx5_0\n");
        write(cards.class.join("infiniband_verbs/abi_version"), "6\n");
        write(cards.class.join("infiniband/mlx5_0/ports/1/state"), "1: DOWN\n");
        write(cards.class.join("infiniband/mlx5_0/ports/2/state"), "4: ACTIVE\n");
        write(cards.devices.join("uverbs0"), "");
        (root, cards)
    }

    #[test]
    fn a_card_counts_only_where_it_is_listed_and_its_port_is_active() {
        let (root, cards) = host("listed");
        for (list, wanted) in [
            (None, true),
            (Some(""), true),
            (Some("all"), true),
            (Some("eth0"), false),
            (Some("lo,eth0"), false),
            (Some("mlx5_0"), true),
            (Some("mlx5_0:2"), true),
            (Some("mlx5_0:1"), false),
            (Some("eth0, mlx5_0:2"), true),
            (Some("mlx5_*"), true),
            (Some("mlx4_*"), false),
            (Some("mlx5_1:2"), false),
            (Some("^mlx5_0"), false),
            (Some("^eth0"), true),
        ] {
            assert_eq!(cards.has_one_of(list), wanted, "{list:?}");
        }
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_card_that_the_process_cannot_open_is_no_route() {
        let (root, cards) = host("closed");
        assert!(cards.has_one_of(None));
        fs::remove_file(cards.devices.join("uverbs0")).unwrap();
        assert!(!cards.has_one_of(None));
        fs::remove_dir_all(root).unwrap();
        assert!(!cards.has_one_of(None), "a host without cards");
    }
}
