"""Every type of the sweep among two ranks: logits of the shares against those of the whole model, float32, on CPUs.

    python -m benchmarks.sweep_parallel --out benchmarks/results/sweep-parallel.json

A type is right (relative error below 1e-4), wrong, or refused with a reason. Nothing but loading and one forward is
tested: rounds are the business of tests/specdec/parallel. What cannot be built, or what one rank refuses, is left out:
benchmarks.sweep has that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from transformers.utils import logging as transformers_logging

from attention.spec import AttentionSpec
from benchmarks.document import provenance, usage
from benchmarks.sweep_configs import VOCAB, all_cases, named_cases
from benchmarks.sweep_models import NotBuilt, build
from specdec.errors import SpecdecError
from specdec.loading.targets import load_target
from specdec.parallel.ranks import Ranks
from specdec.parallel.symmetric import join_group
from specdec.parallel.worker import Orders
from specdec.wrapped.probing import probe_target

_RIGHT = 1e-4
_CPU = torch.device("cpu")
_UNSERVED = (
    *(NotBuilt, SpecdecError, StrictDataclassError),
    *(RuntimeError, TypeError, ValueError, LookupError, AttributeError),
)
"""Of transformers, where a small configuration cannot be."""


def whole_logits(case: Any, folder: Path, ids: torch.Tensor) -> torch.Tensor | None:
    """Save the case's model, and run it; None where it cannot be built."""
    try:
        model = build(case)
        model.save_pretrained(folder)
        again = load_target(folder, torch.float32, _CPU)
        probe_target(again)
        with torch.inference_mode():
            logits: torch.Tensor = again(_known(ids, again), use_cache=False).logits[0]
    except _UNSERVED as error:
        click.echo(f"{case.name}: not built or not served: {type(error).__name__}: {str(error)[:100]}")
        return None
    return logits


def _known(ids: torch.Tensor, model: Any) -> torch.Tensor:
    """The ids, within a model's vocabulary."""
    return ids % model.get_input_embeddings().num_embeddings


def share_logits(folder: Path, ids: torch.Tensor, ranks: Ranks) -> tuple[torch.Tensor, tuple[AttentionSpec, ...]] | str:
    """Of this rank's share, and its attention; or why it is refused."""
    try:
        with ranks.together(), torch.inference_mode():
            model = load_target(folder, torch.float32, _CPU, group=ranks)
            probed = probe_target(model)
            ranks.check_target(probed)
            logits: torch.Tensor = model(_known(ids, model), use_cache=False).logits[0]
            return logits, tuple(call.attention_spec for call in probed.calls)
    except (SpecdecError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error)[:160]}"


def run(rank: int, folder: Path, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Every case on this rank; the lines of rank 0."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    collectives = join_group(rank, 2, _CPU, str(folder / "meeting"))
    ranks, lines = Ranks(rank, 2, _CPU, collectives, Orders(None, 0)), []  # type: ignore[arg-type]
    ids = torch.randint(8, VOCAB, (1, 24), generator=torch.Generator().manual_seed(1))
    for number, case in enumerate(named_cases(names) if names else all_cases()):
        own = folder / str(number)
        whole = whole_logits(case, own, ids) if rank == 0 else None
        built = torch.tensor(whole is not None)
        collectives.from_first(built)
        if not built:
            continue
        found = share_logits(own, ids, ranks)
        dist.barrier()
        if whole is None:
            continue
        line: dict[str, Any] = {"case": case.name}
        if isinstance(found, str):
            line |= {"outcome": "refused", "reason": found}
        else:
            error = float((found[0] - whole).square().mean().sqrt() / whole.square().mean().sqrt())
            line |= {"outcome": "right" if error < _RIGHT else "WRONG", "error": error}
            line["heads"] = sorted({(spec.num_q_heads, spec.num_kv_heads) for spec in found[1]})
        lines.append(line)
        click.echo(json.dumps(line))
    return lines


@click.command(help=usage(__doc__))
@click.option("--types", default="", help="Only these, joined by commas.")
@click.option("--out", type=click.Path(path_type=Path))
def main(types: str, out: Path | None) -> None:
    """Start the second rank, run all cases, and write what rank 0 found."""
    names = tuple(name for name in types.split(",") if name)
    rank = int(os.environ.get("SWEEP_RANK", "0"))
    if rank:
        run(rank, Path(os.environ["SWEEP_FOLDER"]), names)
        return
    with tempfile.TemporaryDirectory() as name:
        variables = {**os.environ, "SWEEP_RANK": "1", "SWEEP_FOLDER": name}
        other = subprocess.Popen([sys.executable, "-m", "benchmarks.sweep_parallel", "--types", types], env=variables)
        lines = run(0, Path(name), names)
        other.wait()
    counts = dict(Counter(line["outcome"] for line in lines).most_common())
    click.echo(json.dumps(counts))
    if out is not None:
        document = {"benchmark": "parallel sweep", "ranks": 2, "device": "cpu", "counts": counts}
        text = json.dumps(document | {"provenance": provenance(), "models": lines}, indent=1)
        out.write_text(text + "\n", encoding="utf-8")
    if "WRONG" in counts:
        sys.exit(1)


if __name__ == "__main__":
    main()
