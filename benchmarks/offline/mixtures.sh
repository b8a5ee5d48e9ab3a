#!/usr/bin/env bash
# Mixtures of experts on one H200 in about 9 minutes: kernels of a hybrid's rounds, prompts beside the least time, and
# rounds of both shapes with the form before beside them. See setup.sh for CARRY and OUT. Arguments are a shape
# of bench_mixtures and its weights, at full depth, alone, for the time of a start: `mixtures.sh gpt-oss-20b mxfp4`.
. "$(dirname "$0")/setup.sh"
run="benchmarks.bench_mixtures --out $OUT/mixtures.jsonl --repeats 5"
if [ -n "${1:-}" ]; then
  held cold $run --shape "$1" --weights "${2:-model}" --forms grouped --drafts 3,3,0 --rows 1,8,32 # cold, and warm
  ready cold cold
  go 200 cold
else
  held next benchmarks.bench_round --shape qwen3-next-80b --layers 8 --drafts 0,3 --rows 1,8,32 --trace 1,8,32 --repeats 1 \
    --out "$OUT/next.jsonl"
  held greedy $run --shape qwen3-next-80b --layers 8 --drafts 1 --rows 1,8,32,128
  held sampled $run --shape qwen3-next-80b --layers 8 --drafts 3,0 --rows 1,8,32,128 --sampled
  tests 90 2 tests/gpu/test_experts.py
  ready next greedy sampled
  timeout 90 python3 -m benchmarks.bench_experts --out "$OUT/experts.jsonl"
  timeout 90 python3 -m benchmarks.bench_experts --shape qwen3-next-80b --out "$OUT/experts.jsonl"
  go 150 next greedy sampled # 128 rows of 96 tokens with two forms take half of it
  cut -c1-300 "$OUT/experts.jsonl"
fi
[ ! -f "$OUT/mixtures.jsonl" ] || cut -c1-400 "$OUT/mixtures.jsonl"
