"""The agreement check of block-parallel heads: the built-in one with its configuration damaged, each damage named.

Oracle: the configuration that the head was trained with, and acceptance in the engine's own rounds.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from fakes import tiny_llama, wrap

from drafters.base import FINAL_NORM, BlockHead
from drafters.block.family import other_readings
from drafters.checkpoints.config_fields import HeadReport, ResolvedField
from drafters.training.blocks import block_outputs
from evals.data.arithmetic import problems
from specdec import SpeculativeModel
from specdec.cli.tables import agreement_lines, readings_table
from specdec.extensions.head_check import measurement
from specdec.extensions.head_check.check import Agreement, check_agreement
from specdec.extensions.head_check.measurement import Passage
from specdec.loading.names import resolve
from specdec.requests.sampling import SamplingParams
from tests.block_heads import DFLASH, DSPARK, block_head, config_of, write_head
from tests.specdec.extensions.head_check.test_check import chains_and_rounds

CHATS = [[{"role": "user", "content": problem.question}] for problem in problems("heldout", 24, seed=0)]
SIZES = {"max_num_seqs": 4, "kv_cache_tokens": 2048, "max_model_len": 512}


@pytest.fixture(scope="module")
def model() -> Iterator[SpeculativeModel]:
    with SpeculativeModel.from_pretrained("gsm-llama", "block", device="cpu", **SIZES) as loaded:
        yield loaded


def checked(model: SpeculativeModel, folder: Path, **changes: Any) -> Agreement:
    """The check of the built-in head with other values in its config.json."""
    shutil.copytree(resolve("gsm-llama-block"), folder, dirs_exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with SpeculativeModel.from_pretrained(model.hf_model, folder, tokenizer=model.tokenizer, **SIZES) as wrapped:
        return check_agreement(wrapped, CHATS)


@pytest.mark.slow
def test_an_intact_head_is_fine(model: SpeculativeModel) -> None:
    """Each other reading is tried once, from every position in one pass a text."""
    with patch.object(measurement, "block_outputs", wraps=block_outputs) as passes:
        found = check_agreement(model, CHATS)
    assert found.verdict == "fine" and found.best is None and found.chains is not None
    names = {tried.reading.name for tried in found.tried}
    assert names == {"fill-in slots", *(f"all aux layers one {by}" for by in ("later", "earlier")), *ENDS}
    assert passes.call_count == (1 + len(found.tried)) * len(CHATS)
    assert found.chains.unconditional[0] > 0.6 and len(found.chains.unconditional) == 7
    told = agreement_lines(found)
    assert "agreement: fine" in told[0] and "no other reading of its files is better" in told[1]
    assert not any("likely cause" in line for line in told)


ENDS = ("aux layer 2 one earlier", "aux layer 6 one later")
WRONG = {
    "layout": ({"sample_from_anchor": False}, {"sample_from_anchor": True}, "sample_from_anchor is absent or wrong"),
    "one earlier": (
        {"target_layer_ids": [0, 1, 2, 3, 4]},
        {"target_layer_ids": [1, 2, 3, 4, 5]},
        "taken for aux layers.*aux_layers: config target_layer_ids",
    ),
    "one later": (
        {"target_layer_ids": [2, 3, 4, 5, 6]},
        {"target_layer_ids": [1, 2, 3, 4, 5]},
        "taken for layers whose output is meant",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_damaged_configuration_is_named(name: str, model: SpeculativeModel, tmp_path: Path) -> None:
    wrong, right, cause = WRONG[name]
    found = checked(model, tmp_path, **wrong)
    assert found.verdict == "misread" and found.best is found.tried[0] and dict(found.best.reading.overrides) == right
    assert re.search(cause, found.cause)
    told = agreement_lines(found)
    assert "the head is READ WRONGLY" in told[0] and told[2] == f"likely cause: {found.cause}"
    assert told[-1] == f"in the head's config.json, set {json.dumps(right)[1:-1]}"
    assert found.as_json()["best"]["config"] == right and readings_table(found).row_count == 1 + len(found.tried)


def test_chains_are_what_the_rounds_accepted(model: SpeculativeModel) -> None:
    done = model.generate(CHATS[:6], SamplingParams(max_new_tokens=40))
    passages = [Passage.of(one, model.device) for one in done]
    head = model.head
    assert isinstance(head, BlockHead)
    pairs = list(chains_and_rounds(model, head, done, passages))
    assert len(pairs) > 10 and all(min(accepted, record.drafted) == record.accepted for accepted, record in pairs)


def test_a_window_and_a_reduced_vocabulary_are_checked_as_well() -> None:
    changes = {"window": 3, "windowed_layers": (0,), "draft_vocab_size": 32}
    wrapped = wrap(tiny_llama(), block_head(tiny_llama(), DSPARK, **changes))
    found = check_agreement(wrapped, [[3, 1, 4, 1, 5], [2, 7, 1]])
    assert found.chains is not None and found.chains.rounds == found.num_tokens - 2
    assert {"fill-in slots", "aux layer 3 one later"} < {tried.reading.name for tried in found.tried}


AUX = "target_layer_ids"
READINGS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "final norm": (
        DFLASH | {"aux_layers": (1, 2, FINAL_NORM)},
        [{"sample_from_anchor": True}, *({AUX: ids} for ids in ([-1, 0, 2], [-1, 1, 3], [0, 2, 3], [0, 1, 2]))],
    ),
    "embeddings": (
        DSPARK | {"aux_layers": (0, 3)},
        [{"sample_from_anchor": False}, *({AUX: ids} for ids in ([0, 3], [0, 2], [-1, 3], [-1, 1]))],
    ),
    "one slot": (DSPARK | {"aux_layers": (0,), "block_size": 1}, [{AUX: [0]}]),
}


@pytest.mark.parametrize("name", READINGS)
def test_the_keys_of_a_reading_choose_it(name: str, tmp_path: Path) -> None:
    """The tensors are the head's own; layers that the target lacks are not tried."""
    fields, keys = READINGS[name]
    head = block_head(tiny_llama(), fields)
    found = other_readings(head, 4, None)
    assert [dict(reading.overrides) for reading in found] == keys
    for place, reading in enumerate(found):
        other: Any = reading.head
        assert other.fc.weight.data_ptr() == head.fc.weight.data_ptr()
        nested = config_of(head).get("dflash_config")
        changes = reading.overrides if nested is None else {"dflash_config": {**nested, **reading.overrides}}
        again: Any = wrap(tiny_llama(), str(write_head(head, tmp_path / str(place), **changes))).head
        assert again.spec == other.spec != head.spec


@pytest.mark.parametrize("layers", [(1, 3, 8), (1, 3, 6)])
def test_ids_of_speculators_are_numbered_as_aux_layers(layers: tuple[int, ...]) -> None:
    """N is the state after the last layer there, not after the final norm."""
    head = block_head(tiny_llama(), DFLASH | {"aux_layers": layers})
    source = ResolvedField("aux_layers", layers, "config aux_hidden_state_layer_ids")
    head.checkpoint_report = HeadReport(Path("head"), "speculators layout", (source,), 1)
    found = [reading for reading in other_readings(head, 8, None) if reading.field == "aux_layers"]
    key = "aux_hidden_state_layer_ids"
    assert found[0].overrides == {key: [b + (1 if layers[-1] < 8 else -1) for b in layers]} and len(found) > 5
    assert [reading.overrides[key] for reading in found] == [list(reading.head.aux_layers) for reading in found]
