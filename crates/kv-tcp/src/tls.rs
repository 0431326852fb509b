//! [`Tls`]: the certificate of a worker, and whom the worker takes for one of its service.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kv_host::OsError;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig, version};

pub(crate) use session::Session;

mod session;

/// Encryption of all connections of a transport, with certificates on both sides. Whoever holds a key whose
/// certificate the service's authority has signed is taken for a worker of the service; nobody else exchanges a
/// byte with the transport.
///
/// The side that dials checks that the certificate names the IP address that it has dialed, or the name given to
/// [`peer_name`](Tls::peer_name). The side that is dialed checks no name.
///
/// Clones share the same configuration.
#[derive(Clone)]
pub struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    peer_name: Option<ServerName<'static>>,
}

impl Tls {
    /// TLS 1.3 with this certificate chain and its key, towards peers whose certificates `authorities` have
    /// signed. All three are PEM: one or more certificates, the worker's first; one private key; one or more
    /// certificates of authorities. The worker's certificate serves both sides of connections: if it names its
    /// uses, they are those of servers and of clients.
    ///
    /// # Errors
    ///
    /// [`TlsError::Pem`] for text that is damaged or has nothing of what is wanted; [`TlsError::Refused`] if key
    /// and certificate do not belong together, or a certificate cannot be used.
    pub fn from_pem(certificates: &[u8], key: &[u8], authorities: &[u8]) -> Result<Tls, TlsError> {
        let chain = all(certificates, "certificates")?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|cause| TlsError::pem("key", &cause))?;
        let mut roots = RootCertStore::empty();
        for authority in all(authorities, "authorities")? {
            roots.add(authority)?;
        }
        let (roots, provider) = (Arc::new(roots), Arc::new(ring::default_provider()));
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
            .build()
            .map_err(|_| TlsError::Pem { what: "authorities", problem: "none is there" })?;
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&version::TLS13])?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), key.clone_key())?;
        // Every connection shows its certificate: nothing is resumed.
        server.send_tls13_tickets = 0;
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&version::TLS13])?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)?;
        client.resumption = rustls::client::Resumption::disabled();
        Ok(Tls::new(Arc::new(client), Arc::new(server)))
    }

    /// As [`from_pem`](Tls::from_pem), from files.
    ///
    /// # Errors
    ///
    /// [`TlsError::File`] for a file that cannot be read; otherwise as [`from_pem`](Tls::from_pem).
    pub fn from_pem_files(
        certificates: impl AsRef<Path>,
        key: impl AsRef<Path>,
        authorities: impl AsRef<Path>,
    ) -> Result<Tls, TlsError> {
        let read = |path: &Path| {
            let failed = |error| TlsError::File { path: path.to_owned(), cause: OsError::new("read", error) };
            std::fs::read(path).map_err(failed)
        };
        Tls::from_pem(&read(certificates.as_ref())?, &read(key.as_ref())?, &read(authorities.as_ref())?)
    }

    /// With configurations of the server's author: another verifier, other ciphers, certificates that are
    /// renewed. Both have to present a certificate, because the transport refuses a peer without one, whatever the
    /// verifier of `server` says.
    pub fn new(client: Arc<ClientConfig>, server: Arc<ServerConfig>) -> Tls {
        Tls { client, server, peer_name: None }
    }

    /// The DNS name, or IP address, that every peer's certificate must have, whatever the address at which the
    /// peer is reached: for workers that share a name because their addresses change.
    ///
    /// # Errors
    ///
    /// [`TlsError::Name`] if `name` is neither.
    pub fn peer_name(self, name: &str) -> Result<Tls, TlsError> {
        let parsed = ServerName::try_from(name.to_owned());
        let peer_name = Some(parsed.map_err(|_| TlsError::Name { name: name.to_owned() })?);
        Ok(Tls { peer_name, ..self })
    }

    /// The state of a connection that this side has dialed.
    pub(crate) fn dialed(&self, ip: IpAddr) -> Result<Session, rustls::Error> {
        let name = self.peer_name.clone().unwrap_or_else(|| ServerName::IpAddress(ip.into()));
        Ok(Session::new(rustls::ClientConnection::new(self.client.clone(), name)?.into()))
    }

    /// The state of a connection that this side has accepted.
    pub(crate) fn accepted(&self) -> Result<Session, rustls::Error> {
        Ok(Session::new(rustls::ServerConnection::new(self.server.clone())?.into()))
    }

    /// The cryptography that [`from_pem`](Tls::from_pem) uses, for configurations of the server's author.
    pub fn provider() -> CryptoProvider {
        ring::default_provider()
    }
}

fn all(text: &[u8], what: &'static str) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    let found = found.map_err(|cause| TlsError::pem(what, &cause))?;
    if found.is_empty() { Err(TlsError::Pem { what, problem: "none is there" }) } else { Ok(found) }
}

impl PartialEq for Tls {
    /// True for clones of one value with the same name.
    fn eq(&self, other: &Tls) -> bool {
        Arc::ptr_eq(&self.client, &other.client)
            && Arc::ptr_eq(&self.server, &other.server)
            && self.peer_name == other.peer_name
    }
}

impl Eq for Tls {}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("peer_name", &self.peer_name).finish_non_exhaustive()
    }
}

/// Why encryption could not be configured.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read: check its path and its owner.
    #[error("{} cannot be read: {cause}", path.display())]
    File {
        /// The path that was given.
        path: PathBuf,
        /// The call and its error number.
        cause: OsError,
    },
    /// PEM text has nothing of what is wanted, or is damaged.
    #[error("{what}: {problem}")]
    Pem {
        /// The text at fault: `certificates`, `key` or `authorities`.
        what: &'static str,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A certificate or key cannot be used: they do not belong together, or are of a kind that is not supported.
    #[error(transparent)]
    Refused(#[from] rustls::Error),
    /// The name for certificates of peers is neither a DNS name nor an IP address.
    #[error("peer_name is {name:?}, which is neither a DNS name nor an IP address")]
    Name {
        /// The name that was given.
        name: String,
    },
}

impl TlsError {
    fn pem(what: &'static str, cause: &pem::Error) -> TlsError {
        let problem = match cause {
            pem::Error::NoItemsFound => "none is there",
            _ => "it is not PEM, or damaged",
        };
        TlsError::Pem { what, problem }
    }
}
