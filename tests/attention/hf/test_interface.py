"""The port into transformers' attention: what the probe finds, what it refuses, and that it leaves the model alone."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from fakes import attention_form, hooks_of, random_prompts, tiny_llama, wrap
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from attention.backends.reference import TorchBackend
from attention.errors import UnsupportedAttentionError
from attention.hf.gate import gate_of, guard, guarded, unguard
from attention.hf.patches import attention_implementation, borrowed
from attention.hf.port import ATTENTION_NAME, AttentionPort, specdec_attention
from attention.hf.probe import probe
from specdec.errors import RoundFailedError
from specdec.requests.sampling import SamplingParams

PROMPT = random_prompts([21])[0]


def generated(model: PreTrainedModel) -> list[int]:
    ids = torch.tensor([PROMPT])
    return model.generate(ids, max_new_tokens=10, do_sample=False, attention_mask=torch.ones_like(ids))[0].tolist()


def test_the_probe_finds_every_layer_in_order() -> None:
    model = tiny_llama()
    found = probe(model)
    calls, vocab = found.calls, found.vocab_size
    assert vocab == 64
    assert [c.module for c in calls] == [layer.self_attn for layer in model.model.layers]
    key = calls[0].attention_spec
    assert (key.num_q_heads, key.num_kv_heads, key.head_dim_k, key.head_dim_v) == (4, 2, 16, 16)
    assert (key.scale, key.window, key.softcap, key.has_sinks) == (0.25, None, None, False)


def test_the_probe_reads_windows_softcap_and_sinks() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 6, "pad_token_id": None}
    mixed = ["sliding_attention", "full_attention"]
    gemma = AutoConfig.for_model("gemma2", **sizes, **heads, layer_types=mixed, attn_logit_softcapping=30.0)
    keys = [c.attention_spec for c in probe(AutoModelForCausalLM.from_config(gemma).eval()).calls]
    assert [k.window for k in keys] == [6, None]
    assert [k.softcap for k in keys] == [30.0, 30.0]
    gpt = AutoConfig.for_model(
        "gpt_oss", **sizes, **heads, layer_types=mixed, num_local_experts=2, num_experts_per_tok=1
    )
    keys = [c.attention_spec for c in probe(AutoModelForCausalLM.from_config(gpt).eval()).calls]
    assert [k.window for k in keys] == [6, None]
    assert all(k.has_sinks for k in keys)


@pytest.mark.slow
def test_the_users_own_generate_works_as_before() -> None:
    model = tiny_llama(context=0.35)
    before, attention = generated(model), attention_form(model)
    wrapped = wrap(model)
    assert generated(model) == before
    ours = wrapped.generate(PROMPT, SamplingParams(max_new_tokens=10))[0].token_ids
    assert PROMPT + ours == before
    assert generated(model) == before
    assert attention_form(model) == attention


@pytest.mark.slow
def test_the_users_own_generate_may_run_between_two_rounds() -> None:
    model = tiny_llama(context=0.35)
    before = generated(model)
    stream = wrap(model).stream(PROMPT, SamplingParams(max_new_tokens=10))
    tokens: list[int] = []
    for update in stream:
        tokens += update.token_ids
        assert generated(model) == before
    assert PROMPT + tokens == before


def test_a_failing_forward_puts_the_attention_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    wrapped, attention = wrap(model), attention_form(model)

    def fail(*args: object) -> object:
        raise RuntimeError("planted")

    monkeypatch.setattr(TorchBackend, "run", fail)
    with pytest.raises(RoundFailedError, match="RuntimeError: planted"):
        wrapped.generate(PROMPT, SamplingParams(max_new_tokens=2))
    assert attention_form(model) == attention


def test_attention_outside_a_forward_of_ours_raises() -> None:
    """Without a mask function a plain forward would attend to everything: it must not run at all."""
    model = tiny_llama()
    wrap(model)
    with (
        attention_implementation((model.config,), ATTENTION_NAME),
        pytest.raises(
            UnsupportedAttentionError, match=r"outside SpeculativeModel; set the model's attention with .*sdpa"
        ),
    ):
        model(torch.tensor([PROMPT]))


def test_a_module_that_was_never_bound_raises() -> None:
    wrap(tiny_llama())
    other = tiny_llama(seed=2)
    with (
        attention_implementation((other.config,), ATTENTION_NAME),
        pytest.raises(UnsupportedAttentionError, match="not bound to a paged cache"),
    ):
        other(torch.tensor([PROMPT]))


def test_an_unknown_argument_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    attention = model.model.layers[1].self_attn
    real = attention.forward
    monkeypatch.setattr(attention, "forward", lambda *a, **k: real(*a, **k, position_bias=torch.zeros(1)))
    with pytest.raises(UnsupportedAttentionError, match="passes position_bias to its attention"):
        probe(model)


def test_a_module_that_attends_twice_is_refused() -> None:
    model = tiny_llama()
    model.model.layers[1].self_attn = model.model.layers[0].self_attn
    with pytest.raises(UnsupportedAttentionError, match="calls attention twice"):
        probe(model)


@pytest.mark.slow
def test_a_wrapped_model_can_be_wrapped_again() -> None:
    """The newer one works; the older one says so instead of answering with the wrong cache."""
    model = tiny_llama(context=0.35)
    right = generated(copy.deepcopy(model))
    first, second = wrap(model), wrap(model)
    params = SamplingParams(max_new_tokens=10)
    assert PROMPT + second.generate(PROMPT, params)[0].token_ids == right
    assert PROMPT + first.generate(PROMPT, params)[0].token_ids == right
    assert PROMPT + second.generate(PROMPT, params)[0].token_ids == right


def test_the_port_gives_contiguous_attention_and_hands_on_rows_that_kernels_can_read() -> None:
    """A backend that returns a permuted view, and a model whose last dimension is strided."""
    model = tiny_llama()
    port = AttentionPort(model, probe(model).calls)
    seen = []

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: object) -> torch.Tensor:
        seen.append([x.stride(-1) for x in (query, key, value)])
        return query.transpose(0, 1).contiguous().transpose(0, 1)

    query, key = torch.randn(1, 4, 16, 5).transpose(2, 3), torch.randn(1, 2, 5, 32)[..., ::2]
    with port.using(attend):
        out, _ = specdec_attention(model.model.layers[0].self_attn, query, key, key, None)
    assert out.is_contiguous() and torch.equal(out, query.transpose(1, 2))
    assert seen == [[1, 1, 1]]


@pytest.mark.parametrize(("kept", "selects"), [("heeded", True), ("ignored", False), ("unknown", False)])
def test_the_probe_finds_whether_a_forward_selects_rows(
    kept: str, selects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    right = model.forward

    def ignoring(input_ids: object, position_ids: object, use_cache: bool, **kwargs: object) -> object:
        return right(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)

    def unknowing(input_ids: object, position_ids: object, use_cache: bool) -> object:
        return right(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)

    if kept != "heeded":
        monkeypatch.setattr(model, "forward", ignoring if kept == "ignored" else unknowing)
    assert probe(model).selects_rows is selects


def test_a_forward_that_returns_other_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    right = model.forward
    monkeypatch.setattr(model, "forward", lambda **kwargs: right(**{**kwargs, "logits_to_keep": 1}))
    with pytest.raises(UnsupportedAttentionError, match="1 rows of logits for 4 tokens of which 2 were asked for"):
        probe(model)


def test_a_probed_model_is_not_kept() -> None:
    """transformers keeps every function that was registered for attention."""
    model = tiny_llama()
    module = weakref.ref(model.model.layers[0].self_attn)
    probe(model)
    assert all(hooks_of(m) == (0, 0) for m in model.modules())
    del model
    gc.collect()
    assert module() is None


def test_two_threads_probe_two_models_at_once() -> None:
    """What one records does not go to the other."""
    models = [tiny_llama(), tiny_llama(seed=2)]
    inside = threading.Barrier(2, timeout=60)
    found: list[Any] = [None, None]

    def meet(*args: object) -> None:
        inside.wait()

    def run(i: int) -> None:
        model = models[i]
        handle = model.model.layers[0].register_forward_pre_hook(meet)
        found[i] = [call.module for call in probe(model).calls]
        handle.remove()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[layer.self_attn for layer in model.model.layers] for model in models]


@pytest.mark.slow
def test_a_forward_that_waited_while_the_guard_was_removed_leaves_the_gate() -> None:
    model = tiny_llama()
    hooks = guard(model)
    gate = gate_of(model.config)
    thread = threading.Thread(target=lambda: model(torch.tensor([PROMPT])))
    with gate.held():
        thread.start()
        time.sleep(0.2)
        unguard([model.config], hooks)
    thread.join(60)
    started = time.perf_counter()
    with gate.held():
        assert time.perf_counter() - started < 5


def test_what_an_interrupt_left_borrowed_is_put_back_before_the_next_forward() -> None:
    # An interrupt within contextlib's exit leaves the generator as it is, until the traceback is dropped.
    model = tiny_llama()
    config = model.config
    with guarded(model):
        left = borrowed([(config, "use_cache", False)])
        left.__enter__()
        with attention_implementation((config,), ATTENTION_NAME):
            assert config.use_cache is True
            with borrowed([(config, "use_cache", False)]):
                left.__exit__(None, None, None)
                with attention_implementation((config,), "eager"):  # nested: what is open stays borrowed
                    pass
                assert config.use_cache is False
        assert config.use_cache is True
