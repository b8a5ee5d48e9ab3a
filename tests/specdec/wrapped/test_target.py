"""Families that come out right through the paged attention, refused families and why, and the aux hidden states."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from fakes import TINY, Operators, enlarge, random_prompts, table_head, tiny_llama, wrap
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from attention.backends.reference import TorchBackend
from attention.batch.host import rows_batch
from attention.batch.metadata import single_batch_arena, stage
from attention.hf.probe import probe
from drafters.base import FINAL_NORM
from specdec.errors import CacheTooSmallError, InvalidInputError, InvariantError, UnsupportedModelError
from specdec.requests.sampling import SamplingParams
from specdec.selftest.eager_reference import DummyRows, likely_cause
from specdec.wrapped.alterations import Alterations
from specdec.wrapped.probing import probe_target
from specdec.wrapped.target import AuxStateRecorder

pytestmark = pytest.mark.usefixtures("every_self_test")

MIXED = ["sliding_attention", "full_attention"] * 2
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
RIGHT: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"layer_types": MIXED, "sliding_window": 7, "use_sliding_window": True},
    "qwen3": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {
        "layer_types": MIXED,
        "sliding_window": 6,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {"layer_types": MIXED, "sliding_window": 6, "query_pre_attn_scalar": 20},
    "gpt_oss": {"layer_types": MIXED, "sliding_window": 6, "rope_parameters": {"rope_type": "default"}, **MOE},
    "mixtral": MOE,
    "phi3": {},
    "olmo2": {},
    "llama4_text": {"attention_chunk_size": 8, "num_local_experts": 2},
}
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "minimax": ({**HYBRID, **MOE}, "4 layers, but 2 of them"),
    "recurrent_gemma": ({"block_types": ["recurrent", "attention"] * 2, "lru_width": 32}, "keeps state"),
    "rwkv": ({"attention_hidden_size": 32}, "keeps state"),
    "falcon": ({"head_dim": None, "alibi": False}, "does not call transformers' attention interface"),
    "bloom": ({}, "4 layers, but 0 of them"),
    "mpt": ({}, "does not call transformers' attention interface"),
    "hrm_text": ({}, "the model repeats its layers: HrmTextAttention runs again"),
    "diffllama": ({}, "calls attention twice"),
    "doge": ({}, "builds its own attention mask"),
}

if Version(transformers.__version__) >= Version("5.24"):  # its modeling file calls the attention interface since
    RIGHT["gptj"] = {"rotary_dim": 4}
else:
    REFUSED["gptj"] = ({"rotary_dim": 4}, "4 layers, but 0 of them")


def build(kind: str, options: dict[str, Any]) -> PreTrainedModel:
    sizes = {name: value for name, value in {**TINY, **options}.items() if value is not None or name != "head_dim"}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).eval()
    enlarge(model)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param(n, marks=[pytest.mark.long] * (n in ("qwen3", "mistral", "olmo2"))) for n in RIGHT],
)
@pytest.mark.cases(1)
def test_a_supported_family_comes_out_right(kind: str) -> None:
    model = build(kind, RIGHT[kind])
    wrapped = wrap(model, max_model_len=100)
    assert wrapped.self_test_error < 1e-5
    model.set_attn_implementation("eager")  # transformers 5.17 gives gemma2 sdpa by default, which drops its softcap
    prompt = random_prompts([19])[0]
    ids = torch.tensor([prompt])
    right = model.generate(ids, max_new_tokens=10, do_sample=False, attention_mask=torch.ones_like(ids))
    assert prompt + wrapped.generate(prompt, SamplingParams(max_new_tokens=10))[0].token_ids == right[0].tolist()


@pytest.mark.parametrize("kind", REFUSED)
def test_a_family_that_would_come_out_wrong_is_refused_with_the_reason(kind: str) -> None:
    options, reason = REFUSED[kind]
    model = build(kind, options)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        probe_target(model)
    assert type(model).__name__ in str(caught.value)


CAUSES: dict[str, tuple[dict[str, Any], str]] = {
    "bart": ({"d_model": 32, "decoder_layers": 4, "decoder_attention_heads": 4}, "does not read position_ids"),
    "roberta": ({"is_decoder": True, "pad_token_id": 1}, "its own positions of a text do not count from 0"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CAUSES)
@pytest.mark.cases(1)
def test_a_family_with_positions_of_its_own_is_refused_for_these(kind: str) -> None:
    options, reason = CAUSES[kind]
    with pytest.raises(UnsupportedModelError, match=f"comes out wrong through the paged attention .*{reason}"):
        wrap(build(kind, options), max_model_len=60)


def test_a_right_model_has_no_cause() -> None:
    assert likely_cause(tiny_llama()) == ""


def test_a_text_model_that_fails_by_itself_is_not_said_to_need_more_than_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()

    def forward(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("a fault of its own")

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", forward)
    with pytest.raises(UnsupportedModelError, match="own forward fails on text: on four tokens it raises ValueError"):
        probe_target(model)


def test_layers_of_an_unknown_type_are_refused_by_their_type() -> None:
    model = tiny_llama()
    model.config.layer_types = ["full_attention", "dilated_attention"] * 2
    with pytest.raises(
        UnsupportedModelError, match="LlamaForCausalLM has layers of type dilated_attention; full, slid"
    ):
        probe_target(model)


def plant(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    """Let `wrong(output, metadata)` spoil what the backend gives."""
    real = TorchBackend.run

    def run(self: Any, plan: Any, key: Any, query: Any, k: Any, v: Any, kv: Any, metadata: Any, *more: Any) -> Any:
        return wrong(real(self, plan, key, query, k, v, kv, metadata, *more), metadata)

    monkeypatch.setattr(TorchBackend, "run", run)


def only_verification(output: torch.Tensor, metadata: Any) -> torch.Tensor:
    return output if metadata.host.num_computed_tokens.sum() == 0 else output.flip(0)


def only_second_row(output: torch.Tensor, metadata: Any) -> torch.Tensor:
    start, stop = metadata.host.query_start_loc[1:3].tolist()
    output[start:stop] = 0
    return output


def everything(output: torch.Tensor, metadata: Any) -> torch.Tensor:
    return output * 0.9


@pytest.mark.parametrize("wrong", [only_verification, only_second_row, everything])
def test_the_self_test_sees(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is wrong in a minority of the tokens: in one row only, or in the verification only."""
    plant(monkeypatch, wrong)
    with pytest.raises(UnsupportedModelError, match="comes out wrong through the paged attention"):
        wrap(tiny_llama(context=0.35))


def test_a_cache_too_small_for_the_self_test_says_so() -> None:
    with pytest.raises(CacheTooSmallError, match=r"the KV cache has 3 pages of 4 tokens; at least 18 are needed"):
        wrap(tiny_llama(), kv_cache_tokens=12)


@pytest.mark.parametrize("aux_layers", [(0,), (1, 2, 3), (2, 4), (FINAL_NORM,)])
def test_aux_hidden_states_are_those_of_the_model(aux_layers: tuple[int, ...]) -> None:
    """Aux layer b is the residual stream after b layers; the last one before the final norm, FINAL_NORM after it."""
    model = tiny_llama(context=0.35)
    ids = torch.tensor(random_prompts([9]))
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
        residual = [*states[:4], model.model.layers[3](states[3], position_embeddings=rope(model, states[3]))]
    recorder = AuxStateRecorder(probe_target(model), aux_layers, 16, Alterations(model))
    with torch.no_grad(), recorder.recording(9):
        model(ids)
    with torch.no_grad():
        model(ids.flip(1))
    right = torch.cat([states[4][0] if layer == FINAL_NORM else residual[layer][0] for layer in aux_layers], -1)
    assert torch.allclose(recorder.buffer[:9], right, atol=1e-5)
    if 4 in aux_layers:
        assert not torch.allclose(residual[4], states[4], atol=1e-2), "transformers' last state is after the norm"


@pytest.mark.slow
@pytest.mark.parametrize("aux_layers", [pytest.param((2,), marks=pytest.mark.long), (3, 1, FINAL_NORM)])
@pytest.mark.thorough
def test_a_compiled_forward_has_its_aux_hidden_states_copied_in_one_launch(aux_layers: tuple[int, ...]) -> None:
    """One token more than counts, as a batch of one has; all in their places, nothing after the last row."""
    model, ids = tiny_llama(context=0.35), torch.tensor(random_prompts([9]))
    recorder, torch_compiled = recorder_of(model, aux_layers, 16), torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        with recorder.recording(8):
            model(ids)
        eager = recorder.buffer.clone()
        recorder.buffer.fill_(7.0)
        with ExitStack() as stack:
            stack.enter_context(recorder.recording(8))
            torch_compiled(input_ids=ids, use_cache=False)
            assert bool((recorder.buffer == 7.0).all()), "nothing is copied inside compiled code"
            with Operators() as seen:
                stack.close()
    assert dict(seen.counts) == {"cat": 1}
    assert torch.allclose(recorder.buffer[:8], eager[:8], atol=1e-6) and bool((recorder.buffer[8:] == 7.0).all())


@pytest.mark.slow
@pytest.mark.thorough
def test_a_compiled_forward_of_too_few_tokens_is_noticed() -> None:
    model, ids = tiny_llama(), torch.tensor(random_prompts([9]))
    recorder, torch_compiled = recorder_of(model, (1, 2), 16), torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(InvariantError, match="of 5 tokens in a forward of 9"), recorder.recording(9):
        torch_compiled(input_ids=ids[:, :5], use_cache=False)


def recorder_of(model: Any, aux_layers: tuple[int, ...], max_tokens: int) -> AuxStateRecorder:
    return AuxStateRecorder(probe_target(model), aux_layers, max_tokens, Alterations(model))


def test_more_tokens_than_the_buffer_of_aux_hidden_states_holds_are_refused() -> None:
    """They were dropped, and the head drafted from the states of an earlier forward."""
    model = tiny_llama()
    recorder, ids = recorder_of(model, (1, 2), 8), torch.tensor(random_prompts([9]))
    recorder.buffer.fill_(7.0)
    with pytest.raises(InvariantError, match=r"9 tokens .* in one forward; .* holds 8"), recorder.recording(9):
        model(ids)
    with torch.no_grad(), recorder.recording(9, keep=False):
        model(ids)
    assert bool((recorder.buffer == 7.0).all()), "what nobody reads is not kept"
    with torch.no_grad(), recorder.recording(8):
        model(ids[:, :8])
    assert not bool((recorder.buffer == 7.0).any())


def test_a_forward_that_passes_no_aux_hidden_states_is_noticed() -> None:
    model = tiny_llama()
    recorder, ids = recorder_of(model, (1, 2), 16), torch.tensor(random_prompts([9]))
    x = torch.zeros(1, 9, 32)
    with torch.no_grad():
        with pytest.raises(InvariantError, match=r"passing aux hidden states \[1\]"), recorder.recording(9):
            model.model.layers[1](x, position_embeddings=rope(model, x))
        with pytest.raises(InvariantError, match="of 5 tokens in a forward of 9"), recorder.recording(9):
            model(ids[:, :5])
        with recorder.recording(9):
            model(ids)


def test_a_batch_longer_than_the_buffer_is_refused_by_the_target() -> None:
    wrapped = wrap(tiny_llama(), table_head(tiny_llama()), num_speculative_tokens=2)
    lens = np.array([30])
    rows = DummyRows.of(wrapped.target, lens)
    batch = rows_batch(np.array([0, 30], np.int32), np.array([0]), rows.table, 4)
    arena, bucket = single_batch_arena(1, 30, rows.table.shape[1], torch.device("cpu"))
    planned = wrapped.target.runner.plan(stage(batch, arena, bucket))
    with pytest.raises(InvariantError, match="30 tokens are to be read in one forward"):
        wrapped.target.forward(rows.ids[0], planned, None)


def rope(model: Any, states: torch.Tensor) -> Any:
    return model.model.rotary_emb(states, torch.arange(states.shape[1])[None])


def test_a_boundary_the_target_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"aux layer 5: the target has aux layers 0 … 4"):
        wrap(tiny_llama(), table_head(tiny_llama(), aux_layers=(1, 5)), num_speculative_tokens=2)


def test_the_probe_does_not_change_the_model() -> None:
    model = tiny_llama()
    ids = torch.tensor(random_prompts([9]))
    with torch.no_grad():
        before = model(ids).logits
        probe(model)
        assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow), torch.float64])
@pytest.mark.parametrize(
    "kind", ["llama", "gpt_oss", *(pytest.param(k, marks=pytest.mark.long) for k in ("gemma2", "mixtral"))]
)
@pytest.mark.cases(1)
def test_rounding_does_not_fail_the_self_test(kind: str, dtype: torch.dtype) -> None:
    if kind in ("mixtral", "gpt_oss") and dtype == torch.float64:
        pytest.skip("transformers' expert kernels have no float64 on CPU")
    assert 0 <= wrap(build(kind, RIGHT[kind]).to(dtype), max_model_len=100).self_test_error < 0.2
