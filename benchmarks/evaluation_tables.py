"""Tables of what `specdec eval` measures, and how values are written in any table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Line = dict[str, Any]


def percent(share: float | None) -> str:
    """A share, or nothing."""
    return "" if share is None else f"{share:.1%}"


def short(value: Any) -> str:
    """Any value in few words.

    >>> short({"a": 0.123456, "b": [True, None]})
    'a 0.1235, b yes, '
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(short, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {short(item)}" for key, item in value.items())
    return "" if value is None else str(value)


def measured_by(whole: Line) -> str:
    """Models, data and versions of a document; of a grid those of its first model that was measured."""
    provenance = whole["provenance"]
    if isinstance(provenance, list):
        settings = next(each["settings"] for each in provenance if each["settings"] is not None)
        model, plan, versions = settings["model"], settings["plan"], settings["versions"]
        where = f"{model['device_name']}, {model['dtype']}; {', '.join(plan['tasks'])}, {plan['limit']} questions each"
        software = f"torch {versions['torch']}, transformers {versions['transformers']}"
        return f"{where}; {software}, lm-eval {versions['lm_eval']}"
    settings = provenance["settings"]
    versions = provenance.get("versions") or settings["versions"]
    models = settings["models"].values() if "models" in settings else [settings["model"]]
    where = ", ".join(f"{model['target']} on {model['device']}, {model['dtype']}" for model in models)
    data = settings["data"]["name"] if "data" in settings else ", ".join(settings["plan"]["tasks"])
    return f"{where}; {data}; torch {versions['torch']}, transformers {versions['transformers']}"


def acceptance(document: Line) -> list[list[str]]:
    """`specdec eval acceptance`, and what `specdec eval gsm8k` has beside its scores: one row per configuration."""
    table = [["configuration", "questions", "τ (95 %)", "acceptance rate", "speed-up", "identical to the target alone"]]
    for arm in document["arms"]:
        metrics, timing = arm["metrics"], arm.get("timing") or {}
        tau, rate, same = metrics.get("tau"), metrics.get("acceptance_rate"), arm.get("identical_to_target_alone")
        table.append(
            [
                arm["name"],
                str(arm["questions"]),
                f"{tau['estimate']:.2f} ({tau['low']:.2f} – {tau['high']:.2f})" if tau else "",
                percent(rate["estimate"] if rate else None),
                f"{timing['speedup']['estimate']:.2f}" if timing.get("speedup") else "",
                f"{same['identical']} of {same['questions']}" if same else "",
            ]
        )
    return table


def lossless(document: Line) -> list[list[str]]:
    """`specdec eval lossless`: greedy identity and the distribution of sampled tokens."""
    table = [["check", "configuration", "size", "result", "passed"]]
    for arm in document["greedy"]["arms"]:
        result = f"{arm['identical']} identical, {arm['near_ties']} near ties, {arm['defects']} defects"
        table.append(["greedy", arm["name"], f"{arm['questions']} questions", result, short(arm["passed"])])
    for arm in document["sampled"]["arms"]:
        finds = min((power["everywhere"] for power in arm.get("powers", ())), default=None)
        result = f"p = {arm['p_value']:.3f}, {arm['degrees']} degrees of freedom"
        if finds is not None:
            result += f", finds every named defect with probability {finds:.2f} or more"
        table.append(["sampled", arm["arm"], f"{arm['samples']} samples", result, short(arm["passed"])])
    return table


def accuracy_grid(document: Line) -> list[list[str]]:
    """A grid over attention backends, of an `eval gsm8k --backends` that is gone: rows against their model's first."""
    table = [["model", "backend", "configuration", "task, filter", "right", "gained, lost", "McNemar's p"]]
    for row in document["rows"]:
        if "refused" in row:
            table.append([row["model"], row["backend"], f"refused: {row['refused']}", "", "", "", ""])
            continue
        p = "none differs" if row["p_value"] is None else f"{row['p_value']:.3f}"
        changed = ["", ""] if row["reference"] else [f"{row['only_b']}, {row['only_a']}", p]
        task = f"{row['task']}, {row['filter']}"
        table.append([row["model"], row["backend"], row["arm"], task, f"{row['right_b']} of {row['total']}", *changed])
    return table


DOCUMENTS: dict[str, Callable[[Line], list[list[str]]]] = {
    "specdec.acceptance": acceptance,
    "specdec.accuracy": acceptance,
    "specdec.lossless": lossless,
    "specdec.accuracy_grid": accuracy_grid,
}
