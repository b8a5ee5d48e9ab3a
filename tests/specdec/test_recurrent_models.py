"""Around targets with recurrent layers: what loading says and refuses, memory, threads, interrupts, what is undone."""

from __future__ import annotations

import sys
import threading
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import engine_of, enlarge, free_everywhere, hooks_of, random_prompts, tiny_llama, wrap
from transformers import AutoModelForCausalLM, GenerationConfig

from attention.recurrence import functions as reference
from attention.recurrence import hf_port as recurrent
from attention.recurrence.functions import REFERENCE
from specdec import SamplingParams
from specdec.cli.tables import fit_lines, route_rows, size
from specdec.errors import (
    CacheTooSmallError,
    InvalidInputError,
    RoundFailedError,
    SpecdecWarning,
    UnsupportedModelError,
)
from specdec.extensions.grammars.masks import GrammarMasks
from specdec.loading.cache_format import state_group
from specdec.loading.sizes import Rows, check_cache_fits
from specdec.logits.extra import ChangedLogits
from specdec.logits.logprobs import Logprobs
from specdec.wrapped.probing import probe_target
from tests.hybrids import TYPES, RecallHead, greedy_text, tiny_config, tiny_hybrid

PROMPTS = random_prompts([17, 3, 9])
NEW = 16
OPTIONS: dict[str, Any] = {"max_model_len": 128, "num_speculative_tokens": 3}


def right_of(name: str) -> list[list[int]]:
    return [greedy_text(name, prompt, NEW)[len(prompt) :] for prompt in PROMPTS]


def recalling(name: str, model: Any = None, **options: Any) -> Any:
    head = RecallHead([greedy_text(name, prompt, NEW) for prompt in PROMPTS], 0.6)
    return wrap(tiny_hybrid(name) if model is None else model, head, **OPTIONS | options)


def said(wrapped: Any) -> list[list[int]]:
    return [list(c.token_ids) for c in wrapped.generate(PROMPTS, SamplingParams(NEW))]


@pytest.mark.slow
@pytest.mark.thorough
def test_the_facts_name_layers_kernel_and_bytes() -> None:
    wrapped = recalling("qwen3_next")
    facts = wrapped.describe()["recurrent"]
    assert facts["calls"] == {"short convolution": 2, "gated delta rule": 2} and facts["kernel"] == "torch"
    states = wrapped.target.states.states
    held = sum(t.nbytes for s in states for t in (s.ring,) if isinstance(t, torch.Tensor))
    held += sum(s.state.nbytes + sum(t.nbytes for t in vars(s.ring).values()) for s in states if hasattr(s, "state"))
    assert held == facts["row_bytes"] * wrapped.target.states.group.num_slots
    assert wrapped.describe()["num_layers"] == 4
    assert ("recurrent layers", "torch: 2 of short convolution, 2 of gated delta rule") in route_rows(
        wrapped.describe()
    )
    assert fit_lines(wrapped.describe())[-1].endswith(f", each with recurrent states of {size(facts['row_bytes'])}")
    assert wrap(tiny_hybrid("lfm2"), max_model_len=64).describe()["recurrent"]["calls"] == {"short convolution": 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["granitemoehybrid", pytest.param("lfm2", marks=pytest.mark.long)])
def test_a_hybrid_class_with_attention_layers_only_is_a_plain_model(name: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name, layer_types=["full_attention"] * 4)).eval()
    enlarge(model)
    model.generation_config = GenerationConfig()
    right = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(ids))
        right.append(out[0].tolist())
    wrapped = wrap(model, RecallHead(right, 0.6), **OPTIONS)
    assert [p + tokens for p, tokens in zip(PROMPTS, said(wrapped), strict=True)] == right
    facts = wrapped.describe()
    assert facts["recurrent"] is None and facts["prefix_caching"] == "on"
    assert [type(extra) for extra in wrapped.config.extras] == [GrammarMasks, ChangedLogits, Logprobs]


INVARIANT: dict[str, Any] = {"backend": "batch_invariant", "max_model_len": 96, "kv_cache_tokens": 1200}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", pytest.param("mamba", marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_invariance_gives_the_same_bits_in_any_batch(name: str, dtype: torch.dtype) -> None:
    prompts = random_prompts((5, 37, 20, 60))
    found = []
    for rows, drafts, tokens in ((1, 0, 96), (4, 3, 96), (3, 3, 20)):
        sizes = INVARIANT | {"max_num_seqs": rows, "max_num_batched_tokens": tokens, "num_speculative_tokens": drafts}
        with wrap(tiny_hybrid(name).to(dtype), "lookup" if drafts else None, **sizes) as wrapped:
            assert wrapped.describe()["recurrent"]["kernel"] == "torch, token by token"
            done = wrapped.generate(prompts, SamplingParams(max_new_tokens=12, logprobs=0))
            found.append([(c.token_ids, [each.logprob for each in c.logprobs]) for c in done])
    assert found[1:] == found[:1] * 2


def test_chunks_of_prompts_are_seen_by_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: functions that read a prompt in chunks."""
    monkeypatch.setattr("attention.recurrence.runner.recurrences_of", lambda *_: replace(REFERENCE, name="chunks"))
    with pytest.raises(UnsupportedModelError, match="Mamba2ForCausalLM is not batch-invariant: the logits of tokens"):
        wrap(tiny_hybrid("mamba2"), **INVARIANT)


def test_batch_invariance_needs_states_in_float32() -> None:
    with pytest.raises(InvalidInputError, match=r"recurrent_state_dtype='bfloat16' rounds states where rounds end"):
        wrap(tiny_hybrid("mamba2").to(torch.bfloat16), **INVARIANT, recurrent_state_dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.thorough
def test_a_cache_in_8_bits_is_refused_where_there_is_none_and_changes_nothing_between_drafts_and_none() -> None:
    with pytest.raises(InvalidInputError, match=r"kv_cache_dtype='fp8': no layer of Mamba2ForCausalLM attends"):
        wrap(tiny_hybrid("mamba2"), max_model_len=64, kv_cache_dtype="fp8")
    alone = said(wrap(tiny_hybrid("qwen3_next"), max_model_len=128, kv_cache_dtype="fp8"))
    head = RecallHead([prompt + tokens for prompt, tokens in zip(PROMPTS, alone, strict=True)], 0.6)
    assert said(wrap(tiny_hybrid("qwen3_next"), head, kv_cache_dtype="fp8", **OPTIONS)) == alone


@pytest.mark.slow
def test_prefixes_are_not_shared_and_that_is_said_where_it_was_asked_for() -> None:
    with pytest.warns(SpecdecWarning, match="no effect: the target's recurrent layers keep the state") as caught:
        wrapped = recalling("qwen3_next", enable_prefix_caching=True)
    assert len(caught) == 1 and wrapped.prefix_caching.startswith("off: the target's recurrent layers")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recalling("qwen3_next").prefix_caching == wrapped.prefix_caching


def test_states_come_off_the_memory_for_pages() -> None:
    probed = probe_target(tiny_hybrid("qwen3_next"))
    sizes = {"num_speculative_tokens": 3, "max_model_len": 64, "max_num_batched_tokens": 64, "page_size": 4}
    few, many = (state_group(probed, Rows(max_num_seqs=rows, **sizes), "float32", False) for rows in (8, 32))
    assert few is not None and many is not None
    assert many.num_bytes(torch.float32) / few.num_bytes(torch.float32) == 33 / 9
    message = r"9\.00 GiB of it for the recurrent states of all rows\); .* page_size, or max_num_seqs"
    with pytest.raises(CacheTooSmallError, match=message):
        check_cache_fits(torch.device("cpu"), 1 << 40, 8, "kv_cache_tokens", state_bytes=9 << 30)


@pytest.mark.slow
def test_states_in_half_precision_take_half_and_only_round_them() -> None:
    sizes = {"max_model_len": 128, "recurrent_state_dtype": "bfloat16"}
    with pytest.raises(InvalidInputError, match="'bfloat16': Qwen3NextForCausalLM is in float32; give 'float32'"):
        wrap(tiny_hybrid("qwen3_next"), **sizes)
    with pytest.raises(InvalidInputError, match="LlamaForCausalLM has no recurrent layer; give 'float32'"):
        wrap(tiny_llama(), **sizes)
    half, full = (
        wrap(tiny_hybrid("mamba2").to(torch.bfloat16), **sizes | own)
        for own in ({}, {"recurrent_state_dtype": "float32"})
    )
    states = [{s.state.dtype for s in wrapped.target.states.states if hasattr(s, "state")} for wrapped in (half, full)]
    assert states == [{torch.bfloat16}, {torch.float32}]
    facts = [wrapped.describe()["recurrent"] for wrapped in (half, full)]
    assert [each["state_dtype"] for each in facts] == ["bfloat16", "float32"]
    assert facts[0]["row_bytes"] < 0.7 * facts[1]["row_bytes"]
    tokens = [said(wrapped)[0] for wrapped in (half, full)]
    assert tokens[0][:4] == tokens[1][:4]


@pytest.mark.slow
def test_the_users_model_is_what_it_was() -> None:
    model = tiny_hybrid("qwen3_next")
    file = sys.modules[type(model).__module__]
    functions, mixer = dict(vars(file)), model.model.layers[0].linear_attn
    ids = torch.tensor([PROMPTS[0]])
    wrapped = recalling("qwen3_next", model)
    assert said(wrapped) == right_of("qwen3_next")
    out = model.generate(ids, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(ids))
    assert out[0].tolist() == greedy_text("qwen3_next", PROMPTS[0], NEW)  # its own cache beside ours
    assert said(wrapped) == right_of("qwen3_next")
    wrapped.close()
    assert hooks_of(mixer) == (0, 0) and not hasattr(mixer, "_specdec_recurrence")
    assert all(vars(file)[name] is value for name, value in functions.items())


@pytest.mark.slow
@pytest.mark.thorough
def test_two_engines_and_the_user_run_models_of_one_file_at_a_time() -> None:
    """The functions of a modeling file are replaced for the threads in forwards of ours only."""
    engines, model = [recalling("qwen3_next") for _ in range(2)], tiny_hybrid("qwen3_next")
    found: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    ids = torch.tensor([PROMPTS[0]])

    def run(number: int) -> None:
        for _ in range(3):
            if number < 2:
                found[number].append(said(engines[number]))
            else:
                out = model.generate(ids, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(ids))
                found[number].append(out[0].tolist())

    threads = [threading.Thread(target=run, args=(number,)) for number in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    right = right_of("qwen3_next")
    assert found == {0: [right] * 3, 1: [right] * 3, 2: [greedy_text("qwen3_next", PROMPTS[0], NEW)] * 3}


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.cases(1)
def test_an_interrupt_while_functions_are_replaced_leaves_no_forward_with_the_originals(
    after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after the forward was counted and before anything is replaced, or after."""
    wrapped, plain = recalling("qwen3_next"), vars(recurrent)["_replace"]
    file = sys.modules[type(wrapped.hf_model).__module__]
    functions = dict(vars(file))

    def interrupted(file: Any) -> None:
        monkeypatch.setattr(recurrent, "_replace", plain)
        if after:
            plain(file)
        raise KeyboardInterrupt

    monkeypatch.setattr(recurrent, "_replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        said(wrapped)
    assert vars(file) == functions
    assert said(wrapped) == right_of("qwen3_next")
    assert vars(file) == functions
    wrapped.close()


@pytest.mark.slow
def test_an_interrupt_while_functions_are_put_back_is_made_good_at_the_close(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped, plain = recalling("qwen3_next"), vars(recurrent)["_restore"]
    file = sys.modules[type(wrapped.hf_model).__module__]
    functions = dict(vars(file))

    def interrupted(file: Any) -> None:
        monkeypatch.setattr(recurrent, "_restore", plain)
        raise KeyboardInterrupt

    monkeypatch.setattr(recurrent, "_restore", interrupted)
    with pytest.raises(KeyboardInterrupt):
        said(wrapped)
    assert vars(file) != functions  # they serve others by the originals
    wrapped.close()
    assert vars(file) == functions


@pytest.mark.slow
@pytest.mark.parametrize("after", [pytest.param(4, marks=pytest.mark.long), 12])
def test_rows_go_on_after_an_interrupt_in_the_midst_of_a_forward(after: int) -> None:
    """The states of the layers before were written then."""
    wrapped, plain, calls = recalling("qwen3_next"), reference.gated_delta, [0]
    states = wrapped.target.states

    def interrupted(*inputs: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == after:
            raise KeyboardInterrupt
        return plain(*inputs)

    states.functions = replace(REFERENCE, gated_delta=interrupted)
    engine, hit = engine_of(wrapped), 0
    requests: dict[int, list[int]] = {engine.submit(prompt, SamplingParams(NEW)): [] for prompt in PROMPTS}
    while engine.has_work:
        try:
            for update in engine.step():
                requests[update.request_id] += update.token_ids
        except KeyboardInterrupt:
            hit += 1
    assert hit == 1 and list(requests.values()) == right_of("qwen3_next")
    assert free_everywhere(wrapped)


def test_another_model_of_the_file_that_a_hook_runs_is_refused_by_name() -> None:
    """Its recurrences would read and write the rows' states."""
    wrapped, other = recalling("qwen3_next"), tiny_hybrid("qwen3_next")
    seen: list[int] = []

    def hook(module: torch.nn.Module, args: Any) -> None:
        seen.append(args[0].shape[1])
        other(torch.zeros(1, seen[-1], dtype=torch.long), use_cache=False)  # as many tokens

    handle = wrapped.hf_model.model.layers[1].register_forward_pre_hook(hook)
    with pytest.raises(RoundFailedError, match="the probe did not see; does a hook on the model run another model"):
        said(wrapped)
    handle.remove()
    assert seen and said(wrapped) == right_of("qwen3_next")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("jamba", marks=pytest.mark.long)])
def test_a_layer_called_alone_on_another_thread_is_served_by_the_originals(name: str) -> None:
    wrapped, x = recalling(name), torch.randn(1, 5, 32)
    layer = wrapped.hf_model.model.layers[0]
    mixer = layer.linear_attn if name == "qwen3_next" else layer.mamba
    ready, stop, found = threading.Event(), threading.Event(), list[bool]()

    def users() -> None:
        torch.set_num_threads(1)  # torch counts them by thread, and sums of several are rounded otherwise
        with torch.no_grad():
            own = mixer(x).clone()
            ready.set()
            while not stop.is_set():
                found.append(torch.equal(mixer(x), own))

    thread = threading.Thread(target=users)
    thread.start()
    assert ready.wait(60)
    rounds = [said(wrapped) for _ in range(2)]
    stop.set()
    thread.join()
    assert rounds == [right_of(name)] * 2 and found and all(found)


@pytest.mark.slow
@pytest.mark.thorough
def test_two_over_one_model_close_in_any_order() -> None:
    model = tiny_hybrid("falcon_h1")
    first, second = (recalling("falcon_h1", model, num_speculative_tokens=k) for k in (3, 2))
    assert said(first) == said(second) == said(first) == right_of("falcon_h1")
    first.close()
    assert said(second) == right_of("falcon_h1")
    second.close()
    assert not any(hooks_of(m) != (0, 0) or hasattr(m, "_specdec_recurrence") for m in model.modules())


@pytest.mark.slow
@pytest.mark.thorough
def test_streams_dropped_midway_leave_their_slots_as_good_as_new() -> None:
    wrapped = recalling("mamba2", max_num_seqs=2)
    for count in (1, 2, 4):
        stream = wrapped.stream(PROMPTS, SamplingParams(NEW))
        for _ in range(count):
            next(stream)
        stream.close()
        assert said(wrapped) == right_of("mamba2")
    assert free_everywhere(wrapped)


@pytest.mark.slow
@pytest.mark.thorough
def test_new_weights_in_place_are_used() -> None:
    model = tiny_hybrid("qwen3_next")
    wrapped = recalling("qwen3_next", model)
    assert said(wrapped) == right_of("qwen3_next")
    with torch.no_grad():
        for layer in (0, 2):
            model.model.layers[layer].linear_attn.A_log.add_(1.0)
            model.model.layers[layer].linear_attn.conv1d.weight.mul_(1.5)
    wrapped.refresh()
    right = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(ids))
        right.append(out[0, len(prompt) :].tolist())
    assert said(wrapped) == right != right_of("qwen3_next")


@pytest.mark.slow
@pytest.mark.skipif("lfm3" not in TYPES, reason="no lfm3 in this transformers")
@pytest.mark.parametrize("kind", ["sliding_attention", pytest.param("full_attention", marks=pytest.mark.long)])
@pytest.mark.thorough
def test_windows_beside_recurrent_layers_say_the_same_with_their_pages_freed_and_kept(kind: str) -> None:
    torch.manual_seed(0)
    layers = ["conv", "sliding_attention", "conv", kind]
    config = tiny_config("lfm3", layer_types=layers, sliding_window=20, max_position_embeddings=640)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    enlarge(model)
    model.generation_config = GenerationConfig()
    prompts, right = random_prompts([5, 200, 70, 1]), []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=24, do_sample=False, attention_mask=torch.ones_like(ids))
        right.append(out[0].tolist())
    sizes = {"num_speculative_tokens": 3, "kv_cache_tokens": 1200, "max_num_batched_tokens": 60}
    for freed in (True, False):
        with wrap(model, RecallHead(right, 0.6), hybrid_kv_cache=freed, **sizes) as wrapped:
            completions = wrapped.generate(prompts, SamplingParams(24))
            assert bool(wrapped.config.windowed) == (freed and kind == "full_attention")
        assert [p + list(c.token_ids) for p, c in zip(prompts, completions, strict=True)] == right


@pytest.mark.slow
def test_mamba2s_least_step_holds_for_every_token() -> None:
    """transformers clamps the step in a prefill alone; we say what its forward without a cache says."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("nemotron_h", time_step_min=0.3)).eval()
    wrapped, ids = wrap(model, max_model_len=64), list(PROMPTS[0])
    (found,) = wrapped.generate([ids], SamplingParams(8, ignore_eos=True))
    with torch.no_grad():
        for _ in range(8):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert ids[len(PROMPTS[0]) :] == list(found.token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("nemotron_h", marks=pytest.mark.long)])
@pytest.mark.thorough
def test_long_prompts_say_the_same_in_chunks_of_every_size(name: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name, max_position_embeddings=4096)).eval()
    enlarge(model)
    model.generation_config = GenerationConfig()
    prompts = random_prompts([1050, 1200])
    right = []
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(ids, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))
            right.append(out[0].tolist())
    sizes = {"kv_cache_tokens": 6000, "page_size": 16, "max_model_len": 2400, "num_speculative_tokens": 3}
    for chunk in (65, 256, 1100):
        wrapped = wrap(model, RecallHead(right, 0.7), max_num_batched_tokens=chunk, **sizes)
        completions = wrapped.generate(prompts, SamplingParams(12))
        assert [p + list(c.token_ids) for p, c in zip(prompts, completions, strict=True)] == right
