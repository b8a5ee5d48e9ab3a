"""docs/models.md from the sweep of the newest transformers: python -m benchmarks.models_page (--check: compare)."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import click

from benchmarks.document import md_table, usage, write_page

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "models.md"
Row = dict[str, Any]

_CLASSES = {
    "exact": "exact",
    "near ties": "exact",
    "exact, limited": "exact with limits",
    "refused": "refused",
    "not built": "not built",
}
"""Outcome of the sweep -> class on the page; any other stands as it is, in capitals."""
_ORDER = ("exact", "exact with limits", "refused", "not built")
_ERROR = re.compile(r"^\w+(Error|NotBuilt): ")
_OWN_NAME = re.compile(r"^[A-Z]\w*(?:ForCausalLM|LMHeadModel|ForConditionalGeneration|Model|Decoder)\b ?")
_HEADER = """# Models

After this page you know whether a model type of transformers is served, and how far.

Generated from `benchmarks/results/{name}` by `python -m benchmarks.models_page`; do not edit.

Every model type of transformers {transformers} in miniature (random weights, float32, CPU, torch backend, commit
{commit}, and for some lines later ones, which the file names): prompts of {lens} tokens, alone and in one ragged batch,
read in chunks, without drafts and with three a round, token for token against the model's own `generate` under its
default attention. Every window and other threshold of a configuration is lower than the longer prompts. How:
`benchmarks/sweep.py`.

- **exact**: all tokens are the model's own, with and without drafts.
- **exact with limits**: so, for requests up to the length that is named; longer ones are refused by name.
- **refused**: loading raises an error that says why; that is what stands here.
- **not built**: transformers makes no such model this small, or it does not generate text from text.

"recurrent": it has layers with a state (hybrid or purely recurrent). What these random miniatures cannot show: real
checkpoints, half precision, GPU kernels.
"""


def sections(rows: list[Row]) -> dict[str, list[Row]]:
    """The float32 rows: causal-LM types, options of some, wrappers, and classes outside both mappings."""
    found: dict[str, list[Row]] = {
        "Causal language models": [],
        "Options of some": [],
        "Wrappers": [],
        "Other classes": [],
    }
    for row in sorted((r for r in rows if r["dtype"] == "float32"), key=lambda r: r["name"].lower()):
        name = row["name"]
        if name.endswith("(wrapper)"):
            found["Wrappers"].append(row)
        elif ": " in name:
            found["Options of some"].append(row)
        else:
            found["Other classes" if name[0].isupper() else "Causal language models"].append(row)
    return found


def class_of(row: Row) -> str:
    """The class of a row on the page."""
    return _CLASSES.get(row["outcome"], str(row["outcome"]).upper())


def page(path: Path) -> str:
    """The whole page, from one results file."""
    document = json.loads(path.read_text("utf-8"))
    facts = document | document.get("provenance", {})
    lens = "5, 20, 37 and 90"
    parts = [_HEADER.format(name=path.name, lens=lens, transformers=facts["transformers"], commit=facts["commit"])]
    found = sections(document["models"])
    parts.append(_counts(found))
    for title, rows in found.items():
        parts.append(f"## {title}\n\n" + md_table([["type", "class", "what is served, or why not"], *map(_line, rows)]))
    return "\n".join(parts)


def _counts(found: dict[str, list[Row]]) -> str:
    classes = [*_ORDER, *sorted({class_of(r) for rows in found.values() for r in rows} - set(_ORDER))]
    table = [["", *classes, "all"]]
    for title, rows in found.items():
        table.append(_count(title, rows, classes))
        if title == "Causal language models":
            table.append(_count("… without recurrent ones", [r for r in rows if not r.get("recurrent")], classes))
    return "## Counts\n\n" + md_table(table)


def _count(title: str, rows: list[Row], classes: list[str]) -> list[str]:
    count = Counter(map(class_of, rows))
    return [title, *(str(count[name]) for name in classes), str(len(rows))]


def _line(row: Row) -> list[str]:
    words = ["recurrent"] if row.get("recurrent") else []
    if row.get("limit"):
        words.append(f"up to {row['limit']} tokens in miniature")
    if reason := row.get("reason"):
        words.append(_OWN_NAME.sub("", _ERROR.sub("", reason)))
    if notes := row.get("notes"):
        words.append(notes)
    name = row["name"].removesuffix(" (wrapper)")
    return [f"`{name}`", class_of(row), "; ".join(words).replace("|", "/").replace("<", "‹").replace(">", "›")]


def newest(results: Path = RESULTS) -> Path:
    """The sweep of the newest transformers that was swept."""
    found = {p: p.stem.removeprefix("sweep-transformers-") for p in results.glob("sweep-transformers-*.json")}
    return max(found, key=lambda path: tuple(map(int, found[path].split("."))))


@click.command(help=usage(__doc__))
@click.option("--check", is_flag=True, help="Write nothing; exit 1 where the page differs.")
def main(check: bool) -> None:
    """Write docs/models.md, or check it."""
    write_page(PAGE, page(newest()), check, "models_page")


if __name__ == "__main__":
    main()
