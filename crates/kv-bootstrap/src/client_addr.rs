//! [`ClientAddr`]: the address by which the server tells clients apart.

use std::net::{IpAddr, Ipv6Addr};

/// The address of a client, for which connections, bytes and entries are counted. The port is left out, and
/// so are the last 64 bits of an IPv6 address, because a host with one address of such a network can use them
/// all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientAddr(IpAddr);

impl From<IpAddr> for ClientAddr {
    fn from(addr: IpAddr) -> ClientAddr {
        ClientAddr(match addr.to_canonical() {
            IpAddr::V6(addr) if !addr.is_loopback() => {
                IpAddr::V6(Ipv6Addr::from_bits(addr.to_bits() & (u128::MAX << 64)))
            }
            other => other,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_ipv6_network_are_one_client() {
        let client = |text: &str| ClientAddr::from(text.parse::<IpAddr>().unwrap());
        assert_eq!(client("2001:db8::1"), client("2001:db8::ffff:1"));
        assert_ne!(client("2001:db8::1"), client("2001:db8:0:1::1"));
        assert_ne!(client("10.0.0.1"), client("10.0.0.2"));
        assert_eq!(client("::ffff:10.0.0.1"), client("10.0.0.1"));
        assert_ne!(client("::1"), client("::2"));
    }
}
