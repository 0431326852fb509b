//! Makes the declarations of libfabric's types and constants, from the headers of the installed libfabric.

use std::env;
use std::path::{Path, PathBuf};
use std::process::exit;

/// Where the headers are looked for, if `KV_FABRIC_INCLUDE` does not say.
const PLACES: [&str; 3] = ["/opt/amazon/efa/include", "/usr/local/include", "/usr/include"];
const HEADERS: [&str; 6] = ["fabric", "fi_domain", "fi_endpoint", "fi_cm", "fi_eq", "fi_rma"];
const TYPES: &str =
    "fi_info|fid_(fabric|domain|ep|av|cq|mr)|fi_(cq|av)_attr|fi_cq_(data|err)_entry|fi_msg_rma|fi_context2";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=KV_FABRIC_INCLUDE");
    if let Err(reason) = declare() {
        println!("cargo::error={reason}");
        exit(1);
    }
}

fn declare() -> Result<(), String> {
    let include = include()?;
    println!("cargo::rerun-if-changed={}", include.join("rdma/fabric.h").display());
    let header: String = HEADERS.iter().map(|name| format!("#include <rdma/{name}.h>\n")).collect();
    let bindings = bindgen::Builder::default()
        .header_contents("kv_fabric.h", &header)
        .clang_arg(format!("-I{}", include.display()))
        .allowlist_type(TYPES)
        .allowlist_type(
            "fi_ep_type|fi_wait_obj|fi_threading|fi_progress|fi_resource_mgmt|fi_av_type|fi_cq_format",
        )
        .allowlist_var("FI_.*")
        .prepend_enum_name(false)
        .layout_tests(false)
        .generate()
        .map_err(|error| {
            format!("bindgen could not read libfabric's headers in {}: {error}", include.display())
        })?;
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets no OUT_DIR")?);
    bindings.write_to_file(out.join("bindings.rs")).map_err(|error| error.to_string())
}

fn include() -> Result<PathBuf, String> {
    let has_headers = |place: &Path| place.join("rdma/fabric.h").exists();
    let help =
        "Run `eval \"$(scripts/setup-fabric.sh --print)\"`, or install them (apt-get install libfabric-dev)";
    match env::var_os("KV_FABRIC_INCLUDE").map(PathBuf::from) {
        Some(place) if has_headers(&place) => Ok(place),
        Some(place) => {
            let place = place.display();
            Err(format!("KV_FABRIC_INCLUDE is {place}, which has no rdma/fabric.h of libfabric. {help}"))
        }
        None => PLACES
            .map(PathBuf::from)
            .into_iter()
            .find(|place| has_headers(place))
            .ok_or_else(|| format!("libfabric's headers are not in {}. {help}", PLACES.join(", "))),
    }
}
