"""Who may know whom: attention <- drafters <- specdec <- evals, never backwards; and the public face."""

from __future__ import annotations

import ast
import functools
import os
import pickle
import subprocess
import sys
import traceback
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from specdec.extensions import EXTENSIONS

ROOT = Path(__file__).resolve().parent.parent
ORDER = ["attention", "drafters", "specdec", "evals"]
FILES = [path for package in ORDER for path in sorted((ROOT / package).rglob("*.py"))]


@functools.cache
def imports_of(source: str) -> list[ast.Import | ast.ImportFrom]:
    """Every import statement of a file, wherever it stands."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported_names(tree: ast.AST) -> set[str]:
    """Top-level names of every import of a file, wherever it stands, and of importlib calls with a literal name."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they go"
            names.add(node.module or "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names |= {str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant)}
    return {name.split(".")[0] for name in names}


def backward(package: str, tree: ast.AST) -> set[str]:
    return imported_names(tree) & set(ORDER[ORDER.index(package) + 1 :])


@pytest.mark.slow
def test_no_file_imports_a_later_package() -> None:
    names = [path.relative_to(ROOT) for path in FILES]
    found = {name.as_posix(): backward(name.parts[0], ast.parse((ROOT / name).read_text("utf-8"))) for name in names}
    assert len(found) > 250 and {name: later for name, later in found.items() if later} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import specdec",
        "from specdec.engine.engine import Engine",
        "def f():\n    import drafters.base",
        "from importlib import import_module\nimport_module('specdec.cli.main')",
    ],
)
def test_the_rule_sees(line: str) -> None:
    assert backward("attention", ast.parse(line))


def test_every_package_is_checked() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(ORDER)
    assert len(FILES) > 40


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "only"),
    [
        ("flashinfer", {f"attention/backends/flashinfer/{name}.py" for name in ("causal", "wrapper", "mla", "trtllm")}),
        ("nixl", {"attention/transport/nixl_agent.py"}),
        ("nvmath", {"specdec/ops/gemm.py"}),
        (
            "transformers.integrations",
            {"specdec/ops/mixtures/choice.py", "specdec/wrapped/quantised_layers.py", "specdec/loading/checkpoint.py"},
        ),
    ],
)
@pytest.mark.cases(1)
def test_some_libraries_are_imported_in_one_place(module: str, only: set[str]) -> None:
    found = set()
    for path in FILES:
        for node in imports_of(path.read_text("utf-8")):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name == module or name.startswith(f"{module}.") for name in names):
                found.add(path.relative_to(ROOT).as_posix())
    assert found <= only


ROOMS = [
    "attention/errors.py",
    "attention/checking.py",
    "attention/cached.py",
    "attention/threads.py",
    "attention/toml_tables.py",
    "attention/staging.py",
    "attention/spec.py",
    "attention/batch",
    "attention/cache",
    "attention/transport",
    "attention/kernels",
    "attention/cascade",
    "attention/hf/custom_op.py",
    "attention/hf/mixing.py",
    "attention/backends",
    "attention/recurrence",
    "attention/runner.py",
    "attention/groups.py",
    "attention/hf",
    "drafters/errors.py",
    "drafters/rope.py",
    "drafters/vocab.py",
    "drafters/loops/base.py",
    "drafters/base.py",
    "drafters/checkpoints",
    "drafters/loops",
    "drafters/loops/block",
    "drafters/unroll.py",
    "drafters/training",
    "drafters/layer_spec.py",
    "drafters/eagle3",
    "drafters/block",
    "drafters/mtp",
    "drafters/assistant",
    "drafters/families.py",
    "drafters/oracle.py",
    "specdec/import_names.py",
    "specdec/torch_state.py",
    "specdec/errors.py",
    "specdec/interrupts.py",
    "specdec/user_warnings.py",
    "specdec/values.py",
    "specdec/run_files.py",
    "specdec/config.py",
    "specdec/options",
    "specdec/ops",
    "specdec/ops/mixtures",
    "specdec/requests",
    "specdec/wrapped",
    "specdec/selftest",
    "specdec/compiler",
    "specdec/rounds",
    "specdec/extras",
    "specdec/logits",
    "specdec/extensions/grammars",
    "specdec/acceptance",
    "specdec/execution",
    "specdec/engine",
    "specdec/loading",
    "specdec/extensions/handoff",
    "specdec/extensions/parallel",
    "specdec/extensions/rollouts",
    "specdec/extensions/tools",
    "specdec/extensions/openai_format.py",
    "specdec/extensions/service",
    "specdec/extensions/server",
    "specdec/model.py",
    "specdec/extensions/attached",
    "specdec/extensions/batches",
    "specdec/extensions/batches/ray.py",
    "specdec/extensions/parallel/worker.py",
    "specdec/extensions/head_check",
    "specdec/extensions/training",
    "specdec/cli",
    "specdec/__main__.py",
    "evals/errors.py",
    "evals/data",
    "evals/runs",
    "evals/acceptance",
    "evals/lossless",
    "evals/accuracy",
    "evals/report",
    "evals/cli",
]
"""The rooms from the bottom up: a room imports itself and rooms above it in this list, and nothing else of ours."""


def room_of(path: str) -> str:
    """The room of a file, "" for the `__init__.py` of a package: a package is no room. A file may be a room of its own
    inside of another one."""
    return max((room for room in ROOMS if path == room or path.startswith(f"{room}/")), key=len, default="")


def sources() -> dict[str, str]:
    """Every file of the four packages by its path in the repository."""
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in FILES}


def imported_files(path: str, files: dict[str, str]) -> set[str]:
    """Files of `files` that the file imports anywhere, under TYPE_CHECKING and inside functions too."""
    names: set[str] = set()
    for node in imports_of(files[path]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {file for name in names if (file := name.replace(".", "/") + ".py") in files} - {path}


def upward_imports(files: dict[str, str]) -> list[str]:
    """Imports of a room that is not above the file's own in ROOMS."""
    found = []
    for path in files:
        for other in imported_files(path, files):
            room, target = room_of(path), room_of(other)
            if room and target and ROOMS.index(target) > ROOMS.index(room):
                found.append(f"{path} imports {other}")
    return found


def import_cycle(files: dict[str, str]) -> list[str]:
    """Files that import each other in a ring, the first of them last again; empty when there is none."""
    try:
        TopologicalSorter({path: imported_files(path, files) for path in files}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_file_belongs_to_a_room() -> None:
    assert [path for path in sources() if not room_of(path) and not path.endswith("__init__.py")] == []
    assert [room for room in ROOMS if not (ROOT / room).exists()] == []


def test_no_room_imports_a_later_one() -> None:
    assert upward_imports(sources()) == []


def test_no_files_import_each_other() -> None:
    assert import_cycle(sources()) == []


def test_a_planted_upward_import_is_seen() -> None:
    files = sources()
    files["specdec/rounds/rows.py"] += "\ndef f():\n    from specdec.engine import commit\n"
    assert upward_imports(files) == ["specdec/rounds/rows.py imports specdec/engine/commit.py"]


def test_a_planted_cycle_is_seen() -> None:
    files = sources()
    files["attention/cache/pages.py"] += "\nimport attention.cache.kv_cache\n"
    files["attention/cache/kv_cache.py"] += "\nimport attention.cache.pages\n"
    assert set(import_cycle(files)) == {"attention/cache/kv_cache.py", "attention/cache/pages.py"}


DOORS = ("specdec/__init__.py", "specdec/model.py", "specdec/cli/")
"""What may import extensions, where it needs them: inside of functions, or for types alone."""


def imports_at_the_top(source: str) -> set[str]:
    """Names of modules that are imported with a file: neither inside of functions nor for types."""
    statements = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    return {alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names} | {
        node.module or "" for node in statements if isinstance(node, ast.ImportFrom)
    }


def crossings(files: dict[str, str]) -> list[str]:
    """Imports of extensions by files that may not, or with the file, or of one extension that another does not name."""
    found = []
    for path, text in files.items():
        own = path.removeprefix("specdec/extensions/").split("/")[0].removesuffix(".py")
        inside = path.startswith("specdec/extensions/")
        for other in imported_files(path, files):
            if not other.startswith("specdec/extensions/"):
                continue
            name = other.split("/")[2].removesuffix(".py")
            if inside and own != "__init__":
                allowed = name in (own, *EXTENSIONS[own].uses)
            else:
                late = other.removesuffix(".py").replace("/", ".") not in imports_at_the_top(text)
                allowed = late and path.startswith(DOORS)
            found += [] if allowed else [f"{path} imports {other}"]
    return sorted(found)


def test_extensions_are_imported_through_doors_alone() -> None:
    assert crossings(sources()) == []
    folders = {path.name.removesuffix(".py") for path in (ROOT / "specdec" / "extensions").iterdir()}
    assert set(EXTENSIONS) == folders - {"__init__", "__pycache__"}


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("specdec/loading/parts.py", "from specdec.extensions.grammars.masks import GrammarMasks"),
        ("specdec/model.py", "from specdec.extensions.service.leading import stream_of"),
        ("specdec/extensions/service/leading.py", "from specdec.extensions.handoff.moved import Handoff"),
    ],
)
def test_a_planted_crossing_is_seen(path: str, line: str) -> None:
    files = sources()
    files[path] += f"\n{line}\n"
    assert len(crossings(files)) == 1


def run(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter that finds packages in `paths`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=os.sep, check=False
    )


@pytest.mark.slow
def test_attention_alone_pulls_in_nothing_else() -> None:
    code = (
        "import sys, attention, attention.cache.pages, attention.backends.reference, attention.batch.metadata\n"
        "print(sorted({'drafters', 'specdec', 'evals', 'transformers', 'flashinfer'} & set(sys.modules)))"
    )
    assert run(code, ROOT).stdout.strip() == "[]"


PUBLIC_NAMES = [
    "Attachment",
    "CacheTooSmallError",
    "ClosedModelError",
    "Completion",
    "DrainingError",
    "Grammar",
    "Handoff",
    "HandoffMismatchError",
    "HeadLoadError",
    "HeadMismatchError",
    "InvalidInputError",
    "InvariantError",
    "KernelBuildError",
    "ModelChangedError",
    "ModelLoadError",
    "NotCopyableError",
    "OutOfDeviceMemoryError",
    "OutOfPagesError",
    "OutputError",
    "QueueFullError",
    "RanksLostError",
    "RequestFailedError",
    "RoundFailedError",
    "RunFolderError",
    "SamplingParams",
    "Score",
    "SpecdecError",
    "SpecdecWarning",
    "SpeculativeModel",
    "StaleMetadataError",
    "StreamUpdate",
    "TrainingDivergedError",
    "TransferError",
    "TransferTimeoutError",
    "UnsupportedAttentionError",
    "UnsupportedModelError",
    "attach",
    "custom_generate",
    "draft_vocab_of",
    "invariant",
    "row_wise",
]


def test_import_specdec_is_lazy() -> None:
    code = "import sys, specdec; print('torch' in sys.modules, 'transformers' in sys.modules, *dir(specdec))"
    assert run(code, ROOT).stdout.split() == ["False", "False", *PUBLIC_NAMES]


def test_the_public_names_exist_and_no_others() -> None:
    import specdec
    import specdec.errors

    assert sorted(specdec.__all__) == specdec.__all__ == PUBLIC_NAMES
    assert {getattr(specdec, name).__name__ for name in specdec.__all__} == set(specdec.__all__)
    others = {"Completion", "Handoff", "SamplingParams", "Score", "SpeculativeModel", "StreamUpdate"}
    others |= {"Attachment", "Grammar", "attach", "custom_generate", "draft_vocab_of", "invariant", "row_wise"}
    assert set(specdec.__all__) == others | set(specdec.errors.__all__)
    with pytest.raises(AttributeError, match="module 'specdec' has no attribute 'Engine'"):
        specdec.Engine  # noqa: B018


def test_the_error_tree_has_one_root() -> None:
    import specdec.errors as errors

    kinds = [getattr(errors, name) for name in errors.__all__ if not name.endswith("Warning")]
    assert all(issubclass(kind, errors.SpecdecError) for kind in kinds)
    assert issubclass(errors.InvalidInputError, ValueError)


def test_errors_are_named_and_pickled_as_those_of_specdec() -> None:
    import specdec.errors as errors

    for name in errors.__all__:
        error = getattr(errors, name)("planted")
        assert traceback.format_exception_only(error)[0] == f"specdec.{name}: planted\n"
        copied = pickle.loads(pickle.dumps(error))
        assert type(copied) is type(error) and copied.args == ("planted",)


def test_an_error_pickled_where_only_attention_is_imported_is_the_same_class() -> None:
    code = (
        "import pickle, sys, attention.errors as a, drafters.errors as d\n"
        "data = [pickle.dumps(e('planted')) for e in (a.InvalidInputError, d.HeadLoadError)]\n"
        "print('specdec' in sys.modules, *(repr(pickle.loads(x)) for x in data))\n"
        "import specdec\n"
        "kinds = specdec.InvalidInputError, specdec.HeadLoadError\n"
        "print(*(type(pickle.loads(x)) is kind for x, kind in zip(data, kinds)))"
    )
    said = run(code, ROOT).stdout.splitlines()
    assert said == ["False InvalidInputError('planted') HeadLoadError('planted')", "True True"]


@pytest.mark.parametrize("name", ["attention", "drafters"])
def test_a_package_that_shadows_ours_is_named(name: str, tmp_path: Path) -> None:
    other = tmp_path / name
    other.mkdir()
    (other / "__init__.py").write_text("")
    done = run("import specdec", tmp_path, ROOT)
    assert done.returncode != 0
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("ImportError: specdec needs its own package")
    assert str(other / "__init__.py") in message and str(ROOT / name) in message


def test_no_folder_of_tests_is_a_package() -> None:
    """A lone __init__.py there would be imported under the name of the package it tests."""
    assert not list((ROOT / "tests").rglob("__init__.py"))
