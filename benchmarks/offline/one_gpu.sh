#!/usr/bin/env bash
# A visit to one GPU: CARRY=folder OUT=results benchmarks/offline/one_gpu.sh tests [FILES]|rounds|lookup
#
# `rounds` takes 8 minutes. All GPU tests take more than the 7 that they get here: name files.
. "$(dirname "$0")/setup.sh"
accuracy() { # of both built-in pairs on every backend; one that refuses a model is in the log
  local pair model draft backend until=$((SECONDS + 450))
  for pair in gsm-llama:auto gsm-deepseek:mtp; do
    model=${pair%:*} draft=${pair#*:}
    for backend in torch flashinfer batch_invariant flex; do
      [ $SECONDS -lt $until ] || return
      PYTHONPATH=$PYTHONPATH:/tmp/lmeval timeout -s INT $((until - SECONDS)) python3 -m specdec.cli.main eval gsm8k \
        --model "$model" --draft "$draft" --backend "$backend" --limit 100 --max-new-tokens 200 --dtype float16 \
        --data /tmp/gsm/gsm8k --run-dir "/tmp/gsmrun/$model-$backend" --output "$OUT/gsm-$model-$backend.json" || true
    done
  done
}
case $1 in
tests)
  export SPECDEC_DATA=/tmp/gsm
  [ $# -gt 1 ] || set -- tests tests/gpu tests/attention/test_backends.py
  accuracy >"$OUT/gsm.log" 2>&1 &
  PYTHONPATH=$PYTHONPATH:/tmp/quant tests 420 11 "${@:2}"
  wait
  tail -n 12 "$OUT/gsm.log"
  ;;
lookup)
  timeout 500 python3 -m benchmarks.bench_lookup --shape llama-3.1-8b --questions 2 --new 192 --turns 3 --out "$OUT/lookup.json"
  ;;
rounds)
  held half benchmarks.bench_round --drafts 3 --rows 1,8,32 --sampled --greedy-share 1,0.5,0 --trace "" --repeats 7 --out "$OUT/round.jsonl"
  held hybrid benchmarks.bench_round --shape qwen3.5-9b --drafts 0,1,3 --rows 1,8,32 --trace 1,32 --out "$OUT/hybrid.jsonl"
  held lite benchmarks.bench_serving --shape deepseek-v2-lite --drafts 0 --repeats 2 --out "$OUT/serving.jsonl"
  ready half hybrid lite
  go 90 half
  held workload benchmarks.bench_serving --drafts 3 --repeats 3 --out "$OUT/serving.jsonl"
  ready workload
  go 60 lite workload
  held fp8 benchmarks.bench_round --drafts 0,5 --rows 1,8,32 --weights fp8 --trace "" --out "$OUT/fp8.jsonl"
  go 200 hybrid
  ready fp8
  go 60 fp8
  ;;
esac
