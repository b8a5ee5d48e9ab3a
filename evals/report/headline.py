"""What a run found, in words: one or two sentences that stand above all tables."""

from __future__ import annotations

from evals.acceptance.bootstrap import FEW
from evals.acceptance.summary import Json


def headline(document: Json) -> str:
    """The result in words: how much faster, and whether answers changed; of a comparison, what differs."""
    drafting = [arm for arm in document["arms"] if arm["k"] and arm["name"] not in document["not_measured"]]
    if not drafting:
        return "Nothing measured: no draft was verified."
    if "differences" in document:
        return _difference(document)
    known = [arm for arm in drafting if arm["timing"]["speedup"]["estimate"] is not None]
    if not known:
        return "No speed-up measured: there were no times to compare."
    best = max(known, key=lambda arm: float(arm["timing"]["speedup"]["estimate"]))
    return f"{best['name']}: {_speed(best['timing']['speedup'])}; {_answers(document, best)}."


def cautions(document: Json) -> list[str]:
    """What the reader of the intervals should know; [] where there is nothing."""
    found = []
    questions = document["arms"][0]["questions"]
    if questions < 2:
        found.append("One question: numbers have no interval. Ask more of them.")
    elif questions < FEW:
        found.append(f"{questions} questions: intervals are Student's t, and wide. Ask {FEW} or more.")
    if document.get("timing", {}).get("runs") == 1:
        found.append(
            "Speeds were measured in one run: their intervals have the scatter of questions, not that of the machine "
            "from run to run, which can be larger. Give --repeats 5."
        )
    return found


def _speed(value: Json) -> str:
    estimate, low, high = value["estimate"], value["low"], value["high"]
    span = "" if low is None else f" [{low:.2f}, {high:.2f}]"
    if low is not None and low <= 1 <= high:
        return f"no clear speed-up, {estimate:.2f} × the target alone's speed{span}"
    return f"{estimate:.2f} × {'faster than' if estimate > 1 else 'the speed of'} the target alone{span}"


def _answers(document: Json, arm: Json) -> str:
    found = arm["identical_to_target_alone"]
    same, total = found["identical"], found["questions"]
    if same == total:
        return f"answers unchanged ({same} of {total} equal)"
    changed = f"{total - same} of {total} answers differ from the target alone's"
    if document["provenance"]["settings"]["asking"]["params"]["temperature"]:
        return f"{changed}, as sampled ones do (`specdec eval lossless` tests their distribution)"
    return f"{changed} (`specdec eval lossless` says whether by more than rounding)"


def _difference(document: Json) -> str:
    left, right = (arm["name"] for arm in document["arms"])
    tau, speed = document["differences"]["metrics"]["tau"], document["differences"]["timing"]["speed_ratio"]
    if tau["estimate"] is None or speed["estimate"] is None:
        return f"{right} against {left}: not everything could be measured."
    is_clear = tau["low"] is not None and not tau["low"] <= 0 <= tau["high"]
    more = f"{abs(tau['estimate']):.2f} tokens a round {'more' if tau['estimate'] > 0 else 'less'}"
    kept = f"keeps {more}" if is_clear else "keeps no clearly different number of tokens a round"
    return f"{right} {kept} than {left}, at {speed['estimate']:.2f} × its speed."
