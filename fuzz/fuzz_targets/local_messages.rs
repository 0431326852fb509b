#![no_main]

#[global_allocator]
static COUNTING: kv_fuzz::alloc::Counting = kv_fuzz::alloc::Counting;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = kv_fuzz::local_messages(bytes);
});
