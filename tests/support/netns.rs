//! Network namespaces for the processes of a test. Everything goes with the processes: names, links and addresses
//! are of namespaces that nothing else is in.

use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::{Child, Command, Stdio};

use super::{only, until};

/// The variable with the name of the test that runs in a namespace of its own.
const INSIDE: &str = "KV_TRANSFER_TEST_NAMESPACE";
/// The addresses of this namespace and of the one beyond the link: of ranges for benchmarks and for private use.
const NEAR: (Ipv4Addr, Ipv6Addr) =
    (Ipv4Addr::new(198, 18, 0, 1), Ipv6Addr::new(0xfd00, 0x18, 0, 0, 0, 0, 0, 1));
const FAR: (Ipv4Addr, Ipv6Addr) =
    (Ipv4Addr::new(198, 18, 0, 2), Ipv6Addr::new(0xfd00, 0x18, 0, 0, 0, 0, 0, 2));

/// The same addresses of a second link, in the order of the first ones.
const SECOND: [Ipv4Addr; 2] = [Ipv4Addr::new(198, 19, 0, 1), Ipv4Addr::new(198, 19, 0, 2)];

/// Makes /sys tell of the devices of the own network namespace, as it does in a container. Where that is not permitted,
/// it tells of others.
const OWN_SYS: &str = "mount -t sysfs sysfs /sys 2>/dev/null";

/// Runs the calling test once more, alone in a network namespace of its own. True inside that namespace. False
/// outside: then the test has run inside, or was skipped, and the reason was printed.
pub fn enter(test: &str) -> bool {
    if std::env::var(INSIDE).is_ok_and(|inside| inside == test) {
        run("ip link set lo up");
        return true;
    }
    if let Err(why) =
        ["unshare -n -m true", "ip -V", "nsenter --version"].map(tried).into_iter().collect::<Result<(), _>>()
    {
        println!("SKIPPED: {test} needs network namespaces and the program `ip` of iproute2: {why}");
        return false;
    }
    let status = Command::new("unshare")
        .args(["-n", "-m", "sh", "-c", &format!("{OWN_SYS}; exec \"$0\" \"$@\"")])
        .arg(std::env::current_exe().unwrap())
        .args(only(test))
        .env(INSIDE, test)
        .status()
        .unwrap();
    assert!(status.success(), "{test} has failed in its namespace");
    false
}

/// Whether /sys tells of the devices of this namespace, where UCX looks for them; if not, prints that this is why
/// nothing is tested.
pub fn has_own_sys() -> bool {
    let devices = std::fs::read_to_string("/proc/net/dev").unwrap();
    let mut told = std::fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
    let own = told.all(|entry| devices.contains(&format!("{}:", entry.file_name().display())));
    if !own {
        println!("SKIPPED: UCX looks for devices in /sys, which cannot be mounted for the namespace here");
    }
    own
}

/// A command line that must succeed.
pub fn run(line: &str) {
    tried(line).unwrap_or_else(|why| panic!("{why}"));
}

/// Runs a command line; what it prints is the error.
pub fn tried(line: &str) -> Result<(), String> {
    let mut words = line.split(' ');
    let mut command = Command::new(words.next().unwrap());
    let output =
        command.args(words).stdin(Stdio::null()).output().map_err(|error| format!("{line}: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{line}: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

/// A second namespace, which a link joins to this one. The link is `near` here and `far` there; a second link is `near1`
/// and `far1`.
pub struct Beyond {
    /// The process that the namespace belongs to.
    holder: Child,
}

impl Beyond {
    pub fn joined() -> Beyond {
        let mut holder = Command::new("unshare")
            .args(["-n", "-m", "sh", "-c", &format!("{OWN_SYS}; echo; exec cat")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // What it says, it says in its namespace.
        holder.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let beyond = Beyond { holder };
        run(&format!("ip link add near type veth peer name far netns {}", beyond.pid()));
        for (at, dev, (v4, v6)) in [("", "near", NEAR), (&*beyond.prefix(), "far", FAR)] {
            run(format!("{at} ip addr add {v4}/24 dev {dev}").trim());
            run(format!("{at} ip addr add {v6}/64 dev {dev} nodad").trim());
            run(format!("{at} ip link set {dev} up").trim());
        }
        run(&format!("{} ip link set lo up", beyond.prefix()));
        until("the link is up", || beyond.is_up(0));
        beyond
    }

    /// The same, with a second link beside the first.
    pub fn joined_twice() -> Beyond {
        let beyond = Beyond::joined();
        run(&format!("ip link add near1 type veth peer name far1 netns {}", beyond.pid()));
        for (at, dev, address) in [("", "near1", SECOND[0]), (&*beyond.prefix(), "far1", SECOND[1])] {
            run(format!("{at} ip addr add {address}/24 dev {dev}").trim());
            run(format!("{at} ip link set {dev} up").trim());
        }
        until("the second link is up", || beyond.is_up(1));
        beyond
    }

    fn pid(&self) -> u32 {
        self.holder.id()
    }

    fn prefix(&self) -> String {
        format!("nsenter -t {} -n -m", self.pid())
    }

    /// The program by which processes are started in the namespace, with its options.
    pub fn by(&self) -> Vec<String> {
        self.prefix().split(' ').map(str::to_owned).collect()
    }

    /// Nothing passes any more, and neither side is told.
    pub fn cut(&self) {
        self.cut_link(0);
    }

    /// The same of one of two links.
    pub fn cut_link(&self, link: usize) {
        run(&format!("ip link set {} down", ENDS[link].0));
    }

    /// After how many repetitions without an answer the kernels at both ends give a TCP connection up; 15 unless said
    /// otherwise, which takes some fifteen minutes.
    pub fn give_up_after(&self, repetitions: u32) -> Result<(), String> {
        let setting = format!("net.ipv4.tcp_retries2={repetitions}");
        tried(&format!("sysctl -w {setting}"))?;
        tried(&format!("{} sysctl -w {setting}", self.prefix()))
    }

    pub fn mend(&self) {
        self.mend_link(0);
    }

    pub fn mend_link(&self, link: usize) {
        run(&format!("ip link set {} up", ENDS[link].0));
        until("the link is up", || self.is_up(link));
    }

    /// Whether both ends count as up, which the kernel decides a moment after their carrier is there.
    fn is_up(&self, link: usize) -> bool {
        let (near, far) = ENDS[link];
        let near = format!("ip -o link show dev {near}");
        let far = format!("{} ip -o link show dev {far}", self.prefix());
        [near, far].iter().all(|line| {
            let mut words = line.split(' ');
            let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
            String::from_utf8_lossy(&output.stdout).contains(" state UP ")
        })
    }

    /// How packets leave both ends of the link, in the words of `tc`.
    pub fn shape(&self, discipline: &str) -> Result<(), String> {
        self.shape_link(0, discipline)
    }

    /// The same of one of two links.
    pub fn shape_link(&self, link: usize, discipline: &str) -> Result<(), String> {
        let (near, far) = ENDS[link];
        tried(&format!("tc qdisc replace dev {near} root {discipline}"))?;
        tried(&format!("{} tc qdisc replace dev {far} root {discipline}", self.prefix()))
    }

    /// How many bytes have come to this namespace by each of two links.
    pub fn came_by(&self) -> [u64; 2] {
        let devices = std::fs::read_to_string("/proc/net/dev").unwrap();
        ENDS.map(|(near, _)| {
            let mark = format!("{near}:");
            let line = devices.lines().find_map(|line| line.trim().strip_prefix(&mark)).unwrap();
            line.split_whitespace().next().unwrap().parse().unwrap()
        })
    }

    /// How many packets were dropped at both ends of the link since the discipline was set.
    pub fn dropped(&self) -> u64 {
        let ends =
            ["tc -s qdisc show dev near".to_owned(), format!("{} tc -s qdisc show dev far", self.prefix())];
        let dropped = |line: &String| -> u64 {
            let mut words = line.split(' ');
            let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            let (_, rest) = text.split_once("(dropped ").unwrap();
            rest.split(',').next().unwrap().parse().unwrap()
        };
        ends.iter().map(dropped).sum()
    }
}

impl Drop for Beyond {
    fn drop(&mut self) {
        // The link would go with the far namespace, but only some time after its last process.
        let _ = tried("ip link del near");
        let _ = tried("ip link del near1");
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// The names of the ends of the links, here and there.
const ENDS: [(&str, &str); 2] = [("near", "far"), ("near1", "far1")];

/// The address of the second link in the namespace in which the first one has this address.
#[cfg(feature = "fabric")]
pub fn second(first: IpAddr) -> IpAddr {
    SECOND[usize::from(first != near(false).ip())].into()
}

/// The device of the link's end with this address.
pub fn device(address: SocketAddr) -> &'static str {
    if [near(false), near(true)].iter().any(|near| near.ip() == address.ip()) { "near" } else { "far" }
}

/// Any port of this end of the link.
pub fn near(v6: bool) -> SocketAddr {
    SocketAddr::new(if v6 { IpAddr::from(NEAR.1) } else { NEAR.0.into() }, 0)
}

/// Any port of the other end.
pub fn far(v6: bool) -> SocketAddr {
    SocketAddr::new(if v6 { IpAddr::from(FAR.1) } else { FAR.0.into() }, 0)
}
