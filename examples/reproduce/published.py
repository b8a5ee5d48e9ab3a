"""One measured number beside the published one; exit code 1 where the settings are the same and ours falls short.

    python examples/reproduce/published.py mt_bench.json --arm K=3 --metric tau_vllm --value 2.60 --source "vLLM, chain"

The document is what `specdec eval acceptance --output` wrote; a metric is one of its `metrics` or `timing`, or
position_1, position_2, …: the share of rounds with drafts in which so many were accepted, as vLLM counts it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click


class NotMeasuredError(click.ClickException):
    """The document has no such configuration or number."""


@click.command()
@click.argument("document", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--arm", required=True, help="Name of the configuration in the document, e.g. K=3.")
@click.option("--metric", required=True, help="Name of the number, e.g. tau_vllm, speedup_spec_bench, position_1.")
@click.option("--value", required=True, type=float, help="What was published.")
@click.option("--source", required=True, help="By whom.")
@click.option("--other-setting", default=None, help="How theirs differs: both are printed, and nothing is asked for.")
@click.option("--floor", default=0.9, show_default=True, help="The least share of the published number; 0: no least.")
def main(
    document: Path, arm: str, metric: str, value: float, source: str, other_setting: str | None, floor: float
) -> None:
    """Print a measured number beside a published one."""
    measured = number_of(json.loads(document.read_text(encoding="utf-8")), arm, metric)
    theirs = f"{source}; {other_setting}, not comparable" if other_setting else source
    click.echo(f"{document.name}, {arm}, {metric}: {measured:.3f} here, {value:.3f} published ({theirs})")
    if other_setting is None and measured < floor * value:
        click.echo(f"FAIL: less than {floor:g} of what was published for this setting", err=True)
        sys.exit(1)


def number_of(document: dict[str, Any], arm: str, metric: str) -> float:
    """The estimate of a metric of a configuration.

    Raises:
        NotMeasuredError: the document does not hold it, or it is none (no draft was verified).
    """
    found = next((each for each in document["arms"] if each["name"] == arm), None)
    if found is None:
        raise NotMeasuredError(f"no configuration {arm!r}; there are {[each['name'] for each in document['arms']]}")
    if metric.startswith("position_"):
        values = {f"position_{i}": rate for i, rate in enumerate(found["per_position_vllm"], 1)}
    else:
        values = {**found["metrics"], **found["timing"]}
    estimate = values[metric]["estimate"] if metric in values else None
    if estimate is None:
        raise NotMeasuredError(f"{arm} has no number {metric!r}; it has {sorted(values)}")
    return float(estimate)


if __name__ == "__main__":
    main()
