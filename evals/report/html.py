"""An acceptance document as one self-contained page: pictures inline, no script, nothing loaded from elsewhere."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from evals.acceptance.metrics import METRICS
from evals.acceptance.summary import Json
from evals.report import pictures
from evals.report.terminal import groupings, show


def render(document: Json) -> str:
    """The page as HTML text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["value"] = show
    template = environment.from_string(files("evals").joinpath("report/templates/report.html.j2").read_text("utf-8"))
    settings = document["provenance"]["settings"]
    return template.render(
        document=document,
        settings=settings,
        metrics=METRICS,
        pictures=_pictures(document),
        provenance=json.dumps(document["provenance"], indent=2, ensure_ascii=False),
        title=_title(document),
    )


def _title(document: Json) -> str:
    models = document["provenance"]["settings"]["models"].values()
    data = document["provenance"]["settings"]["data"]["name"]
    return f"Acceptance of {' and '.join(sorted({str(model['target']) for model in models}))} on {data}"


def _pictures(document: Json) -> list[dict[str, Any]]:
    arms = [arm for arm in document["arms"] if arm["k"]]
    drawn = [
        ("Acceptance per draft position", "conditional", pictures.acceptance_per_position(arms)),
        ("Accepted drafts in a round", "histogram", pictures.accepted_histogram(arms)),
    ]
    for title, group in groupings(arms[0]):
        drawn.append((f"τ {title}", "tau", pictures.by_group(arms, group, "metrics", "tau", "τ")))
        if "timing" in document:
            speed = pictures.by_group(arms, group, "timing", "speedup", "speed-up")
            drawn.append((f"Speed-up {title}", "speedup", speed))
    if "timing" in document:
        curve = pictures.speedup_over_k(arms, document["timing"]["prediction"])
        drawn.append(("Speed-up over K", "prediction", curve))
    return [{"title": title, "definition": document["definitions"][key], "svg": svg} for title, key, svg in drawn]
