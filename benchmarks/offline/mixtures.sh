#!/usr/bin/env bash
# What is left to measure of mixtures of experts on one H200, three visits of 5 minutes: `mixtures.sh 1`, 2 and 3. See
# setup.sh for CARRY and OUT.
# A model is drawn before it is packed (gpt-oss 42 GB), so processes begin one after the other.
. "$(dirname "$0")/setup.sh"
run="benchmarks.bench_mixtures --out $OUT/mixtures.jsonl --repeats 5"
if [ "${1:-1}" = 1 ]; then # alone: 48 layers compile for minutes
  held full $run --shape qwen3-30b-a3b --drafts 3 --rows 1,8,32
  ready full full
  go 90 full
elif [ "$1" = 2 ]; then
  held next benchmarks.bench_round --shape qwen3-next-80b --layers 8 --drafts 0,3 --rows 1,8,32 --trace 1,8,32 --repeats 1 \
    --out "$OUT/next.jsonl"
  timeout 90 python3 -m benchmarks.bench_experts --out "$OUT/experts.jsonl"
  timeout 90 python3 -m benchmarks.bench_experts --shape qwen3-next-80b --out "$OUT/experts.jsonl"
  ready next
  go 120 next
  cut -c1-300 "$OUT/experts.jsonl"
else
  held sampled $run --shape qwen3-30b-a3b --layers 16 --drafts 3 --rows 32 --requests 128 --sampled
  held oss $run --shape gpt-oss-20b --weights mxfp4 --drafts 3 --rows 1,8,32
  ready sampled oss
  held plain $run --shape qwen3-30b-a3b --layers 16 --drafts 0 --rows 1,8,32,128
  ready plain
  go 60 sampled oss plain
fi
[ ! -f "$OUT/mixtures.jsonl" ] || cut -c1-400 "$OUT/mixtures.jsonl"
