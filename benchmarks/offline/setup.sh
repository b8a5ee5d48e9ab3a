# Sourced first on the GPU machine, in the repository's root: unpacks CARRY (what pack.sh made) once, sets the environment,
# and has what the visits below share. OUT: the folder for results. WORK: /tmp. Every wait has an end: what hangs is said, and its
# stacks are printed.
set -u
: "${CARRY:?the folder that pack.sh made}" "${OUT:?a folder for results}"
began=$SECONDS work=${WORK:-/tmp}
held=$work/held logs=$work/logs site=$work/site
mkdir -p "$held" "$logs" "$OUT"
say() { echo "[$((SECONDS - began))] $*"; }
if [ ! -d "$site" ]; then
  mkdir -p "$site" && tar -C "$site" -xJf "$CARRY/fi.tar.xz"
  mkdir -p "$site/flashinfer/data/aot"
  [ ! -f "$CARRY/aot.tar.xz" ] || tar -C "$site/flashinfer/data/aot" -xJf "$CARRY/aot.tar.xz"
  for name in quant lmeval tf523 gsm; do
    [ ! -f "$CARRY/$name.tar.xz" ] || { mkdir -p "/tmp/$name" && tar -C "/tmp/$name" -xJf "$CARRY/$name.tar.xz"; }
  done
  for wheel in "$CARRY"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$site"; done
fi
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=4
export FLASHINFER_CUDA_ARCH_LIST=9.0a PYTHONPATH=$PWD:$site SPECDEC_COMMIT
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
SPECDEC_COMMIT=$(cat "$CARRY/commit")
held() { # NAME MODULE ARGUMENTS…: a benchmark that loads, and then waits for its turn; variables stand before the call
  local name=$1
  shift
  python3 -m benchmarks.offline.in_turn "$@" --hold "$held/$name" >"$logs/$name.log" 2>&1 &
  echo $! >"$held/$name.pid"
}
runs() { kill -0 "$(cat "$held/$1.pid")" 2>/dev/null; }
ready() { # NAME…: until each has loaded, at most 150 s
  local name
  for name; do
    for _ in $(seq 300); do [ -f "$held/$name.ready" ] || ! runs "$name" || sleep 0.5; done
    say "$name $([ -f "$held/$name.ready" ] && echo ready || echo 'NOT ready')"
  done
}
go() { # SECONDS NAME…: one after the other, each at most so long
  local name most=$1
  shift
  for name; do
    touch "$held/$name"
    for _ in $(seq $((4 * most))); do ! runs "$name" || sleep 0.25; done
    if runs "$name"; then
      say "$name HANGS"
      kill -ABRT "$(cat "$held/$name.pid")"
      sleep 1
      kill -KILL "$(cat "$held/$name.pid")"
    fi
    say "$name ended"
    grep -E "^K=|TP=|tokens/s|Error" "$logs/$name.log" | cut -c1-170 | tail -n 10
    { echo "#### $name" && cat "$logs/$name.log"; } >>"$OUT/logs"
  done
}
tests() { # SECONDS WORKERS ARGUMENTS…: pytest, each outcome as it comes, in $OUT/tests.log
  local most=$1 workers=$2
  shift 2
  timeout -s INT "$most" python3 -m pytest -n "$workers" --dist load --maxschedchunk 1 -v --show-capture=no --tb=short \
    -p no:cacheprovider -p benchmarks.offline.at_once -m gpu "$@" >>"$OUT/tests.log" 2>&1
  say "tests ended with $?"
  grep -E "^## (failed|error)|^=+ .* in " "$OUT/tests.log" | tail -n 30
}
