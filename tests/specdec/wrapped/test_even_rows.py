"""Batch-invariant targets on a CPU: activations, operators that are refused, and log-probabilities bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fakes import VOCAB, eagle3_head, hf_greedy, random_prompts, tiny_llama, wrap
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig
from transformers.activations import ACT2FN

from attention.backends.reference import TorchBackend
from specdec import SamplingParams
from specdec.errors import InvalidInputError, UnsupportedAttentionError, UnsupportedModelError
from specdec.wrapped import even_rows, linears
from specdec.wrapped.even_rows import even_activations
from tests.specdec.execution.test_graphs import mla_mixture_pair
from tests.specdec.ops.test_packed_weight import DTYPES

ROWS = (1, 2, 3, 7, 31, 128, 257)


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def uneven(function: Any, width: int) -> list[int]:
    """The numbers of rows in which a row of so many numbers has other bits than alone."""
    x = torch.randn(257, width, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([function(row[None].clone()) for row in x])
    return [rows for rows in ROWS if not torch.equal(function(x[None, :rows]), alone[None, :rows])]


@pytest.mark.parametrize("width", [1536, 100, 1])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "quick_gelu"])
@torch.inference_mode()
def test_activations_round_a_number_alike_in_any_batch(name: str, width: int) -> None:
    ((_, _, even),) = even_activations(ACT2FN[name])
    x = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(even(x), ACT2FN[name](x))
    for number in (1, 5):
        with threads(number):
            assert not uneven(even, width), number


@torch.inference_mode()
def test_plain_ones_do_not() -> None:
    """What the test before would see, by width and by threads; the processor of CI may have less."""
    with threads(5):
        assert uneven(F.silu, 100) and uneven(F.silu, 1536)


def test_activations_with_weights_or_along_a_dimension_stay() -> None:
    assert not even_activations(nn.Sequential(nn.PReLU(), nn.Softmax(-1), nn.GLU(), nn.MultiheadAttention(4, 2)))


PROMPTS = random_prompts((5, 40, 1, 50, 9), seed=3)
OPTIONS: dict[str, Any] = {"kv_cache_tokens": 800, "backend": "batch_invariant"}


def tied(dtype: torch.dtype) -> Any:
    model = tiny_llama().to(dtype)
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def bits(dtype: torch.dtype, together: bool, drafts: int = 0, **options: Any) -> list[Any]:
    """Tokens and log-probabilities of every prompt, alone or beside the others."""
    model = tied(dtype)
    head: Any = eagle3_head(model).to(dtype) if drafts else None
    sizes = {"max_num_seqs": 5 if together else 1, "max_num_batched_tokens": 64, **OPTIONS, **options}
    params = SamplingParams(max_new_tokens=12, logprobs=3)
    with wrap(model, head, num_speculative_tokens=drafts, **sizes) as wrapped:
        return [(c.token_ids, c.logprobs) for c in wrapped.generate(PROMPTS, params)]


CASES = {
    "neighbours": {},
    "a draft": {"drafts": 1},
    "drafts": {"drafts": 5},
    "prompts in pieces": {"max_num_batched_tokens": 30, "drafts": 5},
    "prompts in other pieces": {"max_num_batched_tokens": 7},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.thorough
def test_log_probabilities_have_the_same_bits(dtype: torch.dtype) -> None:
    alone = bits(dtype, False)
    for name, options in CASES.items():
        assert bits(dtype, True, **options) == alone, name
    if dtype is torch.float32:
        assert [tokens for tokens, _ in alone] == [hf_tied(p) for p in PROMPTS]


@pytest.mark.slow
def test_mla_runs_with_keys_and_values_of_all_heads() -> None:
    """The latent form would multiply by a matrix of every head."""
    target, head = mla_mixture_pair(dense=3)
    found = []
    for rows, drafts in ((1, 0), (5, 3)):
        sizes = {"max_num_seqs": rows, "max_num_batched_tokens": 64, **OPTIONS}
        with wrap(target, head if drafts else None, num_speculative_tokens=drafts, **sizes) as wrapped:
            specs = [spec for runner in wrapped.runners for spec in runner.group.attention_specs]
            assert not any(spec.value_in_key for spec in specs) and {spec.num_kv_heads for spec in specs} == {4}
            done = wrapped.generate(PROMPTS, SamplingParams(max_new_tokens=12, logprobs=3))
            found.append([(c.token_ids, c.logprobs) for c in done])
    assert found[0] == found[1]
    for prompt, (tokens, _) in zip(PROMPTS, found[0], strict=True):
        ids = torch.tensor([prompt])
        own = target.generate(ids, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))
        assert own[0, len(prompt) :].tolist() == tokens


@pytest.mark.slow
def test_rows_longer_than_a_window_round_alike() -> None:
    """Their page lists begin behind the first page."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16}
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    target: Any = Gemma2Config(**sizes, **heads, eos_token_id=None, bos_token_id=None, pad_token_id=None)  # type: ignore[arg-type]
    target = AutoModelForCausalLM.from_config(target).eval()
    prompts, found = random_prompts((5, 200, 170), seed=4), []
    for rows, tokens in ((1, 512), (3, 40)):
        options = {**OPTIONS, "max_num_seqs": rows, "max_num_batched_tokens": tokens, "max_model_len": 256}
        with wrap(target, None, num_speculative_tokens=0, **options) as wrapped:
            done = wrapped.generate(prompts, SamplingParams(max_new_tokens=12, logprobs=0))
            found.append([(c.token_ids, c.logprobs) for c in done])
    assert found[0] == found[1]


@pytest.mark.slow
def test_rows_of_the_self_test_end_where_positions_do() -> None:
    """Positions of longrope are looked up in a table as long as requests; a row of 256 tokens was beyond it."""
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.1 * i for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_parameters": rope | factors}
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = LlamaConfig(**sizes, **heads, **ids, max_position_embeddings=128)  # type: ignore[arg-type]
    target: Any = AutoModelForCausalLM.from_config(config).eval()
    with wrap(target, None, num_speculative_tokens=0, **OPTIONS, max_model_len=60, max_num_batched_tokens=64) as model:
        assert len(model.generate(PROMPTS, SamplingParams(max_new_tokens=4))) == len(PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_and_routers_round_alike(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: without even functions in their blocks the model is refused."""
    target, head = mla_mixture_pair()
    parts: Any = target.to(dtype), head.to(dtype)
    found = []
    for rows, drafts, tokens in ((1, 0, 64), (5, 3, 64), (3, 2, 20)):
        sizes = {"max_num_seqs": rows, **OPTIONS, "max_num_batched_tokens": tokens}
        with wrap(parts[0], parts[1] if drafts else None, num_speculative_tokens=drafts, **sizes) as wrapped:
            done = wrapped.generate(PROMPTS, SamplingParams(max_new_tokens=12, logprobs=3))
            found.append([(c.token_ids, c.logprobs) for c in done])
    assert found[1:] == found[:1] * 2
    assert vars(parts[0].config)["_experts_implementation_internal"] == "grouped_mm"
    monkeypatch.setattr("specdec.wrapped.even_rows._run_evenly", unevenly)
    with pytest.raises(
        UnsupportedModelError, match=r"the model calls aten\.linear\.default, which may round a token by"
    ):
        wrap(parts[0], **OPTIONS)


def hf_tied(prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    found = tied(torch.float32).generate(ids, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("defect", ["one row", "attention"])
@pytest.mark.thorough
def test_planted_defects_are_seen_by_the_self_test_and_in_answers(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if defect == "one row":
        monkeypatch.setattr(linears, "EVEN_ROWS", 0)
        monkeypatch.setattr("specdec.ops.packed_weight.blocks_of", lambda laid_out, plain: None)  # so lm_head is plain
    else:
        monkeypatch.setattr(TorchBackend, "__init__", not_exact)
    with pytest.raises(UnsupportedModelError, match="not batch-invariant"):
        bits(torch.float32, True)
    for name in ("matmul_test", "invariance_test"):
        monkeypatch.setattr(f"specdec.loading.assembly.{name}", lambda target: None)
    assert bits(torch.float32, True) != bits(torch.float32, False)


def not_exact(
    backend: Any, device: torch.device, exact: bool = False, own: Callable[..., None] = TorchBackend.__init__
) -> None:
    own(backend, device)
    backend.name, backend.batch_invariant = "batch_invariant", exact


def unevenly(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


class Functional(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x)


class Transposed(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.weight.data.t().contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(x.new_zeros(1), x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


@pytest.mark.parametrize("functional", [False, True])
def test_functions_that_are_no_modules_run_evenly(functional: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model runs by even functions only where it needs to. Planted: without them it is refused."""
    made: list[Any] = []
    own = vars(even_rows)["_run_evenly"]

    def run(forward: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(forward)
        return own(forward, *args, **kwargs)

    monkeypatch.setattr("specdec.wrapped.even_rows._run_evenly", run)
    found = []
    for rows in (1, 5):
        model = tiny_llama()
        if functional:
            model.model.layers[1].mlp.act_fn = Functional()
        sizes = {**OPTIONS, "max_num_seqs": rows, "max_num_batched_tokens": 64}
        with wrap(model.eval(), None, num_speculative_tokens=0, **sizes) as wrapped:
            done = wrapped.generate(PROMPTS, SamplingParams(max_new_tokens=8, logprobs=0))
            found.append([(c.token_ids, c.logprobs) for c in done])
    assert found[0] == found[1] and bool(made) == functional
    if functional:
        monkeypatch.setattr("specdec.wrapped.even_rows._run_evenly", unevenly)
        with pytest.raises(UnsupportedModelError, match=r"the model calls aten.silu.default, which may round"):
            wrap(model, **OPTIONS)


class Called(nn.Module):
    """An activation that is a function with arguments, or of a number that is no token's."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.gate = name, nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        of_name = {
            "keyword": lambda: F.gelu(x, approximate="tanh"),
            "position": lambda: F.softplus(x, 2.0),
            "scalar": lambda: x * torch.sigmoid(self.gate),
        }
        return of_name[self.name]()


@pytest.mark.parametrize("name", ["keyword", "position", "scalar"])
def test_functions_keep_their_arguments(name: str) -> None:
    """As the model's own forward: without approximate="tanh" logits were off by 2e-4, which the self-test lets pass."""
    model, (prompt,) = tiny_llama(), random_prompts((9,))
    model.model.layers[1].mlp.act_fn = Called(name)
    with wrap(model.eval(), None, num_speculative_tokens=0, **OPTIONS) as wrapped:
        (done,) = wrapped.generate([prompt], SamplingParams(max_new_tokens=6, return_logits=True))
    with torch.no_grad():
        right = model(torch.tensor([prompt + done.token_ids[:-1]])).logits[0, len(prompt) - 1 :]
    torch.testing.assert_close(torch.as_tensor(done.logits), right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("functional", [False, True])
def test_recorded_steps_compute_activations(functional: bool) -> None:
    """A recording of even forms that it could not see held their results as constants. It passed its check where the
    next step of that shape was the same step again: of a request that goes on where another one ended."""
    model, (prompt,) = tiny_llama(), random_prompts((9,))
    if functional:
        model.model.layers[1].mlp.act_fn = Functional()
    params = SamplingParams(max_new_tokens=12, logprobs=0)
    with wrap(model.eval(), None, num_speculative_tokens=0, **OPTIONS) as wrapped:
        (right,) = wrapped.generate([prompt], params)
    with wrap(model, None, num_speculative_tokens=0, **OPTIONS) as wrapped:
        (first,) = wrapped.generate([prompt], SamplingParams(max_new_tokens=4))
        (rest,) = wrapped.generate([prompt + first.token_ids[:2]], replace(params, max_new_tokens=10))
        steps = wrapped.target.steps
        assert steps is not None and not steps.reason and any(each.is_checked for each in steps.shapes.values())
    assert rest.token_ids == right.token_ids[2:] and rest.logprobs == (right.logprobs or ())[2:]


def test_operators_that_are_not_even_are_refused_by_name() -> None:
    model: Any = tiny_llama()
    model.model.layers[1].mlp.up_proj = Transposed(model.model.layers[1].mlp.up_proj)
    model.eval()
    with pytest.raises(UnsupportedModelError, match=r"the model calls aten.addmm.default, which may round"):
        wrap(model, **OPTIONS)
    assert type(model.model.layers[0].mlp.up_proj.weight) is nn.Parameter
    assert type(model.model.layers[0].mlp.up_proj.weight.data) is torch.Tensor


REFUSED: dict[str, tuple[dict[str, Any], torch.dtype, type[Exception], str]] = {
    "float16": ({}, torch.float16, InvalidInputError, "packs linear layers, but oneDNN takes no torch.float16"),
    "float64": ({}, torch.float64, InvalidInputError, "packs linear layers, but oneDNN takes no torch.float64"),
    "plain": ({"cpu_linears": "plain"}, torch.float32, InvalidInputError, "but cpu_linears='plain' is given"),
    "8 bits": ({"kv_cache_dtype": "fp8"}, torch.float32, UnsupportedAttentionError, "no cache in 8 bits"),
    "graphs": ({"cuda_graphs": True}, torch.float32, InvalidInputError, "cuda_graphs=True needs a backend for a GPU"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_by_name(name: str) -> None:
    options, dtype, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        wrap(tiny_llama().to(dtype), **OPTIONS, **options)


def test_a_weight_that_a_head_reads_too_is_multiplied_by_where_it_is() -> None:
    model = tiny_llama()
    head = eagle3_head(model)
    head.register_buffer("target_lm_head", model.lm_head.weight.detach(), persistent=False)
    wrapped = wrap(model, head, **OPTIONS)
    assert wrapped.describe()["linears"] == "29 of 29 by oneDNN, 29 in its layout"
    assert list(wrapped.generate([PROMPTS[0]], max_new_tokens=12)[0].token_ids) == hf_greedy(PROMPTS[0], 12)
    wrapped.close()
    assert head.target_lm_head.data_ptr() == model.lm_head.weight.data_ptr()


def test_the_model_is_as_it_was_after_close() -> None:
    model = tiny_llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    act = model.model.layers[0].mlp.act_fn
    wrapped = wrap(model, **OPTIONS)
    wrapped.generate([PROMPTS[0]], max_new_tokens=3)
    assert "forward" not in vars(act)
    wrapped.close()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
