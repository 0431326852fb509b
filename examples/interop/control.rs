//! Commands between the two sides of a pair: JSON over HTTP on 127.0.0.1, in the form of the peers' own
//! drivers.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError, channel, sync_channel};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::error::PairError;

/// How long the answer to a command may take.
const PATIENCE: Duration = Duration::from_secs(300);
/// Longest command or answer, in bytes.
const MAX_BODY: u64 = 64 << 20;

/// The control of our side. Each command waits until the owner has answered it.
pub struct Control {
    commands: Receiver<Command>,
    woken: UnixStream,
    addr: std::net::SocketAddr,
}

/// A command that has come, and waits for its answer.
pub struct Command {
    /// The path, without its slash.
    pub name: String,
    /// The JSON that came with the command; null if there was none.
    pub body: Value,
    answer: SyncSender<(u16, Value)>,
}

impl Command {
    /// Answers the command.
    pub fn answer(self, answer: Value) {
        // The caller may have gone.
        let _ = self.answer.send((200, answer));
    }

    /// Answers that the command failed.
    pub fn refuse(self, status: u16, why: impl std::fmt::Display) {
        let _ = self.answer.send((status, json!({ "error": why.to_string() })));
    }
}

impl Control {
    /// Listens at this port of 127.0.0.1, or at any free port if it is 0.
    pub fn listen(port: u16) -> Result<Control, PairError> {
        let listener =
            TcpListener::bind(("127.0.0.1", port)).map_err(PairError::io("listen for commands"))?;
        let addr = listener.local_addr().map_err(PairError::io("listen for commands"))?;
        let (tell, commands) = channel();
        let (woken, wake) = UnixStream::pair().map_err(PairError::io("make a socket pair"))?;
        woken.set_nonblocking(true).map_err(PairError::io("make a socket pair"))?;
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (tell, wake) = (tell.clone(), wake.try_clone());
                thread::spawn(move || serve(&stream, &tell, wake.ok()));
            }
        });
        Ok(Control { commands, woken, addr })
    }

    /// The address of the control, as peers' drivers take it.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// The next command that has come, without waiting.
    pub fn next(&mut self) -> Option<Command> {
        match self.commands.try_recv() {
            Ok(command) => Some(command),
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => {
                while self.woken.read(&mut [0; 64]).is_ok_and(|bytes| bytes > 0) {}
                // One may have come before the bytes were taken.
                self.commands.try_recv().ok()
            }
        }
    }
}

/// Readable when a command has come.
impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.woken.as_fd()
    }
}

fn serve(stream: &TcpStream, tell: &Sender<Command>, wake: Option<UnixStream>) {
    let Some((name, body)) = request(stream) else { return };
    let (answer, answered) = sync_channel(1);
    if tell.send(Command { name, body, answer }).is_err() {
        return;
    }
    if let Some(mut wake) = wake {
        let _ = wake.write_all(&[0]);
    }
    let (status, answer) = match answered.recv_timeout(PATIENCE) {
        Ok(answer) => answer,
        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
            (504, json!({"error": "our side did not answer"}))
        }
    };
    let (body, mut stream) = (answer.to_string(), stream);
    let head = format!("HTTP/1.1 {status} -\r\ncontent-type: application/json\r\nconnection: close\r\n");
    let _ = write!(stream, "{head}content-length: {}\r\n\r\n{body}", body.len());
}

/// The path and the JSON of a request.
fn request(stream: &TcpStream) -> Option<(String, Value)> {
    let mut reader = BufReader::new(stream);
    let head = head(&mut reader)?;
    let mut headers = [httparse::EMPTY_HEADER; 32];
    let mut parsed = httparse::Request::new(&mut headers);
    parsed.parse(&head).ok()?;
    let name = parsed.path?.trim_matches('/').to_owned();
    let len = content_length(parsed.headers).unwrap_or(0);
    let mut body = Vec::new();
    reader.take(len.min(MAX_BODY)).read_to_end(&mut body).ok()?;
    Some((name, serde_json::from_slice(&body).unwrap_or(Value::Null)))
}

/// Gives a command to a peer's control, and waits for the answer.
pub fn call(url: &str, command: &str, body: Option<&Value>) -> Result<Value, PairError> {
    let url = format!("{url}/{command}");
    let failed = |why: &str| PairError::Control { url: url.clone(), why: why.to_owned() };
    let io = |error: std::io::Error| failed(&error.to_string());
    let rest = url.strip_prefix("http://").ok_or_else(|| failed("must begin with http://"))?;
    let (host, path) = rest.split_once('/').ok_or_else(|| failed("has no path"))?;
    let mut stream = TcpStream::connect(host).map_err(io)?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(io)?;
    let (method, body) = body.map_or(("GET", String::new()), |body| ("POST", body.to_string()));
    let request = format!("{method} /{path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n");
    write!(stream, "{request}content-length: {}\r\n\r\n{body}", body.len()).map_err(io)?;
    let mut reader = BufReader::new(stream);
    let head = head(&mut reader).ok_or_else(|| failed("the answer has no head"))?;
    let mut headers = [httparse::EMPTY_HEADER; 32];
    let mut parsed = httparse::Response::new(&mut headers);
    parsed.parse(&head).map_err(|error| failed(&error.to_string()))?;
    let len = content_length(parsed.headers).unwrap_or(MAX_BODY);
    let mut body = Vec::new();
    reader.take(len.min(MAX_BODY)).read_to_end(&mut body).map_err(io)?;
    match parsed.code {
        Some(200) => serde_json::from_slice(&body).map_err(|error| failed(&error.to_string())),
        code => Err(failed(&format!("status {code:?}: {}", String::from_utf8_lossy(&body)))),
    }
}

/// All bytes to the empty line.
fn head(reader: &mut impl BufRead) -> Option<Vec<u8>> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() > 1 << 16 || reader.read_until(b'\n', &mut head).ok()? == 0 {
            return None;
        }
    }
    Some(head)
}

fn content_length(headers: &[httparse::Header<'_>]) -> Option<u64> {
    let length = headers.iter().find(|header| header.name.eq_ignore_ascii_case("content-length"))?;
    std::str::from_utf8(length.value).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_waits_until_the_owner_has_answered_it() {
        let mut control = Control::listen(0).unwrap();
        let url = control.url();
        let caller = thread::spawn(move || {
            let answer = call(&url, "finish", Some(&json!({"reqs": [1]}))).unwrap();
            let refused = call(&url, "nothing", None).unwrap_err();
            (answer, refused.to_string())
        });
        let mut next = || loop {
            rustix::event::poll(
                &mut [rustix::event::PollFd::new(&control, rustix::event::PollFlags::IN)],
                None,
            )
            .unwrap();
            if let Some(command) = control.next() {
                return command;
            }
        };
        let command = next();
        assert_eq!((command.name.as_str(), &command.body), ("finish", &json!({"reqs": [1]})));
        command.answer(json!({"params": []}));
        next().refuse(404, "no such command");
        let (answer, refused) = caller.join().unwrap();
        assert_eq!(answer, json!({"params": []}));
        assert!(refused.contains("404") && refused.contains("no such command"), "{refused}");
    }
}
