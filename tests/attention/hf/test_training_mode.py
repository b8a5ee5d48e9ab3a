"""Training mode of a wrapped model: what computes otherwise in it is switched during forwards of ours."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
from fakes import free_everywhere, hf_greedy, table_head, tiny_llama, wrap
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from attention.errors import SpecdecError
from attention.hf.training_mode import evaluating, trainable_modules
from specdec.requests.sampling import SamplingParams

PROMPT, FEW = [5, 9, 2, 40], SamplingParams(8)


def gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 64}
    dropped = {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropped, bos_token_id=0, eos_token_id=None)).eval()


def opt() -> Any:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "word_embed_proj_dim": 16, "num_attention_heads": 2}
    own = OPTConfig(**sizes, ffn_dim=16, vocab_size=64, max_position_embeddings=64, dropout=0.5, eos_token_id=None)
    return OPTForCausalLM(own).eval()


def otherwise(model: Any) -> set[str]:
    return {type(own.place()).__name__ for own in trainable_modules(model) if own.computes_otherwise}


def test_what_computes_otherwise() -> None:
    llama = tiny_llama().train()
    assert otherwise(llama) == set()
    llama.gradient_checkpointing_enable()
    assert "LlamaDecoderLayer" in otherwise(llama)
    for module in llama.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    assert "LlamaAttention" in otherwise(llama)
    assert otherwise(llama.eval()) == set()
    assert {"Dropout", "GPT2Attention"} <= otherwise(gpt2().train())
    assert "OPTDecoderLayer" in otherwise(opt().train())


class Noisy(nn.Module):
    """Code of nobody's that asks for its mode, in a function inside its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def noise() -> Any:
            return torch.randn_like(x) if self.training else 0.0

        return x + noise()


def test_classes_of_others_count() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Noisy(), nn.BatchNorm1d(4)).train()
    assert otherwise(model) == {"Noisy", "BatchNorm1d"}
    with evaluating(model, trainable_modules(model)):
        x = torch.randn(3, 4)
        assert torch.equal(model(x), model(x)) and model.training and not model[1].training
    assert model[1].training and model[2].training


def test_embeddings_that_are_to_require_gradients_do_not_in_a_forward_of_ours() -> None:
    """Gradient checkpointing's hook; another hook stays, and afterwards both are there."""
    model, seen = tiny_llama(), []
    embedding = model.get_input_embeddings()
    embedding.requires_grad_(False)
    model.enable_input_require_grads()
    embedding.register_forward_hook(lambda *_: seen.append(1))
    hooks = vars(embedding)["_forward_hooks"]
    with evaluating(model, trainable_modules(model)):
        assert not embedding(torch.tensor([1])).requires_grad and seen == [1]
    assert vars(embedding)["_forward_hooks"] is hooks and len(hooks) == 2 and embedding(torch.tensor([1])).requires_grad
    model.disable_input_require_grads()
    assert len(hooks) == 1 and not embedding(torch.tensor([1])).requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt2, opt, tiny_llama])
@pytest.mark.cases(1)
def test_answers_are_those_of_evaluation_mode(make: Any) -> None:
    """Also with gradient checkpointing; the model is in training mode afterwards, and its dropout works."""
    model = make()
    wrapped = wrap(model, max_model_len=48)
    (right,) = wrapped.generate([PROMPT], FEW)
    own = wrapped.own_logits(PROMPT)
    model.gradient_checkpointing_enable()
    model.train()
    (found,) = wrapped.generate([PROMPT], FEW)
    assert found.token_ids == right.token_ids and torch.equal(wrapped.own_logits(PROMPT), own)
    assert all(module.training for module in model.modules())
    ids = torch.tensor([PROMPT])
    if make is not tiny_llama:
        assert not torch.equal(model(ids).logits, model(ids).logits)
    model.eval()
    assert wrapped.generate([PROMPT], FEW)[0].token_ids == right.token_ids and free_everywhere(wrapped)


def test_steps_of_an_optimizer_between_generations() -> None:
    model = tiny_llama()
    wrapped = wrap(model, table_head(model), num_speculative_tokens=3)
    optimizer = torch.optim.SGD(model.requires_grad_(True).parameters(), lr=0.5)
    for _ in range(3):
        model.train().to(torch.float32)
        model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        (found,) = wrapped.generate([PROMPT], FEW)
        own = model.eval().generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)
        assert found.token_ids == own[0, len(PROMPT) :].tolist()
    assert found.token_ids != hf_greedy(PROMPT, 8)


@pytest.mark.slow
def test_a_training_forward_on_another_thread_keeps_its_dropout() -> None:
    """And rounds between its forwards have none."""
    model = gpt2()
    wrapped = wrap(model, max_model_len=48)
    right = wrapped.generate([PROMPT], FEW)[0].token_ids
    model.train()
    ids, seen, ended = torch.tensor([PROMPT]), list[torch.Tensor](), threading.Event()

    def train() -> None:
        while not ended.is_set() or len(seen) < 4:
            seen.append(model(ids).logits.detach())

    trainer = threading.Thread(target=train)
    trainer.start()
    found = [wrapped.generate([PROMPT], FEW)[0].token_ids for _ in range(6)]
    ended.set()
    trainer.join()
    assert found == [right] * 6
    assert not any(torch.equal(one, other) for one, other in pairwise(seen))


def test_a_change_of_mode_during_a_forward_is_seen() -> None:
    """`eval()` stays; after `train()` nobody can use the forward: the caller is told, and calls again."""
    model = gpt2().train()
    modules = trainable_modules(model)
    with evaluating(model, modules):
        model.eval()
    assert not any(module.training for module in model.modules())
    with pytest.raises(SpecdecError, match="training mode during a round"), evaluating(model, modules):
        model.train()
    assert all(module.training for module in model.modules())
    model.eval()
    wrapped = wrap(model, max_model_len=48)
    right, calls = wrapped.generate([PROMPT], FEW)[0].token_ids, [0]

    def called(*given: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            model.train()

    model.transformer.h[1].mlp.act.register_forward_pre_hook(called)
    with pytest.raises(SpecdecError, match="training mode during a round"):
        wrapped.generate([PROMPT], FEW)
    assert wrapped.generate([PROMPT], FEW)[0].token_ids == right and free_everywhere(wrapped)
