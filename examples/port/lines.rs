//! The request channel of the adapter: lines of JSON over TCP, with threads that may wait so that schedulers do not.
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use super::adapter::Line;

/// Lines that wait in each queue. A full queue stops the reader of a socket, and so the sender at the other end.
const QUEUE: usize = 256;
/// The longest line: a prompt of a million tokens.
const LONGEST: u64 = 8 << 20;
/// The pause before a client tries a server again.
const AGAIN: Duration = Duration::from_millis(100);

/// What comes from a peer: it is there, it says something, it is gone.
pub enum Heard {
    New(SyncSender<Line>),
    Line(Line, SyncSender<Line>),
    Gone,
}

/// Connects to each address, again after each end, until the result is dropped. Peers are numbered by address.
pub fn dial(addrs: &[String]) -> Receiver<(usize, Heard)> {
    let (heard, result) = sync_channel(QUEUE);
    for (number, addr) in addrs.iter().cloned().enumerate() {
        let heard = heard.clone();
        thread::spawn(move || {
            while TcpStream::connect(&addr).map_or(true, |stream| talk(&stream, number, &heard)) {
                thread::sleep(AGAIN);
            }
        });
    }
    result
}

/// Accepts peers, which are numbered as they come.
pub fn listen(listener: TcpListener) -> Receiver<(usize, Heard)> {
    let (heard, result) = sync_channel(QUEUE);
    thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let (Ok(stream), heard) = (stream, heard.clone()) else { continue };
            thread::spawn(move || talk(&stream, number, &heard));
        }
    });
    result
}

/// Passes lines on in both directions until the connection ends; false if nobody listens any more.
fn talk(stream: &TcpStream, number: usize, heard: &SyncSender<(usize, Heard)>) -> bool {
    let (lines, queued) = sync_channel::<Line>(QUEUE);
    let Ok(mut out) = stream.try_clone() else { return true };
    thread::spawn(move || {
        for line in queued {
            let Ok(mut line) = serde_json::to_vec(&line) else { break };
            line.push(b'\n');
            if out.write_all(&line).is_err() {
                break;
            }
        }
        let _ = out.shutdown(Shutdown::Both);
    });
    let mut listened = heard.send((number, Heard::New(lines.clone()))).is_ok();
    let (mut reader, mut line) = (BufReader::new(stream), Vec::new());
    while listened {
        line.clear();
        let read = (&mut reader).take(LONGEST).read_until(b'\n', &mut line);
        let (Ok(1..), Ok(said)) = (read, serde_json::from_slice(&line)) else { break };
        listened = heard.send((number, Heard::Line(said, lines.clone()))).is_ok();
    }
    let _ = stream.shutdown(Shutdown::Both);
    heard.send((number, Heard::Gone)).is_ok()
}
