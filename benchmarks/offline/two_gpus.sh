#!/usr/bin/env bash
# A visit to two GPUs of one host: CARRY=folder OUT=results benchmarks/offline/two_gpus.sh tests [EXPRESSION]|llama-70b|llama-8b|deepseek
#
# Each stage below four minutes, most memory on one GPU 115 of 140 GiB: nothing else may run there. NVLink multicast is off.
. "$(dirname "$0")/setup.sh"
export PYTHONPATH=/tmp/tf523:$PYTHONPATH OMP_NUM_THREADS=2
ranks() { # NAME RANKS DRAFTS ARGUMENTS…
  local name=$1 size=$2 drafts=$3
  shift 3
  held "$name" benchmarks.bench_parallel --tensor-parallel-size "$size" --drafts "$drafts" --rows 1,8,32 \
    --new-tokens 96 --folder /tmp/pairs --out "$OUT/parallel.jsonl" "$@"
}
case $1 in
tests) # those that are killed by themselves: `tests "killed and auto"`; a start takes 40 to 60 s, float32 two minutes
  tests 220 3 tests/gpu/test_parallel.py tests/gpu/test_handoff.py -k "${2:-not killed and not nixl}"
  ;;
llama-70b)
  ranks s8t1 1 0 --shape llama-70b --layers 8
  ranks s24t2 2 0 --shape llama-70b --layers 24
  ready s8t1 s24t2
  ranks s8t2 2 0 --shape llama-70b --layers 8
  ranks s24t1 1 0 --shape llama-70b --layers 24
  ready s8t2 s24t1
  go 45 s8t2 s24t2 s24t1 s8t1
  ranks k5t1 1 5 --shape llama-70b --layers 24
  ranks k5t2 2 5 --shape llama-70b --layers 24
  ready k5t1 k5t2
  go 45 k5t1 k5t2
  ;;
llama-8b)
  ranks l0t1 1 0 --shape llama-3.1-8b
  ranks l0t2 2 0 --shape llama-3.1-8b
  ready l0t1 l0t2
  SPECDEC_COLLECTIVES=nccl ranks n0t2 2 0 --shape llama-3.1-8b
  ranks l5t1 1 5 --shape llama-3.1-8b
  ranks l5t2 2 5 --shape llama-3.1-8b
  ready n0t2 l5t1 l5t2
  go 30 l0t1 l0t2 n0t2 l5t1 l5t2
  ;;
deepseek) # each loads its second model after the first one's rounds
  ranks d1 1 0,1 --shape deepseek-v3
  ranks d2 2 0,1 --shape deepseek-v3
  ready d1 d2
  go 120 d2 d1
  ;;
esac
