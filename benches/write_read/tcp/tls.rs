//! Encrypted pairs: certificates for both processes, and rustls over blocking sockets, as its users have it.

use std::net::TcpStream;
use std::sync::Arc;

use kv_benches::{bytes, hex};
use kv_transfer::tcp::{TcpConfig, Tls};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, StreamOwned, version,
};

use super::Plain;
use crate::Error;

const HERE: &str = "127.0.0.1";

/// A certificate, its key, and that of the authority, as one word.
pub(super) fn certificates() -> Result<String, Error> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    let key = KeyPair::generate()?;
    let certificate = CertificateParams::new(vec![HERE.to_owned()])?.signed_by(&key, &authority)?;
    let texts = [certificate.pem(), key.serialize_pem(), authority.pem()];
    Ok(texts.map(|text| hex(text.as_bytes())).join(","))
}

fn texts(told: &str) -> Result<[Vec<u8>; 3], Error> {
    let texts: Result<Vec<_>, Error> = told.split(',').map(|word| Ok(bytes(word)?)).collect();
    texts?.try_into().map_err(|_| "three texts are told".into())
}

pub(super) fn encrypted(config: TcpConfig, told: &str) -> Result<TcpConfig, Error> {
    let [certificate, key, authority] = texts(told)?;
    let tls = Tls::from_pem(&certificate, &key, &authority)?;
    Ok(config.with(|config| config.tls = Some(tls)))
}

type Parts = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>, Arc<RootCertStore>);

fn parts(told: &str) -> Result<Parts, Error> {
    let [certificate, key, authority] = texts(told)?;
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(&authority)?)?;
    let chain = vec![CertificateDer::from_pem_slice(&certificate)?];
    Ok((chain, PrivateKeyDer::from_pem_slice(&key)?, Arc::new(roots)))
}

pub(super) fn dialed(socket: TcpStream, told: &str) -> Result<Box<dyn Plain>, Error> {
    let (chain, key, roots) = parts(told)?;
    let config = ClientConfig::builder_with_provider(Arc::new(Tls::provider()))
        .with_protocol_versions(&[&version::TLS13])?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)?;
    let session = ClientConnection::new(Arc::new(config), ServerName::try_from(HERE)?)?;
    Ok(Box::new(StreamOwned::new(session, socket)))
}

pub(super) fn accepted(socket: TcpStream, told: &str) -> Result<Box<dyn Plain>, Error> {
    let (chain, key, roots) = parts(told)?;
    let provider = Arc::new(Tls::provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone()).build()?;
    let config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&version::TLS13])?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)?;
    Ok(Box::new(StreamOwned::new(ServerConnection::new(Arc::new(config))?, socket)))
}
