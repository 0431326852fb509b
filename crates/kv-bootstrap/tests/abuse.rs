//! Clients that are slow, huge, malformed, silent, half-closed or deaf harm nobody.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{ErrorKind, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use kv_bootstrap::{KvBootstrapServer, ServerConfig};
use support::{Http, LONG, assert_alive, eventually, once, rank, rank_json};

fn start(config: ServerConfig) -> (KvBootstrapServer, SocketAddr) {
    let server = KvBootstrapServer::start_with("127.0.0.1:0", config).unwrap();
    let addr = server.local_addr();
    (server, addr)
}

/// Timeouts short enough for a test.
fn impatient() -> ServerConfig {
    ServerConfig::default().with(|config| {
        config.head_timeout = Duration::from_millis(300);
        config.body_timeout = Duration::from_millis(300);
        config.idle_timeout = Duration::from_secs(2);
        config.write_timeout = Duration::from_millis(600);
    })
}

/// Writes until the server stops taking it; how many bytes went out.
fn flood(http: &mut Http, piece: &[u8], max: usize) -> usize {
    let mut sent = 0;
    while sent < max {
        match http.stream.get_mut().write(piece) {
            Ok(len) => sent += len,
            Err(_) => break,
        }
    }
    sent
}

#[test]
fn a_header_fed_byte_by_byte_is_408_in_the_end() {
    let (_server, addr) = start(impatient());
    let mut http = Http::connect(addr);
    let begin = Instant::now();
    for byte in b"GET /health HTTP/1.1\r\nX-Slow: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa".iter().cycle() {
        if http.stream.get_mut().write_all(&[*byte]).is_err() || begin.elapsed() > LONG {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    // The answer may have been lost to the reset that later bytes caused; the end is certain.
    if let Some(answer) = http.try_answer(false) {
        assert_eq!(answer.status, 408);
    }
    assert!(http.is_closed());
    assert_alive(addr);
}

#[test]
fn a_request_whose_body_never_ends_gets_408() {
    let (_server, addr) = start(impatient());
    let mut http = Http::connect(addr);
    http.send("PUT /route HTTP/1.1\r\nContent-Length: 100\r\n\r\n{");
    let answer = http.answer();
    assert_eq!((answer.status, answer.header("connection")), (408, Some("close")));
    assert!(http.is_closed());
    assert_alive(addr);
}

#[test]
fn a_silent_client_is_closed_without_an_answer() {
    let (_server, addr) = start(impatient());
    let mut silent = Http::connect(addr);
    let mut after_one = Http::connect(addr);
    assert_eq!(after_one.request("GET", "/health", None).status, 200);
    assert_eq!(silent.try_answer(false), None);
    assert_eq!(after_one.try_answer(false), None);
    assert_alive(addr);
}

#[test]
fn ten_megabytes_of_header_are_431_and_not_remembered() {
    let (_server, addr) = start(ServerConfig::default());
    let mut http = Http::connect(addr);
    http.send("GET /health HTTP/1.1\r\nX-Huge: ");
    let sent = flood(&mut http, &[b'x'; 65536], 10 << 20);
    if let Some(answer) = http.try_answer(false) {
        assert_eq!(answer.status, 431);
    } else {
        assert!(sent < 10 << 20, "taken whole and not answered");
    }
    assert!(http.is_closed());

    let mut exact = Http::connect(addr);
    exact.send(format!("GET /health HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(17 << 10)));
    assert_eq!(exact.answer().status, 431);
    assert_alive(addr);
}

#[test]
fn bad_framing_is_refused_and_the_connection_closed() {
    let (_server, addr) = start(ServerConfig::default());
    let long = "GET / HTTP/1.1\r\n".to_owned() + &"a: b\r\n".repeat(100) + "\r\n";
    let cases = [
        ("PUT /route HTTP/1.1\r\nContent-Length: ten\r\n\r\n", 400),
        ("PUT /route HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        ("PUT /route HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", 400),
        ("PUT /route HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        ("PUT /route HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 413),
        ("PUT /route HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400),
        ("PUT /route HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n", 400),
        ("PUT /route HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n", 413),
        ("PUT /route HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        ("\u{1}\u{2}\u{3}\r\n\r\n", 400),
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (&long, 431),
    ];
    for (text, status) in cases {
        let mut http = Http::connect(addr);
        http.send(text);
        let answer = http.answer();
        assert_eq!((answer.status, answer.header("connection")), (status, Some("close")), "{text:?}");
        assert!(http.is_closed(), "{text:?}");
    }
    assert_alive(addr);
}

#[test]
fn a_client_that_is_still_sending_receives_the_refusal() {
    let (_server, addr) = start(ServerConfig::default());
    let mut http = Http::connect(addr);
    http.send("PUT /v1/ranks HTTP/1.1\r\nContent-Length: 4194304\r\n\r\n");
    for _ in 0..64 {
        http.send([b'x'; 1 << 16]);
    }
    let answer = http.answer();
    assert_eq!((answer.status, answer.header("connection")), (413, Some("close")));
    assert!(http.is_closed());
}

#[test]
fn an_endless_chunked_body_is_413() {
    let (_server, addr) = start(ServerConfig::default());
    let mut http = Http::connect(addr);
    http.send("PUT /v1/ranks HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n");
    let chunk = [b"1000\r\n".to_vec(), vec![b'['; 0x1000], b"\r\n".to_vec()].concat();
    let begin = Instant::now();
    while http.stream.get_mut().write(&chunk).is_ok() {
        assert!(begin.elapsed() < LONG, "the server takes it without end");
    }
    // The reset that ended the flood may have taken the answer along.
    if let Some(answer) = http.try_answer(false) {
        assert_eq!(answer.status, 413);
    }
    assert_alive(addr);

    let mut http = Http::connect(addr);
    http.send("PUT /v1/ranks HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n");
    for _ in 0..300 {
        http.send(&chunk);
    }
    assert_eq!(http.answer().status, 413, "a client that stops is told why");
}

#[test]
fn a_client_that_never_reads_is_stopped_and_then_closed() {
    let (_server, addr) = start(impatient().with(|config| config.write_timeout = Duration::from_secs(2)));
    // Something large to be answered with.
    let mut large = rank("p", (1, 0), 1);
    large.transports[0].metadata = vec![7; 60 << 10].into();
    assert_eq!(once(addr, "PUT", "/v1/ranks", Some(&rank_json(&large, 600_000))).status, 200);
    let mut deaf = Http::connect(addr);
    deaf.stream.get_ref().set_write_timeout(Some(Duration::from_millis(100))).unwrap();
    let request = b"GET /v1/ranks?role=prefill&dp_rank=0 HTTP/1.1\r\n\r\n".repeat(2000);
    let begin = Instant::now();
    let (mut sent, mut stopped) = (0, false);
    loop {
        match deaf.stream.get_mut().write(&request) {
            Ok(len) => sent += len,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                // The kernel's buffers are full, because the server does not read any more.
                stopped = true;
                assert_alive(addr);
            }
            // Reset: the server has closed.
            Err(_) => break,
        }
        assert!(begin.elapsed() < LONG, "the server still holds the connection");
    }
    assert!(stopped, "the server took {sent} bytes of requests without stopping");
    assert_alive(addr);
}

#[test]
fn pipelined_requests_are_answered_in_order_and_half_closing_loses_none() {
    let (_server, addr) = start(ServerConfig::default());
    let mut http = Http::connect(addr);
    let mut text = String::new();
    for room in 0..500 {
        let body = format!("{{\"bootstrap_room\":{room},\"dp_rank\":{}}}", room % 7);
        text += &format!("POST /register_dp_rank HTTP/1.1\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        let body = format!("{{\"bootstrap_rooms\":[{room}]}}");
        text += &format!("POST /query_dp_ranks HTTP/1.1\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    }
    http.send(&text);
    http.stream.get_ref().shutdown(Shutdown::Write).unwrap();
    for room in 0..500 {
        assert_eq!(http.answer().body, "OK");
        assert_eq!(http.answer().body, format!("{{\"{room}\":{}}}", room % 7));
    }
    assert!(http.is_closed());

    let mut half = Http::connect(addr);
    half.send("PUT /route HTTP/1.1\r\nContent-Length: 10\r\n\r\nabc");
    half.stream.get_ref().shutdown(Shutdown::Write).unwrap();
    assert_eq!(half.try_answer(false), None);
}

#[test]
fn http10_connection_close_head_and_continue_are_honoured() {
    let (_server, addr) = start(ServerConfig::default());
    let mut old = Http::connect(addr);
    old.send("GET /health HTTP/1.0\r\n\r\n");
    let answer = old.answer();
    assert!(answer.head.starts_with("HTTP/1.0 200 OK\r\n"), "{answer:?}");
    assert!(old.is_closed());

    let mut close = Http::connect(addr);
    close.send("GET /health HTTP/1.1\r\nConnection: close\r\n\r\n");
    assert_eq!(close.answer().header("connection"), Some("close"));
    assert!(close.is_closed());

    let mut http = Http::connect(addr);
    http.send("HEAD /health HTTP/1.1\r\n\r\n");
    let head = http.try_answer(true).unwrap();
    assert_eq!((head.status, head.header("content-length")), (200, Some("2")));
    http.send("POST /query_dp_ranks HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 22\r\n\r\n");
    assert_eq!(http.answer().status, 100);
    http.send("{\"bootstrap_rooms\":[]}");
    assert_eq!(http.answer().body, "{}");
    http.send(
        "POST /query_dp_ranks HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n14\r\n{\"bootstrap_rooms\":[\r\n2\r\n]}\r\n0\r\n\r\n",
    );
    assert_eq!(http.answer().body, "{}");
    http.send("PUT /route HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 99999999\r\n\r\n");
    assert_eq!(http.answer().status, 413, "no invitation to a body that is too large");
}

#[test]
fn a_thousand_idle_connections_leave_room_for_a_working_connection() {
    // 2 x 400 descriptors in this process, below the usual limit.
    let (_server, addr) = start(ServerConfig::default().with(|config| config.max_connections = 300));
    let mut idle = Vec::new();
    for number in 0..1000 {
        idle.push(TcpStream::connect(addr).unwrap());
        if number % 50 == 0 {
            assert_alive(addr);
        }
        // Those the server must have closed by now would only fill this process.
        if idle.len() > 350 {
            idle.remove(0);
        }
    }
    assert_alive(addr);
    let mut open = 0;
    for stream in &mut idle {
        stream.set_nonblocking(true).unwrap();
        open += usize::from(matches!(
            std::io::Read::read(stream, &mut [0]),
            Err(error) if error.kind() == ErrorKind::WouldBlock
        ));
    }
    assert!(open <= 300, "{open} connections are open");
}

#[test]
fn a_connection_beyond_the_limit_gets_503() {
    let (_server, addr) = start(ServerConfig::default().with(|config| config.max_connections = 4));
    let busy: Vec<Http> = (0..4)
        .map(|_| {
            let mut http = Http::connect(addr);
            http.send("PUT /route HTTP/1.1\r\nContent-Length: 10\r\nExpect: 100-continue\r\n\r\n");
            assert_eq!(http.answer().status, 100);
            http
        })
        .collect();
    let answer = once(addr, "GET", "/health", None);
    assert_eq!((answer.status, answer.header("connection")), (503, Some("close")));
    drop(busy);
    eventually("the server recovers", || once(addr, "GET", "/health", None).status == 200);
}

#[test]
fn unfinished_bodies_are_bounded_over_all_connections() {
    let (_server, addr) = start(ServerConfig::default().with(|config| config.max_buffered = 1 << 20));
    let mut clients: Vec<Http> = (0..8).map(|_| Http::connect(addr)).collect();
    let body = "x".repeat(400 << 10);
    for http in &mut clients {
        http.send("PUT /route HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n");
        // Refused clients may find the connection closed while they send.
        let _ = http.stream.get_mut().write_all(body.as_bytes());
    }
    for http in &clients {
        http.stream.get_ref().set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    }
    let refused =
        clients.iter_mut().filter_map(|http| http.try_answer(false)).filter(|a| a.status == 503).count();
    assert!(refused >= 1, "nobody was refused");
    assert_alive(addr);
}

#[test]
fn a_stopped_server_closes_its_connections_and_frees_its_port() {
    let (server, addr) = start(ServerConfig::default());
    let mut http = Http::connect(addr);
    assert_eq!(http.request("GET", "/health", None).status, 200);
    server.stop();
    assert!(http.is_closed());
    let again = KvBootstrapServer::start(&addr.to_string()).unwrap();
    assert_alive(again.local_addr());
    let taken = KvBootstrapServer::start(&addr.to_string()).unwrap_err();
    assert!(taken.to_string().contains(&addr.to_string()), "{taken}");
    assert!(KvBootstrapServer::start("no port").is_err());
}
