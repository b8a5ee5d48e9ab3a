#!/usr/bin/env bash
# Benchmarks and GPU tests on one machine: everything builds at once, is measured in turn, and only then tested.
#
#   OUT=results benchmarks/run_benchmarks.sh BUNDLE.tar.xz [KERNELS.tar.xz]
#
# BUNDLE holds flashinfer and apache-tvm-ffi as a site folder; KERNELS is what prebuild_kernels.py packed. One H200 holds
# about 140 GiB: an 8B model at 128 rows takes 38 of them, at 32 rows 28, DeepSeek-V2-Lite 35.
set -u
site=/tmp/flashinfer-site release=$(mktemp -d)
mkdir -p "$site/flashinfer/data/aot" "$OUT" && tar -C "$site" -xJf "$1"
[ $# -gt 1 ] && tar -C "$site/flashinfer/data/aot" -xJf "$2"
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 PYTHONPATH="$site:$PWD" FLASHINFER_CUDA_ARCH_LIST=9.0a TORCHINDUCTOR_COMPILE_THREADS=5

build() { # NAME ARGUMENTS…: a benchmark that waits, once it is built, for its turn
  local name=$1
  shift
  python3 -m benchmarks.bench_round "$@" --hold "$release/$name" --out "$OUT/round.jsonl" >"$OUT/$name.log" 2>&1 &
  echo $! >"$release/$name.pid"
}

measure() { # NAME…: let them measure, one after the other
  for name in "$@"; do
    while [ ! -f "$release/$name.ready" ] && kill -0 "$(cat "$release/$name.pid")" 2>/dev/null; do sleep 1; done
  done
  for name in "$@"; do
    touch "$release/$name"
    wait "$(cat "$release/$name.pid")"
    tail -n 4 "$OUT/$name.log"
  done
}

build k5 --drafts 5 --rows 1,8,32,128 --trace 1,8,32,128
build k0 --drafts 0 --rows 1,8,32,128 --trace 1,32
build m1 --shape deepseek-v2-lite --drafts 1 --rows 1,8,32 --trace 1,8,32 --repeats 3
measure k5 k0 m1
for part in "eager_tokens" "never_sync or trace or kernel" "not (eager_tokens or never_sync or trace or kernel)"; do
  python3 -m pytest -q tests/gpu/test_graph_rounds.py -k "$part" &
done
python3 -m pytest -q tests/gpu/test_{packed,norm_and_rotation,linear,greedy}.py &
wait
