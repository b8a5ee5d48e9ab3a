"""Random options, requests, aborts and changes of the model between calls: each request lives as it does alone.

Alone: in a batch of one, without prefix cache, with one cache group and large pages. Tokens, text, drafts and rounds
are compared, greedy tokens also with the model's own forward. With emulated graphs sampled rows are drafted and decided
by the kernels, interpreted, with an eye on every address (tests/interpreter_memory.py).

`SPECDEC_RANDOM_EPISODES=500 pytest tests/public/test_random_workloads.py` tries so many; `SPECDEC_RANDOM_SEED` chooses
others.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from fakes import (
    CPU,
    LETTERS,
    TINY,
    VOCAB,
    backend_of_ours,
    enlarge,
    free_everywhere,
    launch_ahead,
    table_head,
    wrap,
)
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from attention.backends.reference import TorchBackend
from drafters.mtp.head import MtpHead, MtpStack
from drafters.mtp.spec import MtpSpec, mtp_target
from specdec.requests.sampling import SamplingParams
from tests.sampled_rounds import kernels_by_reference
from tests.specdec.execution.test_graphs import FixedPlaceBackend, compile_nothing, record_on_cpu

EPISODES = int(os.environ.get("SPECDEC_RANDOM_EPISODES", "3"))
INTERPRETED = (
    os.environ.get("TRITON_INTERPRET") == "1"
    and importlib.util.find_spec("triton") is not None
    and "SPECDEC_RANDOM_EPISODES" in os.environ
)
"""Rounds from graphs run the kernels in Triton's interpreter, most of an episode's time; else torch's reference. Of
`make test` tests/specdec/execution/test_graphs.py has the kernels in such rounds."""
SEED = int(os.environ.get("SPECDEC_RANDOM_SEED", "0"))
LONGEST = 160
SIZES = {**TINY, "max_position_embeddings": LONGEST}
WINDOWED = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 20}
KINDS: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": {}, "gemma3_text": WINDOWED, "olmo3": WINDOWED}
NEAR_TIE = 1e-4
"""Of the largest logit: rounding decides between two tokens that are closer."""


def build(kind: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **KINDS[kind])).eval()
    enlarge(model, seed)
    with torch.no_grad():  # bigrams, which the head knows, decide some tokens and attention others
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.1)
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    return model


def head_of(kind: str, model: PreTrainedModel) -> Any:
    if kind == "none":
        return None
    if kind == "table":
        return table_head(model, aux_layers=(1, 2, 3))
    heads = [MtpHead(MtpSpec(experts=False), mtp_target(model)).eval().requires_grad_(False) for _ in range(2)]
    for seed, each in enumerate(heads):
        enlarge(each, seed)
    return MtpStack(heads)


def change(model: PreTrainedModel, how: str, layer: int) -> None:
    projection: Any = model.get_decoder().layers[layer].self_attn.v_proj
    if how == "in place":
        with torch.no_grad():
            projection.weight.mul_(1.4)
    elif how == "another tensor":
        projection.weight = nn.Parameter(projection.weight.detach() * 1.4)
    else:
        model.load_state_dict({name: 1.1 * value for name, value in model.state_dict().items()}, assign=True)


class Workload:
    """One model with random options, and the same model alone."""

    def __init__(self, rng: random.Random, stack: ExitStack) -> None:
        self.rng = rng
        kind, self.graphs = rng.choice(list(KINDS)), rng.random() < 0.4
        heads = ["none", "table", "table", "modules"] if kind in ("llama", "qwen3") else ["none", "table"]
        head = rng.choice(heads)
        self.model, self.drafts = build(kind, rng.randrange(3)), 0 if head == "none" else rng.choice([1, 3, 5])
        self.twin = copy.deepcopy(self.model)
        shared = {"num_speculative_tokens": self.drafts, "max_model_len": LONGEST}
        alone = {"max_num_seqs": 1, "page_size": 32, "max_num_batched_tokens": 400, "kv_cache_tokens": 400}
        off = {"enable_prefix_caching": False, "hybrid_kv_cache": False}
        self.alone = stack.enter_context(wrap(self.twin, head_of(head, self.twin), **shared, **alone, **off))
        rows = rng.choice([1, 2, 3, 5])
        sizes = {
            "max_num_seqs": rows,
            "page_size": rng.choice([1, 3, 4, 4, 16, 64]),
            "max_num_batched_tokens": max(rng.choice([24, 60]), rows * (self.drafts + 1)),
            "max_num_prefill_tokens": rng.choice([2, 16, 512]),
            "kv_cache_tokens": rng.choice([240, 300, 1000]),
            "kv_cache_layout": rng.choice(["NHD", "HND"]),
            "hybrid_kv_cache": rng.random() < 0.5,
            "cuda_graphs": self.graphs,
        }
        self.told = f"{kind}, head {head}, {shared | sizes}"
        if self.graphs:
            patches = stack.enter_context(pytest.MonkeyPatch.context())
            stack.enter_context(nullcontext() if INTERPRETED else kernels_by_reference())
            record_on_cpu(patches)
            compile_nothing(patches)
        with backend_of_ours(FixedPlaceBackend(CPU) if self.graphs else TorchBackend(CPU)):
            self.wrapped = stack.enter_context(wrap(self.model, head_of(head, self.model), **shared, **sizes))
        launch_ahead(self.wrapped, self.graphs or rng.random() < 0.5)
        self.begins = [self.letters(n) for n in (17, 40, 70)]

    def letters(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def request(self) -> tuple[list[int], SamplingParams]:
        rng = self.rng
        prompt = rng.choice([*self.begins, []]) + self.letters(rng.choice([1, 2, 5, 12, 30]))
        options: dict[str, Any] = {"max_new_tokens": rng.choice([1, 2, 5, 12, 30]), "return_drafts": True}
        if rng.random() < 0.3:
            options |= {"temperature": 0.8, "top_p": rng.choice([1.0, 0.9]), "seed": rng.randrange(99)}
        if rng.random() < 0.2:
            options["cache_prefix"] = False
        if self.drafts and rng.random() < 0.3:
            options["num_speculative_tokens"] = rng.randrange(self.drafts + 1)
        if rng.random() < 0.2:
            options["stop"] = [rng.choice(LETTERS)]
        return prompt, SamplingParams(**options)

    def streams(self) -> None:
        """Several calls at once, each read a little at a time; some are closed early."""
        rng, running = self.rng, []
        for _ in range(rng.choice([1, 2, 4])):
            requests = [self.request() for _ in range(rng.choice([1, 2, 3]))]
            stream = self.wrapped.stream([p for p, _ in requests], [s for _, s in requests])
            running.append((stream, requests, {}, rng.choice([None, None, 1, 5])))
        updates = {id(stream): 0 for stream, *_ in running}
        while running:
            one = stream, requests, done, most = rng.choice(running)
            updates[id(stream)] += 1
            update = None if updates[id(stream)] == most else next(stream, None)
            if update is None:
                running.remove(one)
                stream.close()
                if most is None:
                    assert sorted(done) == list(range(len(requests)))
                for index, completion in done.items():
                    self.compare(*requests[index], completion)
            elif update.completion is not None:
                done[update.index] = update.completion
        assert free_everywhere(self.wrapped)

    def compare(self, prompt: list[int], params: SamplingParams, found: Any) -> None:
        (alone,) = self.alone.generate(prompt, params)
        if params.greedy:
            with torch.no_grad():
                logits = self.twin(torch.tensor([prompt + found.token_ids]), use_cache=False).logits[0]
            logits = logits[len(prompt) - 1 : -1]
            gaps = logits.amax(-1) - logits.gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]
            assert float(gaps.max() / logits.abs().max()) < NEAR_TIE, (self.told, prompt, params)
        lived = [(c.token_ids, c.text, c.finish_reason, c.drafts, c.stats.rounds) for c in (found, alone)]
        assert lived[0] == lived[1], (self.told, prompt, params)


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEED, SEED + EPISODES))
@pytest.mark.cases(1)
def test_each_request_lives_as_it_does_alone(seed: int, closing: ExitStack) -> None:
    rng = random.Random(seed)
    workload = Workload(rng, closing)
    for call in range(3):
        if call:
            how, layer = rng.choice(["in place", "another tensor", "assigned", ""]), rng.randrange(4)
            for model in (workload.model, workload.twin) if how else ():
                change(model, "in place" if workload.graphs else how, layer)
        workload.streams()
