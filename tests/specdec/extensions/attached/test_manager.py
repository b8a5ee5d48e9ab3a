"""transformers' interface of continuous batching on an attached model: its `generate_batch`, and the manager."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fakes import hf_greedy, random_prompts, table_head, tiny_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedTokenizerFast, pipeline

from specdec.errors import InvalidInputError
from specdec.extensions.attached.attach import attach
from specdec.extensions.attached.manager import Manager

PROMPTS = random_prompts((9, 4, 14, 1, 6))
NEW = 12
CONFIG = GenerationConfig(max_new_tokens=NEW, do_sample=False)


@pytest.fixture(scope="module")
def attached() -> Iterator[Any]:
    target = copy.deepcopy(tiny_llama())
    sizes: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "page_size": 4, "kv_cache_tokens": 600}
    with attach(target, table_head(target), num_speculative_tokens=3, **sizes) as handle:
        target.handle = handle
        yield target


@pytest.fixture
def manager(attached: Any) -> Iterator[Manager]:
    own = attached.init_continuous_batching(CONFIG)
    own.start()
    yield own
    own.stop(hard_stop=True)
    assert attached.handle.model.usage().requests == 0


def test_generate_batch_is_transformers_own_over_our_rounds(attached: Any) -> None:
    rounds = attached.handle.model.engine_stats.rounds
    found = attached.generate_batch(PROMPTS, generation_config=CONFIG)
    assert list(found) == [f"req_{i}" for i in range(5)]
    for prompt, output in zip(PROMPTS, found.values(), strict=True):
        assert output.is_finished() and output.error is None
        assert (output.prompt_ids, output.generated_tokens) == (prompt, hf_greedy(prompt, NEW))
        assert 0 < output.lifespan[0] <= output.lifespan[1]
    assert attached.handle.model.engine_stats.rounds > rounds
    logprobs = ContinuousBatchingConfig(return_logprobs=True)
    (one,) = attached.generate_batch(PROMPTS[:1], CONFIG, logprobs, max_new_tokens=3).values()
    assert len(one.logprobs) == 3 and all(value <= 0 for value in one.logprobs)


def test_samples_are_children(attached: Any) -> None:
    config = GenerationConfig(max_new_tokens=4, do_sample=True, temperature=1.5, num_return_sequences=3)
    manager = attached.init_continuous_batching(config)
    manager.add_requests(PROMPTS[:2])
    manager.start()
    manager.stop()
    found = {output.request_id: output.generated_tokens for output in manager}
    assert set(found) == {name for i in (0, 1) for name in (f"req_{i}", f"req_{i}__child#0", f"req_{i}__child#1")}
    assert all(len(tokens) == 4 for tokens in found.values()) and len({*map(tuple, found.values())}) > 1


@pytest.mark.slow
def test_requests_join_while_others_run(manager: Manager) -> None:
    first = manager.add_requests(PROMPTS[:2], max_new_tokens=40, streaming=True)
    told = next(manager.request_id_iter(first[0]))
    assert not told.is_finished() and told.generated_tokens == hf_greedy(PROMPTS[0], 40)[: len(told.generated_tokens)]
    later = [manager.add_request(prompt) for prompt in PROMPTS[2:]]
    lengths = dict.fromkeys(first, 40) | dict.fromkeys(later, NEW)
    done: dict[str, list[int]] = {}
    while len(done) < 5:
        output = manager.get_result(timeout=60)
        assert output is not None
        if output.is_finished():
            done[output.request_id] = output.generated_tokens
    for name, prompt in zip((*first, *later), PROMPTS, strict=True):
        assert done[name] == hf_greedy(prompt, lengths[name])
    assert manager.get_result(timeout=0.01) is None


def test_a_cancelled_request_ends_with_its_tokens(manager: Manager) -> None:
    long = manager.add_request(PROMPTS[0], max_new_tokens=110, streaming=True, eos_token_id=-1)
    assert manager.get_result(long, timeout=60) is not None
    manager.cancel_request(long)
    *_, last = manager.request_id_iter(long)
    assert last.is_finished() and 0 < len(last.generated_tokens) < 110
    short = manager.add_request(PROMPTS[1])
    result = manager.get_result(short, timeout=60)
    assert result is not None and result.generated_tokens == hf_greedy(PROMPTS[1], NEW)


def test_samples_of_a_cancelled_request_end_with_it(attached: Any) -> None:
    config = GenerationConfig(max_new_tokens=100, do_sample=True, num_return_sequences=3)
    manager = attached.init_continuous_batching(config)
    names = [
        manager.add_request(prompt, request_id=name)
        for prompt, name in zip(PROMPTS[:2], ("mine", "other"), strict=True)
    ]
    manager.cancel_request(names[0])
    manager.start()
    manager.stop()
    found = {output.request_id: len(output.generated_tokens) for output in manager}
    ids = {name: [name, f"{name}__child#0", f"{name}__child#1"] for name in names}
    assert found.keys() == {*ids["mine"], *ids["other"]}
    assert all(found[name] < 100 for name in ids["mine"]) and all(found[name] == 100 for name in ids["other"])


@pytest.mark.parametrize("whose", ["config", "model"])
def test_a_request_ends_at_its_own_end_or_the_managers(
    attached: Any, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = hf_greedy(PROMPTS[1], NEW)
    _, early, *_, late = (i for i, token in enumerate(right) if token not in right[:i])
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False)
    monkeypatch.setattr(config if whose == "config" else attached.generation_config, "eos_token_id", right[early])
    manager = attached.init_continuous_batching(config)
    names = [manager.add_request(PROMPTS[1], eos_token_id=end) for end in (None, right[late], [1, right[late]], -1)]
    manager.start()
    manager.stop()
    found = {output.request_id: output.generated_tokens for output in manager}
    lengths = (early + 1, late + 1, late + 1, NEW)
    assert [found[name] for name in names] == [right[:length] for length in lengths]


@pytest.mark.slow
def test_requests_are_cancelled_before_they_run_and_ids_may_come_again(attached: Any) -> None:
    manager = attached.init_continuous_batching(CONFIG)
    manager.add_request(PROMPTS[0], request_id="mine")
    manager.cancel_request("mine")
    manager.cancel_request("nobody")
    manager.start()
    first = manager.get_result(timeout=60)
    assert first is not None and first.is_finished() and len(first.generated_tokens) < NEW
    manager.cancel_request("mine")  # it has ended
    threading.Event().wait(0.2)
    for name in ("mine", "nobody"):
        manager.add_request(PROMPTS[1], request_id=name)
        found = manager.get_result(name, timeout=60)
        assert found is not None and found.generated_tokens == hf_greedy(PROMPTS[1], NEW)
    manager.stop()


def test_the_model_is_looked_at_once_for_all_that_is_added_together(
    attached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, check = [0], type(attached.handle.model.engine).check_weights

    def counted(engine: Any) -> None:
        looks[0] += 1
        check(engine)

    monkeypatch.setattr(type(attached.handle.model.engine), "check_weights", counted)
    manager = attached.init_continuous_batching(CONFIG)
    manager.add_requests(PROMPTS)
    manager.start()
    manager.stop()
    assert looks == [1] and len(list(manager)) == 5


def test_what_was_told_stays_as_it_was(manager: Manager) -> None:
    name = manager.add_request(PROMPTS[0], streaming=True, record_timestamps=True)
    told = list(manager.request_id_iter(name))
    lengths = [len(output.generated_tokens) for output in told]
    assert lengths == sorted(set(lengths)) and lengths[-1] == NEW and len(lengths) > 1
    assert [len(output.timestamps or ()) for output in told] == lengths


@pytest.mark.slow
def test_no_round_runs_in_a_pause(attached: Any, manager: Manager) -> None:
    manager.add_request(PROMPTS[0], request_id="mine", max_new_tokens=110, streaming=True, eos_token_id=-1)
    assert manager.get_result("mine", timeout=60) is not None
    with manager.pause():
        rounds = attached.handle.model.engine_stats.rounds
        threading.Event().wait(0.2)
        assert attached.handle.model.engine_stats.rounds == rounds
        with pytest.raises(RuntimeError, match="inside a pause"):
            manager.stop()
    *_, last = manager.request_id_iter("mine")
    assert len(last.generated_tokens) == 110


def test_handlers_get_results_on_their_event_loop(manager: Manager) -> None:
    async def ask() -> list[Any]:
        told: asyncio.Queue[Any] = asyncio.Queue()
        manager.register_result_handler("own", told.put_nowait)
        manager.add_request(PROMPTS[2], request_id="own", streaming=True)
        outputs = [await told.get()]
        while not outputs[-1].is_finished():
            outputs.append(await told.get())
        return outputs

    outputs = asyncio.run(ask())
    assert outputs[-1].generated_tokens == hf_greedy(PROMPTS[2], NEW) and len(outputs) > 1


def test_stop_lets_requests_finish_and_a_hard_stop_fails_them(attached: Any) -> None:
    manager = attached.init_continuous_batching(CONFIG)
    manager.add_requests(PROMPTS)
    manager.start()
    manager.stop()
    assert [len(output.generated_tokens) for output in manager] == [NEW] * 5
    manager.start()
    name = manager.add_request(PROMPTS[0], max_new_tokens=110, streaming=True, eos_token_id=-1)
    assert manager.get_result(timeout=60) is not None
    manager.stop(hard_stop=True)
    last = [output for output in manager if output.is_finished()][-1]
    assert (last.request_id, last.error) == (name, "the manager was stopped")
    with pytest.raises(RuntimeError, match="start"):
        manager.add_request(PROMPTS[0])
    assert attached.handle.model.usage().requests == 0


@pytest.mark.slow
def test_one_that_fails_is_told_at_once_and_no_other_ends(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputError, match="outside the vocabulary"):
        manager.add_request([3, 999])
    with pytest.raises(InvalidInputError, match=r"add_request\(top_q=…\)"):
        manager.add_request(PROMPTS[0], top_q=3)
    long = manager.add_request(PROMPTS[0], max_new_tokens=110, eos_token_id=-1)

    def failing(tokens: Any, scores: Any) -> bool:
        raise ValueError("mine")

    from dataclasses import replace

    monkeypatch.setattr(manager, "_params", replace(vars(manager)["_params"], stopping_criteria=failing))
    name = manager.add_request(PROMPTS[1])
    output = manager.get_result(name, timeout=60)
    assert output is not None and output.error is not None and "ValueError: mine" in output.error
    rest = manager.get_result(long, timeout=60)
    assert rest is not None and rest.error is None and len(rest.generated_tokens) == 110


def test_a_pipeline_runs_on_it(attached: Any) -> None:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")
    pipe = pipeline("text-generation", model=attached, tokenizer=tokenizer)
    rounds = attached.handle.model.engine_stats.rounds
    (one,) = pipe("w5 w7 w9", max_new_tokens=5, do_sample=False, return_full_text=False)
    assert one["generated_text"].split() == [f"w{token}" for token in hf_greedy([5, 7, 9], 5)]
    assert attached.handle.model.engine_stats.rounds > rounds
