//! [`Authority`]: certificates that a test makes, as the operator of a service would.

use std::path::PathBuf;
use std::sync::OnceLock;

use kv_tcp::Tls;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};

/// An authority, which signs certificates of workers.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, as PEM.
pub struct Signed {
    pub certificate: String,
    pub key: String,
}

impl Authority {
    pub fn new() -> Authority {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// The authority's own certificate, as PEM.
    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// A certificate with these addresses and names, which is valid until this year.
    pub fn sign_until(&self, year: i32, names: &[&str]) -> Signed {
        let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(year, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap().pem();
        Signed { certificate, key: key.serialize_pem() }
    }

    pub fn sign(&self, names: &[&str]) -> Signed {
        self.sign_until(3000, names)
    }

    /// The configuration of a worker with this certificate, which trusts this authority.
    pub fn trusted_by(&self, signed: &Signed) -> Tls {
        Tls::from_pem(signed.certificate.as_bytes(), signed.key.as_bytes(), self.pem().as_bytes()).unwrap()
    }

    /// The configuration of a worker at the addresses of the loopback.
    pub fn tls(&self) -> Tls {
        self.trusted_by(&self.sign(&["127.0.0.1", "::1"]))
    }
}

/// The configuration that a test binary, which has this process id, and the processes that it starts share: the
/// first makes the files, and the others read them.
pub fn shared(number: u32) -> Tls {
    static SHARED: OnceLock<Tls> = OnceLock::new();
    SHARED.get_or_init(|| read_or_make(number)).clone()
}

fn read_or_make(number: u32) -> Tls {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("kv-tcp-{number}"));
    let files = ["certificate.pem", "key.pem", "authority.pem"].map(|name| folder.join(name));
    if number == std::process::id() {
        let authority = Authority::new();
        let Signed { certificate, key } = authority.sign(&["127.0.0.1"]);
        std::fs::create_dir_all(&folder).unwrap();
        for (file, text) in files.iter().zip([certificate, key, authority.pem()]) {
            std::fs::write(file, text).unwrap();
        }
    }
    let [certificate, key, authority] = &files;
    Tls::from_pem_files(certificate, key, authority).unwrap()
}
