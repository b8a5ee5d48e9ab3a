"""What a user knows better than a head's config.json: read in its place, and reported as the user's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes import eagle3_head, tiny_llama, wrap

from drafters.eagle3.checkpoint import save_eagle3
from drafters.errors import HeadLoadError
from specdec.errors import InvalidInputError
from specdec.options import LoadOptions


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head whose configuration names aux layers 1, 2, 3."""
    head: Any = eagle3_head(tiny_llama())
    return save_eagle3(head, tmp_path_factory.mktemp("head"))


def head_of(saved: Path, **overrides: Any) -> Any:
    return wrap(tiny_llama(), str(saved), head_overrides=overrides).head


def test_every_kind_of_value(saved: Path) -> None:
    head = head_of(saved, aux_layers=[0, 2, 3], feedback="post_norm", rms_norm_eps=1e-3)
    assert head.aux_layers == (0, 2, 3) and head.spec.feedback == "post_norm" and head.spec.rms_norm_eps == 1e-3
    sources = {field.name: field.source for field in head.checkpoint_report.fields}
    assert {name for name, source in sources.items() if "chosen by the user" in source} == {
        "aux_layers",
        "feedback",
        "rms_norm_eps",
    }


def test_nested_keys_and_removed_ones(saved: Path) -> None:
    theta = {"rope_theta": 5e5, "rope_parameters.rope_theta": 5e5}
    assert head_of(saved, **theta).spec.rope.theta == 5e5
    nested = {"eagle_aux_hidden_state_layer_ids": None, "eagle_config.eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    assert head_of(saved, **nested).aux_layers == (1, 2, 4)  # ids of layers whose output is read; 4 is their number
    config = json.loads((saved / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2], "the file stays as it is"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"rope_tetha": 1}, r"'rope_tetha' decides nothing \(is rope_theta meant\?\); known are aux_layers"),
        ({"aux_layers": "2,3"}, r"aux_layers='2,3': give a list of layer numbers"),
        ({"aux_layers": [1, 2, 9]}, "reads aux layers"),
        ({"feedback": "norm"}, "feedback='norm': allowed are pre_norm, post_norm"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be float"),
        ({"bias": True}, r"bias = True, but the checkpoint has no fc\.bias"),
        ({"rope_theta": 5e5}, "contradicts itself about rope_theta"),
    ],
)
def test_bad_ones(overrides: dict[str, Any], words: str, saved: Path) -> None:
    with pytest.raises((HeadLoadError, InvalidInputError), match=words):
        head_of(saved, **overrides)


@pytest.mark.slow
def test_not_for_other_heads() -> None:
    with pytest.raises(InvalidInputError, match="the head is loaded already; leave it out"):
        wrap(tiny_llama(), eagle3_head(tiny_llama()), head_overrides={"rope_theta": 1.0})
    with pytest.raises(InvalidInputError, match="an EAGLE head are read, but this is a multi-token-prediction module"):
        wrap("gsm-deepseek", "mtp", head_overrides={"rope_theta": 1.0}, tokenizer=None)


def test_words_of_a_command_line() -> None:
    words = ("rope_theta=500000", "aux_layers=[2, 16, 29]", "feedback=post_norm", "norm_output=null")
    expected = {"rope_theta": 500000, "aux_layers": [2, 16, 29], "feedback": "post_norm", "norm_output": None}
    assert LoadOptions.from_words({"head_overrides": words}).head_overrides == expected
    assert LoadOptions.from_words({"head_overrides": ";".join(words)}).head_overrides == expected
    assert LoadOptions.from_words({"head_overrides": ()}).head_overrides is None
    with pytest.raises(InvalidInputError, match="head_overrides='rope_theta': give KEY=VALUE"):
        LoadOptions.from_words({"head_overrides": ("rope_theta",)})
    with pytest.raises(InvalidInputError, match=r"head_overrides=3: allowed is a mapping"):
        LoadOptions(head_overrides=3)  # type: ignore[arg-type]
