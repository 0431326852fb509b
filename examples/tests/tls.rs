//! The example `pd` over TCP with TLS: its processes find their certificates in the environment.
//!
//! The program is the one that cargo builds beside the tests of the package: `cargo test --test tls` alone builds none,
//! so `cargo build --example pd --features tls` comes first, with the same profile.
#![cfg(feature = "tls")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::PathBuf;
use std::process::{Command, Output};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

/// Runs the example over TCP with the variables that have a value.
fn run(variables: [Option<PathBuf>; 3], options: &[&str]) -> Output {
    run_over("tcp", variables, options)
}

fn run_over(transport: &str, variables: [Option<PathBuf>; 3], options: &[&str]) -> Output {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().unwrap().with_file_name("examples").join("pd");
    assert!(path.exists(), "{} is missing: build the examples of the package first", path.display());
    let names = ["KV_TCP_TLS_CERT", "KV_TCP_TLS_KEY", "KV_TCP_TLS_CA"];
    let variables = names.into_iter().zip(variables).filter_map(|(name, path)| Some((name, path?)));
    Command::new(path).args(["--transport", transport]).args(options).envs(variables).output().unwrap()
}

#[test]
fn tokens_are_equal_over_tls_whatever_is_killed_and_half_a_configuration_is_refused_or_left_out() {
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let worker = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    let worker = worker.signed_by(&key, &authority).unwrap();

    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("pd-tls-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let texts =
        [("worker.pem", worker.pem()), ("worker.key", key.serialize_pem()), ("ca.pem", authority.pem())];
    let files = texts.map(|(name, text)| {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        Some(path)
    });
    let modes: [&[&str]; 3] = [&[], &["--mode", "pull", "--turns", "2"], &["--kill", "prefill"]];
    for options in modes {
        let output = run(files.clone(), options);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{options:?}: {said}{}", String::from_utf8_lossy(&output.stdout));
    }
    let [certificate, key, _] = files;
    for (transport, works) in [("tcp", false), ("auto", true)] {
        let output = run_over(transport, [certificate.clone(), key.clone(), None], &["--requests", "2"]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), works, "{transport}: {said}");
        assert!(said.contains("KV_TCP_TLS_CA is missing"), "{transport}: {said}");
        assert_eq!(said.contains("going on without tcp"), works, "{transport}: {said}");
    }
    std::fs::remove_dir_all(folder).unwrap();
}
