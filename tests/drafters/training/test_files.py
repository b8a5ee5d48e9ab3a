"""What a run keeps on disk is whole or not there, and a damaged piece is never taken for a good one."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from drafters.eagle3.checkpoint import save_eagle3
from drafters.eagle3.head import Eagle3Head
from drafters.eagle3.spec import Eagle3Spec
from drafters.errors import RunFolderError, TrainingDivergedError
from drafters.training.files import MANIFEST, damage, whole_folder, write_file
from drafters.training.state import Learner, Run, TrainConfig, checkpoints, restore, save_checkpoint

SPEC = Eagle3Spec(
    hidden_size=8,
    target_hidden_size=8,
    intermediate_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=16,
    draft_vocab_size=16,
    aux_layers=(1, 2, 3),
)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    write_file(file, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(RunFolderError, match=r"a\.json.*No space left"):
        patched.setattr("drafters.training.files.sync", full)
        write_file(file, b"new")
    assert file.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    for content in ("one", "two"):
        with whole_folder(folder) as partial:
            (partial / "weights").write_text(content)
    with pytest.raises(RunFolderError, match="cannot write"), whole_folder(folder) as partial:
        (partial / "weights").write_text("three")
        raise OSError(28, "No space left on device")
    with pytest.raises(KeyboardInterrupt), whole_folder(folder) as partial:
        (partial / "weights").write_text("four")
        raise KeyboardInterrupt
    assert (folder / "weights").read_text() == "two" and damage(folder) is None
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("weights", "tw", "weights differs"),
        ("weights", "owt", "weights differs"),
        ("weights", None, "weights is missing"),
        (MANIFEST, None, "has no manifest"),
        (MANIFEST, "{", "cannot be read"),
        (MANIFEST, "[]", "no list of files"),
        (MANIFEST, '{"weights": []}', "weights differs"),
    ],
)
def test_damage_is_seen(file: str, content: str | None, reason: str, tmp_path: Path) -> None:
    with whole_folder(tmp_path / "head") as partial:
        (partial / "weights").write_text("two")
    (tmp_path / "head" / file).unlink()
    if content is not None:
        (tmp_path / "head" / file).write_text(content)
    assert reason in str(damage(tmp_path / "head"))


def learner() -> Learner[Eagle3Head]:
    head = Eagle3Head(SPEC, torch.zeros(16, 8))
    optimizer = torch.optim.AdamW(head.parameters())
    return Learner(head, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))


def test_the_newest_good_checkpoint_is_taken(tmp_path: Path) -> None:
    run, console = Run(tmp_path, TrainConfig(), "data"), Console(file=io.StringIO(), width=300)
    for step in (1, 2):
        save_checkpoint(run, step, learner(), [], save_eagle3)
    (tmp_path / "step-0000002" / "config.json").write_text("{}")
    assert restore(run, learner(), console)[0] == 1
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step-0000002 is damaged (config.json differs" in said and "goes on from step-0000001" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-0000001", "step-0000002.damaged"]
    (tmp_path / "step-0000001" / "trainer.pt").unlink()
    with pytest.raises(RunFolderError, match=r"every checkpoint is damaged.*trainer\.pt is missing"):
        restore(run, learner(), console)


def test_a_state_that_lacks_something_is_damaged(tmp_path: Path) -> None:
    """Whole by its manifest, and yet no state of ours."""
    run, console = Run(tmp_path, TrainConfig(), "data"), Console(file=io.StringIO(), width=300)
    for state in ([], {"step": 1}):
        with whole_folder(tmp_path / "step-0000001") as partial:
            torch.save(state, partial / "trainer.pt")
        with pytest.raises(RunFolderError, match=r"damaged.*trainer\.pt"):
            restore(run, learner(), console)


def test_weights_that_are_not_finite_are_never_kept(tmp_path: Path) -> None:
    broken = learner()
    with torch.no_grad():
        broken.head.norm.weight[0] = float("nan")
    with pytest.raises(TrainingDivergedError, match=r"step 5.*norm\.weight"):
        save_checkpoint(Run(tmp_path, TrainConfig(), "data"), 5, broken, [], save_eagle3)
    assert checkpoints(tmp_path) == []


def test_a_manifest_lists_every_file(tmp_path: Path) -> None:
    save_checkpoint(Run(tmp_path, TrainConfig(), "data"), 5, learner(), [], save_eagle3)
    listed = json.loads((tmp_path / "step-0000005" / MANIFEST).read_text())
    assert sorted(listed) == ["config.json", "model.safetensors", "trainer.pt"]
