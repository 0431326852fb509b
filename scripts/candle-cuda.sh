#!/usr/bin/env bash
# Checks the crate kv-candle-cuda where CUDA's compiler is, and runs its tests where a GPU is, too.
#
#   scripts/candle-cuda.sh
#
# The crate is outside of the workspace, because candle compiles its kernels with nvcc. Where nvcc is missing, the script
# checks the crate's lock file only, says so, and ends well.
set -euo pipefail
cd "$(dirname "$0")/.."

export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
# The lock file of the crate has the packages that its crates of the workspace need now, also where nothing is built.
if ! said=$(cd crates/kv-candle-cuda && cargo update --workspace --locked 2>&1); then
    printf '%s\n' "$said" >&2
    case $said in *"--locked was passed"*) exit 1 ;; esac
    echo "NOT TESTED: the lock file of kv-candle-cuda, for the reason above"
fi
if ! command -v nvcc >/dev/null; then
    echo "NOT TESTED: kv-candle-cuda. It needs CUDA's compiler: nvcc is not on the PATH"
    exit 0
fi
cd crates/kv-candle-cuda
# The compute capability of the GPU is asked for; without a GPU any will do.
command -v nvidia-smi >/dev/null || export CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-80}
cargo fmt -- --check
cargo clippy --all-targets --locked -- -D warnings
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null; then
    cargo test --locked
else
    echo "NOT TESTED: regions in GPU memory. nvidia-smi finds no GPU"
fi
