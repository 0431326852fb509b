//! Sockets, and the options that every connection has.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use kv_host::OsError;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, accept_with, bind, connect, getsockname, listen, socket_with,
    sockopt,
};

use crate::config::TcpConfig;

const BACKLOG: i32 = 1024;
/// The longest times that the kernel takes for its keepalive.
const LONGEST: Duration = Duration::from_secs(32_767);
const FLAGS: SocketFlags = SocketFlags::NONBLOCK.union(SocketFlags::CLOEXEC);

fn open(address: &SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    socket_with(family, SocketType::STREAM, FLAGS, None)
}

/// A socket that listens on `config.bind`, and the address that it got.
pub(crate) fn listener(config: &TcpConfig) -> Result<(OwnedFd, SocketAddr), OsError> {
    let error = |call| move |error: Errno| OsError::new(call, error);
    let socket = open(&config.bind).map_err(error("socket"))?;
    // A worker that comes back may listen on its port at once.
    sockopt::set_socket_reuseaddr(&socket, true).map_err(error("setsockopt"))?;
    // Connections that are accepted have the buffers of the listener from their first byte on.
    set_buffers(&socket, config).map_err(error("setsockopt"))?;
    bind(&socket, &config.bind).map_err(error("bind"))?;
    listen(&socket, BACKLOG).map_err(error("listen"))?;
    let bound = getsockname(&socket).map_err(error("getsockname"))?;
    let bound = SocketAddr::try_from(bound).map_err(error("getsockname"))?;
    Ok((socket, bound))
}

/// Accepts a connection, which gets the options that every connection has.
pub(crate) fn accept(listener: &OwnedFd, config: &TcpConfig) -> Result<OwnedFd, Errno> {
    let socket = accept_with(listener, FLAGS)?;
    set_options(&socket, config)?;
    Ok(socket)
}

/// Begins to connect. The socket is writable once the connection is open or has failed.
pub(crate) fn dial(address: &SocketAddr, config: &TcpConfig) -> Result<OwnedFd, Errno> {
    let socket = open(address)?;
    set_buffers(&socket, config)?;
    set_options(&socket, config)?;
    match connect(&socket, address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket),
        Err(error) => Err(error),
    }
}

/// The error with which connecting has failed, if it has.
pub(crate) fn failure(socket: impl AsFd) -> Option<Errno> {
    match sockopt::socket_error(socket) {
        Ok(Ok(())) => None,
        Ok(Err(error)) | Err(error) => Some(error),
    }
}

fn set_buffers(socket: &OwnedFd, config: &TcpConfig) -> Result<(), Errno> {
    if let Some(len) = config.send_buffer {
        sockopt::set_socket_send_buffer_size(socket, len)?;
    }
    if let Some(len) = config.receive_buffer {
        sockopt::set_socket_recv_buffer_size(socket, len)?;
    }
    Ok(())
}

fn set_options(socket: &OwnedFd, config: &TcpConfig) -> Result<(), Errno> {
    sockopt::set_tcp_nodelay(socket, true)?;
    let silence = u32::try_from(config.silence.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(socket, silence)?;
    // An idle connection: the first probe after half of the time; with a user timeout, the kernel counts no
    // probes.
    let bounded = |time: Duration| time.clamp(Duration::from_secs(1), LONGEST);
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, bounded(config.silence / 2))?;
    sockopt::set_tcp_keepintvl(socket, bounded(config.silence / 8))?;
    Ok(())
}

/// The address of a listener that peers of the same address family are told.
pub(crate) fn advertised(config: &TcpConfig, bound: SocketAddr) -> Result<Vec<SocketAddr>, SocketAddr> {
    let mut addresses = config.advertise.clone();
    if addresses.is_empty() {
        addresses.push(bound);
    }
    for address in &mut addresses {
        if address.port() == 0 {
            address.set_port(bound.port());
        }
    }
    // The zone of a link-local address is a number of this host, and means nothing to a peer.
    let names_no_host = |ip: IpAddr| match ip.to_canonical() {
        IpAddr::V4(four) => four.is_unspecified() || four.is_multicast(),
        IpAddr::V6(six) => six.is_unspecified() || six.is_multicast() || six.is_unicast_link_local(),
    };
    match addresses.iter().find(|address| names_no_host(address.ip())) {
        Some(address) => Err(*address),
        None => Ok(addresses),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_told_addresses_that_name_a_host_and_the_port_that_was_got() {
        let bound: SocketAddr = "0.0.0.0:7000".parse().unwrap();
        let config = TcpConfig::new(bound);
        assert_eq!(advertised(&config, bound), Err(bound));
        let one = "10.0.0.1:0".parse().unwrap();
        let other = "[fd00::1]:90".parse().unwrap();
        let config = config.with(|config| config.advertise = vec![one, other]);
        let wanted = vec!["10.0.0.1:7000".parse().unwrap(), other];
        assert_eq!(advertised(&config, bound), Ok(wanted));
    }
    #[test]
    fn an_address_that_only_this_host_understands_is_not_told_to_peers() {
        let mapped = ["[::ffff:0.0.0.0]:80", "[::ffff:224.0.0.1]:80"];
        let others = ["[fe80::1%3]:80", "[fe80::1]:80", "[ff02::1]:80", "224.0.0.1:80", "[::]:80"];
        for refused in mapped.into_iter().chain(others) {
            let refused: SocketAddr = refused.parse().unwrap();
            let bound = "[::1]:80".parse().unwrap();
            let config = TcpConfig::new(bound).with(|config| config.advertise = vec![bound, refused]);
            assert_eq!(advertised(&config, bound), Err(refused));
        }
    }

    #[test]
    fn dialed_and_accepted_connections_have_the_time_of_silence_and_the_chosen_buffers() {
        // A day is the longest time that the configuration allows, and longer than the kernel's longest.
        for (address, silence, idle, interval) in
            [("127.0.0.1:0", 8, 4, 1), ("[::1]:0", 8, 4, 1), ("127.0.0.1:0", 86_400, 32_767, 10_800)]
        {
            let config = TcpConfig::new(address.parse().unwrap()).with(|config| {
                config.silence = Duration::from_secs(silence);
                (config.send_buffer, config.receive_buffer) = (Some(8 << 10), Some(16 << 10));
            });
            let (listener, bound) = listener(&config).unwrap();
            let dialed = dial(&bound, &config).unwrap();
            let accepted = loop {
                match accept(&listener, &config) {
                    Ok(socket) => break socket,
                    Err(error) => assert_eq!(error, Errno::WOULDBLOCK),
                }
            };
            for socket in [dialed, accepted] {
                assert_eq!(sockopt::tcp_user_timeout(&socket), Ok(1000 * silence as u32));
                assert_eq!(sockopt::socket_keepalive(&socket), Ok(true));
                assert_eq!(sockopt::tcp_keepidle(&socket), Ok(Duration::from_secs(idle)));
                assert_eq!(sockopt::tcp_keepintvl(&socket), Ok(Duration::from_secs(interval)));
                assert_eq!(sockopt::tcp_nodelay(&socket), Ok(true));
                // The kernel doubles what it is asked for, to have room for its own records.
                assert_eq!(sockopt::socket_send_buffer_size(&socket), Ok(16 << 10));
                assert_eq!(sockopt::socket_recv_buffer_size(&socket), Ok(32 << 10));
            }
        }
    }
}
