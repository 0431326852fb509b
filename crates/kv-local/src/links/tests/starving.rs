//! Writes that the kernel refuses for want of means are tried again, and a link that is refused for long ends.

use std::process::Command;

use kv_core::TransportWait;
use kv_host::descriptors;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use super::*;
use crate::links::flushing::FLUSH_AGAIN;

const STARVING: &str = "KV_LOCAL_STARVING";
/// Descriptors that this process may have, and those of its user that may be on their way in messages.
const FEW: u64 = 64;

#[test]
fn a_greeting_that_the_kernel_refuses_for_now_is_written_later() {
    // The bound holds for a whole process.
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "links::tests::starving::starving", "--nocapture", "--test-threads=1"])
        .env(STARVING, "1")
        .output()
        .unwrap();
    assert!(child.status.success(), "{child:?}");
    assert!(String::from_utf8_lossy(&child.stdout).contains("fed"), "{child:?}");
}

/// So many descriptors on their way that the kernel refuses further ones, until the value is dropped.
fn refusal() -> (UnixStream, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let many = vec![theirs.as_fd(); 2 * FEW as usize];
    while descriptors::send(ours.as_fd(), &[io::IoSlice::new(b"!")], &many).is_ok() {}
    (ours, theirs)
}

/// The process under the bound. Without its variable, this test does nothing.
#[test]
fn starving() {
    if std::env::var_os(STARVING).is_none() {
        return;
    }
    let ((mut us, source), (mut them, arena)) = (transport(), transport());
    setrlimit(Resource::Nofile, Rlimit { current: Some(FEW), ..getrlimit(Resource::Nofile) }).unwrap();
    // The bound is not for those who administer the host.
    let mut sets = capabilities(None).unwrap();
    sets.effective -= CapabilitySet::SYS_ADMIN | CapabilitySet::SYS_RESOURCE;
    set_capabilities(None, sets).unwrap();
    let mut at = Duration::ZERO;
    let fed = |side: &mut LocalTransport, at: &mut Duration| {
        // Messages of other processes count, too, so that one attempt may not be enough.
        for _ in 0..400 {
            *at += FLUSH_AGAIN;
            assert_eq!(poll_at(side, *at), []);
            if side.starved.is_empty() {
                return;
            }
            std::thread::sleep(FLUSH_AGAIN);
        }
        panic!("never fed");
    };

    // The side that dials.
    let refused = refusal();
    befriend(&mut us, PeerId(1), &them.metadata().unwrap()).unwrap();
    us.post(PeerId(1), write_post(1, 4096)).unwrap();
    assert_eq!(poll_at(&mut us, at), []);
    assert!(matches!(us.wait(), TransportWait::ReadableOrAfter(_, after) if after <= FLUSH_AGAIN));
    assert_eq!(us.starved.len(), 1);
    drop(refused);
    fed(&mut us, &mut at);

    // The side that is dialed, whose answer opens the link.
    let refused = refusal();
    assert_eq!(poll_at(&mut them, at), []);
    assert_eq!((them.starved.len(), them.links.unclaimed().len()), (1, 1));
    assert!(matches!(them.wait(), TransportWait::ReadableOrAfter(_, after) if after <= FLUSH_AGAIN));
    drop(refused);
    fed(&mut them, &mut at);
    source.write(0, b"written late").unwrap();
    let done = TransportEvent::Posted { post: PostId(1), result: Ok(()) };
    assert_eq!(poll_at(&mut us, at), [done]);
    let mut page = [0; 12];
    arena.read(0, &mut page).unwrap();
    assert_eq!(&page, b"written late");
    us.disconnect(PeerId(1));
    poll_at(&mut them, at);
    assert!(us.links.is_empty() && them.links.is_empty());

    // A refusal that does not pass.
    let _refused = refusal();
    befriend(&mut us, PeerId(2), &them.metadata().unwrap()).unwrap();
    let patience = us.config.handshake_timeout;
    assert_eq!(poll_at(&mut us, at + patience - Duration::from_millis(1)), []);
    assert_eq!((us.links.len(), us.starved.len()), (1, 1));
    assert_eq!(poll_at(&mut us, at + patience + FLUSH_AGAIN), []);
    assert_eq!((us.links.len(), us.starved.len()), (0, 0));
    let lost = TransportEvent::PeerGone { peer: PeerId(2), end: WayEnd::Lost };
    assert_eq!(poll_at(&mut us, at + patience + FLUSH_AGAIN + DYING), [lost]);
    println!("fed");
}
