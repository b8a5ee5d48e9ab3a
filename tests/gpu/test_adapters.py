"""Adapters of peft on a GPU: merged and live, from CUDA graphs and not, with the base's own head.

Needs peft beside the environment: `pip install --target DIR --no-deps peft accelerate psutil`, DIR on PYTHONPATH.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import SamplingParams, SpeculativeModel
from specdec.errors import ModelChangedError
from specdec.loading.names import builtin_path
from tests.agreement import agreement

peft: Any = pytest.importorskip("peft", reason="peft is not installed: pip install 'specdec-hf[peft]'")

NEW = 32
SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256}
CHATS = [
    [{"role": "user", "content": f"Tom has {n} apples and buys {n + 4} more. How many apples does he have now?"}]
    for n in (3, 5, 8)
]


def adapted(dtype: torch.dtype) -> Any:
    """gsm-llama with an adapter that changes its answers, on the GPU."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(builtin_path("gsm-llama"), dtype=dtype)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.25 * torch.randn(parameter.shape, generator=generator))
    return model.to("cuda")


def right(model: Any, ids: list[int]) -> list[int]:
    given = torch.tensor([ids], device="cuda")
    out = model.generate(input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, do_sample=False)
    said: list[int] = out[0, len(ids) :].tolist()
    return said


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("merge", [True, False], ids=["merged", "live"])
def test_a_folder_says_what_its_own_generate_says(merge: bool, cuda_graphs: bool, drafts: int, tmp_path: Path) -> None:
    """In bfloat16, where near ties may fall either way."""
    model = adapted(torch.bfloat16)
    for config in model.peft_config.values():
        config.base_model_name_or_path = str(builtin_path("gsm-llama"))
    model.save_pretrained(tmp_path)
    head = "auto" if drafts else None
    options = {"num_speculative_tokens": drafts, "cuda_graphs": cuda_graphs, "merge_adapter": merge, **SIZES}
    with SpeculativeModel.from_pretrained(str(tmp_path), head, dtype="bfloat16", **options) as wrapped:
        said = wrapped.generate(CHATS, SamplingParams(max_new_tokens=NEW))
        assert wrapped.graphs.startswith("on" if cuda_graphs else "off")
        assert wrapped.describe()["adapter"].endswith("merged" if merge else "live")
        assert not drafts or sum(r.accepted for c in said for r in c.stats.rounds) > 0
    assert agreement([c.token_ids for c in said], [right(model, c.prompt_token_ids) for c in said]) >= 0.8


def test_a_captured_adapter_is_watched() -> None:
    model = adapted(torch.bfloat16)
    options = {"num_speculative_tokens": 3, "cuda_graphs": True, **SIZES}
    with SpeculativeModel.from_pretrained(model, "auto", **options) as wrapped:
        before = [c.token_ids for c in wrapped.generate(CHATS, SamplingParams(max_new_tokens=NEW))]
        model.merge_adapter()
        with pytest.raises(ModelChangedError, match="adapters of the model were default when it was wrapped"):
            wrapped.generate(CHATS)
        model.unmerge_adapter()
        again = [c.token_ids for c in wrapped.generate(CHATS, SamplingParams(max_new_tokens=NEW))]
        assert agreement(again, before) >= 0.8  # subtracting what was added rounds once more
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.neg_()
        said = wrapped.generate(CHATS, SamplingParams(max_new_tokens=NEW))
        assert agreement([c.token_ids for c in said], [right(model, c.prompt_token_ids) for c in said]) >= 0.8
