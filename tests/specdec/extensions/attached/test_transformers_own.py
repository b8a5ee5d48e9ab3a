"""transformers' own generation tests on attached tiny models: every call of `generate` gives what it gives without
`attach`, or is refused for a reason of docs/what_is_done.md.

The wheel of transformers has no tests: `SPECDEC_TRANSFORMERS_TESTS` names a folder with its `generation/test_utils.py`.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
import re
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fakes import TINY
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM

from specdec.errors import InvalidInputError
from specdec.extensions.attached.attach import Attachment, attach
from tests.hybrids import tiny_hybrid

SOURCE = Path(os.environ.get("SPECDEC_TRANSFORMERS_TESTS", "/none")) / "generation" / "test_utils.py"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not SOURCE.is_file(), reason="SPECDEC_TRANSFORMERS_TESTS has no generation/test_utils.py"),
]
REASONS = (
    r"output_(attentions|hidden_states): only token ids",
    r"num_beams=2",
    r"generate\(inputs_embeds=…\)",
    r"generate\(.*(assistant_model|past_key_values|cache).*=…\)",
    r"prompt_lookup_num_tokens=2",
    r"position_ids: only token ids",
    r"only padding on the left is served",
)
"""What a refusal may say; docs/what_is_done.md has each."""
SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "page_size": 4, "kv_cache_tokens": 600}
EXTRA = {"output_attentions": False, "output_hidden_states": False}


@dataclass
class Watched:
    """`generate` of a model class: each call also on an attached copy, and what came of it."""

    found: Counter[str] = field(default_factory=Counter)
    different: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)

    def generate(self, model: Any, *given: Any, **named: Any) -> Any:
        plain: Callable[..., Any] = GenerationMixin.generate.__get__(model)
        if Attachment.of(model) is not None:  # an assistant that is the model itself
            return plain(*given, **named)
        generator = torch.get_rng_state()
        kept = copied((given, named))
        right, error = outcome(plain, given, named)
        after = torch.get_rng_state()
        with attach(model, "lookup", num_speculative_tokens=3, **SIZES) as handle:
            self.compare(handle, plain, generator, kept, (right, error))
            if kept[1].get("output_hidden_states") or kept[1].get("output_attentions"):
                less = (kept[0], {**kept[1], **EXTRA})
                torch.set_rng_state(generator)
                self.compare(handle, plain, generator, less, outcome(plain, *copied(less)))
        torch.set_rng_state(after)
        if error is not None:
            raise error
        return right

    def compare(self, handle: Any, plain: Any, generator: torch.Tensor, call: Any, right: tuple[Any, Any]) -> None:
        torch.set_rng_state(generator)
        given, named = copied(call)
        found, error = outcome(lambda *g, **n: handle.calls.generate(plain, g, n), given, named)
        if isinstance(error, InvalidInputError) and right[1] is None:
            self.found["refused"] += 1
            self.refused.add(str(error))
        elif error is not None or right[1] is not None:
            same = type(error) is type(right[1]) or (isinstance(right[1], ValueError) and isinstance(error, ValueError))
            self.note(same, f"{error!r} in place of {right[1]!r}")
        else:
            sampled = named.get("do_sample") or handle.hf_model.generation_config.do_sample
            self.note(alike(found, right[0], bool(sampled)), f"{found} in place of {right[0]}, {named}")

    def note(self, same: bool, difference: str) -> None:
        self.found["same" if same else "different"] += 1
        if not same:
            self.different.append(difference)


def copied(value: Any) -> Any:
    """A copy; models stay as they are, and tensors leave their graph, which deepcopy refuses."""
    if isinstance(value, dict):
        return {name: copied(each) for name, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(copied, value))
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value if isinstance(value, torch.nn.Module) else copy.deepcopy(value)


def outcome(function: Callable[..., Any], given: Any, named: Any) -> tuple[Any, Exception | None]:
    try:
        return function(*given, **named), None
    except Exception as error:
        return None, error


def alike(found: Any, right: Any, sampled: bool) -> bool:
    """Whether results agree: all of greedy ones, and of sampled ones, which draw other numbers, the first scores."""
    if type(found) is not type(right):
        return False
    tensors = (found, right) if isinstance(right, torch.Tensor) else (found.sequences, right.sequences)
    if tensors[0].shape != tensors[1].shape or tensors[0].dtype != tensors[1].dtype:
        return False
    if not sampled and not torch.equal(*tensors):
        return False
    for name in () if isinstance(right, torch.Tensor) else ("scores", "logits"):
        ours, theirs = getattr(found, name) or (), getattr(right, name) or ()
        if len(ours) != len(theirs):
            return False
        for one, other in list(zip(ours, theirs, strict=True))[: 1 if sampled else None]:
            if not torch.allclose(one.float(), other.float(), rtol=0.0, atol=1e-4):
                return False
    return True


class Inputs:
    """Stands for transformers' model tester. masks: how the rows are padded."""

    seq_length = 7

    def __init__(self, config: Any, masks: str) -> None:
        self._config, self._masks = config, masks

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        ids = torch.randint(5, TINY["vocab_size"], (4, self.seq_length))
        mask = torch.ones_like(ids)
        for row in range(4):
            if self._masks == "left":
                mask[row, :row] = 0
            elif self._masks == "right":  # as transformers' own tester
                mask[row, row + 1 :] = 0
        inputs = {"input_ids": ids} if self._masks == "none" else {"input_ids": ids, "attention_mask": mask}
        return copy.deepcopy(self._config), inputs


def config_of(kind: str) -> tuple[Any, Any]:
    options = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    if kind == "llama":
        return LlamaForCausalLM, LlamaConfig(**{**TINY, **options})
    model: Any = tiny_hybrid(kind)
    for name, value in options.items():
        setattr(model.config, name, value)
    return type(model), model.config


def methods() -> list[str]:
    return list(unittest.TestLoader().getTestCaseNames(case_class())) if SOURCE.is_file() else ["none"]


class Unmarked:
    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        return lambda function: function


@functools.cache
def case_class() -> Any:
    spec = importlib.util.spec_from_file_location("transformers_generation_tests", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.object(pytest, "mark", Unmarked()):  # marks of theirs, which this repository does not declare
        spec.loader.exec_module(module)
    return type("OfTransformers", (module.GenerationTesterMixin, unittest.TestCase), {"has_attentions": True})


@pytest.fixture(scope="module")
def totals(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    found = SimpleNamespace(calls=Counter(), methods=Counter(), refused=set())
    yield found
    reporter, capture = map(request.config.pluginmanager.get_plugin, ("terminalreporter", "capturemanager"))
    if reporter is None or capture is None:
        return
    with capture.global_and_fixture_disabled():
        reporter.write_line(f"\ncalls: {dict(found.calls)}\nmethods: {dict(found.methods)}")
        for reason in sorted({next(r for r in REASONS if re.search(r, message)) for message in found.refused}):
            reporter.write_line(f"refused: {reason}")


@pytest.mark.parametrize("masks", ["none", "left", "right"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
@pytest.mark.parametrize("method", methods())
def test_attached_calls_of_transformers_own_tests(totals: SimpleNamespace, kind: str, masks: str, method: str) -> None:
    cls, config = config_of(kind)

    def run() -> str:
        """How the method ends: "", or what it raised; its own assertions hold or fail as without `attach`."""
        torch.manual_seed(1)
        case = case_class()(method)
        case.model_tester, case.all_generative_model_classes = Inputs(config, masks), (cls,)
        try:
            getattr(case, method)()
        except (Exception, unittest.SkipTest) as error:
            return type(error).__name__
        return ""

    right = run()
    watched = Watched()
    cls.generate = functools.wraps(GenerationMixin.generate)(lambda *given, **named: watched.generate(*given, **named))
    try:
        assert run() == right
    finally:
        del cls.generate
    kinds = [kind for kind in ("different", "refused", "same") if watched.found[kind]]
    totals.methods[right or (kinds[0] if kinds else "no call of generate")] += 1
    totals.calls += watched.found
    totals.refused |= watched.refused
    assert watched.different == []
    assert [message for message in watched.refused if not any(re.search(reason, message) for reason in REASONS)] == []
