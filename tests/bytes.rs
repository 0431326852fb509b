//! Transfers move the right bytes: for any geometry, page lists, chunks, order of opening and limits, every
//! page of a request arrives where it belongs, and no other byte changes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use kv_conformance::Random;
use kv_transfer::Limits;
use kv_transfer::Parallel;
use kv_transfer::prelude::*;
use support::host::{Host, Setup};
use support::memory::Shape;
use support::traffic::{Load, Tally, run};
use support::{ended, reclaimed, server};

/// Serves a load, and expects every request of it to succeed.
fn serve(random: &mut Random, mut prefills: Vec<Host>, mut decodes: Vec<Host>, load: Load) -> Tally {
    let tally = run(random, &mut prefills, &mut decodes, load);
    assert_eq!((tally.sent, tally.received), (load.requests, load.requests), "{tally:?}");
    assert!(tally.sender_first > 0 && tally.receiver_first > 0, "{tally:?}");
    let posts: u64 = prefills.iter().map(|host| host.gauges().posts).sum();
    let failed: u64 = prefills.iter().map(|host| host.gauges().posts_failed).sum();
    println!("{tally:?}, {posts} posts");
    assert_eq!(failed, 0);
    for host in prefills {
        host.close("prefill");
    }
    for host in decodes {
        host.close("decode");
    }
    tally
}

#[test]
fn scattered_pages_of_many_layers_arrive_whole() {
    let mut random = Random::new("scattered_pages_of_many_layers_arrive_whole");
    let (_server, addr) = server();
    let prefill = Setup::prefill(&addr, Shape::layer_major(700, 16, 264)).start();
    let decode = Setup::decode(&addr, Shape::layer_major(520, 16, 264)).start();
    let load = Load { requests: 300, at_once: 20, max_pages: 24, give_up: 0 };
    serve(&mut random, vec![prefill], vec![decode], load);
}

#[test]
fn runs_of_whole_pages_arrive_whole() {
    let mut random = Random::new("runs_of_whole_pages_arrive_whole");
    let (_server, addr) = server();
    let prefill = Setup { runs: true, ..Setup::prefill(&addr, Shape::page_major(500, 16, 520)) }.start();
    let decode = Setup { runs: true, ..Setup::decode(&addr, Shape::page_major(900, 16, 520)) }.start();
    let load = Load { requests: 300, at_once: 20, max_pages: 24, give_up: 0 };
    serve(&mut random, vec![prefill], vec![decode], load);
}

/// Two replicas of a prefill engine serve two decode engines, which both fetch from both.
#[test]
fn two_replicas_serve_two_decode_engines() {
    let mut random = Random::new("two_replicas_serve_two_decode_engines");
    let (_server, addr) = server();
    let prefill = |rank| {
        let parallel = Parallel::default().with(|parallel| {
            parallel.dp_size = 2;
            parallel.dp_rank = rank;
        });
        let shape = Shape::layer_major(600 + 50 * rank, 8, 512);
        Setup { rank, parallel, runs: rank == 1, ..Setup::prefill(&addr, shape) }.start()
    };
    let decode = |number: u32| {
        let engine = format!("decode-{number}");
        let shape = Shape::layer_major(600 - 50 * number, 8, 512);
        Setup { engine, runs: number == 0, ..Setup::decode(&addr, shape) }.start()
    };
    let (prefills, decodes) = ((0..2).map(prefill).collect(), (0..2).map(decode).collect());
    let load = Load { requests: 400, at_once: 24, max_pages: 20, give_up: 0 };
    serve(&mut random, prefills, decodes, load);
}

/// Two prefill engines, each with its own bootstrap server, serve one decode engine.
#[test]
fn a_decode_engine_fetches_from_two_prefill_engines() {
    let mut random = Random::new("a_decode_engine_fetches_from_two_prefill_engines");
    let servers = [server(), server()];
    let shape = Shape::page_major(300, 4, 100);
    let prefills = servers.iter().map(|(_, addr)| Setup::prefill(addr, shape).start()).collect();
    let decode = Setup::decode(&servers[0].1, shape).start();
    let load = Load { requests: 200, at_once: 16, max_pages: 16, give_up: 0 };
    serve(&mut random, prefills, vec![decode], load);
}

#[test]
fn posts_of_one_descriptor_one_at_a_time_serve_all_requests() {
    let mut random = Random::new("posts_of_one_descriptor_one_at_a_time_serve_all_requests");
    let (_server, addr) = server();
    let shape = Shape::layer_major(200, 6, 300);
    let prefill = Setup { max_sge: 1, max_inflight: 1, ..Setup::prefill(&addr, shape) }.start();
    let decode = Setup::decode(&addr, shape).start();
    let load = Load { requests: 60, at_once: 12, max_pages: 8, give_up: 0 };
    serve(&mut random, vec![prefill], vec![decode], load);
}

/// Posts that end within a page, at a place that no layout knows.
#[test]
fn posts_smaller_than_a_page_arrive_whole() {
    let mut random = Random::new("posts_smaller_than_a_page_arrive_whole");
    for shape in [Shape::layer_major(200, 4, 700), Shape::page_major(200, 4, 700)] {
        let (_server, addr) = server();
        let limits = Limits::default().with(|limits| limits.max_post_bytes = 333);
        let prefill = Setup { limits, max_inflight: 3, runs: true, ..Setup::prefill(&addr, shape) }.start();
        let decode = Setup { runs: true, ..Setup::decode(&addr, shape) }.start();
        let load = Load { requests: 50, at_once: 10, max_pages: 8, give_up: 0 };
        serve(&mut random, vec![prefill], vec![decode], load);
    }
}

#[test]
fn a_ring_of_one_command_delays_and_loses_nothing() {
    let mut random = Random::new("a_ring_of_one_command_delays_and_loses_nothing");
    let (_server, addr) = server();
    let shape = Shape::layer_major(600, 2, 128);
    let prefill = Setup { command_queue: 1, ..Setup::prefill(&addr, shape) }.start();
    let decode = Setup { command_queue: 1, ..Setup::decode(&addr, shape) }.start();
    let load = Load { requests: 200, at_once: 32, max_pages: 12, give_up: 0 };
    let tally = serve(&mut random, vec![prefill], vec![decode], load);
    assert!(tally.backpressure > 0, "the ring was never full");
}

/// Two decode engines fetch one prompt, each into pages of its own.
#[test]
fn one_prompt_goes_to_two_decode_engines() {
    let mut random = Random::new("one_prompt_goes_to_two_decode_engines");
    let (_server, addr) = server();
    let shape = Shape::layer_major(128, 6, 512);
    let mut prefill = Setup { receivers: 2, ..Setup::prefill(&addr, shape) }.start();
    let decode = |engine: &str| Setup { engine: engine.to_owned(), ..Setup::decode(&addr, shape) }.start();
    let mut decodes = [decode("decode-a"), decode("decode-b")];
    for room in 0..40 {
        let (pages, content) = (1 + random.below(32), random.bits());
        let mut receivers = Vec::new();
        let early = random.below(3);
        let mut open = |decodes: &mut [Host; 2], which: usize| {
            let mut receiver = decodes[which].receiver(&addr, room, SessionOptions::default());
            receiver.init(decodes[which].room_for(pages), None).unwrap();
            receivers.push((which, receiver));
        };
        (0..early).for_each(|which| open(&mut decodes, which));
        let mut sender = prefill.sender(room, SessionOptions::default());
        sender.init(pages, None).unwrap();
        let mut head = prefill.prompt(pages, content);
        let tail = head.split_off(random.below(pages));
        sender.send(head).unwrap();
        (early..2).for_each(|which| open(&mut decodes, which));
        sender.send(tail).unwrap();
        for (which, receiver) in receivers {
            assert_eq!(ended(&receiver), KvPoll::Success, "{:?}", receiver.failure());
            let pages = reclaimed(receiver);
            decodes[which].arrived(pages.list(), content, &format!("room {room}"));
            decodes[which].free(pages);
        }
        assert_eq!(ended(&sender), KvPoll::Success, "{:?}", sender.failure());
        prefill.free(reclaimed(sender));
    }
    prefill.close("prefill");
    for decode in decodes {
        decode.close("decode");
    }
}
