#!/usr/bin/env bash
# Train a head for SmolLM2-135M-Instruct in several calls to one GPU machine, each of which goes on where the last one ended:
#
#   CARRY=folder OUT=results benchmarks/offline/head.sh PHASE…
#
# `pieces` keeps the parts of the GGUF file that this call brought. `target` joins them and makes the folder that
# transformers reads. `own COUNT` lets the target write so many more prompts. `answers SECONDS`, `train SECONDS` and
# `measure SECONDS` stop at their time: the same call goes on. `results` packs what there is into OUT: answers, the head
# in bfloat16, logs.
# CARRY beside what pack.sh makes: part.*, smollm2.tar.xz (`python -m benchmarks.gguf_folder … --tokenizer`), sum (the
# file's SHA-256), prompts.jsonl.xz, questions.jsonl.xz (Spec-Bench), evaluated.jsonl.xz (no prompt shares its words), and,
# to begin with them, answers.tar.xz.
. "$(dirname "$0")/setup.sh"
run=$work/run target=$work/target parts=$work/parts
processes=${PROCESSES:-4} tokens=${TOKENS:-256} batch=${BATCH:-48}
mkdir -p "$run" "$parts"
questions() { for file in "$work"/prompts/*; do printf -- '--data %s ' "$file"; done; }
common() { echo "--model $target --output $run --max-new-tokens $tokens --max-length 768 --dtype ${DTYPE:-bfloat16} --backend ${BACKEND:-auto}"; }
pieces() {
  for part in "$CARRY"/part.*; do [ ! -f "$part" ] || cp "$part" "$parts/"; done
  [ ! -f "$CARRY/answers.tar.xz" ] || tar -C "$run" -xJf "$CARRY/answers.tar.xz"
  [ ! -f "$CARRY/smollm2.tar.xz" ] || { mkdir -p "$target" && tar -C "$target" -xJf "$CARRY/smollm2.tar.xz"; }
  for name in prompts questions evaluated; do [ ! -f "$CARRY/$name.jsonl.xz" ] || xz -dc "$CARRY/$name.jsonl.xz" >"$work/$name.jsonl"; done
  [ ! -f "$CARRY/sum" ] || cp "$CARRY/sum" "$work/sum"
  say "$(cat "$parts"/part.* | wc -c) bytes of the target"
}
target() {
  cat "$parts"/part.* >"$work/target.gguf"
  echo "$(cat "$work/sum")  $work/target.gguf" | sha256sum -c - || exit 1
  python3 -m benchmarks.gguf_folder "$work/target.gguf" "$target"
  mkdir -p "$work/prompts" "$work/data/spec_bench"
  split -n "r/$processes" -d "$work/prompts.jsonl" "$work/prompts/"
  cp "$work/questions.jsonl" "$work/data/spec_bench/question.jsonl"
  say "target ready"
}
own() { # COUNT
  local i
  for i in $(seq "$processes"); do
    python3 -m benchmarks.own_prompts --model "$target" --count $(($1 / processes)) --seed "$i" --dtype "${DTYPE:-bfloat16}" \
      --rows "${ROWS:-256}" --kv-cache-tokens "${CACHE:-262144}" --avoid "$work/evaluated.jsonl" --out "$work/prompts/own.$i" \
      >>"$logs/own.$i" 2>&1 &
  done
  wait
  say "$(tail -qn 1 "$logs"/own.*)"
  cat "$work"/prompts/* >"$work/prompts.jsonl"
}
answers() { # SECONDS: several processes, as the host takes most of a round's time
  local file
  for file in "$work"/prompts/*; do
    timeout -s INT -k 20 "$1" python3 -m specdec.cli.main train eagle3 $(common) --data "$file" --answers-only \
      --max-num-seqs "${ROWS:-256}" --kv-cache-tokens "${CACHE:-262144}" >>"$logs/answers.$(basename "$file")" 2>&1 &
  done
  wait
  say "$(cat "$run"/answers-*.jsonl | wc -l) of $(wc -l <"$work/prompts.jsonl") answers"
  tail -qn 3 "$logs"/answers.*
}
train() { # SECONDS
  timeout -s INT -k 20 "$1" python3 -m specdec.cli.main train eagle3 $(common) $(questions) --steps "${STEPS:-5000}" \
    --batch-size "$batch" --held-out "${HELD_OUT:-256}" --draft-vocab-size "${VOCAB:-6144}" --intermediate-size "${MLP:-768}" \
    --learning-rate "${RATE:-1e-3}" --checkpoint-every "${EVERY:-250}" --kv-cache-tokens "${CACHE:-131072}" >>"$logs/train" 2>&1
  say "training ended with $?"
  grep -vE "^ *$" "$logs/train" | tail -n 30
}
export_head() { # a finished one, or the newest checkpoint
  local found
  found=$run/head
  [ -d "$found" ] || found=$(ls -d "$run"/step-??????? | tail -n 1)
  rm -rf "$work/head"
  python3 -m specdec.cli.main export "$found" --layout specforge --dtype bfloat16 --target "$target" --out "$work/head"
  say "$found is exported"
}
measure() { # SECONDS; the run's folder is named after what is measured
  local sum
  sum=$(cksum <"$work/head/model.safetensors" | cut -d ' ' -f 1)
  SPECDEC_DATA=$work/data timeout -s INT -k 20 "$1" python3 -m specdec.cli.main eval acceptance --model "$target" \
    --draft "$work/head" --data spec_bench ${LIMIT:+--limit "$LIMIT"} -k 5 --max-new-tokens 128 --batch-size "${ASKED:-32}" \
    --dtype "${DTYPE:-bfloat16}" --run-dir "$work/measured-$sum" --output "$OUT/acceptance.json" >>"$logs/measure" 2>&1
  say "measuring ended with $?"
  tail -n 60 "$logs/measure"
}
results() {
  (cd "$run" && tar -cJf "$OUT/answers.tar.xz" answers-*.jsonl)
  (cd "$work" && tar -cJf "$OUT/prompts.tar.xz" prompts)
  [ ! -d "$work/head" ] || tar -C "$work" -cf "$OUT/head.tar" head
  tar -C "$work" -cJf "$OUT/logs.tar.xz" logs
  ls -l "$OUT"
}
while [ $# -gt 0 ]; do
  case $1 in
  own | answers | train | measure) "$1" "$2" && shift 2 || exit ;;
  *) "$1" && shift || exit ;;
  esac
done
