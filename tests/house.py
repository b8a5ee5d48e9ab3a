"""How large the house is, and how far a token walks in it: the numbers of the house plan, for any checkout.

    python -m tests.house [--root CHECKOUT] [--json]

A steady CPU round is measured with `sys.setprofile` from one `Engine.step` to the next, of one greedy request to the
built-in EAGLE-3 pair with K = 3, once `STEADY` rounds have run: what is counted are the named functions of the four
packages (no comprehensions, no lambdas). *Depth* is from the loop over a stream's updates down. *Visits to a file* are
pairs of functions in different files of which one calls the other. *The copy* is what runs below the one `send` of the
round's arrays. Everything else is read from the sources.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGES = ("attention", "drafters", "specdec", "evals")
SPINE = (
    *("attention/batch", "attention/cache", "attention/backends/base.py", "drafters/base.py", "drafters/loops"),
    *("specdec/requests", "specdec/rounds", "specdec/acceptance", "specdec/execution", "specdec/engine"),
    "specdec/model.py",
)
"""Folders and files that every round passes, whatever features are there."""
WING_FOLDERS = ("specdec/extensions", "attention/cascade", "attention/recurrence", "attention/transport")
"""Folders of what can be absent; everything inside the first is a wing of its own."""
WORDS = {
    "attached": r"attach\w*",
    "batches": r"run_batch|offline",
    "grammars": r"grammars?|llguidance",
    "handoff": r"handoff|moved_\w+|\w+_moved|moving|depart|crossing|aside|visit",
    "parallel": r"parallel|rank|ranks|ranked|announce|symmetric",
    "recurrence": r"recurren\w*|states?_?(?:index|fields?|rows)|fold\w*|replay_\w+|(?:\w+_)?replayed|max_replay",
    "rollouts": r"rollouts?",
    "transport": r"transports?",
}
"""Words in names by which a line of the spine names a wing, beside the name of its folder."""
_ABSENT = re.compile(
    r"window|recurren|fold|replay|long_?rope|rope_positions|handoff|moved|moving|departure|\brank|announce|state_fields|"
    r"StateIndex|StateRows|\bstates\b|modules?\b|num_modules|begins",
    re.I,
)
"""What the review searched the text of the spine for, as near as its number can be reproduced."""
STEADY = 5
_COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>")
_SEND = ("RoundTransfer.send", "Arena.send")
_LOOP = "Stream.__next__"
Function = tuple[str, str]
"""(file, qualified name)."""


def modules(root: Path) -> list[Path]:
    """The library's tracked files with code, relative; a package's own `__init__.py` is none."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard"]
    folders = [f"{package}/*.py" for package in PACKAGES]
    listed = subprocess.run([*command, *folders], check=True, capture_output=True, text=True).stdout.split()
    return [Path(name) for name in sorted(listed) if not name.endswith("__init__.py") and (root / name).exists()]


@functools.cache
def trees(root: Path) -> dict[Path, ast.Module]:
    """What `modules` holds, parsed once for all questions; `trees.cache_clear()` frees half a million nodes."""
    return {path: ast.parse((root / path).read_text("utf-8")) for path in modules(root)}


def is_spine(path: Path) -> bool:
    """Whether a file lies in the spine."""
    return any(path.as_posix() == part or path.as_posix().startswith(part + "/") for part in SPINE)


def wings(root: Path) -> list[str]:
    """Names of what can be absent, from the folders."""
    first, *others = WING_FOLDERS
    inside = [path.name.removesuffix(".py") for path in (root / first).glob("*") if not path.name.startswith("__")]
    return sorted([*inside, *(Path(other).name for other in others)])


def wing_lines(root: Path, path: Path) -> list[tuple[int, str]]:
    """Lines of a file that name a wing, with its name: identifiers of code, no prose."""
    words = _words(root)
    found: dict[int, str] = {}
    for line, name in _identifiers(trees(root)[path]):
        for part in name.split("."):
            snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", part).lower()
            for wing, pattern in words.items():
                if pattern.search(snake):
                    found.setdefault(line, wing)
    return sorted(found.items())


@functools.cache
def _words(root: Path) -> dict[str, re.Pattern[str]]:
    return {wing: re.compile(rf"(?:^|_)(?:{WORDS.get(wing, wing)})(?:_|s?$)", re.I) for wing in wings(root)}


def _identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.Attribute):
            yield node.end_lineno or line, node.attr
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            yield line, node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield line, node.name
        elif isinstance(node, ast.ImportFrom):
            yield line, node.module or ""
            yield from ((alias.lineno, alias.name) for alias in node.names)


def importers(root: Path) -> dict[str, set[str]]:
    """By module of the library, which others of its modules import it or something of it; `__main__` is an entry."""
    names = {path.with_suffix("").as_posix().replace("/", "."): path for path in trees(root)}
    found: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for node in ast.walk(trees(root)[path]):
            if isinstance(node, ast.ImportFrom) and node.module:
                targets = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            else:
                continue
            for target in targets:
                if target in found and target != name and not name.endswith("__main__"):
                    found[target].add(name)
    return found


def single_heirs(root: Path) -> list[str]:
    """Classes of the library with one heir and no instance: a class that is cut in two."""
    bases: Counter[str] = Counter()
    made: set[str] = set()
    own: dict[str, ast.ClassDef] = {}
    for tree in trees(root).values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                own[node.name] = node
                bases.update(_base(base) for base in node.bases)
            elif isinstance(node, ast.Call):
                given = [] if _base(node.func) in ("isinstance", "issubclass") else node.args
                made.update(map(_base, [node.func, *given]))  # who is given a class makes instances of it
            elif isinstance(node, ast.Assign) and any(_base(target) == "__class__" for target in node.targets):
                made.add(_base(node.value))
            elif isinstance(node, ast.IfExp):
                made.update(map(_base, (node.body, node.orelse)))  # as the class of a new EAGLE head
            elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
                made.update(map(_base, node.value.elts))  # as the pair of classes by which handoff moves requests
            elif isinstance(node, ast.Dict):
                made.update(map(_base, node.values))  # as that by which wrapped.quantised_layers gives layers a class
    is_open = {name for name, node in own.items() if {"Protocol", "ABC", "Exception"} & set(map(_base, node.bases))}
    return sorted(n for n in own if bases[n] == 1 and n not in made | is_open and not n.endswith("Error"))


def classes_twice(root: Path) -> list[str]:
    """Names of public classes that more than one module of the library defines."""
    counts = Counter(node.name for tree in trees(root).values() for node in tree.body if isinstance(node, ast.ClassDef))
    return sorted(name for name, count in counts.items() if count > 1 and not name.startswith("_"))


def _base(node: ast.expr) -> str:
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def longest(root: Path) -> tuple[tuple[int, str], tuple[int, str]]:
    """(lines, name) of the longest file and of the longest function, kernels (functions of Triton) left out."""
    files, functions = [], []
    for path, tree in trees(root).items():
        files.append(((root / path).read_text("utf-8").count("\n"), path.as_posix()))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not any("jit" in ast.dump(d) for d in node.decorator_list):
                functions.append((_body(node), f"{path.as_posix()}: {node.name}"))
    return max(files), max(functions)


def _body(function: ast.FunctionDef) -> int:
    """Lines of a function without its signature and docstring."""
    first, *rest = function.body
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        if not rest:
            return 0
        first = rest[0]
    return (function.end_lineno or 0) - first.lineno + 1


def step_lines(root: Path) -> int:
    """Lines of the body of `Engine.step`, without docstring, comments and empty lines."""
    text = (root / "specdec/engine/engine.py").read_text("utf-8")
    (step,) = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == "step")
    own = text.splitlines()[(step.end_lineno or 0) - _body(step) : step.end_lineno]
    return sum(1 for line in own if line.strip() and not line.strip().startswith("#"))


@dataclass(frozen=True)
class Walk:
    """Calls of one round as ("call" or "return", function); above: functions around `Engine.step`, outermost first."""

    events: tuple[tuple[str, Function], ...]
    above: tuple[Function, ...]

    @property
    def functions(self) -> list[Function]:
        """Each once, in the order of their first call."""
        return list(dict.fromkeys(function for event, function in self.events if event == "call"))

    @property
    def visits(self) -> int:
        """Pairs of functions in different files of which one calls the other."""
        return len({(one, other) for one, other in self._edges() if one[0] != other[0]})

    @property
    def depth(self) -> int:
        """The most of our functions on the stack, from the loop over updates down."""
        names = [name for _, name in self.above]
        level = most = len(names) - names.index(_LOOP) if _LOOP in names else len(names)
        for event, _ in self.events:
            level += 1 if event == "call" else -1
            most = max(most, level)
        return most

    def below(self, names: tuple[str, ...]) -> set[Function]:
        """Functions that run while one of these does, itself included."""
        found: set[Function] = set()
        inside = 0
        for event, function in self.events:
            if event == "return":
                inside -= bool(inside)
            elif inside or function[1] in names:
                inside += 1
                found.add(function)
        return found

    def _edges(self) -> Iterator[tuple[Function, Function]]:
        stack: list[Function] = list(self.above)
        for event, function in self.events:
            if event == "return":
                if stack:
                    stack.pop()
                continue
            if stack:
                yield stack[-1], function
            stack.append(function)


def walk(root: Path) -> Walk:
    """Of one steady round of the packages in `root`, which must be the ones that are imported."""
    from specdec import SamplingParams, SpeculativeModel
    from specdec.engine.engine import Engine

    folders = tuple(f"{root / package}{os.sep}" for package in PACKAGES)
    events: list[tuple[str, Function]] = []
    above: list[Function] = []
    own_step, count = Engine.step, 0

    def named(code: Any) -> Function | None:
        if not code.co_filename.startswith(folders) or code.co_qualname.endswith(_COMPREHENSIONS):
            return None
        return str(Path(code.co_filename).relative_to(root)), code.co_qualname

    def note(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "return") and (function := named(frame.f_code)):
            events.append((event, function))

    def step(engine: Any) -> Any:
        nonlocal count
        count += 1
        if count == STEADY:
            frame = inspect.currentframe()
            while (frame := frame and frame.f_back) is not None:
                if function := named(frame.f_code):
                    above.insert(0, function)
            sys.setprofile(note)
        elif count == STEADY + 1:
            sys.setprofile(None)
        return own_step(engine)

    Engine.step = step  # type: ignore[method-assign]
    try:
        with SpeculativeModel.from_pretrained("gsm-llama", draft="auto", num_speculative_tokens=3) as model:
            question = "Tom has 3 apples and buys 4 more. How many apples does he have?"
            model.generate([[{"role": "user", "content": question}]], SamplingParams(max_new_tokens=64))
    finally:
        sys.setprofile(None)
        Engine.step = own_step  # type: ignore[method-assign]
    return Walk(tuple(events), tuple(above))


def distances(root: Path) -> dict[str, dict[str, int]]:
    """How far a token walks in one round, and in the round's one copy."""
    round_ = walk(root)
    copy = round_.below(_SEND)
    return {
        "round": {
            "functions": len(round_.functions),
            "files": len({file for file, _ in round_.functions}),
            "visits": round_.visits,
            "depth": round_.depth,
        },
        "copy": {"functions": len(copy), "files": len({file for file, _ in copy})},
    }


def table(root: Path) -> dict[str, Any]:
    """Every number by its name."""
    files = modules(root)
    spine = [path for path in files if is_spine(path)]
    lines = {path: (root / path).read_text("utf-8").count("\n") for path in files}
    named = {path: len(wing_lines(root, path)) for path in spine}
    walked = distances(root).items()
    names = Counter(path.name for path in files)
    rooms = Counter(path.parent.as_posix() for path in files)
    return {
        "modules": len(files),
        "modules of specdec": sum(path.parts[0] == "specdec" for path in files),
        "lines": sum(lines.values()),
        **{f"{what}: {name}": count for what, counts in walked for name, count in counts.items()},
        "spine text naming what can be absent": round(
            sum(_naming(root, path) for path in spine) / sum(lines[path] for path in spine), 4
        ),
        "spine lines that name a wing": round(sum(named.values()) / sum(lines[path] for path in spine), 4),
        "worst spine files": {p.as_posix(): round(n / lines[p], 3) for n, p in _most(named, 5)},
        "single-heir mixins": single_heirs(root),
        "modules with one importer": sum(len(own) == 1 for own in importers(root).values()),
        "public class names twice": classes_twice(root),
        "file names that occur twice": sum(count > 1 for count in names.values()),
        "body of Engine.step": step_lines(root),
        "longest file, longest function": longest(root),
        "files a room, most": dict(rooms.most_common(6)),
    }


def _naming(root: Path, path: Path) -> int:
    return sum(bool(_ABSENT.search(line)) for line in (root / path).read_text("utf-8").splitlines())


def _most(counts: dict[Path, int], number: int) -> list[tuple[int, Path]]:
    return sorted(((count, path) for path, count in counts.items()), reverse=True)[:number]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--walk", action="store_true", help="the functions of the round, in the order of their calls")
    given = parser.parse_args()
    root = given.root.resolve()
    sys.path.insert(0, str(root))
    if given.walk:
        print("\n".join(f"{file}: {name}" for file, name in walk(root).functions))
        return
    found = table(root)
    print(json.dumps(found) if given.json else "\n".join(f"{name:32} {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
