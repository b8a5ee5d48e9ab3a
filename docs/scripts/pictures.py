"""Draw docs/pictures/*.svg, from benchmarks/results where they show numbers: python docs/scripts/pictures.py."""

from __future__ import annotations

import json
import math
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
ROUNDS = ROOT / "benchmarks" / "results" / "round-h200-2026-11-21-e.jsonl"
ACCEPTANCE = ROOT / "benchmarks" / "results" / "eval_gsm8k200.json"
TARGET, HEAD, HOST, INK = "#3f51b5", "#ef6c00", "#607d8b", "#555"
COLOURS = (HOST, TARGET, HEAD, "#2e7d32")
Line = list[tuple[float, float]]


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    """A picture with a white ground, legible in a dark page too."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" role="img">'
    )
    ground = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([head, f"<title>{title}</title>", ground, *parts, "</svg>", ""])


def text(x: float, y: float, said: str, colour: str = INK, anchor: str = "middle", size: int = 13) -> str:
    """A line of text."""
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}" font-size="{size}">{said}</text>'


def box(x: float, y: float, width: float, said: str, colour: str) -> list[str]:
    """A span of time in a lane."""
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="40" rx="4" fill="{colour}"/>'
    return [shape, text(x + width / 2, y + 25, said, "white")]


def round_picture() -> str:
    """One round of one row with K = 3; a schema, not to scale."""
    parts = [text(10, y + 25, name, anchor="start") for name, y in (("target", 20), ("head", 80), ("host", 140))]
    parts += box(80, 20, 200, "verify 4 tokens", TARGET)
    parts += box(290, 140, 60, "read", HOST) + box(355, 140, 70, "commit", HOST) + box(430, 140, 80, "schedule", HOST)
    parts += box(520, 80, 70, "draft 1", HEAD) + box(595, 80, 65, "2", HEAD) + box(665, 80, 65, "3", HEAD)
    parts += box(520, 140, 210, "text, stop texts, statistics", HOST)
    parts += box(740, 20, 150, "verify …", TARGET)
    tokens = (("bonus token", TARGET), ("draft ✓", HEAD), ("draft ✓", HEAD), ("draft ✗", "#bbb"))
    for i, (said, colour) in enumerate(tokens):
        parts += box(80 + 115 * i, 210, 110, said, colour)
    parts.append(text(545, 235, "→ 2 accepted + a new bonus token = 3 tokens", anchor="start"))
    parts.append('<path d="M80 195H890" stroke="#bbb" fill="none"/>')
    return svg(900, 270, "One round: verify, read, commit, schedule, draft", parts)


def chart(title: str, x_name: str, y_name: str, lines: dict[str, Line], ticks: list[float], most: float) -> str:
    """Lines over positions that are evenly spaced; their values from 0 to `most`."""
    place = {tick: 70 + 400 * i / (len(ticks) - 1) for i, tick in enumerate(ticks)}
    parts = [text(290, 20, title, size=15), text(270, 345, x_name)]
    for i in range(5):
        value, y = most * i / 4, 300 - 65 * i
        parts.append(f'<path d="M70 {y}H470" stroke="#ddd"/>')
        parts.append(text(62, y + 4, f"{value:,.4g}" if most < 10 else f"{value:,.0f}", anchor="end"))
    parts += [text(place[tick], 320, f"{tick:g}") for tick in ticks] + [text(12, 38, y_name, anchor="start")]
    ends: list[tuple[float, str, str]] = []
    for colour, (name, line) in zip(COLOURS, lines.items(), strict=False):
        points = [(place[x], 300 - 260 * y / most) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in points]
        ends.append((points[-1][1] + 4, name, colour))
    last = -math.inf
    for y, name, colour in sorted(ends):
        last = max(y, last + 15)  # names do not overlap
        parts.append(text(480, last, name, colour, "start"))
    return svg(560, 355, title, parts)


def measured(rows_most: int = 128) -> dict[int, dict[int, float]]:
    """Output tokens per second by K and rows: Llama-3.1-8B shape, prompts of 512 tokens."""
    found: dict[int, dict[int, float]] = {}
    for line in ROUNDS.read_text("utf-8").splitlines():
        row = json.loads(line)
        if (row["shape"], row["prompt"], row["plan_from"]) == ("llama-3.1-8b", [512, 512], "host"):
            found.setdefault(row["drafts"], {})[row["rows"]] = row["tokens_per_s"]
    return found


def speed_picture() -> str:
    """Times faster than K = 0, against rows."""
    by_k = measured()
    plain = by_k[0]
    lines = {f"K = {k}": [(rows, by_k[k][rows] / plain[rows]) for rows in sorted(plain)] for k in sorted(by_k)}
    return chart("Tokens per second over K = 0, one H200", "rows", "times", lines, sorted(plain), 4)


def accepted() -> dict[int, float]:
    """τ by K, GSM8K questions, gsm-llama."""
    arms = json.loads(ACCEPTANCE.read_text("utf-8"))["arms"]
    return {arm["k"]: arm["metrics"]["tau"]["estimate"] for arm in arms}


def tau_picture() -> str:
    """τ against K, beside the most that K allows."""
    found = accepted()
    line = [(float(k), tau) for k, tau in found.items()]
    most = [(float(k), k + 1.0) for k in found]
    lines = {"K + 1": most, "measured": line}
    return chart(
        "τ on GSM8K, gsm-llama with its head", "K", "τ", lines, sorted(map(float, found)), math.ceil(most[-1][1])
    )


def pictures() -> dict[str, str]:
    """File name -> picture."""
    return {"round.svg": round_picture(), "speed.svg": speed_picture(), "tau.svg": tau_picture()}


if __name__ == "__main__":
    for name, picture in pictures().items():
        (PICTURES / name).write_text(picture, "utf-8")
