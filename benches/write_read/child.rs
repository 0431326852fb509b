//! This program once more, as the process that serves the other one's transfers.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::Error;

/// A process of this program that serves or measures, and is killed when this is dropped.
pub(crate) struct Served {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Served {
    /// Starts the process, which finds `told` in this variable. Returns it with its first line: how to reach it, for one that
    /// serves.
    pub(crate) fn start(variable: &str, told: String) -> Result<(Served, String), Error> {
        let mut process = Command::new(std::env::current_exe()?)
            .env(variable, told)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = process.stdin.take().ok_or("no input of the child")?;
        let output = BufReader::new(process.stdout.take().ok_or("no output of the child")?);
        let mut served = Served { process, input, output };
        let line = served.line()?;
        Ok((served, line))
    }

    /// Tells the process a number, which it takes from [`heard`].
    #[cfg(feature = "fabric")]
    pub(crate) fn tell(&mut self, number: u8) -> Result<(), Error> {
        Ok(self.input.write_all(&[number])?)
    }

    /// Writes this to the process, and returns the line that it answers.
    pub(crate) fn ask(&mut self, question: &str) -> Result<String, Error> {
        self.input.write_all(question.as_bytes())?;
        self.line()
    }

    fn line(&mut self) -> Result<String, Error> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            return Err(format!("the child has closed its output; {}", self.state()).into());
        }
        Ok(line.trim().to_owned())
    }

    /// What has become of the process, in words.
    pub(crate) fn state(&mut self) -> String {
        match self.process.try_wait() {
            Ok(Some(status)) => format!("the child has ended with {status}"),
            Ok(None) => "the child runs".to_owned(),
            Err(error) => format!("the child cannot be asked: {error}"),
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// In the process that serves: ends it when the other process has ended, which closes standard input.
pub(crate) fn end_with_the_parent() {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
}

/// In the process that serves: the number that the other process has told last, at first 0. When that process has ended,
/// this one does, too.
#[cfg(feature = "fabric")]
pub(crate) fn heard() -> &'static std::sync::atomic::AtomicU8 {
    use std::sync::atomic::{AtomicU8, Ordering};
    static HEARD: AtomicU8 = AtomicU8::new(0);
    std::thread::spawn(|| {
        for number in std::io::stdin().lock().bytes().map_while(Result::ok) {
            HEARD.store(number, Ordering::Relaxed);
        }
        std::process::exit(0);
    });
    &HEARD
}
