"""How a process imports one edited file: from memory, or, with Triton's kernels, from a copy of the packages."""

from __future__ import annotations

import re
import shutil
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from tests.mutants.entries import ROOT, Mutant

PACKAGES = ("attention", "drafters", "specdec", "evals")
_KERNEL = re.compile(r"^@(triton|gluon)\.jit", re.MULTILINE)


class EditedLoader(SourceFileLoader):
    """Loads one module from a text instead of its file, never from or to a .pyc file."""

    def __init__(self, fullname: str, path: str, text: str) -> None:
        super().__init__(fullname, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType | None:
        """See `SourceLoader.get_code`."""
        return self.source_to_code(self._text.encode(), self.path)

    def get_source(self, fullname: str) -> str:
        """See `SourceLoader.get_source`."""
        return self._text


class EditedFinder(MetaPathFinder):
    """Finds the one module that is edited; `used` once it was imported."""

    def __init__(self, mutant: Mutant) -> None:
        self.used = False
        self._name = module_of(mutant.file)
        self._text = mutant.source()

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder.find_spec`."""
        if fullname != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None, f"{fullname} is not found"
        spec.loader = EditedLoader(fullname, spec.origin, self._text)
        self.used = True
        return spec


class EditedCopy:
    """A copy of the library's packages in a folder, from which this process imports them.

    Triton reads the source of a kernel from the file that its module was loaded from. All packages are copied, as
    `specdec` refuses an `attention` that lies elsewhere.
    """

    def __init__(self, mutant: Mutant, folder: Path) -> None:
        self._name, self._path = module_of(mutant.file), folder / mutant.file
        for package in PACKAGES:
            shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        self._path.write_text(mutant.source(), encoding="utf-8")
        sys.path.insert(0, str(folder))

    @property
    def used(self) -> bool:
        """Whether the edited module was imported, from the copy."""
        module = sys.modules.get(self._name)
        return module is not None and module.__file__ == str(self._path)


def edit(mutant: Mutant, folder: Path) -> EditedFinder | EditedCopy:
    """Make this process import the edited file. folder: an empty one, for as long as the process lives."""
    if has_kernels(mutant.source()):
        return EditedCopy(mutant, folder)
    finder = EditedFinder(mutant)
    sys.meta_path.insert(0, finder)
    return finder


def has_kernels(text: str) -> bool:
    """Whether a module has kernels or device functions of Triton or Gluon."""
    return _KERNEL.search(text) is not None


def module_of(file: str) -> str:
    """The module's name.

    >>> module_of("specdec/ops/fp8_kernel.py"), module_of("specdec/ops/__init__.py")
    ('specdec.ops.fp8_kernel', 'specdec.ops')
    """
    return file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
