#!/usr/bin/env bash
# Pack what a GPU machine without a package index lacks, into a folder to carry there (about 23 MB):
#
#   benchmarks/offline/pack.sh FLASHINFER.tar.xz FOLDER [KERNELS.tar.xz]
#
# FLASHINFER: flashinfer-python and apache-tvm-ffi as a site folder. KERNELS: the content of flashinfer/data/aot, which
# saves nvcc's minute there; `python -m flashinfer.aot` builds it with nvcc and FLASHINFER_CUDA_ARCH_LIST=9.0a, without a
# GPU. From this machine's index and .venv come, for Python 3.12: nvmath-python; the quantisation libraries of the tests;
# lm-eval with gsm8k alone; transformers 5.23, for tensor parallelism.
# What is to be carried at once may be too much: rounds need fi, aot and wheels, tests also quant, lmeval and gsm, ranks
# tf523. GSM8K is taken from $SPECDEC_DATA.
set -euo pipefail
flashinfer=$(realpath "$1") out=$(realpath -m "$2") kernels=${3:+$(realpath "$3")}
here=$(cd "$(dirname "$0")/../.." && pwd) work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
site=$(echo "$here"/.venv/lib/python3*/site-packages)
platforms=$(printf -- '--platform %s ' manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_24_x86_64 \
  manylinux_2_17_x86_64 manylinux2014_x86_64 any)
fetch() { # FOLDER PACKAGE…
  local folder=$1
  shift
  # shellcheck disable=SC2086
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 \
    --abi none $platforms -d "$folder" "$@"
}
packed() { # FOLDER NAME: a site folder of the wheels in it
  mkdir -p "$work/$2"
  for wheel in "$1"/*.whl; do python3 -m zipfile -e "$wheel" "$work/$2"; done
  tar -C "$work/$2" -c . | xz -T0 -6 >"$out/$2.tar.xz"
}
mkdir -p "$out"
cp "$flashinfer" "$out/fi.tar.xz"
[ -z "$kernels" ] || cp "$kernels" "$out/aot.tar.xz"
fetch "$out/wheels" 'nvmath-python>=1.0,<2'
fetch "$work/q" 'compressed-tensors>=0.15' 'torchao>=0.15' 'optimum-quanto>=0.2.7' loguru annotated-types typing-inspection \
  pydantic "pydantic-core==$("$here/.venv/bin/python" -c 'import pydantic_core; print(pydantic_core.__version__)')"
packed "$work/q" quant
fetch "$work/t" 'transformers==5.23.0'
packed "$work/t" tf523
fetch "$work/l" "multiprocess==$("$here/.venv/bin/python" -c 'import multiprocess; print(multiprocess.__version__)')"
mkdir -p "$work/lmeval"
for name in lm_eval datasets dill evaluate more_itertools pytablewriter dataproperty mbstrdecoder pathvalidate tabledata \
  tcolorpy typepy rouge_score word2number; do cp -r "$site/$name" "$work/lmeval/"; done
cp "$site/sqlitedict.py" "$work/lmeval/"
cp -r "$site"/{lm_eval,datasets,dill,evaluate}-*.dist-info "$work/lmeval/"
find "$work/lmeval" -name __pycache__ -prune -exec rm -rf {} +
find "$work/lmeval/lm_eval/tasks" -mindepth 1 -maxdepth 1 -type d ! -name gsm8k -exec rm -rf {} +
packed "$work/l" lmeval
[ -z "${SPECDEC_DATA:-}" ] || tar -C "$SPECDEC_DATA" -cJf "$out/gsm.tar.xz" gsm8k
git -C "$here" rev-parse --short HEAD >"$out/commit"
ls -la "$out"
