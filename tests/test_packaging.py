"""What is no Python file must be named in pyproject.toml, or an installed copy lacks it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from attention.errors import ERRORS_PAGE, manual

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


def shared() -> dict[str, Path]:
    """Files that [tool.setuptools.data-files] installs, by their place in share/doc/specdec-hf."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["data-files"]
    files = ((place, path) for place, globs in table.items() for each in globs for path in ROOT.glob(each))
    return {f"{place}/{path.name}".removeprefix("share/doc/specdec-hf/"): path for place, path in files}


def test_pages_for_users_and_the_examples_that_they_name_are_in_the_wheel() -> None:
    there = shared()
    assert ERRORS_PAGE in there and all(path == ROOT / name for name, path in there.items())
    named = {name for path in there.values() for name in re.findall(r"examples/[\w./-]+\.\w+", path.read_text("utf-8"))}
    assert len(named) > 5 and {name for name in named if (ROOT / name).is_file()} - set(there) == set()


def test_an_installed_copy_names_the_page_of_its_own_environment(tmp_path: Path) -> None:
    packages, pages = tmp_path / "lib" / "python3" / "site-packages", tmp_path / "share" / "doc" / "specdec-hf"
    assert manual() is None and manual(packages) is None
    pages.mkdir(parents=True)
    manual.cache_clear()
    assert manual(packages) == pages
