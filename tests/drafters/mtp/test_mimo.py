"""MiMo as it is published: Python files of its own beside the weights, in which the module's tensors are parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import LetterTokenizer

from drafters.mtp.head import MtpHead
from specdec import SpeculativeModel
from specdec.errors import ModelLoadError
from specdec.requests.sampling import SamplingParams

AUTO = {
    "AutoConfig": "configuration_mimo.MiMoConfig",
    "AutoModel": "modeling_mimo.MiMoModel",
    "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
}
CONFIGURATION = """
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"

    def __init__(self, *args, num_nextn_predict_layers=0, **kwargs):
        self.num_nextn_predict_layers = num_nextn_predict_layers
        super().__init__(*args, **kwargs)
"""
MODELING = """
from torch import nn
from transformers.models.qwen2 import modeling_qwen2 as qwen2

from .configuration_mimo import MiMoConfig


class MiMoMTPLayers(nn.Module):
    def __init__(self, config):
        super().__init__()
        for name in ("input", "post_attention", "token", "hidden", "final"):
            setattr(self, f"{name}_layernorm", qwen2.Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        self.input_proj = nn.Linear(config.hidden_size * 2, config.hidden_size, bias=False)
        self.self_attn = qwen2.Qwen2Attention(config, layer_idx=0)
        self.mlp = qwen2.Qwen2MLP(config)


class MiMoModel(qwen2.Qwen2Model):
    config_class = MiMoConfig

    def __init__(self, config):
        super().__init__(config)
        self.mtp_layers = nn.ModuleList([MiMoMTPLayers(config) for _ in range(config.num_nextn_predict_layers)])


class MiMoForCausalLM(qwen2.Qwen2ForCausalLM):
    config_class = MiMoConfig

    def __init__(self, config):
        super(qwen2.Qwen2ForCausalLM, self).__init__(config)
        self.model = MiMoModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
"""
"""With the classes and parameters of XiaomiMiMo/MiMo-7B-RL's own files."""


@pytest.fixture
def folder(tiny_case: Callable[..., Any], tmp_path: Path) -> Path:
    settings = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "auto_map": AUTO}
    settings |= {"num_nextn_predict_layers": 1, "use_sliding_window": False, "sliding_window": 32768}
    tiny_case("mimo", context=0.02).write(tmp_path, settings=settings)
    (tmp_path / "configuration_mimo.py").write_text(CONFIGURATION)
    (tmp_path / "modeling_mimo.py").write_text(MODELING)
    return tmp_path


@pytest.mark.slow
@torch.inference_mode()
def test_its_module_drafts(folder: Path) -> None:
    with SpeculativeModel.from_pretrained(
        folder, "mtp", tokenizer=LetterTokenizer(), trust_remote_code=True, num_speculative_tokens=2, max_num_seqs=2
    ) as wrapped:
        model: Any = wrapped.hf_model
        assert type(model).__name__ == "MiMoForCausalLM" and isinstance(wrapped.head, MtpHead)
        assert wrapped.head.spec.hidden_first
        own = model.model.mtp_layers[0].input_proj.weight
        assert torch.equal(wrapped.head.eh_proj.weight, own), "the module's tensors, read from the files again"
        (completion,) = wrapped.generate([[3, 1, 4]], SamplingParams(max_new_tokens=10))
        expected = model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=10, do_sample=False)[0, 3:]
        assert completion.token_ids == expected.tolist() and len(completion.stats.rounds) > 0


def test_without_leave_to_run_its_files_it_is_refused(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="trust_remote_code"):
        SpeculativeModel.from_pretrained(folder, "mtp", tokenizer=LetterTokenizer())
