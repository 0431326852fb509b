//! The client against the server: registrations that live as long as their worker, and lookups.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::time::Duration;

use kv_bootstrap::{ClientConfig, KvBootstrapServer, Secret, ServerConfig};
use kv_core::{BootstrapClient, BootstrapError, BootstrapEvent, RankRecord};
use support::driver::{Driver, nowhere, quick, server};
use support::{LONG, eventually, once, rank};

fn with_secret(secret: &str) -> ClientConfig {
    quick().with(|config| config.secret = Some(Secret::new(secret).unwrap()))
}

#[test]
fn a_wrong_secret_fails_lookups_and_registrations_and_the_right_secret_serves() {
    let secret = Some(Secret::new("the right secret of 2026".replace(' ', "-").as_str()).unwrap());
    let server = KvBootstrapServer::start_with(
        "127.0.0.1:0",
        ServerConfig::default().with(|config| config.secret = secret),
    )
    .unwrap();
    let addr = server.local_addr().to_string();
    let record = rank("p", (1, 0), 1);
    for config in [quick(), with_secret("the-right-secret-of-2027")] {
        let mut driver = Driver::new(config);
        assert_eq!(driver.lookup(&addr), Err(BootstrapError::Unauthorized));
        assert!(!BootstrapError::Unauthorized.is_retryable());
        driver.publish(&addr, &record);
        let (error, retry_in) = (BootstrapError::Unauthorized, Duration::MAX);
        assert_eq!(driver.next(), BootstrapEvent::PublishFailed { addr: addr.clone(), error, retry_in });
        assert_eq!(driver.idle(Duration::from_millis(300)), [], "given up");
    }
    assert_eq!(server.gauges().ranks, 0);
    let mut driver = Driver::new(with_secret("the-right-secret-of-2026"));
    driver.publish(&addr, &record);
    assert_eq!(driver.next(), BootstrapEvent::Published { addr: addr.clone() });
    assert_eq!(driver.lookup(&addr), Ok(vec![record]));
    let now = driver.now();
    driver.client.withdraw(now);
    assert!(driver.client.flush(now, LONG));
    eventually("the rank has left", || server.gauges().ranks == 0);
}

#[test]
fn a_rank_that_is_published_is_found_by_another_worker() {
    let (_server, addr) = server();
    let ranks = [rank("p", (2, 0), 1), rank("p", (2, 1), 2)];
    let (mut first, mut second) =
        (Driver::new(ClientConfig::default()), Driver::new(ClientConfig::default()));
    let mut decode = Driver::new(ClientConfig::default());
    assert_eq!(decode.lookup(&addr), Err(BootstrapError::UnknownRank));
    first.publish(&addr, &ranks[0]);
    assert_eq!(first.next(), BootstrapEvent::Published { addr: addr.clone() });
    assert_eq!(decode.lookup(&addr), Err(BootstrapError::NotReady { registered: 1, expected: 2 }));
    second.publish(&addr, &ranks[1]);
    assert_eq!(second.next(), BootstrapEvent::Published { addr: addr.clone() });
    assert_eq!(decode.lookup(&addr), Ok(ranks.to_vec()));

    let now = first.now();
    first.client.withdraw(now);
    assert!(first.client.flush(now, LONG));
    assert_eq!(decode.lookup(&addr), Err(BootstrapError::NotReady { registered: 1, expected: 2 }));
}

#[test]
fn a_name_is_resolved_without_blocking() {
    let (server, _) = server();
    let addr = format!("localhost:{}", server.local_addr().port());
    let mut driver = Driver::new(ClientConfig::default());
    assert_eq!(driver.lookup(&addr), Err(BootstrapError::UnknownRank));
    let failed = driver.lookup("no-such-host.invalid:1");
    assert!(matches!(failed, Err(BootstrapError::Unreachable(_) | BootstrapError::TimedOut)), "{failed:?}");
    assert_eq!(driver.lookup("nonsense"), Err(BootstrapError::Address("nonsense".into())));
}

#[test]
fn registrations_outlive_their_lease_by_renewal_and_end_with_their_worker() {
    let (_server, addr) = server();
    let mut worker = Driver::new(quick());
    let mut decode = Driver::new(ClientConfig::default());
    worker.publish(&addr, &rank("p", (1, 0), 1));
    assert_eq!(worker.next(), BootstrapEvent::Published { addr: addr.clone() });
    // On a machine that stalls a renewal may come late; the rank is then registered again.
    worker.idle(Duration::from_millis(1500));
    eventually("the rank is there after two leases", || {
        worker.poll();
        decode.lookup(&addr).is_ok()
    });
    drop(worker);
    eventually("the rank of a dead worker leaves", || {
        decode.lookup(&addr) == Err(BootstrapError::UnknownRank)
    });
}

#[test]
fn withdrawal_gets_out_by_polling_alone() {
    let (_server, addr) = server();
    let mut worker =
        Driver::new(ClientConfig::default().with(|config| config.lease = Duration::from_secs(3600)));
    let mut decode = Driver::new(ClientConfig::default());
    worker.publish(&addr, &rank("p", (1, 0), 1));
    assert_eq!(worker.next(), BootstrapEvent::Published { addr: addr.clone() });
    let now = worker.now();
    worker.client.withdraw(now);
    eventually("the rank has left", || {
        worker.poll();
        decode.lookup(&addr) == Err(BootstrapError::UnknownRank)
    });
}

#[test]
fn a_rank_that_leaves_stays_registered_and_lookups_say_that_its_replica_drains() {
    let (server, addr) = server();
    let mut worker = Driver::new(ClientConfig::default());
    let mut decode = Driver::new(ClientConfig::default());
    worker.publish(&addr, &rank("p", (1, 0), 1));
    assert_eq!(worker.next(), BootstrapEvent::Published { addr: addr.clone() });
    let now = worker.now();
    worker.client.leave(now);
    eventually("the replica has left", || {
        worker.poll();
        decode.lookup(&addr) == Err(BootstrapError::Draining)
    });
    assert_eq!(server.gauges().ranks, 1);
    let now = worker.now();
    worker.client.withdraw(now);
    assert!(worker.client.flush(now, LONG));
    assert_eq!(decode.lookup(&addr), Err(BootstrapError::UnknownRank));
}

#[test]
fn a_restarted_server_learns_of_the_rank_again() {
    let (server, addr) = server();
    let mut worker = Driver::new(quick());
    let record = rank("p", (1, 0), 1);
    worker.publish(&addr, &record);
    assert_eq!(worker.next(), BootstrapEvent::Published { addr: addr.clone() });
    server.stop();
    let down = worker.next();
    assert!(
        matches!(&down, BootstrapEvent::PublishFailed { addr: at, error: BootstrapError::Unreachable(_), .. } if *at == addr),
        "{down:?}"
    );
    let server = KvBootstrapServer::start(&addr).unwrap();
    let mut decode = Driver::new(ClientConfig::default());
    let mut found = Err(BootstrapError::UnknownRank);
    eventually("the rank is registered again", || {
        worker.poll();
        found = decode.lookup(&addr);
        found.is_ok()
    });
    assert_eq!(found, Ok(vec![record]));
    server.stop();
}

#[test]
fn a_bootstrap_server_that_starts_late_is_found_by_waiting_clients() {
    let addr = nowhere();
    let mut worker = Driver::new(quick());
    worker.publish(&addr.to_string(), &rank("p", (1, 0), 1));
    match worker.next() {
        BootstrapEvent::PublishFailed { error: BootstrapError::Unreachable(_), retry_in, .. } => {
            assert_eq!(retry_in, Duration::from_millis(20));
        }
        other => panic!("{other:?}"),
    }
    let _server = KvBootstrapServer::start(&addr.to_string()).unwrap();
    let published = BootstrapEvent::Published { addr: addr.to_string() };
    eventually("published", || worker.poll() == Some(published.clone()));
}

#[test]
fn many_ranks_and_lookups_share_one_http_connection() {
    let (_server, addr) = server();
    let mut worker = Driver::new(ClientConfig::default());
    let ranks: Vec<RankRecord> = (0..16).map(|number| rank("p", (16, number), 1)).collect();
    for rank in &ranks {
        worker.publish(&addr, rank);
    }
    let mut published = 0;
    while published < 16 {
        assert_eq!(worker.next(), BootstrapEvent::Published { addr: addr.clone() });
        published += 1;
    }
    let mut asked = 0..1000;
    for id in asked.clone() {
        worker.ask(&addr, id);
    }
    let mut seen = 0;
    while seen < 1000 {
        match worker.next() {
            BootstrapEvent::Found { lookup, ranks: found } => {
                assert_eq!((Some(lookup.0), &found), (asked.next(), &ranks));
                seen += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(once(addr.parse().unwrap(), "GET", "/health", None).status, 200);
}

#[test]
fn an_idle_client_sleeps_until_its_next_renewal() {
    let (_server, addr) = server();
    let mut worker =
        Driver::new(ClientConfig::default().with(|config| config.lease = Duration::from_secs(300)));
    assert_eq!(worker.client.next_timeout(), None);
    worker.publish(&addr, &rank("p", (1, 0), 1));
    assert!(worker.client.next_timeout().unwrap() <= worker.now());
    assert_eq!(worker.next(), BootstrapEvent::Published { addr });
    assert_eq!(worker.poll(), None);
    let next = worker.client.next_timeout().unwrap();
    assert!(next > worker.now() + Duration::from_secs(10), "{next:?}");
    assert!(worker.client.as_raw_fd().is_some());
}
