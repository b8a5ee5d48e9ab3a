"""Accuracy over models, attention backends and numbers of drafts in one table, each row paired with a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evals.acceptance.summary import Json
from evals.accuracy import paired
from evals.accuracy.accuracy import scores

GRID_SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Measured:
    """One model on one backend.

    Attributes:
        model, backend: names. settings: what its answers depend on; None where it was refused.
        results: (name of a configuration, lm-eval's result, whether a draft was verified) of each; () where refused.
        refused: why this backend does not serve this model, in its own words.
    """

    model: str
    backend: str
    settings: Json | None = None
    results: tuple[tuple[str, Json, bool], ...] = ()
    refused: str = ""


def document(measured: Sequence[Measured]) -> Json:
    """The grid as a JSON document; `rows`: see `rows_of`."""
    return {
        "schema": "specdec.accuracy_grid",
        "schema_version": GRID_SCHEMA_VERSION,
        "provenance": [{"model": m.model, "backend": m.backend, "settings": m.settings} for m in measured],
        "definitions": {"mcnemar": paired.MCNEMAR, "accuracy_interval": paired.INTERVAL},
        "rows": [row for m in measured for row in rows_of(m, measured)],
    }


def rows_of(one: Measured, measured: Sequence[Measured]) -> list[Json]:
    """A row for each configuration, task, filter and metric of one model on one backend.

    It is paired with the reference: the first configuration of the model's first backend that was not refused. The
    reference's own row has `reference` true, and no difference to speak of.
    """
    names = {"model": one.model, "backend": one.backend}
    if one.refused:
        return [names | {"refused": one.refused}]
    first = next(m for m in measured if m.model == one.model and not m.refused)
    reference = first.results[0][1]
    rows: list[Json] = []
    for name, result, tested in one.results:
        facts: dict[str, Any] = {"arm": name, "tested": tested, "reference": result is reference}
        rows += [names | facts | score for score in scores(reference, result)]
    return rows
