"""Write docs/generation_options.md: what is done with every field of SamplingParams and of GenerationConfig.

python -m benchmarks.options_page [--check]
"""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import click
from transformers import GenerationConfig

from benchmarks.document import md_table, usage
from specdec.logits.options import OFF, SAMPLED_ONLY, WITHOUT_EFFECT
from specdec.requests.generation_config import how_served
from specdec.requests.sampling import SamplingParams

PAGE = Path(__file__).resolve().parent.parent / "docs" / "generation_options.md"

OWN: dict[str, tuple[str, str]] = {
    "max_new_tokens": ("host", "`max_new_tokens`, `max_length`"),
    "temperature": ("device", "0 is greedy; `do_sample`, `temperature`"),
    "top_k": ("device", ""),
    "top_p": ("device", ""),
    "min_p": ("device", ""),
    "stop": ("host", "`stop_strings`"),
    "stop_token_ids": ("host", "`eos_token_id`"),
    "ignore_eos": ("host", ""),
    "seed": ("host", "numbers by position: no state, the same whatever else runs"),
    "num_speculative_tokens": ("host", "changes no greedy token"),
    "return_drafts": ("host", ""),
    "n": ("host", "`num_return_sequences`"),
    "cache_prefix": ("host", "changes no token"),
    "logits_processor": (
        "host",
        "the user's code, once for each position of a verification, on the thread of the round",
    ),
    "prefix_allowed_tokens_fn": ("host", "as `logits_processor`"),
    "grammar": ("host", "masks by llguidance or by the user's object, made while the target verifies"),
    "stopping_criteria": ("host", "the user's code, once for each committed token"),
    "logprobs": ("device", "read with the round's result"),
    "logprobs_mode": ("device", ""),
    "prompt_logprobs": ("device", "positions asked for are read, a bounded number of them a round"),
    "prompt_logprobs_start": ("host", ""),
    "return_logits": ("device", "transformers' `output_logits`; in `Completion.logits`"),
    "return_scores": ("device", "transformers' `output_scores`; in `Completion.scores`"),
    "max_time": ("host", "`max_time`; looked at once a round"),
    "strict_length": ("host", "refuses what is cut otherwise (`Completion.truncated_by`)"),
}
"""Fields of SamplingParams that are no options of logits: where they apply, and their names in GenerationConfig."""

REASONS: dict[str, str] = {
    **dict.fromkeys(("num_beams", "num_beam_groups"), "beams share no prefix with drafts"),
    **dict.fromkeys(("constraints", "force_words_ids"), "they need beams"),
    "penalty_alpha": "contrastive search needs hidden states of every candidate",
    "dola_layers": "needs logits of inner layers",
    "guidance_scale": "needs a second forward of each position",
    "watermarking_config": "it follows the filters; its processor as `logits_processor` comes before temperature",
    "token_healing": "changes the prompt before generation; do it before the call",
    "return_dict_in_generate": "the result is a `Completion`",
    **dict.fromkeys(("output_scores", "output_logits"), "`SamplingParams.return_scores` and `return_logits`"),
    **dict.fromkeys(("output_attentions", "output_hidden_states"), "rounds keep neither"),
    **dict.fromkeys(("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"), "drafts are the head's"),
}
_OF_SPECULATION = ("assistant_", "prompt_lookup_", "max_matching_", "speculation_", "target_lookbehind", "use_mtp")
_WORDS = {"device": "exact, on the device", "host": "exact, on the host"}
_HEADER = """# Options of a request

Written by `python -m benchmarks.options_page`; a test compares it. *Exact*: tokens are those of transformers'
`generate` with the same option (greedy), or are drawn from the same distribution (sampled), with drafts and without.
*On the device*: one more launch or a few, no further read. What is refused is refused by name, before anything runs.
"""


def page() -> str:
    """The page for the installed transformers."""
    theirs = sorted(name for name in vars(GenerationConfig()) if not name.startswith("_"))
    tables = {
        "SamplingParams": {f.name: _of_ours(f.name) for f in fields(SamplingParams) if f.name not in OFF},
        "Options that change logits (fields of both)": {name: _of_option(name) for name in OFF},
        "GenerationConfig": {name: _of_theirs(name) for name in theirs},
    }
    parts = [_HEADER]
    for title, rows in tables.items():
        cells = [(f"`{name}`", *told) for name, told in rows.items()]
        parts.append(f"## {title}\n\n" + md_table([("field", "what is done", "notes"), *cells]))
    return "\n".join(parts)


def _of_ours(name: str) -> tuple[str, str]:
    where, notes = OWN[name]
    return _WORDS[where], notes


def _of_option(name: str) -> tuple[str, str]:
    if name in WITHOUT_EFFECT:
        return "without effect", "no token changes"
    return _WORDS["device"], "of sampled requests alone" if name in SAMPLED_ONLY else ""


def _of_theirs(name: str) -> tuple[str, str]:
    served = how_served(name)
    reason = REASONS.get(name, "transformers' own speculation" if name.startswith(_OF_SPECULATION) else "not known")
    return _WORDS.get(served, served), reason if served == "refused" else ""


@click.command(help=usage(__doc__))
@click.option("--check", is_flag=True, help="Write nothing; exit 1 where the page lacks a line for what is installed.")
def main(check: bool) -> None:
    """Write docs/generation_options.md, or check it. It may have lines of other versions of transformers."""
    text = page()
    if not check:
        PAGE.write_text(text, "utf-8")
    elif missing := set(text.splitlines()) - set(PAGE.read_text("utf-8").splitlines()):
        click.echo("\n".join(sorted(missing)), err=True)
        click.echo("docs/generation_options.md lacks these lines; run: python -m benchmarks.options_page", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
