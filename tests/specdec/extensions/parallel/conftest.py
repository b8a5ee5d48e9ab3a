"""One pair of processes for many tests: models come and go, the processes stay."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import ClosedModelError
from tests.rank_server import forked_ranks, real_ranks

__all__ = ["forked_ranks", "real_ranks"]


@pytest.fixture(scope="session", autouse=True)
def packages(forked_ranks: None) -> None:
    """accelerate, which transformers looks for when it is imported."""
    pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def two_ranks(every_self_test: None, packages: None) -> Iterator[Any]:
    """The other rank's process stays between models."""
    from specdec.extensions.parallel.loading import start_ranks

    link = start_ranks(2, torch.device("cpu"))
    yield link
    link.close()


@pytest.fixture(scope="module")
def keep() -> Iterator[Callable[[str, Callable[[], Sequence[Any]]], Sequence[Any]]]:
    """(name, load) -> models that the tests of a module share, loaded anew where one is closed or has lost a rank.

    Idle workers steal tests from the end of others' lists: any test of the module may have run before.
    """
    made: dict[str, Sequence[Any]] = {}

    def kept(name: str, load: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        if name not in made or any(map(is_gone, made[name])):
            for model in made.pop(name, ()):
                model.close()
            made[name] = load()
        return made[name]

    yield kept
    for models in made.values():
        for model in models:
            model.close()


def is_gone(model: Any) -> bool:
    """Whether a model is closed, or a process of its ranks is lost."""
    try:
        return model.ranks is not None and bool(model.ranks.channel.workers.is_lost)
    except ClosedModelError:
        return True


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny random models by name, saved."""
    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> Path:
        path = root / name
        if not path.exists():
            tiny(name).save_pretrained(path)
        return path

    return folder


def tiny(name: str) -> Any:
    """A random model whose every part shows in its logits."""
    from fakes import TINY, VOCAB, enlarge
    from transformers import DeepseekV3Config, GptOssConfig, LlamaConfig, Qwen3MoeConfig
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    sizes: dict[str, Any] = {**TINY, "num_hidden_layers": 2, "tie_word_embeddings": False}
    latent = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    latent |= {"n_group": 1, "topk_group": 1}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config: Any = {
        "one-kv-head": lambda: LlamaConfig(**{**sizes, "num_key_value_heads": 1, "attention_bias": True}),
        "one-layer": lambda: LlamaConfig(
            **{**sizes, "num_key_value_heads": 1, "attention_bias": True, "num_hidden_layers": 1}
        ),
        "deepseek-v3": lambda: DeepseekV3Config(
            **{**sizes, "num_key_value_heads": 4, "head_dim": 8},
            **{**experts, **latent},
            n_routed_experts=4,
            n_shared_experts=1,
            first_k_dense_replace=1,
        ),
        "two-kv-heads": lambda: LlamaConfig(**sizes),
        "qwen3-moe": lambda: Qwen3MoeConfig(**sizes, **experts, num_experts=4),
        "gpt-oss": lambda: GptOssConfig(
            **{**sizes, "intermediate_size": 16}, num_experts_per_tok=2, num_local_experts=4, sliding_window=12
        ),
        "odd-vocabulary": lambda: LlamaConfig(**{**sizes, "vocab_size": VOCAB + 1, "intermediate_size": 47}),
    }[name]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)  # for what `enlarge` adds to: gpt-oss draws its sinks
        model = AutoModelForCausalLM.from_config(config)
    enlarge(model, seed=3)
    return model.eval()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt: a shell starts what runs in its background with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
