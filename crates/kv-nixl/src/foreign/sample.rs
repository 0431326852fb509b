//! The metadata of an agent as NIXL writes it, without NIXL.

fn put(out: &mut Vec<u8>, tag: &str, value: &[u8]) {
    out.extend(tag.as_bytes());
    out.extend((value.len() as u64).to_le_bytes());
    out.extend(value);
    out.push(b'|');
}

/// An agent with one backend and these ranges of host memory: address, length and device.
pub(crate) fn sample(name: &[u8], ranges: &[[u64; 3]]) -> Vec<u8> {
    let mut out = b"nixlSerDes|".to_vec();
    put(&mut out, "Agent", name);
    put(&mut out, "Conns", &1_u64.to_le_bytes());
    put(&mut out, "t", b"UCX");
    put(&mut out, "c", &[0, 255, b'|', 7]);
    put(&mut out, "", b"MemSection");
    put(&mut out, "nixlSecElms", &u64::from(!ranges.is_empty()).to_le_bytes());
    if !ranges.is_empty() {
        put(&mut out, "bknd", b"UCX");
        put(&mut out, "nixlDList", b"nixlSDList");
        put(&mut out, "t", &0_u32.to_le_bytes());
        put(&mut out, "n", &(ranges.len() as u64).to_le_bytes());
    }
    for range in ranges {
        let mut blob: Vec<u8> = range.iter().flat_map(|number| number.to_le_bytes()).collect();
        blob.extend(b"key");
        put(&mut out, "", &blob);
    }
    out
}
