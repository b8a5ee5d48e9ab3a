"""The manual: blocks run, links lead somewhere, names have their place, sentences are short."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import json
import pickle
import re
import shlex
import sys
import tomllib
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from click.testing import CliRunner

import evals.errors  # noqa: F401 (its errors are subclasses that the reference names)
import specdec
from attention.errors import ERRORS_PAGE
from specdec.cli.lazy import PluginError  # noqa: F401 (likewise)
from specdec.cli.main import cli
from specdec.engine.streams import Stream
from specdec.extensions.parallel.collectives import RankGoneError  # noqa: F401 (likewise)
from specdec.extensions.service.monitoring import METRICS
from specdec.loading import assembly
from specdec.loading import names as loading_names
from specdec.loading.names import builtin_path
from specdec.model import SpeculativeModel
from specdec.selftest.selftest import check_target
from specdec.selftest.twin import twin_test
from tests.fakes import LETTERS, tiny_llama
from tests.gguf_files import written

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = {
    "meta-llama/Llama-3.1-8B-Instruct": "gsm-llama",
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": "gsm-llama-eagle3",
}
NOT_RUN = {
    ("index.md", "installs packages; `docs/scripts/fresh.py` does it with the wheel"),
    ("batches.md", "needs Ray"),
    ("how-to/gsm8k.md", "needs the GSM8K files"),
    ("service.md", "starts a server, or asks it; the tests of the example do"),
    ("tools.md", "starts a server, or asks it; the tests of the example do"),
    ("tools.md", "needs a model that calls tools"),
    ("service.md", "is part of a coroutine; the tests of asynchronous calls are"),
    ("numbers.md", "needs a GPU"),
}
"""Every block that is not run, with the reason that its page gives."""
HABITS = (
    *("what is to be done", "what is to be", r"\bthat of\b", "those of whom", r"\bwhoever\b", r"\bnobody\b"),
    *("where they shall", "where they may", "and what cannot be", "says other things"),
    r"(?<!could )(?<!can )\b(?:says?|wants?|asks?|stands?)\b",
    r"(?:^|[.;:] )(?:What|Who)\b(?![^.?|]*\?)[^.?|]*\.",
)
"""Phrases that read as translated (the house's list): things that say, want, ask or stand; clauses without a noun."""
QUESTIONS = ["What is 3 + 4?", "Tom has 3 boxes of 12 eggs. How many eggs?", "What is 5 + 6?"]


def script(name: str) -> ModuleType:
    """A module of docs/scripts, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


pages = script("pages")


def here(text: str) -> str:
    """With what is on this machine in place of what is on the hub."""
    for hub, name in STAND_INS.items():
        text = text.replace(hub, str(builtin_path(name)))
    return text.replace("meta-llama/Llama-3.2-1B-Instruct", "small")


def commands(code: str) -> list[str]:
    lines = [line.partition("  #")[0].strip() for line in code.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def run_command(line: str) -> None:
    words = shlex.split(here(line))
    if words[:2] == ["pip", "install"]:  # the extras exist; docs/scripts/fresh.py installs
        assert all(extra in PYPROJECT_EXTRAS for extra in re.findall(r"\[(\w+)\]", line)), line
        return
    if words[0] == "echo" and words[2] == ">":
        Path(words[3]).write_text(words[1] + "\n", "utf-8")
        return
    assert words[0] == "specdec", f"not a command that can be run here: {line}"
    done = CliRunner().invoke(cli, words[1:])
    assert done.exit_code in ((0, 3) if "lossless" in words else (0,)), f"{line}\n{done.output}\n{done.exception!r}"


PYPROJECT_EXTRAS = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
WITH_BLOCKS = [
    page for page in pages.user_pages() if any(one.language in ("python", "bash") for one in pages.blocks(page))
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").symlink_to(builtin_path("gsm-llama"))
    rows = (json.dumps({"id": i, "prompt": question}) for i, question in enumerate(QUESTIONS))
    (tmp_path / "questions.jsonl").write_text("\n".join(rows), "utf-8")
    yield tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[] if page == "index.md" else pytest.mark.long) for page in WITH_BLOCKS]
)
def test_every_block_runs(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page == "how-to/several_gpus.md":  # all ranks read a model alike: none remembers an earlier test's self-test
        monkeypatch.setattr(assembly, "check_target", check_target)
        monkeypatch.setattr(assembly, "twin_test", twin_test)
    if page == "how-to/gguf.md":
        pytest.importorskip("gguf", reason="the package gguf is not installed: pip install 'specdec-hf[gguf]'")
        (folder / "models").mkdir()
        monkeypatch.setattr(loading_names, "PUBLISHED_HEADS", {})  # the file is of another model
        written(tiny_llama(), folder / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf", tokens=LETTERS)
    names: dict[str, Any] = {"__name__": "manual"}
    try:
        for place, block in enumerate(pages.blocks(page), 1):
            if block.reason or block.language not in ("python", "bash"):
                continue
            if block.language == "python":
                exec(compile(here(block.code), f"{page}, block {place}", "exec"), names)
            else:
                for line in commands(block.code):
                    run_command(line)
    finally:
        for value in names.values():
            if isinstance(value, SpeculativeModel):
                value.close()


def test_blocks_that_are_not_run_are_few_and_listed() -> None:
    found = [(page, one.reason) for page in pages.user_pages() for one in pages.blocks(page) if one.reason]
    assert set(found) == NOT_RUN and len(found) <= 10


def test_every_fence_has_a_language() -> None:
    """Commands that take hours or other people's weights are `console`: not run, but their options are checked."""
    of_console = []
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        opening = re.findall(r"^ *```(.*)$", path.read_text("utf-8"), re.M)[::2]
        assert set(opening) <= {"python", "bash", "text", "console", "json", "jsonl"}, (path, opening)
        of_console += [path.name] * opening.count("console")
    assert of_console == ["evaluation.md"] * 3


@pytest.mark.parametrize(
    "page",
    sorted(
        path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md") if path.name != pages.BUILT
    ),
)
def test_links_lead_to_pages_and_headings(page: str) -> None:
    for link in pages.links(pages.read(page)):
        if re.match(r"https?:", link) or link == pages.BUILT:
            continue
        name, _, anchor = link.partition("#")
        target = ((ROOT / "docs" / page).parent / name) if name else ROOT / "docs" / page
        assert target.is_file(), f"{page}: {link}"
        assert not anchor or anchor in pages.anchors(target.read_text("utf-8")), f"{page}: {link}"


def test_options_that_pages_name_exist() -> None:
    known = {name for _, command in script("command_line").commands() for one in command.params for name in one.opts}
    known |= {
        name
        for _, command in script("command_line").commands()
        for one in command.params
        for name in one.secondary_opts
    }
    known |= {
        "--help",
        "--model_args",
        "--tasks",
        "--limit",
        "--apply_chat_template",
        "--metadata",
        "--use_cache",
        "--head",
    }
    for page in pages.user_pages():
        for line in re.findall(r"^specdec .*$|`specdec [^`]*`|`--[\w-]+[^`]*`", pages.read(page), re.M):
            named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", line))
            assert named <= known, (page, named - known)


def test_arguments_that_blocks_name_exist() -> None:
    """A call of a page that is not run still has options that there are."""
    known = set(inspect.signature(SpeculativeModel.from_pretrained).parameters)
    tables = pages.read("how-to/own_model.md") + pages.read("concepts/memory.md")
    named = set(re.findall(r"`(\w+)=", tables))
    assert named - known <= {"chat", "draft", "cache_prefix"}


def test_every_public_name_is_in_the_reference() -> None:
    api, errors = pages.read("reference/api.md"), pages.anchors(pages.read("reference/errors.md"))
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: ([\w.]+)", api, re.M)}
    missing = [name for name in specdec.__all__ if name not in shown and name.lower() not in errors]
    assert missing == []


def test_every_public_method_is_in_the_reference() -> None:
    api = pages.read("reference/api.md")
    members = {name for name in vars(SpeculativeModel) if not name.startswith("_")} - {"in_group"}
    assert [name for name in sorted(members) if not re.search(rf"\b{name}\b", api)] == []


def shown_objects() -> Iterator[tuple[Any, list[str]]]:
    """What the reference shows: each class or function, and the members of a class that are shown with it."""
    for name, options in re.findall(r"^::: ([\w.]+)\n((?: .*\n)*)", pages.read("reference/api.md"), re.M):
        module, _, own = name.rpartition(".")
        found = getattr(importlib.import_module(module), own)
        members = re.search(r"members: *\[(.*?)\]", options, re.S)
        shown = members[1].replace("\n", " ").split(",") if members else [n for n in vars(found) if n[0] != "_"]
        yield found, [] if "members: false" in options else [member.strip() for member in shown]


def items(docstring: str | None) -> list[str]:
    """Names that have a line of their own in a section of parameters or attributes: others are lost on the page."""
    parts = re.split(r"^(?=\S)", inspect.cleandoc(docstring or ""), flags=re.M)
    tables = [part for part in parts if part.startswith(("Args:\n", "Attributes:\n"))]
    return [name for part in tables for name in re.findall(r"^    (\w+)(?: \([^)]*\))?: ", part, re.M)]


def parameters(made: Any) -> list[str]:
    return [name.lstrip("*") for name in inspect.signature(made).parameters if name not in ("self", "cls")]


def lost(docstring: str | None, names: list[str]) -> list[str]:
    """Parameters without a line where there is a table, else those that are neither named nor described elsewhere."""
    if there := items(docstring):
        return [name for name in names if name not in there]
    elsewhere = re.search(r"[Aa]s `|see `", docstring or "")
    return [] if elsewhere else [name for name in names if not re.search(rf"\b{name}\b", docstring or "")]


def test_the_reference_has_every_parameter_of_every_signature() -> None:
    """Of SpeculativeModel the constructor is not for callers."""
    found = dict[str, list[str]]()
    for shown, members in shown_objects():
        fields = [name for name in getattr(shown, "__dataclass_fields__", ()) if name in shown.__annotations__]
        own = fields if inspect.isclass(shown) else parameters(shown)
        found[shown.__name__] = lost(shown.__doc__, list(getattr(shown, "_fields", own)))
        for member in members if inspect.isclass(shown) else ():
            method = inspect.getattr_static(shown, member, None)
            method = getattr(method, "__func__", method)
            if inspect.isroutine(method):
                found[f"{shown.__name__}.{member}"] = lost(method.__doc__, parameters(method))
    assert len(found) > 45 and {name: names for name, names in found.items() if names} == {}


def test_signatures_are_broken_into_lines() -> None:
    """mkdocstrings does so where a formatter is installed."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    settings = (ROOT / "mkdocs.yml").read_text()
    assert any(name.startswith("ruff") for name in extra)
    assert "separate_signature: true" in settings and re.search(r"line_length: \d+", settings)


def error_classes(cls: type = specdec.SpecdecError) -> Iterator[type]:
    """Those of the library: other tests of this process may define more."""
    if cls.__module__.partition(".")[0] in ("attention", "drafters", "specdec", "evals"):
        yield cls
    for below in cls.__subclasses__():
        yield from error_classes(below)


def test_every_error_has_a_cause_and_a_remedy() -> None:
    text = pages.read("reference/errors.md")
    ours = {cls.__name__ for cls in (*error_classes(), specdec.SpecdecWarning) if cls.__name__[0] != "_"}
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    assert ours == set(sections)
    assert [name for name, said in sections.items() if "**Cause.**" not in said or "**Remedy.**" not in said] == []


def test_every_error_names_its_section() -> None:
    path, anchors = ROOT / ERRORS_PAGE, pages.anchors(pages.read("reference/errors.md"))
    assert path.is_file()
    for cls in error_classes():
        error = cls("why")
        assert str(error) == "why"
        shown = traceback.format_exception_only(error)[-1]
        named = next(one for one in cls.__mro__ if one.__name__[0] != "_").__name__.lower()
        assert shown == f"See {ERRORS_PAGE}#{named}\n" and named in anchors
        assert pickle.loads(pickle.dumps(error)).__notes__ == error.__notes__ == [shown.rstrip()]


def test_the_metrics_page_has_what_the_code_emits() -> None:
    text = pages.read("reference/metrics.md")
    rows = re.findall(r"^\| `(\w+)` `(\w+)` \| (.*) \| (\w+) \| (\S+) \|$", text, re.M)
    assert {name: (kind, help) for name, _, help, kind, _ in rows} == METRICS and len(rows) == len(METRICS)
    assert [name for name, there, *_ in rows if there != f"specdec_{name}"] == []
    in_seconds = {name for name, _, _, _, unit in rows if unit == "s"}
    assert in_seconds == {name for name in METRICS if "_seconds" in name}
    assert set(re.findall(r"specdec_(\w+)", text)) == set(METRICS)


def test_an_error_of_users_names_the_section_of_its_base() -> None:
    class OwnError(specdec.QueueFullError):
        """Defined outside of this library."""

    assert OwnError.described_at() == f"{ERRORS_PAGE}#queuefullerror"


def test_the_command_line_page_is_what_the_commands_say() -> None:
    command_line = script("command_line")
    text = pages.read("reference/command_line.md")
    assert text == command_line.page(), "run: python docs/scripts/command_line.py"
    for path, command in command_line.commands():
        assert f"## {path}\n" in text or path == "specdec"
        options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
        assert [name for one in options for name in command_line.names(one) if f"`{name}`" not in text] == []


def test_pictures_are_drawn_from_the_results() -> None:
    for name, picture in script("pictures").pictures().items():
        assert (ROOT / "docs" / "pictures" / name).read_text("utf-8") == picture, "run: python docs/scripts/pictures.py"


def test_pictures_are_shown_with_their_results() -> None:
    """A picture of numbers names its files, and its description has their numbers."""
    pictures, shown = script("pictures"), {}
    for page in sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")):
        for files, said, name in re.findall(
            r"(?:<!-- (?:picture|results): (.*) -->\n)?!\[(.+)\]\((\S+)\)", pages.read(page)
        ):
            shown[name.rpartition("/")[2]] = (files.split(", ") if files else [], said)
    assert shown.keys() == pictures.pictures().keys()
    for name, (files, _) in shown.items():
        assert bool(files) == (name not in ("round.svg", "house.svg")), name
        assert [file for file in files if not (pictures.RESULTS / file).is_file()] == []
    seen, (plain, likely) = pictures.traced(), pictures.by_position().values()
    *steps, verify, prefill = seen["graph_ms"]
    times = f"{verify:.2f} of {seen['round_ms']:.2f} ms, the five drafts {sum(steps) + prefill:.2f} ms"
    assert times in shown["timeline.svg"][1] and f"for {seen['idle_ms']:.3f} ms" in shown["timeline.svg"][1]
    ends = f"is {plain[0]:.2f} at the first draft and {plain[-1]:.2f} at the seventh"
    assert (
        ends in shown["positions.svg"][1] and f"from {likely[0]:.2f} to {likely[-1]:.2f}" in shown["positions.svg"][1]
    )
    over = [value for line in pictures.over_floor().values() for _, value in line]
    assert f"{min(over):.1f} to {max(over):.1f} times" in shown["floor.svg"][1]
    by_k = pictures.measured()
    assert by_k[3][128] > by_k[5][128] and all(by_k[3][rows] < by_k[5][rows] for rows in (1, 8, 32))
    faster = {rows: by_k[5][rows] / by_k[0][rows] for rows in (1, 128)}
    assert f"from {faster[1]:.1f} at one row to {faster[128]:.1f} at 128" in shown["speed.svg"][1]


def test_numbers_of_the_performance_page_are_those_of_its_results() -> None:
    pictures, text = script("pictures"), pages.read("numbers.md")
    files = re.findall(r"<!-- results: (\S+) -->\n\|", text)
    assert len(files) == len(re.findall(r"^\|---", text, re.M)) and len(files) == 2
    assert [name for name in files if not (ROOT / "benchmarks" / "results" / name).is_file()] == []
    by_k = pictures.measured()
    for rows in by_k[0]:
        cells = [f"{by_k[k][rows]:,.0f}" for k in (0, 3, 5)]
        assert f"| {rows} | {' | '.join(cells)} | {by_k[5][rows] / by_k[0][rows]:.2f} |" in text
    assert "| τ | " + " | ".join(f"{tau:.2f}" for k, tau in pictures.accepted().items() if k) + " |" in text


def new_pages() -> list[str]:
    return [page for page in pages.user_pages() if page not in pages.GENERATED]


def test_sentences_are_short() -> None:
    lengths = {page: [len(one.split()) for one in pages.sentences(pages.read(page))] for page in new_pages()}
    means = {page: sum(each) / len(each) for page, each in lengths.items()}
    print("\n".join(f"{page}: {mean:.1f}" for page, mean in sorted(means.items())))
    assert {page: round(mean, 1) for page, mean in means.items() if mean > 17} == {}


@pytest.mark.parametrize("page", new_pages())
def test_pages_have_no_habits(page: str) -> None:
    text = re.sub(r"```.*?```|<!--.*?-->|`[^`]*`", "", pages.read(page), flags=re.S)
    assert [found[0] for phrase in HABITS for found in re.finditer(phrase, text, re.M)] == []


@pytest.mark.parametrize("page", new_pages())
def test_a_page_says_at_its_top_what_one_can_do_after_it(page: str) -> None:
    first = pages.read(page).split("\n\n")[1]
    assert "fter this page you" in first, first


@pytest.mark.slow
def test_examples_of_help_texts_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Each says what the method does, in what state the model is afterwards, and has an example."""
    methods = [getattr(SpeculativeModel, name) for name in ("usage", "generate_iter", "refresh", "own_logits")]
    for method in (*methods, Stream.close):
        with SpeculativeModel.from_pretrained("gsm-llama", draft="auto") as model:
            (found,) = doctest.DocTestFinder().find(method, method.__name__, globs={"model": model})
            assert found.examples and doctest.DocTestRunner().run(found).failed == 0, capsys.readouterr().out


@pytest.mark.slow
def test_docstrings_have_few_habits() -> None:
    habits = script("habits")
    words, places = habits.found(path for package in habits.PACKAGES for path in (ROOT / package).rglob("*.py"))
    assert {name: len(own) for name, own in places.items() if 1e4 * len(own) > 8 * words} == {}
