"""Heads trained here load into the authors' own packages, draft the same there, and have the same loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import CPU, VOCAB, random_prompts

from drafters.oracle import oracle_drafts
from drafters.training.blocks import LOSSES, evaluate_blocks
from drafters.training.data import answer_set
from drafters.training.objective import collate
from specdec.selftest.twin import enlarge
from tests.drafters.training.test_blocks import Bench


def trained(bench: Bench, kind: str, folder: Path, **shape: Any) -> tuple[Any, Path]:
    """A head as a run would train it, with larger weights than a fresh one's, and its folder."""
    recipe = bench.plan(kind, {"num_layers": 2, **shape}).recipe
    head = recipe.start(torch.ones).requires_grad_(False)
    enlarge(head, 3)
    return head.eval(), recipe.save(head, folder)


@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_the_loss_is_that_of_nemo_automodel(kind: str, tmp_path: Path) -> None:
    """With an anchor at every position that can be one; target, head and answers are the same."""
    dspark = "nemo_automodel.components.speculative.dspark"
    model_code = pytest.importorskip(f"{dspark}.draft_qwen3", reason="nemo-automodel is not installed")
    core = pytest.importorskip(f"{dspark}.core")
    bench = Bench()
    head, folder = trained(bench, kind, tmp_path, num_anchors=100, slots="anchor-first")
    prompts = random_prompts((5, 9, 12))
    answers = random_prompts((20, 11, 3), seed=5)
    batch = collate(answer_set(prompts, answers, 64), np.arange(3), 8, CPU)
    with torch.no_grad():
        out = bench.target(batch.token_ids, output_hidden_states=True, use_cache=False)
        aux = torch.cat([out.hidden_states[layer] for layer in head.aux_layers], -1)
        ours = evaluate_blocks(head, batch, aux, out.logits, 4, math.exp(-1 / 4), num_anchors=100, weights=LOSSES[kind])
        theirs = model_code.Qwen3DSparkModel.from_pretrained(folder, attn_implementation="sdpa")
        cross_entropy, distance = LOSSES[kind]
        objective = core.DSparkTrainerModule(
            theirs, loss_decay_gamma=4.0, ce_loss_alpha=cross_entropy, l1_loss_alpha=distance
        )
        expected = objective(batch.token_ids, aux, batch.answer, out.hidden_states[-1])
    assert float(ours.loss) == pytest.approx(float(expected.loss), rel=1e-5)
    assert ours.possible.tolist() == [sum(max(len(a) - 1 - k, 0) for a in answers) for k in range(4)]


def test_dflash_drafts_as_here(tmp_path: Path) -> None:
    dflash = pytest.importorskip("dflash.model", reason="dflash is not installed")
    bench = Bench()
    head, folder = trained(bench, "dflash", tmp_path)
    model = dflash.DFlashDraftModel.from_pretrained(folder)
    for length in (1, 7, 30):
        (ids,) = random_prompts((length + 1,), seed=length)
        with torch.no_grad():
            states = bench.target(torch.tensor([ids[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
            hidden = model(
                target_hidden=dflash.extract_context_feature(states, model.target_layer_ids),
                noise_embedding=bench.target.get_input_embeddings()(torch.tensor([[ids[-1], *[VOCAB - 1] * 4]])),
                position_ids=torch.arange(length + 5)[None],
            )
            theirs = model.compute_logits(hidden[:, 1:], bench.target.lm_head)[0].argmax(-1).tolist()
        aux = torch.cat([states[layer] for layer in head.aux_layers], -1)[0]
        assert oracle_drafts(head, torch.tensor(ids), aux, 4) == theirs
