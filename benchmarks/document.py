"""The one JSON line that a benchmark ends in."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import transformers


def publish(document: dict[str, Any], out: Path | None) -> None:
    """Add versions, machine and commit; print the line, and write it to `out` when there is one."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    facts = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "commit": commit.stdout.strip() or None,
    }
    line = json.dumps(document | facts)
    click.echo(line)
    if out is not None:
        out.write_text(line + "\n", encoding="utf-8")
