#!/usr/bin/env bash
# Mamba-Codestral-7B (Mamba-2, no attention): HumanEval with K = 0 against K = 3, the same answers.
#
# Download   mistralai/Mamba-Codestral-7B-v0.1 (7B parameters, 15 GB in bf16); humaneval, from the hub or SPECDEC_DATA.
#            Our references name no published head: DRAFT=… takes one, else TRAIN_DATA=questions.jsonl trains an EAGLE-3
#            head on prompts of code that you choose (a line each: prompt, question or messages; never HumanEval's own).
#            `specdec train` puts them into a chat template: where the tokenizer has none it refuses, and
#            --tokenizer FOLDER in LOAD below takes one that has.
# Machine    one GPU with 40 GB. HumanEval runs code that the model wrote: set CONFIRM_UNSAFE_CODE=1, in a container
#            without network and secrets.
# Published  no number in our references, neither pass@1 nor acceptance.
# Expect     equal answers with and without drafts, but for near ties in bf16 (`lossless` lists and replays them);
#            speed-up depends on the head alone.
# Failure    `lossless` FAIL; pass@1 whose difference has an interval without zero; NOT TESTED (exit code 3).
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
MODEL=${MODEL:-mistralai/Mamba-Codestral-7B-v0.1} DRAFT=${DRAFT:-}
LOAD=(--dtype bfloat16) LIMIT=${LIMIT:-164} NEW_TOKENS=1024
TRAINING=(--steps 1500 --batch-size 16 --held-out 256 --draft-vocab-size 32000 --max-new-tokens 512 --max-length 1024)
if [ -n "${DRY_RUN:-}" ]; then TRAIN_DATA=$OUT/stand-in/data/code.jsonl CONFIRM_UNSAFE_CODE=1; fi
if [ -z "$DRAFT" ] && [ -z "${TRAIN_DATA:-}" ]; then
  echo "give DRAFT=… (a head for $MODEL) or TRAIN_DATA=questions.jsonl (prompts of code to train one on)" >&2
  exit 2
fi
if [ -z "${CONFIRM_UNSAFE_CODE:-}" ]; then
  echo "HumanEval runs code that the model wrote; set CONFIRM_UNSAFE_CODE=1 to allow it, in a container please" >&2
  exit 2
fi
dry_run mamba2 ""
LOAD+=(--max-model-len 4096) # a Mamba model names no longest sequence

train_head "${TRAIN_DATA:-}"
TARGET=(--model "$MODEL" --draft "$DRAFT" "${LOAD[@]}")
run specdec inspect "${TARGET[@]}"
run specdec eval lossless "${TARGET[@]}" --data humaneval --limit "$LIMIT" --no-chat-template \
    --num-speculative-tokens 3 \
  --max-new-tokens "$NEW_TOKENS" --mode greedy --output "$OUT/lossless.json" --run-dir "$OUT/lossless-run"
run specdec eval acceptance "${TARGET[@]}" --data humaneval --limit "$LIMIT" --no-chat-template \
    --num-speculative-tokens 3 \
  --max-new-tokens "$NEW_TOKENS" --output "$OUT/acceptance.json" --run-dir "$OUT/acceptance-run"
run specdec eval humaneval "${TARGET[@]}" --limit "$LIMIT" --num-speculative-tokens 3 --confirm-run-unsafe-code \
  --output "$OUT/humaneval.json" --run-dir "$OUT/humaneval-run"
