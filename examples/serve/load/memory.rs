//! How much memory the processes of a service take, as a load goes on.

/// How often the memory is looked at, in the whole load.
pub const SAMPLES: usize = 20;
/// The part of the load, of [`SAMPLES`], in which memory may grow: caches fill, and threads get their memory.
const WARM_UP: usize = 8;
/// What a process may grow by after that, in bytes: what an allocator keeps back.
const SLACK: u64 = 4 << 20;

/// The memory of each process.
pub struct Memory {
    processes: Vec<(String, u64)>,
    /// Requests that had ended, and the bytes of each process.
    samples: Vec<(usize, Vec<u64>)>,
}

/// What a process took in the load.
pub struct Growth {
    /// The name of the process.
    pub name: String,
    /// Its resident bytes after the warm-up, in the mean of four samples.
    pub before: u64,
    /// The same at the end.
    pub after: u64,
}

impl Growth {
    /// True if the process has not grown.
    pub fn is_flat(&self) -> bool {
        self.after <= self.before + SLACK
    }
}

impl Memory {
    /// Looks at processes with these names and numbers.
    pub fn new(processes: Vec<(String, u64)>) -> Memory {
        Memory { processes, samples: Vec::new() }
    }

    /// Notes the memory of all processes now.
    pub fn sample(&mut self, done: usize) {
        let resident = self.processes.iter().map(|(_, pid)| resident(*pid).unwrap_or_default());
        self.samples.push((done, resident.collect()));
    }

    /// What each process has taken.
    pub fn growth(&self) -> Vec<Growth> {
        let of = |samples: &[(usize, Vec<u64>)], process: usize| {
            let sum: u64 = samples.iter().filter_map(|(_, bytes)| bytes.get(process)).sum();
            sum / samples.len().max(1) as u64
        };
        let warm = self.samples.get(WARM_UP..).unwrap_or_default();
        let (first, last) = (&warm[..warm.len().min(4)], &warm[warm.len().saturating_sub(4)..]);
        let growth = |(index, (name, _)): (usize, &(String, u64))| Growth {
            name: name.clone(),
            before: of(first, index),
            after: of(last, index),
        };
        self.processes.iter().enumerate().map(growth).collect()
    }
}

/// The resident bytes of a process, without those of the cache, which are touched page by page until all are.
fn resident(pid: u64) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let of = |field: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(field))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    };
    Some((of("VmRSS:")? - of("RssShmem:")?) << 10)
}
