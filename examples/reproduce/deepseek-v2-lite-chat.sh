#!/usr/bin/env bash
# DeepSeek-V2-Lite-Chat (latent attention, mixture of experts): its own tokens without drafts, then with a trained head.
#
# Download   deepseek-ai/DeepSeek-V2-Lite-Chat (16B parameters, 31 GB in bf16). Its checkpoint holds no module for
#            multi-token prediction, and our references name no published head: DRAFT=… takes one, else the script trains
#            an EAGLE-3 head on GSM8K's training questions (SPECDEC_DATA, see docs/evaluation.md).
# Machine    one GPU with 80 GB: 31 GB of weights, and a second copy in float32 (63 GB) while `lossless` replays a
#            difference; with less room replays fail, the rest runs.
# Published  no number in our references for this model, alone or with a head.
# Expect     `inspect` and `own_tokens` pass without drafts; a head trained on one set accepts drafts of that kind of text
#            and few of others. A tuned head of SpecForge's would be the number to beat.
# Failure    `own_tokens` or `lossless` not PASS; τ of 1.0 with the trained head (it learned nothing).
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
MODEL=${MODEL:-deepseek-ai/DeepSeek-V2-Lite-Chat} DRAFT=${DRAFT:-}
LOAD=(--dtype bfloat16) LIMIT=${LIMIT:-80} NEW_TOKENS=512 SAMPLES=1000
TRAINING=(--steps 1500 --batch-size 16 --held-out 256 --draft-vocab-size 32000 --max-new-tokens 512 --max-length 1024)
dry_run gsm-deepseek ""
need_data gsm8k/train.jsonl gsm8k/test.jsonl

run specdec inspect --model "$MODEL" --draft none "${LOAD[@]}"
run "$PYTHON" "$HERE/own_tokens.py" --model "$MODEL" --draft none "${LOAD[@]}" --data gsm8k --limit "$LIMIT" \
  --new-tokens "$NEW_TOKENS" --output "$OUT/own-tokens.json"
train_head "$SPECDEC_DATA/gsm8k/train.jsonl"
TARGET=(--model "$MODEL" --draft "$DRAFT" "${LOAD[@]}")
for data in gsm8k mt_bench; do
  run specdec eval acceptance "${TARGET[@]}" --data "$data" --limit "$LIMIT" --num-speculative-tokens 1,3 \
    --max-new-tokens "$NEW_TOKENS" --output "$OUT/$data.json" --run-dir "$OUT/$data-run"
done
run specdec eval lossless "${TARGET[@]}" --data gsm8k --limit "$LIMIT" --num-speculative-tokens 3 \
    --max-new-tokens "$NEW_TOKENS" \
  --samples "$SAMPLES" --output "$OUT/lossless.json" --run-dir "$OUT/lossless-run"
run specdec eval gsm8k "${TARGET[@]}" --limit "$LIMIT" --num-speculative-tokens 3 --max-new-tokens "$NEW_TOKENS" \
  --output "$OUT/gsm8k-accuracy.json" --run-dir "$OUT/gsm8k-accuracy-run"
