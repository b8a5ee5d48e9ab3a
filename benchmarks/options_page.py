"""Write docs/generation_options.md: the meaning of every option, and what is done with fields of GenerationConfig.

python -m benchmarks.options_page [--check]
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import Field, fields
from pathlib import Path

import click
from transformers import GenerationConfig

from benchmarks.document import md_table, usage
from specdec.options.generation_config import how_served
from specdec.options.logits_options import OFF, LogitsOptions
from specdec.requests.sampling import SamplingParams

PAGE = Path(__file__).resolve().parent.parent / "docs" / "generation_options.md"

NAMES: dict[str, str] = {
    "max_new_tokens": "`max_new_tokens`, `max_length`",
    "temperature": "`do_sample`, `temperature`",
    "stop": "`stop_strings`",
    "stop_token_ids": "`eos_token_id`",
    "n": "`num_return_sequences`",
    "logits_processor": "`logits_processor` of `generate`",
    "prefix_allowed_tokens_fn": "`prefix_allowed_tokens_fn` of `generate`",
    "stopping_criteria": "`stopping_criteria` of `generate`",
    "return_logits": "`output_logits`",
    "return_scores": "`output_scores`",
    "num_speculative_tokens": "`num_assistant_tokens`",
}
"""What transformers calls an option, where it has another name or takes it elsewhere."""

NOTES = {"stop_strings": "`stop`: found in the new text alone; transformers also finds one that begins in the prompt"}
"""Fields that are served otherwise than by the same option."""

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
_HEADER = """# Options of a request

After this page you can set any option of a request, and translate a call of transformers. The usual options are shown
at work in [Sampling options](how-to/sampling.md).

Give options by name, `model.generate(prompt, temperature=0.7)`, or as `SamplingParams(temperature=0.7)`. Greedy tokens
are those of transformers' `generate` with the same option, and sampled ones are drawn from the same distribution. An
option that is not served is refused by name before anything runs.

Options that change logits cost a few kernel launches in each round. Functions of yours (`logits_processor`,
`stopping_criteria`, …) run on the host for every position of a verification, and all requests wait for them.
"""


def page() -> str:
    """The page for the installed transformers."""
    ours = {each.name: _of_ours(each) for each in fields(SamplingParams)}
    parts = [_HEADER]
    for title, names in (("Options", [n for n in ours if n not in OFF]), ("Options that change logits", list(OFF))):
        rows = [(f"`{name}`", *ours[name]) for name in names]
        parts.append(f"## {title}\n\n" + md_table([("option", "default", "meaning", "in transformers"), *rows]))
    about = "Fields of a `transformers.GenerationConfig` that you pass, and what is done with them.\n\n"
    parts.append("## GenerationConfig\n\n" + about + md_table([("here", "fields"), *_grouped()]))
    return "\n".join(parts)


def _grouped() -> list[tuple[str, str]]:
    """What is done with fields of GenerationConfig, and the fields; what is served first, what is refused last."""
    found: dict[str, list[str]] = {}
    for name in sorted(name for name in vars(GenerationConfig()) if not name.startswith("_")):
        found.setdefault(_of_theirs(name), []).append(f"`{name}`")
    order = sorted(found, key=lambda here: (here.startswith("refused"), here.startswith("ignored"), here))
    return [(here, ", ".join(found[here])) for here in order]


def cells(text: str) -> set[tuple[str, str]]:
    """A page's options, each with its line, and fields of GenerationConfig, each with what is done with it."""
    ours, _, theirs = text.partition("## GenerationConfig")
    rows = [line.strip("| ").split(" | ") for line in theirs.splitlines() if "`" in line and line.startswith("|")]
    fields = {(name, here) for here, names in rows for name in names.split(", ")}
    return fields | {(line.partition(" | ")[0], line) for line in ours.splitlines() if line.startswith("| `")}


def meanings(kind: type) -> dict[str, str]:
    """The first sentence of every attribute in a class's docstring."""
    text = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
    each = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", text, re.M)
    return {name: " ".join(own.split()).partition(". ")[0].rstrip(".") for name, own in each}


_MEANINGS = meanings(LogitsOptions) | meanings(SamplingParams)


def _of_ours(field: Field[object]) -> tuple[str, str, str]:
    default = "none" if field.default is None or field.default == () else f"`{field.default!r}`"
    known = hasattr(GenerationConfig(), field.name)
    theirs = NAMES.get(field.name, f"`{field.name}`" if known else "")
    return default, _MEANINGS[field.name].replace("|", "\\|"), theirs


def _of_theirs(name: str) -> str:
    served = how_served(name)
    if served == "refused":
        reason = REASONS.get(name, "transformers' own speculation" if name.startswith(_OF_SPECULATION) else "not known")
        return f"refused: {reason}"
    if served == "without effect":
        return "ignored: changes no token here"
    if name in NOTES:
        return NOTES[name]
    own = next((ours for ours, names in NAMES.items() if f"`{name}`" in names), name)
    return "the same option" if own == name else f"`{own}`"


@click.command(help=usage(__doc__))
@click.option("--check", is_flag=True, help="Write nothing; exit 1 where the page lacks a field of what is installed.")
def main(check: bool) -> None:
    """Write docs/generation_options.md, or check it. It may have fields of other versions of transformers."""
    text = page()
    if not check:
        PAGE.write_text(text, "utf-8")
    elif missing := cells(text) - cells(PAGE.read_text("utf-8")):
        click.echo("\n".join(": ".join(each) for each in sorted(missing)), err=True)
        click.echo("docs/generation_options.md lacks these; run: python -m benchmarks.options_page", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
