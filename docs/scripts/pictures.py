"""Draw docs/pictures/*.svg from committed results and from the code: python docs/scripts/pictures.py.

Pictures are 560 wide with letters of 15 or more, so that they can be read on a phone of 390 px.
"""

from __future__ import annotations

import ast
import json
import math
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
RESULTS = ROOT / "benchmarks" / "results"
ROUNDS = RESULTS / "round-h200-2026-11-21-e.jsonl"
MIXTURES = RESULTS / "mixtures-h200-2026-11-28.jsonl"
ACCEPTANCE = RESULTS / "eval_gsm8k200.json"
TARGET, HEAD, HOST, INK, GREEN = "#3f51b5", "#bf5600", "#607d8b", "#444", "#2e7d32"
COLOURS = (HOST, TARGET, HEAD, GREEN)
WIDTH = 560
Line = list[tuple[float, float]]


def svg(height: float, title: str, parts: list[str]) -> str:
    """A picture with a white ground, legible in a dark page too."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" font-family="sans-serif" role="img">'
    )
    ground = f'<rect width="{WIDTH}" height="{height:g}" fill="white"/>'
    return "\n".join([head, f"<title>{title}</title>", ground, *parts, "</svg>", ""])


def text(x: float, y: float, said: str, colour: str = INK, anchor: str = "middle", size: int = 15) -> str:
    """A line of text."""
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}" font-size="{size}">{said}</text>'


def box(x: float, y: float, width: float, height: float, said: str, colour: str) -> list[str]:
    """A filled box with a word in its middle."""
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{colour}"/>'
    return [shape, text(x + width / 2, y + height / 2 + 5, said, "white")]


def round_picture() -> str:
    """One round of one row with K = 3; a schema, not to scale. Time goes down."""
    left = {"target": 10, "head": 195, "host": 380}
    parts = [text(x + 85, 22, name, size=17) for name, x in left.items()]
    parts += ['<path d="M187 8V428M372 8V428" stroke="#ddd"/>']
    spans = (
        *(("target", 34, 120, "verify 4 tokens", TARGET), ("host", 158, 34, "read", HOST)),
        *(("host", 196, 34, "commit", HOST), ("host", 234, 34, "schedule", HOST)),
        *(("head", 272, 34, "draft 1", HEAD), ("head", 310, 34, "draft 2", HEAD), ("head", 348, 34, "draft 3", HEAD)),
        *(("host", 272, 110, "text, statistics", HOST), ("target", 386, 42, "verify …", TARGET)),
    )
    for lane, y, height, said, colour in spans:
        parts += box(left[lane], y, 170, height, said, colour)
    parts.append('<path d="M10 442H550" stroke="#bbb"/>')
    tokens = (("bonus token", TARGET), ("kept draft", HEAD), ("kept draft", HEAD), ("wrong draft", "#767676"))
    for i, (said, colour) in enumerate(tokens):
        parts += box(10 + 136 * i, 456, 130, 36, said, colour)
    parts.append(text(280, 520, "2 accepted drafts + a new bonus token = 3 tokens"))
    return svg(534, "One round: verify, read, commit, schedule, draft", parts)


def traced() -> dict[str, Any]:
    """What CUDA events saw of rounds of one row: Llama-3.1-8B shape, K = 5; times of graphs in their order."""
    rows = map(json.loads, ROUNDS.read_text("utf-8").splitlines())
    row = next(r for r in rows if (r["shape"], r["drafts"], r["rows"]) == ("llama-3.1-8b", 5, 1))
    found: dict[str, Any] = row["by_events"]
    return found


def timeline_picture() -> str:
    """A measured round, to scale. Its graphs: draft steps 2 to K, the verification, the draft prefill (step 1)."""
    found = traced()
    *steps, verify, prefill = found["graph_ms"]
    spans = [("verify", 0.0, verify), ("draft", verify, prefill)]
    place = verify + prefill + found["idle_ms"]
    for step in steps:
        spans.append(("draft", place, step))
        place += step
    scale = 470 / found["round_ms"]
    parts = [text(280, 24, f"A measured round of one row, K = {len(steps) + 1}: {found['round_ms']:.2f} ms", size=16)]
    for name, y, colour in (("target", 50, TARGET), ("head", 110, HEAD)):
        parts.append(text(8, y + 28, name, anchor="start"))
        for kind, begin, lasts in spans:
            if (kind == "verify") == (name == "target"):
                shape = (
                    f'<rect x="{75 + begin * scale:.1f}" y="{y}" width="{max(lasts * scale - 1, 1):.1f}" height="44"'
                )
                parts.append(f'{shape} fill="{colour}"/>')
    parts.append(text(75 + verify * scale / 2, 78, f"verify 6 tokens: {verify:.2f} ms", "white"))
    parts.append(
        text(75 + (verify - 0.1) * scale, 138, f"{len(steps) + 1} drafts: {prefill + sum(steps):.2f} ms", HEAD, "end")
    )
    for ms in range(int(found["round_ms"]) + 1):
        x = 75 + ms * scale
        parts += [f'<path d="M{x:.1f} 165V173" stroke="{INK}"/>', text(x, 192, f"{ms}")]
    share = f"{found['idle_ms']:.3f} ms ({found['exposed_host_share']:.1%})"
    parts += [text(545, 192, "ms"), text(280, 222, f"The GPU waits for the host for {share} of it.")]
    return svg(236, "A measured round on one H200, to scale", parts)


def chart(title: str, x_name: str, y_name: str, lines: dict[str, Line], ticks: list[float], most: float) -> str:
    """Lines over positions that are evenly spaced; their values from 0 to `most`."""
    place = {tick: 75 + 345 * i / (len(ticks) - 1) for i, tick in enumerate(ticks)}
    parts = [text(280, 22, title, size=17), text(250, 362, x_name), text(8, 48, y_name, anchor="start")]
    for i in range(5):
        value, y = most * i / 4, 312 - 62 * i
        parts.append(f'<path d="M75 {y}H420" stroke="#ddd"/>')
        parts.append(text(67, y + 5, f"{value:,.4g}" if most < 10 else f"{value:,.0f}", anchor="end"))
    parts += [text(place[tick], 336, f"{tick:g}") for tick in ticks]
    ends: list[tuple[float, str, str]] = []
    for colour, (name, line) in zip(COLOURS, lines.items(), strict=False):
        points = [(place[x], 312 - 248 * y / most) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in points]
        ends.append((points[-1][1] + 5, name, colour))
    last = -math.inf
    for y, name, colour in sorted(ends):
        last = max(y, last + 18)  # names do not overlap
        parts.append(text(430, last, name, colour, "start"))
    return svg(374, title, parts)


def measured() -> dict[int, dict[int, float]]:
    """Output tokens per second by K and rows: Llama-3.1-8B shape, prompts of 512 tokens."""
    found: dict[int, dict[int, float]] = {}
    for row in _dense():
        found.setdefault(row["drafts"], {})[row["rows"]] = row["tokens_per_s"]
    return dict(sorted(found.items()))


def _dense() -> list[dict[str, Any]]:
    rows = map(json.loads, ROUNDS.read_text("utf-8").splitlines())
    return [r for r in rows if (r["shape"], r["prompt"], r["plan_from"]) == ("llama-3.1-8b", [512, 512], "host")]


def speed_picture() -> str:
    """Times faster than K = 0, against rows."""
    by_k = measured()
    plain = by_k[0]
    lines = {f"K = {k}": [(rows, by_k[k][rows] / plain[rows]) for rows in sorted(plain)] for k in by_k}
    return chart("Tokens per second over K = 0, one H200", "rows", "times", lines, sorted(plain), 4)


def tokens_picture() -> str:
    """Output tokens per second against rows."""
    lines = {f"K = {k}": [*map(tuple, sorted(found.items()))] for k, found in measured().items()}
    return chart("Tokens per second, one H200", "rows", "tokens/s", lines, [1, 8, 32, 128], 24_000)


def over_floor() -> dict[str, Line]:
    """Time of a round over its floor, by rows, for dense targets and mixtures of experts."""
    found: dict[str, Line] = {}
    for row in _dense():
        if row["drafts"] in (0, 5):
            found.setdefault(f"8B, K = {row['drafts']}", []).append((row["rows"], row["over_floor"]))
    names = {"qwen3-30b-a3b": "30B-A3B, K = 3", "qwen3-next-80b": "Next 80B, K = 3"}
    for row in map(json.loads, MIXTURES.read_text("utf-8").splitlines()):
        if row["drafts"] == 3:
            found.setdefault(names[row["shape"]], []).append((row["rows"], row["over_floor"]))
    return {name: sorted(line) for name, line in sorted(found.items())}


def floor_picture() -> str:
    """How near the rounds come to what the GPU's bandwidth and arithmetic allow."""
    return chart("Time of a round over its floor, one H200", "rows", "times", over_floor(), [1, 8, 32, 128], 2)


def accepted() -> dict[int, float]:
    """τ by K, GSM8K questions, gsm-llama."""
    return {arm["k"]: arm["metrics"]["tau"]["estimate"] for arm in _arms()}


def _arms() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(ACCEPTANCE.read_text("utf-8"))["arms"]
    return found


def tau_picture() -> str:
    """τ against K, beside the most that K allows."""
    found = accepted()
    line = [(float(k), tau) for k, tau in found.items()]
    most = [(float(k), k + 1.0) for k in found]
    lines = {"K + 1": most, "measured": line}
    return chart(
        "τ on GSM8K, gsm-llama with its head", "K", "τ", lines, sorted(map(float, found)), math.ceil(most[-1][1])
    )


def by_position() -> dict[str, list[float]]:
    """Both kinds of acceptance at each draft position, of the largest K."""
    arm = max(_arms(), key=lambda one: int(one["k"]))
    return {kind: [value["estimate"] for value in arm[kind]] for kind in ("conditional", "unconditional")}


def positions_picture() -> str:
    """Acceptance against the position of a draft."""
    found = by_position()
    lines = {kind: [(float(j), value) for j, value in enumerate(values, 1)] for kind, values in found.items()}
    ticks = [j for j, _ in lines["conditional"]]
    return chart(f"Acceptance on GSM8K, K = {len(ticks)}", "draft position", "share", lines, ticks, 1)


def rooms() -> dict[str, list[str]]:
    """Rooms of each package that are folders, from the bottom up: ROOMS of tests/test_imports.py."""
    source = (ROOT / "tests" / "test_imports.py").read_text("utf-8")
    names: list[str] = ast.literal_eval(re.search(r"^ROOMS = (\[.*?\])$", source, re.M | re.S)[1])  # type: ignore[index]
    found: dict[str, list[str]] = {}
    for name in names:
        package, _, room = name.partition("/")
        if not name.endswith(".py"):
            found.setdefault(package, []).append(room)
    return found


def house_picture() -> str:
    """Packages and their rooms; what stands lower is imported by what stands higher."""
    parts, y = [], 20.0
    for package, colour in zip(("evals", "specdec", "drafters", "attention"), (GREEN, TARGET, HEAD, HOST), strict=True):
        top, x = y, 30.0
        parts.append(text(x, y + 22, package, colour, "start", 18))
        y += 34
        for room in reversed(rooms()[package]):
            width = 9 * len(room) + 20
            if x + width > 528:
                x, y = 30.0, y + 38
            parts += box(x, y, width, 32, room, colour)
            x += width + 6
        y += 44
        parts.append(
            f'<rect x="20" y="{top:g}" width="520" height="{y - top:g}" rx="6" fill="none" stroke="{colour}"/>'
        )
        if package != "attention":
            parts.append(f'<path d="M280 {y + 2:g}V{y + 18:g}M273 {y + 11:g}L280 {y + 18:g}L287 {y + 11:g}" {_ARROW}/>')
            parts.append(text(296, y + 16, "imports", anchor="start"))
            y += 24
    return svg(y + 12, "The rooms of the library: a room imports only rooms after it", parts)


_ARROW = f'stroke="{INK}" stroke-width="2" fill="none"'


def pictures() -> dict[str, str]:
    """File name -> picture."""
    return {
        "round.svg": round_picture(),
        "timeline.svg": timeline_picture(),
        "speed.svg": speed_picture(),
        "tokens.svg": tokens_picture(),
        "floor.svg": floor_picture(),
        "tau.svg": tau_picture(),
        "positions.svg": positions_picture(),
        "house.svg": house_picture(),
    }


if __name__ == "__main__":
    for name, picture in pictures().items():
        (PICTURES / name).write_text(picture, "utf-8")
