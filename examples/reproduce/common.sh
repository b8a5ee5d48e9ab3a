# Sourced by the scripts of this folder. A script names its model, head, data and sizes, calls `dry_run` with what stands
# in for them, and then runs its commands through `run`. Environment: MODEL, DRAFT, LIMIT, OUT, PYTHON, DRY_RUN=1.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
OUT=${OUT:-reproduced/$(basename "$0" .sh)}
PYTHON=${PYTHON:-python}
FLOOR=0.9 # a measured number below 0.9 of a published one of the same setting is a failure; the choice is ours
mkdir -p "$OUT"

# Print a command, then run it: what was run can be copied from the output.
run() {
  printf '+' >&2
  printf ' %q' "$@" >&2
  printf '\n' >&2
  "$@"
}

# dry_run MODEL DRAFT: with DRY_RUN=1 the same commands with these stand-ins, a few made-up questions, and sizes that a
# CPU does in seconds. A model of "mamba2" is made in $OUT/stand-in/mamba2. Numbers of a dry run say nothing.
dry_run() {
  [ -n "${DRY_RUN:-}" ] || return 0
  run "$PYTHON" "$HERE/stand_in.py" "$OUT/stand-in"
  export SPECDEC_DATA="$OUT/stand-in/data"
  MODEL=$1 DRAFT=$2 FLOOR=0
  [ "$MODEL" != mamba2 ] || MODEL=$OUT/stand-in/mamba2
  LOAD=(--dtype float32 --device cpu)
  LIMIT=2 SAMPLES=100 NEW_TOKENS=32 REPEATS=1
  TRAINING=(--steps 2 --batch-size 2 --held-out 2 --draft-vocab-size 64 --max-new-tokens 16 --max-length 128)
}

# need_data FILE…: files that have to be in the data folder, asked for before anything is downloaded.
need_data() {
  [ -z "${DRY_RUN:-}" ] || return 0
  for file in "$@"; do
    if [ ! -f "${SPECDEC_DATA:-}/$file" ]; then
      echo "set SPECDEC_DATA to a folder with $file (docs/reproduce.md says where it comes from)" >&2
      exit 2
    fi
  done
}

# train_head DATA: an EAGLE-3 head for the model, unless DRAFT names one. A second run goes on where the first stopped.
train_head() {
  [ -z "$DRAFT" ] || return 0
  run specdec train eagle3 --model "$MODEL" "${LOAD[@]}" --data "$1" --output "$OUT/training" "${TRAINING[@]}"
  DRAFT=$OUT/training/head
}

# beside DOCUMENT ARM METRIC VALUE SOURCE [OPTION…]: a measured number beside the published one (published.py).
beside() {
  run "$PYTHON" "$HERE/published.py" "$1" --arm "$2" --metric "$3" --value "$4" --source "$5" --floor "$FLOOR" "${@:6}"
}
