"""`specdec doctor` tells what an issue report needs, and never fails because something is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from specdec.cli import doctor
from specdec.cli.main import cli


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of its own, with a cache of 2 KiB, to which every variable points."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("XDG_CACHE_HOME", "FLASHINFER_WORKSPACE_BASE"):
        monkeypatch.delenv(name, raising=False)
    held = tmp_path / ".cache" / "flashinfer" / "kernels"
    held.mkdir(parents=True)
    (held / "a.so").write_bytes(b"x" * 2048)
    return tmp_path


def test_text_and_json_name_the_same_sections(home: Path) -> None:
    text = CliRunner().invoke(cli, ["doctor"])
    facts = json.loads(CliRunner().invoke(cli, ["doctor", "--json"]).output)
    assert text.exit_code == 0 and "No problem found." in text.output and facts["problems"] == []
    assert all(f"{name}:" in text.output for name in ("specdec", "system", "packages", "device", "extras"))
    assert facts["caches"]["FlashInfer workspace"]["size"] == "2 KiB"
    assert facts["caches"]["FlashInfer workspace"]["folder"] == "~/.cache/flashinfer"
    assert facts["caches"]["Triton"]["folder"] == "~/TRITON_CACHE_DIR"
    assert str(home) not in json.dumps({name: facts[name] for name in ("caches", "settings")})
    assert {"cuda", "eval", "grammar"} <= set(facts["extras"])


def test_what_is_missing_is_named_with_its_command() -> None:
    assert doctor.unmet(["numpy>=2", "no-such-thing>=3", "specdec-hf[eval]"]) == ["no-such-thing>=3"]
    assert doctor.unmet(["numpy>=999", 'numpy>=999; sys_platform == "none"']) == ["numpy>=999"]
    found = doctor.extra_facts("cuda", ["no-such-thing>=3"])
    assert found["install"] == 'pip install "specdec-hf[cuda]"' and found["missing"] == ["no-such-thing>=3"]
    assert doctor.extra_facts("eval", ["numpy"]) == {"present": True}


def test_requirements_of_an_installed_copy_are_sorted_by_extra(tmp_path: Path) -> None:
    assert doctor.requirements()[1].keys() >= {"cuda", "eval"}
    given = ["torch>=2", 'scipy>=1; extra == "eval"', 'triton; sys_platform == "none" and extra == "eval"']
    assert doctor.applying(given, "") == ["torch>=2"] and doctor.applying(given, "eval") == ["torch>=2", "scipy>=1"]
    needed, extras = doctor.requirements(tmp_path)  # no checkout: the metadata
    assert any(each.startswith("torch") for each in needed) and any("lm_eval" in each for each in extras["eval"])
    assert not set(needed) & set(extras["eval"]) and not {"dev", "docs"} & set(extras)


def test_problems_come_last_and_are_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(name: str) -> None:
        if name == "drafters":
            raise ImportError("specdec needs its own package 'drafters'")

    monkeypatch.setattr(doctor, "check_sibling", taken)
    monkeypatch.setattr(doctor, "other_distribution", lambda: "another project's distribution")
    monkeypatch.setitem(sys.modules, "torch", None)
    result = CliRunner().invoke(cli, ["doctor"])
    assert result.exit_code == 1
    assert "PROBLEM: specdec needs its own package 'drafters'" in result.output
    assert "PROBLEM: another project's distribution" in result.output
    assert "PROBLEM: torch cannot be imported: ModuleNotFoundError" in result.output
    assert "No problem found" not in result.output


def test_a_gpu_without_flashinfer_is_hinted_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda name: None)
    facts = {"torch built for": "CUDA 13.0", "GPUs": ["H100"]}
    assert 'pip install "specdec-hf[cuda]"' in doctor.hints(facts)[0]
    assert doctor.hints({**facts, "torch built for": "ROCm 7"}) == []
    assert "torch is built for CUDA" in doctor.hints({**facts, "GPUs": []})[0]


def test_specdec_alone_shows_what_one_can_do() -> None:
    result = CliRunner().invoke(cli, [])
    assert result.exit_code == 0 and "Examples:" in result.output and "specdec doctor" in result.output


def test_the_issue_form_asks_for_it() -> None:
    form = Path(__file__).resolve().parents[3] / ".github" / "ISSUE_TEMPLATE" / "bug.yml"
    assert "specdec doctor" in form.read_text("utf-8")


def test_threads_on_busy_cores_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (9.0, 0.0, 0.0))
    found = doctor.hints({"torch built for": "CPU", "GPUs": [], "CPU threads": 2})
    assert len(found) == 2 and "set OMP_NUM_THREADS=1" in found[1]
    assert len(doctor.hints({"torch built for": "CPU", "GPUs": [], "CPU threads": 1})) == 1
    assert doctor.device_facts()["CPU threads"] >= 1
