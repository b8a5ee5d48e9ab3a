"""Log-probabilities of many tokens, of answers and of prompts, against a plain forward over the same tokens.

    PYTHONPATH=.:tests python -m tests.public.soak_logprobs [--tokens N] [--device cuda] [--drafts 0 5]

The built-in pair answers questions of GSM8K (SPECDEC_DATA) that share a beginning, twice: the second time the prompts
come from the prefix cache. Prints, for each K, how many tokens were compared, the largest difference, and how many came
from the cache; ends with 1 where a difference is above `MOST`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from itertools import count
from pathlib import Path

import torch

from specdec import Completion, SamplingParams, SpeculativeModel

MOST = 1e-3
SHOTS = 2


def questions() -> list[str]:
    """Prompts that share their first SHOTS solved questions."""
    path = next(Path(os.environ["SPECDEC_DATA"]).rglob("gsm8k/*test*.jsonl"))
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    shots = "".join(f"Question: {line['question']}\nAnswer: {line['answer']}\n\n" for line in lines[:SHOTS])
    return [f"{shots}Question: {line['question']}\nAnswer:" for line in lines[SHOTS:]]


@torch.no_grad()
def difference(model: SpeculativeModel, done: Completion) -> tuple[int, float]:
    """Tokens compared, and the largest difference of their log-probabilities."""
    ids = [*done.prompt_token_ids, *done.token_ids]
    rows = model.hf_model(torch.tensor([ids], device=model.device), use_cache=False).logits[0].float().log_softmax(1)
    right = rows[:-1].gather(1, torch.tensor(ids[1:], device=rows.device)[:, None])[:, 0].cpu()
    told = [*(done.prompt_logprobs or ())[1:], *(done.logprobs or ())]
    given = torch.tensor([each.logprob for each in told if each is not None])
    return len(given), float((given - right[len(right) - len(given) :]).abs().max())


def main() -> int:
    """Compare until there are enough tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 5], help="K of each run")
    given = parser.parse_args()
    worst = 0.0
    for drafts in given.drafts:
        with SpeculativeModel.from_pretrained(
            "gsm-llama", "auto" if drafts else None, num_speculative_tokens=drafts, dtype="float32", device=given.device
        ) as model:
            compared, largest, prompts = 0, 0.0, questions()
            for first in count(step=8):
                asked = prompts[first : first + 8]
                start = len(model.tokenizer(asked[0])["input_ids"]) // 2
                for prompt_start in (0, start):  # the second time pages before it come from the cache
                    params = SamplingParams(48, logprobs=2, prompt_logprobs=0, prompt_logprobs_start=prompt_start)
                    for done in model.generate(asked, params):
                        tokens, own = difference(model, done)
                        compared, largest = compared + tokens, max(largest, own)
                if compared >= given.tokens:
                    break
            stats = model.engine_stats
            print(
                f"K={drafts}: {compared} tokens, largest difference {largest:.2e}, {stats.cached_tokens} from the cache"
            )
            worst = max(worst, largest)
    return int(worst > MOST)


if __name__ == "__main__":
    sys.exit(main())
