#!/usr/bin/env bash
# Run one command of tensor parallelism on a machine with two GPUs whose own transformers is older than 5.23.
#
#   benchmarks/run_parallel.sh WHEELS FLASHINFER.tar.xz COMMAND…
#
# WHEELS: a folder of transformers 5.23, accelerate, tokenizers >= 0.23.1, huggingface_hub >= 1.31, safetensors >= 0.8 and
# what these need (30 MB: pip download transformers==5.23.0 accelerate --no-deps, and the rest with its dependencies).
# Wheels for another Python than this machine's are left out; its own packages stand in for them. FLASHINFER: see
# run_benchmarks.sh; - where it is installed. Commands, each below ten minutes:
#
#   python3 -m pytest -q -s tests/gpu/test_parallel.py
#   python3 -m benchmarks.bench_parallel --folder /tmp/pairs --tensor-parallel-size 1 --drafts 0,5 --out $OUT/tp.jsonl
#   python3 -m benchmarks.bench_parallel --folder /tmp/pairs --tensor-parallel-size 2 --drafts 0,5 --out $OUT/tp.jsonl
#   SPECDEC_COLLECTIVES=nccl … the same with 2, to compare
#   python3 -m benchmarks.bench_parallel --shape llama-70b --layers 8 --tensor-parallel-size 1,2 --drafts 0 \
#     --folder /tmp/pairs --out $OUT/tp.jsonl      then --layers 24, and --drafts 5
set -eu
wheels=$1 flashinfer=$2
shift 2
own=/tmp/parallel-site
if [ ! -d "$own" ]; then
  for wheel in "$wheels"/*.whl; do
    python3 -m pip install --quiet --no-index --no-deps --target "$own" "$wheel" || echo "left out: $wheel"
  done
fi
if [ "$flashinfer" != - ]; then
  [ -d /tmp/flashinfer-site ] || { mkdir -p /tmp/flashinfer-site && tar -C /tmp/flashinfer-site -xJf "$flashinfer"; }
  own=$own:/tmp/flashinfer-site
fi
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4 PYTHONPATH="$own:$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$@"
