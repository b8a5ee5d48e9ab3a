"""What a greedy or sampled request of one process does not need: the core runs where this folder is missing.

An extension joins the core through what the core publishes: draft loops and heads (`drafters.families`), attention
backends (`attention.backends`), the extras of a round (`specdec.rounds.extras`), moving requests
(`specdec.engine.guests`) and groups of processes (`specdec.wrapped.group`). Only `specdec.model`, `specdec.cli` and the
package itself import from here, inside of functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any


@dataclass(frozen=True)
class Extension:
    """One folder or file of this package.

    Attributes:
        uses: the other extensions that it may import.
        extras: its function that makes extras of rounds at loading (`specdec.rounds.extras.MakeExtras`), as
            "module:function"; "" without any. Its module is imported with every model, so it imports little itself.
    """

    uses: tuple[str, ...] = ()
    extras: str = ""


EXTENSIONS = {
    "attached": Extension(),
    "batches": Extension(uses=("openai_format", "tools")),
    "grammars": Extension(extras="masks:grammar_extras"),
    "handoff": Extension(),
    "head_check": Extension(),
    "openai_format": Extension(uses=("tools",)),
    "parallel": Extension(uses=("handoff",)),
    "rollouts": Extension(),
    "server": Extension(uses=("openai_format", "service", "tools")),
    "service": Extension(uses=("openai_format",)),
    "tools": Extension(),
    "training": Extension(),
}


def round_extras(one_process: bool, greedy: bool) -> tuple[Any, ...]:
    """The extras of rounds of all extensions that are installed: see `specdec.rounds.extras.MakeExtras`."""
    found: tuple[Any, ...] = ()
    for name, extension in EXTENSIONS.items():
        if extension.extras and find_spec(f"{__name__}.{name}") is not None:
            found += resolve_name(f"{__name__}.{name}.{extension.extras}")(one_process, greedy)
    return found
