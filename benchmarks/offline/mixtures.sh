#!/usr/bin/env bash
# Mixtures of experts on one H200, three visits of 5 minutes: `mixtures.sh 1`, 2 and 3. See setup.sh for CARRY and OUT.
# A model is drawn before it is packed (gpt-oss 42 GB), so processes begin one after the other.
. "$(dirname "$0")/setup.sh"
run="benchmarks.bench_mixtures --out $OUT/mixtures.jsonl --repeats 5"
if [ "${1:-1}" = 1 ]; then
  held oss-3 $run --shape gpt-oss-20b --weights mxfp4 --drafts 3 --rows 1,8,32
  held q-0 $run --shape qwen3-30b-a3b --layers 16 --drafts 0 --rows 1,8,32
  sleep 25
  held oss-0 $run --shape gpt-oss-20b --weights mxfp4 --drafts 0 --rows 1,8,32
  held q-1 $run --shape qwen3-30b-a3b --layers 16 --drafts 1 --rows 1,8,32
  ready q-0 q-1 oss-3 oss-0
  go 60 q-0 q-1 oss-3 oss-0
elif [ "$1" = 2 ]; then
  held next benchmarks.bench_round --shape qwen3-next-80b --layers 8 --drafts 0,3 --rows 1,8,32 --trace 1,8,32 --repeats 1 \
    --out "$OUT/next.jsonl"
  timeout 90 python3 -m benchmarks.bench_experts --out "$OUT/experts.jsonl"
  timeout 90 python3 -m benchmarks.bench_experts --shape qwen3-next-80b --out "$OUT/experts.jsonl"
  ready next
  go 120 next
  cut -c1-300 "$OUT/experts.jsonl"
else
  held serve $run --shape qwen3-30b-a3b --layers 16 --drafts 3 --rows 32 --requests 128
  held served-sampled $run --shape qwen3-30b-a3b --layers 16 --drafts 3 --rows 32 --requests 128 --sampled
  sleep 20
  held fp8 $run --shape qwen3-30b-a3b --layers 16 --weights fp8 --drafts 3 --rows 1,8,32
  held bf16 $run --shape qwen3-30b-a3b --layers 16 --drafts 3 --rows 1,8,32
  ready fp8 bf16 serve served-sampled
  go 100 fp8 bf16 serve served-sampled
fi
[ ! -f "$OUT/mixtures.jsonl" ] || cut -c1-400 "$OUT/mixtures.jsonl"
