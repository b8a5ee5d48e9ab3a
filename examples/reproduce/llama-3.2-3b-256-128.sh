#!/usr/bin/env bash
# Llama-3.2-3B-Instruct with an EAGLE-3 head: prompts of 256 tokens, 128 new tokens, tokens per second by batch size.
#
# Download   meta-llama/Llama-3.2-3B-Instruct (gated, 6.4 GB in bf16). Our references name no published EAGLE-3 head for
#            it: DRAFT=… takes one, else the script trains one on GSM8K's training questions (SPECDEC_DATA).
# Machine    one GPU with 24 GB or more.
# Published  no number in our references for this model at these lengths.
# Expect     the largest speed-up at one row, less with every more rows: at many rows verification costs arithmetic, not
#            bandwidth. Lengths are exact: ends of text are ignored, prompts are cut from GSM8K's test questions.
# Failure    fewer tokens per second with drafts than without at one row (the head accepts too little: look at τ);
#            `lossless` not PASS.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
MODEL=${MODEL:-meta-llama/Llama-3.2-3B-Instruct} DRAFT=${DRAFT:-}
LOAD=(--dtype bfloat16) LIMIT=${LIMIT:-80} NEW_TOKENS=128 SAMPLES=1000 REPEATS=3 ROWS=1,8,32,128
TRAINING=(--steps 1500 --batch-size 16 --held-out 256 --draft-vocab-size 32000 --max-new-tokens 512 --max-length 1024)
dry_run gsm-llama ""
[ -z "${DRY_RUN:-}" ] || ROWS=1,2
need_data gsm8k/train.jsonl gsm8k/test.jsonl

train_head "$SPECDEC_DATA/gsm8k/train.jsonl"
TARGET=(--model "$MODEL" --draft "$DRAFT" "${LOAD[@]}")
run "$PYTHON" "$HERE/fixed_lengths.py" "${TARGET[@]}" --num-speculative-tokens 3 --data gsm8k --prompt-tokens 256 \
  --new-tokens "$NEW_TOKENS" --rows "$ROWS" --repeats "$REPEATS" --output "$OUT/256-$NEW_TOKENS.json"
run specdec eval acceptance "${TARGET[@]}" --data gsm8k --limit "$LIMIT" --num-speculative-tokens 3 \
    --max-new-tokens "$NEW_TOKENS" \
  --output "$OUT/gsm8k.json" --run-dir "$OUT/gsm8k-run"
run specdec eval lossless "${TARGET[@]}" --data gsm8k --limit "$LIMIT" --num-speculative-tokens 3 \
    --max-new-tokens "$NEW_TOKENS" \
  --samples "$SAMPLES" --output "$OUT/lossless.json" --run-dir "$OUT/lossless-run"
