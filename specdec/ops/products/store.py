"""Choices kept on disk: one file for each GPU and version of the library, in the user's cache folder."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from filelock import FileLock

from specdec.ops.products.choice import Algorithm, Choice
from specdec.ops.products.shape import ProductShape

_FORMAT = 1
_LOCK_SECONDS = 10


def cache_folder() -> Path:
    """The folder of what specdec keeps between starts: specdec in $XDG_CACHE_HOME, or in ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "specdec"


class ChoiceStore:
    """The choices for one GPU and one version of the library.

    What cannot be read counts as not there, what cannot be written is not kept: neither is an error.
    """

    def __init__(self, gpu: str, version: int, folder: Path | None = None) -> None:
        """gpu: its name and whatever else changes its timings."""
        self._gpu, self._version = gpu, version
        name = re.sub(r"[^A-Za-z0-9.-]+", "_", f"{gpu} cublaslt {version}")
        self.path = (cache_folder() / "products" if folder is None else folder) / f"{name}.json"

    def read(self) -> dict[str, Choice]:
        """Choices by the name of their shape; those that are damaged are left out."""
        try:
            found = json.loads(self.path.read_text("utf-8"))
            same = (found["format"], found["gpu"], found["library"]) == (_FORMAT, self._gpu, self._version)
            choices = dict(found["choices"]) if same else {}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("ignoring %s, which is damaged (%s)", self.path, error)
            return {}
        return {name: choice for name, entry in choices.items() if (choice := _choice(entry)) is not None}

    def add(self, choices: dict[ProductShape, Choice]) -> bool:
        """Add to what the file holds by now; whether that worked."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=_LOCK_SECONDS):
                both = self.read() | {str(shape): choice for shape, choice in choices.items()}
                entries = {name: _entry(choice) for name, choice in sorted(both.items())}
                content = {"format": _FORMAT, "gpu": self._gpu, "library": self._version, "choices": entries}
                new = self.path.with_suffix(f".{os.getpid()}.new")
                new.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
                os.replace(new, self.path)
        except (OSError, TimeoutError) as error:
            log.warning("choices of matmul algorithms are not kept: %s", error)
            return False
        return True


def _entry(choice: Choice) -> dict[str, Any]:
    times = {"us": round(choice.us, 2), "usual_us": round(choice.usual_us, 2)}
    if choice.algorithm is None:
        return {"algorithm": None, **times}
    return {"algorithm": choice.algorithm.data.hex(), "workspace": choice.algorithm.workspace, **times}


def _choice(entry: Any) -> Choice | None:
    try:
        times = float(entry["us"]), float(entry["usual_us"])
        if entry["algorithm"] is None:
            return Choice(None, *times)
        algorithm = Algorithm(bytes.fromhex(entry["algorithm"]), int(entry["workspace"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return Choice(algorithm, *times) if algorithm.workspace >= 0 else None
