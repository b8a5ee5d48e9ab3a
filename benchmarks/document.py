"""The JSON lines that a benchmark ends in, and where its numbers come from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import transformers

from benchmarks.given import usage as usage


def provenance() -> dict[str, Any]:
    """Versions, machine, GPU where there is one, and commit (SPECDEC_COMMIT where the tree is no git checkout)."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "commit": os.environ.get("SPECDEC_COMMIT") or git.stdout.strip() or None,
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts |= {"flashinfer": _version("flashinfer-python"), "nvmath": _version("nvmath-python")}
    return facts


def publish(document: dict[str, Any], out: Path | None, append: bool = False) -> None:
    """Add the provenance; print the line, and write it to `out` where there is one, behind others with `append`."""
    line = json.dumps(document | provenance())
    click.echo(line)
    if out is not None:
        with out.open("a" if append else "w", encoding="utf-8") as file:
            file.write(line + "\n")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def md_table(rows: Iterable[Sequence[str]]) -> str:
    """Rows of cells as a table of Markdown; the first is its head."""
    head, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body]) + "\n"


def write_page(page: Path, text: str, check: bool, module: str) -> None:
    """Write a page of docs/ that is made from results; with `check` write nothing, and exit 1 where it differs."""
    if not check:
        page.write_text(text, "utf-8")
    elif not page.exists() or page.read_text("utf-8") != text:
        click.echo(f"docs/{page.name} is not what the results say; run: python -m benchmarks.{module}", err=True)
        sys.exit(1)
