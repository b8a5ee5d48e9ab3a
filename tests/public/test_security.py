"""SECURITY.md: each of its claims has a test, here or in a file that is named here."""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path

import pytest

from specdec import SpecdecError, SpeculativeModel
from specdec.loading.names import builtin_path

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = {
    "Pickles": "tests/public/test_errors.py::test_a_folder_that_is_no_target",
    "Remote code": "tests/public/test_security.py::test_files_of_a_checkpoint_do_not_run_unasked",
    "Kernels": "tests/public/test_security.py::test_no_kernel_is_fetched_and_no_pickle_read",
    "Plug-ins": "tests/specdec/cli/test_plugins.py::test_own_commands_are_checked_for_shadowing_others_not",
    "Callers' code": "tests/public/test_outside_exceptions.py::test_each_ends_the_call_that_it_struck_and_no_other",
    "Chat templates": "tests/public/test_security.py::test_a_chat_template_runs_in_a_sandbox",
    "Several GPUs": "tests/specdec/extensions/parallel/test_workers.py",
    "Handoffs": "tests/specdec/extensions/handoff/test_transfers.py::test_bytes_that_are_no_handoff",
    "Names": "tests/test_imports.py::test_a_package_that_shadows_ours_is_named",
}
"""The test of each paragraph with a bold name."""
LEAVES_A_FILE = "from pathlib import Path\nPath(__file__).with_name('made').touch()\nPath({made!r}).touch()\n"
SOURCES = [path for package in ("attention", "drafters", "specdec", "evals") for path in (ROOT / package).rglob("*.py")]


def test_every_claim_has_a_test() -> None:
    named = re.findall(r"^- \*\*(.+?)\.?\*\*", (ROOT / "SECURITY.md").read_text("utf-8"), re.M)
    assert named == list(CLAIMS)
    for place in CLAIMS.values():
        file, _, test = place.partition("::")
        assert f"def {test}(" in (ROOT / file).read_text("utf-8") if test else (ROOT / file).is_file(), place


@pytest.mark.slow
def test_no_kernel_is_fetched_and_no_pickle_read() -> None:
    """Every `torch.load` takes tensors alone, nothing is unpickled otherwise, and the package `kernels` is not used."""
    loads = 0
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", None)
                names = [module] if module else [alias.name for alias in node.names]
                assert not {str(name).split(".")[0] for name in names} & {"kernels", "dill", "cloudpickle"}, path
            if isinstance(node, ast.Call):
                called, given = ast.unparse(node.func), {one.arg: ast.unparse(one.value) for one in node.keywords}
                assert called not in ("pickle.load", "pickle.loads", "pickle.Unpickler", "eval", "exec"), path
                assert "use_kernels" not in given and given.get("weights_only") != "False", path
                if called == "torch.load":
                    loads += 1
                    assert given["weights_only"] == "True", path
    assert loads >= 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with Python files of its own for its model, configuration, tokenizer and `generate`."""
    target, made = tmp_path / "target", str(tmp_path / "made")
    shutil.copytree(builtin_path("gsm-llama"), target)
    for name, auto_map in (
        ("config.json", {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["own.Own", "own.Own"]}),
    ):
        file = target / name
        file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), "auto_map": auto_map}), "utf-8")
    (target / "custom_generate").mkdir()
    for name in ("own.py", "custom_generate/generate.py"):
        (target / name).write_text(LEAVES_A_FILE.format(made=made), "utf-8")
    return target


@pytest.mark.slow
def test_files_of_a_checkpoint_do_not_run_unasked(folder: Path) -> None:
    made = folder.parent / "made"
    with SpeculativeModel.from_pretrained(folder) as model:  # by transformers' own classes
        assert model.generate("What is 3 + 4?", max_new_tokens=4)[0].token_ids
    assert not made.exists()
    with pytest.raises(SpecdecError):  # it runs, and has no class `Own`
        SpeculativeModel.from_pretrained(folder, trust_remote_code=True)
    assert made.exists()


@pytest.mark.slow
def test_a_chat_template_runs_in_a_sandbox(folder: Path) -> None:
    with SpeculativeModel.from_pretrained(folder) as model:
        model.tokenizer.chat_template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
        with pytest.raises(SpecdecError, match="unsafe"):
            model.generate([{"role": "user", "content": "hello"}], max_new_tokens=4)
