"""What is divided and what stays whole, and what is refused before any process is started."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes import TINY, tiny_llama
from safetensors.torch import save_file
from transformers import (
    DeepseekV3Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
)

from specdec import SpeculativeModel
from specdec.errors import InvalidInputError, ModelLoadError, SpecdecError, UnsupportedModelError
from specdec.extensions.parallel import loading as parallel
from specdec.extensions.parallel import workers
from specdec.extensions.parallel.collectives import leave_group
from specdec.extensions.parallel.loading import check_not_quantised, check_parallel
from specdec.extensions.parallel.plan import ShardingPlan, plan_for
from specdec.extensions.parallel.ranks import HeldInterrupt
from specdec.extensions.parallel.shares import gather_ranks, sum_ranks
from specdec.extensions.parallel.symmetric import join_group
from specdec.loading.names import resolve
from specdec.loading.targets import auto_class
from specdec.options import LoadOptions

LAYER = "model.layers.*"
TWO = LoadOptions(tensor_parallel_size=2, device="cpu")


def plan(kind: type[PreTrainedConfig], size: int = 2, **changes: Any) -> ShardingPlan:
    config = kind(**{**TINY, **changes})
    return plan_for(config, auto_class(config), size)


def divided(found: ShardingPlan) -> dict[str, str]:
    return {name.removeprefix(f"{LAYER}."): style for name, style in found.styles.items() if style != "replicate"}


def test_a_llama_is_divided_but_for_what_heads_share() -> None:
    found = plan(LlamaConfig)
    assert divided(found) == {
        **{f"self_attn.{part}_proj": "colwise" for part in "qkv"},
        "self_attn.o_proj": "rowwise",
        "mlp.gate_proj": "colwise",
        "mlp.up_proj": "colwise",
        "mlp.down_proj": "rowwise",
    }
    assert found.kv_cut == set() and found.style_of("lm_head") == found.style_of("model.embed_tokens") == "replicate"
    assert found.style_of("model.layers.1.mlp.up_proj") == "colwise"


def test_fewer_kv_heads_than_ranks_are_read_whole() -> None:
    found = plan(LlamaConfig, 4)
    assert found.kv_cut == {f"{LAYER}.self_attn"}
    assert "self_attn.k_proj" not in divided(found) and divided(found)["self_attn.q_proj"] == "colwise"


def test_gaps_of_transformers_plans() -> None:
    sizes = {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4}
    sizes |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
    latent = divided(plan(DeepseekV3Config, **{**sizes, "num_key_value_heads": 4, "q_lora_rank": 12}))
    assert latent["self_attn.q_b_proj"] == latent["self_attn.kv_b_proj"] == "colwise"
    assert latent["self_attn.o_proj"] == "rowwise" and "self_attn.q_a_proj" not in latent
    assert latent["mlp.experts"] == "moe_tp_experts"
    oss = divided(plan(GptOssConfig, num_local_experts=4, num_experts_per_tok=2))
    assert oss["self_attn.sinks"] == "colwise" and oss["mlp.experts.gate_up_proj_bias"] == "rowwise"
    assert "mlp.experts.down_proj_bias" not in oss


def test_attention_that_is_gathered_and_uneven_widths_stay_whole() -> None:
    assert not any("self_attn" in name for name in divided(plan(Olmo2Config)))
    uneven = divided(plan(LlamaConfig, intermediate_size=47))
    assert not any("mlp" in name for name in uneven) and "self_attn.o_proj" in uneven


def test_a_fork_of_a_process_with_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "is_fork", lambda: True)
    with pytest.raises(InvalidInputError, match=r"this process is a fork .*multiprocessing: 'spawn'"):
        check_parallel("gsm-llama", None, TWO)


def test_what_cannot_be_divided() -> None:
    with pytest.raises(InvalidInputError, match="4 attention heads, which 3 ranks cannot divide"):
        plan(LlamaConfig, 3)
    with pytest.raises(InvalidInputError, match="4 key-value heads"):
        plan(LlamaConfig, 6, hidden_size=48, num_attention_heads=12, num_key_value_heads=4)
    with pytest.raises(UnsupportedModelError, match="no tensor-parallel plan"):
        plan(GPT2Config, n_embd=32, n_layer=2, n_head=4)
    with pytest.raises(UnsupportedModelError, match=r"tensor_parallel_size=2: .* quantised \(fp8\)"):
        check_not_quantised("fp8", 2)
    check_not_quantised(None, 2)


def test_targets_are_refused_before_any_process_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their configurations say enough; a thousand processes on a CPU would take the machine with them."""

    def started(rank: int) -> None:
        raise AssertionError(f"a process for rank {rank}")

    monkeypatch.setattr(workers, "start", started)
    with pytest.raises(InvalidInputError, match="4 attention heads, which 1000 ranks cannot divide"):
        SpeculativeModel.from_pretrained("gsm-llama", tensor_parallel_size=1000, device="cpu")
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(resolve("gsm-llama"))}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(InvalidInputError, match=r"the target is the adapter .*merge_and_unload"):
        SpeculativeModel.from_pretrained(tmp_path, tensor_parallel_size=2, device="cpu")
    quantised = tmp_path / "quantised"
    stored: dict[str, Any] = {**TINY, "quantization_config": {"quant_method": "fp8"}}
    LlamaConfig(**stored).save_pretrained(quantised)
    save_file({"model.norm.weight": torch.ones(32)}, quantised / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"quantised \(fp8\)"):
        SpeculativeModel.from_pretrained(quantised, tensor_parallel_size=2, device="cpu")


def test_ranks_meet_after_a_group_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch numbers the groups that it begins, and the other rank's process begins its first."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(RuntimeError, match="no-such-interface"):
        join_group(0, 1, torch.device("cpu"), f"{tmp_path}/first")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    join_group(0, 1, torch.device("cpu"), f"{tmp_path}/second")
    try:
        assert dist.group.WORLD is not None and dist.group.WORLD.group_name == "0"
    finally:
        leave_group()


def test_a_fused_gate_is_divided_in_both_halves_and_fused_attention_stays_whole() -> None:
    found = divided(plan(Phi3Config))
    assert found == {"mlp.gate_up_proj": "packed_colwise", "mlp.down_proj": "rowwise"}


@pytest.mark.parametrize(
    ("target", "draft", "options", "error", "words"),
    [
        (tiny_llama, None, TWO, InvalidInputError, "target=.* is an object of this process"),
        ("gsm-llama", torch.nn.Linear(2, 2), TWO, InvalidInputError, "draft=.* is an object"),
        ("gsm-llama", None, replace(TWO, adapter="some/adapter"), InvalidInputError, "merge_and_unload"),
        ("gsm-llama", None, replace(TWO, device="cuda:1"), InvalidInputError, "rank r runs on cuda:r"),
        ("gsm-llama", None, replace(TWO, device=1), InvalidInputError, "rank r runs on cuda:r"),
        ("gsm-llama", None, replace(TWO, device="mps"), InvalidInputError, "rank r runs on cuda:r"),
        (
            *("gsm-llama", None, replace(TWO, tensor_parallel_size=3, backend="batch_invariant")),
            *(InvalidInputError, "give tensor_parallel_size=2"),
        ),
    ],
)
def test_options_that_are_refused(
    target: Any, draft: Any, options: LoadOptions, error: type[SpecdecError], words: str
) -> None:
    with pytest.raises(error, match=words):
        check_parallel(target, draft, options)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_parallel("gsm-llama", "auto", TWO) == torch.device("cpu")
    monkeypatch.setattr(parallel, "is_accelerate_available", lambda: False)
    with pytest.raises(ModelLoadError, match=r"needs the package accelerate: pip install 'specdec-hf\[parallel\]'"):
        check_parallel("gsm-llama", "auto", TWO)
    monkeypatch.setattr(parallel, "transformers_version", "5.17.0")
    with pytest.raises(ModelLoadError, match=r"needs transformers >= 5\.23.*this is 5\.17\.0"):
        check_parallel("gsm-llama", "auto", TWO)


def test_a_process_group_of_the_user_is_refused(tmp_path: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        with pytest.raises(InvalidInputError, match="process group of its own"):
            check_parallel("gsm-llama", "auto", TWO)
    finally:
        dist.destroy_process_group()


def test_operators_of_a_rank_alone_say_so_and_have_shapes_for_the_compiler() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with pytest.raises(SpecdecError, match="on one rank alone"):
        sum_ranks(torch.ones(2, 3))
    with FakeTensorMode():
        x = torch.empty(5, 4)
        assert sum_ranks(x).shape == (5, 4) and gather_ranks(x, 3).shape == (5, 12)


def test_an_interrupt_comes_after_what_all_ranks_do(interruptible: None) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), HeldInterrupt():
        signal.raise_signal(signal.SIGINT)
        done.append("all of it")
    assert done == ["all of it"]
    with pytest.raises(KeyboardInterrupt), HeldInterrupt():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("more")
    assert done == ["all of it"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="no alarms here")
def test_an_alarm_comes_after_what_all_ranks_do() -> None:
    def late(number: int, frame: object) -> None:
        raise TimeoutError(number)

    done, before = [], signal.signal(signal.SIGALRM, late)
    try:
        with pytest.raises(TimeoutError), HeldInterrupt(), HeldInterrupt():
            signal.raise_signal(signal.SIGALRM)
            done.append("all of it")
        assert done == ["all of it"] and signal.getsignal(signal.SIGALRM) is late
        with pytest.raises(TimeoutError), HeldInterrupt():
            signal.raise_signal(signal.SIGALRM)
            signal.raise_signal(signal.SIGALRM)
            done.append("more")
        assert done == ["all of it"] and signal.getsignal(signal.SIGALRM) is late
    finally:
        signal.signal(signal.SIGALRM, before)
