//! Makes the Rust interface of UCX from the headers of UCX, which are found in this order: the directory
//! `KV_UCX_INCLUDE`; what `pkg-config ucx` says; `/usr/include` and `/usr/local/include`. The library itself is
//! loaded at run time, so nothing is linked.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const HEADER: &str = "ucp/api/ucp.h";
const HELP: &str = "Run `eval \"$(scripts/setup-ucx.sh --print)\"` in this project's sources, which needs no root; \
                    or install the headers (apt-get install libucx-dev); or set KV_UCX_INCLUDE to the directory \
                    that holds ucp/api/ucp.h.";

fn main() -> ExitCode {
    println!("cargo::rerun-if-env-changed=KV_UCX_INCLUDE");
    println!("cargo::rerun-if-env-changed=PKG_CONFIG_PATH");
    println!("cargo::rerun-if-changed=build.rs");
    match generate() {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            println!("cargo::error=kv-ucx: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn generate() -> Result<(), String> {
    let include = include()?;
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    println!("cargo::rerun-if-changed={}", include.join(HEADER).display());
    let bindings = bindgen::Builder::default()
        .header_contents("kv_ucx.h", "#include <ucp/api/ucp.h>")
        .clang_arg(format!("-I{}", include.display()))
        .dynamic_library_name("Ucp")
        .dynamic_link_require_all(true)
        .allowlist_function(FUNCTIONS)
        .allowlist_type(
            "ucp_.*_attr_field|ucp_.*_params?_field|ucp_ep_close_flags_t|ucp_send_am_flags|ucp_am_cb_flags",
        )
        .allowlist_type("ucp_op_attr_t|ucp_am_recv_attr_t|ucp_feature|ucp_params_field|ucp_datatype_.*")
        .allowlist_var("UCP_API_M.*|UCP_MEM_MAP_.*")
        .prepend_enum_name(false)
        .generate_comments(false)
        .layout_tests(false)
        .generate()
        .map_err(|error| {
            format!("bindgen cannot read the headers in {}: {error}. {HELP}", include.display())
        })?;
    bindings.write_to_file(out.join("ucp.rs")).map_err(|error| format!("{}: {error}", out.display()))
}

/// The functions that the crate calls.
const FUNCTIONS: &str = "ucp_get_version|ucp_config_(read|modify|release)|ucp_init_version|ucp_cleanup|\
                         ucp_context_query|ucp_worker_(create|destroy|query|release_address|progress|arm|get_efd|\
                         set_am_recv_handler)|ucp_ep_(create|close_nbx|flush_nbx|query|rkey_unpack)|\
                         ucp_(put|get|am_send)_nbx|ucp_request_(free|check_status)|ucp_mem_(map|unmap)|\
                         ucp_rkey_(pack|buffer_release|destroy)|ucs_status_string";

fn include() -> Result<PathBuf, String> {
    let has = |dir: &Path| dir.join(HEADER).is_file();
    if let Some(dir) = env::var_os("KV_UCX_INCLUDE").filter(|dir| !dir.is_empty()).map(PathBuf::from) {
        return if has(&dir) {
            Ok(dir)
        } else {
            Err(format!("KV_UCX_INCLUDE is {}, which has no {HEADER}. {HELP}", dir.display()))
        };
    }
    let usual = ["/usr/include", "/usr/local/include"].map(PathBuf::from);
    let found = from_pkg_config().into_iter().chain(usual).find(|dir| has(dir));
    found.ok_or_else(|| format!("the headers of UCX ({HEADER}) were not found. {HELP}"))
}

fn from_pkg_config() -> Option<PathBuf> {
    let output = Command::new("pkg-config").args(["--variable=includedir", "ucx"]).output().ok()?;
    let dir = String::from_utf8(output.stdout).ok()?;
    Some(PathBuf::from(dir.trim())).filter(|dir| dir.is_absolute())
}
