//! Commands for the driver: JSON over HTTP.

use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::Value;

/// The address that the driver says in one of its lines.
pub fn address(line: &Value) -> String {
    line["ctl"].as_str().unwrap().strip_prefix("http://").unwrap().to_owned()
}

/// Does one command, and waits for its answer.
pub fn command(address: &str, path: &str, body: Option<Value>) -> Value {
    let mut stream = TcpStream::connect(address).unwrap();
    let (method, body) = body.map_or(("GET", String::new()), |body| ("POST", body.to_string()));
    let head = format!("{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n");
    write!(stream, "{head}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
    serde_json::from_str(body).unwrap()
}
