"""Names under which modules are imported: of the packages beside `specdec`, and those of an earlier release."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
"""The folder that the packages lie in: of a checkout, or site-packages."""
_EXTENSIONS = (
    "attached",
    "batches",
    "grammars",
    "handoff",
    "head_check",
    "parallel",
    "rollouts",
    "service",
    "training",
)
OLD_NAMES = {
    **{f"specdec.{name}": f"specdec.extensions.{name}" for name in _EXTENSIONS},
    "specdec.loading.builtin": "specdec.loading.names",
    "specdec.loading.draft_vocabulary": "specdec.loading.heads",
    "specdec.logits.options": "specdec.options.logits_options",
    "specdec.option_kinds": "specdec.options.kinds",
    "specdec.ray": "specdec.extensions.batches.ray",
    **{f"specdec.requests.{name}": f"specdec.options.{name}" for name in ("arguments", "generation_config")},
    "specdec.requests.scores": "specdec.requests.submission",
    "specdec.service.openai_format": "specdec.extensions.openai_format",
}
"""Modules and packages by the names of an earlier release; modules below them are found, too."""


class OldNames(MetaPathFinder):
    """Imports a module under its old name: the same module object, not a second copy of it.

    It must be the first finder, or `sys.path` would find a copy of `specdec.rollouts.trl` in that package's folder.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder.find_spec`."""
        parts = fullname.split(".")
        for count in range(len(parts), 1, -1):
            new = OLD_NAMES.get(".".join(parts[:count]))
            if new is not None:
                name = ".".join([new, *parts[count:]])
                return None if find_spec(name) is None else ModuleSpec(fullname, _Renamed(name))
        return None


class _Renamed(Loader):
    """Loads the module of another name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has just replaced it by that of the old name


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause Python's garbage collection where a great many objects are made that stay. Importing torch and transformers
    makes a million, and looking through them again and again would take a quarter of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            # Few are looked through in no time, and the count of frozen ones takes as long as they are many.
            if gc.get_count()[0] > 100_000 and not gc.get_freeze_count():
                gc.freeze()  # and back, into the oldest generation: else the youngest ones are looked through twice
                gc.unfreeze()
            gc.enable()


def version_of(distribution: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def other_distribution() -> str:
    """What is wrong where the distribution `specdec` of the package index is installed, too; "" where it is not.

    Its package and its command have our names, so whichever is installed last writes over the other's files.
    """
    found = version_of("specdec")
    if found is None:
        return ""
    return (
        f"another project's distribution named 'specdec' ({found}) is installed, and writes over files and the command "
        "of this library, which is specdec-hf; to repair: pip uninstall specdec, then install specdec-hf again with "
        "--force-reinstall --no-deps"
    )


def check_sibling(name: str) -> None:
    """Make sure that `import name` finds the package beside this one.

    Raises:
        ImportError: it finds another or none; the message names the file.
    """
    spec = find_spec(name)
    origin = None if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    found = None if origin is None else Path(origin).resolve()
    if found is None or found != ROOT / name / "__init__.py":
        raise ImportError(
            f"specdec needs its own package {name!r} at {ROOT / name}, but `import {name}` finds "
            f"{found or 'nothing'}; remove or rename what shadows it"
        )
