"""What is no Python file must be named in pyproject.toml, or an installed copy lacks it."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def data_files() -> set[Path]:
    """Files of the four packages that are no Python source."""
    packages = ("attention", "drafters", "specdec", "evals")
    every = (path for package in packages for path in (ROOT / package).rglob("*") if path.is_file())
    return {path for path in every if path.suffix not in (".py", ".pyc")}


def packaged() -> set[Path]:
    """Files that [tool.setuptools.package-data] matches."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["package-data"]
    return {
        path
        for package, globs in patterns.items()
        for each in globs
        for path in (ROOT / package.replace(".", "/")).glob(each)
    }


def test_every_data_file_is_packaged() -> None:
    assert data_files() - packaged() == set()
    names = {path.relative_to(ROOT).as_posix() for path in data_files()}
    assert {"specdec/models/gsm-llama/model.safetensors", "evals/report/templates/report.html.j2"} <= names
