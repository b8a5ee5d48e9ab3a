"""DSpark stages that a vendor ships inside a target's checkpoint: recognised by name, and never read as modules."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.checkpoints.layouts import Layout, detect_by_config, module_names
from drafters.families import FAMILIES, family_of
from drafters.mtp.checkpoint import load_mtp
from drafters.mtp.spec import mtp_target
from specdec.errors import HeadLoadError
from specdec.loading.checkpoint import _check_no_head

V4: dict[str, Any] = {"dspark_block_size": 5, "dspark_target_layer_ids": [1, 2], "dspark_markov_rank": 4}
"""Keys of DeepSeek-V4-Flash-0731; `num_nextn_predict_layers` counts its stages there."""
INSIDE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "DeepSeek V4": (V4, ("mtp.0.e_proj.weight", "mtp.1.norm.weight", "mtp.2.markov_head.markov_w1.weight")),
    "DeepSeek V4, names of a module": (V4, ("mtp.0.eh_proj.weight", "mtp.fc.weight", "mtp.layers.0.norm.weight")),
    "Mistral Large 4": ({}, ("mtp_dspark.layers.0.norm.weight", "mtp_dspark.markov_head.markov_w1.weight")),
}


@pytest.mark.parametrize("kind", INSIDE)
@pytest.mark.parametrize("num_modules", [0, 1, 3])
def test_they_are_named_and_not_read(
    kind: str, num_modules: int, tmp_path: Path, tiny_case: Callable[..., Any]
) -> None:
    """Whatever num_nextn_predict_layers counts."""
    case, (keys, names) = tiny_case("mimo"), INSIDE[kind]
    folder = case.write(tmp_path, {**dict.fromkeys(case.tensors), **{name: torch.zeros(2, 2) for name in names}})
    config = json.loads((folder / "config.json").read_text()) | keys | {"num_nextn_predict_layers": num_modules}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(HeadLoadError, match=f"DSpark inside a target's checkpoint .*not supported.*{min(names)}"):
        load_mtp(folder, mtp_target(case.model), torch.float32, "cpu")
    assert family_of(folder) is not FAMILIES["mtp"]
    with pytest.raises(HeadLoadError, match="layout is DSpark inside a target's checkpoint"):
        family_of(folder).code().describe_head(str(folder), {})
    _check_no_head(folder, config, {path.name for path in folder.iterdir()})  # as a target it is loaded


def test_transformers_reports_none_of_their_tensors() -> None:
    """Of "mtp_dspark" transformers' own class knows; of another class the loader of targets does."""
    patterns = module_names(4, 0)
    for _, names in INSIDE.values():
        assert all(any(re.search(pattern, name) for pattern in patterns) for name in names)


@pytest.mark.parametrize("key", V4)
def test_one_key_is_enough(key: str) -> None:
    config = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
    assert detect_by_config(config) is None
    assert detect_by_config(config | {key: V4[key]}) is Layout.MTP_DSPARK
