"""Every test runs with the validators on, on one thread, against the packages of this repository."""

from __future__ import annotations

import atexit
import functools
import gc
import hashlib
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.utils.collect_env
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

os.environ["SPECDEC_CHECK"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: see test_triton_kernels.py
# The compiler need not find out what wide registers the CPU has: trial builds, seconds of every process that compiles
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"
# Nor look for garbage after every compilation
os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start: as many busy threads as cores slow each other down
torch.set_num_threads(1)
# lm-eval writes it into every result: half a second of `pip list` and compilers, the same each time
torch.utils.collect_env.get_pretty_env_info = functools.cache(torch.utils.collect_env.get_pretty_env_info)
gc.disable()  # while tests are imported and collected: next to nothing of that is garbage
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


class FakesFinder(MetaPathFinder):
    """Finds `fakes`; tests/ itself stays off sys.path, where tests/attention would shadow `attention`.

    It is imported by the first who needs it: xdist's controller, which runs no test, never imports transformers, and
    its workers start that many seconds earlier.
    """

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != "fakes":
            return None
        return importlib.util.spec_from_file_location(fullname, Path(__file__).with_name("fakes.py"))


sys.meta_path.append(FakesFinder())


class Refused(MetaPathFinder):
    """Refuses what can be absent: `make test-core` runs the core's tests without it, `make test-extensions` each
    extension's without the extensions that its row of `EXTENSIONS` does not name."""

    packages = ("specdec.extensions", "attention.cascade", "attention.recurrence", "attention.transport")
    through_others = ("logits/test_requests.py", "options/test_load_options.py", "specdec/test_recurrent_targets.py")
    """Tests that need one of them without its name: of what another test file imports, or of a public name."""

    def __init__(self, extension: str) -> None:
        """extension: whose tests run; "1" for the core's."""
        self.refused = self.packages
        if extension != "1":
            from specdec.extensions import EXTENSIONS

            needed = [extension]
            for name in needed:  # and what those need
                needed += [each for each in EXTENSIONS[name].uses if each not in needed]
            absent = [name for name in EXTENSIONS if name not in needed]
            self.refused = tuple(f"specdec.extensions.{name}" for name in absent)
            for name in absent:
                del EXTENSIONS[name]  # `round_extras` looks whether they are there, and would find their folders

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self.refused):
            raise ImportError(f"{fullname} is refused in this run", name=fullname)
        return None


REFUSES = os.environ.get("SPECDEC_REFUSE_EXTENSIONS", "")
if REFUSES:
    sys.meta_path.insert(0, Refused(REFUSES))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Tests of a GPU without one; where extensions are refused, files whose code names one: they are not the core's."""
    if collection_path.name == "gpu" and not torch.cuda.is_available():
        return True  # importing three dozen files takes seconds
    if REFUSES != "1" or collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text("utf-8")
    named = any(name in text for name in Refused.packages)
    return True if named or collection_path.as_posix().endswith(Refused.through_others) else None


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    """Triton's interpreter in less than half of its time, and with an eye on every address: tests/interpreter.py,
    tests/interpreter_memory.py."""
    if "TRITON_INTERPRET" in os.environ and importlib.util.find_spec("triton"):
        from tests.interpreter import hasten
        from tests.interpreter_memory import check_memory

        hasten()
        check_memory()


@pytest.fixture(scope="session", autouse=True)
def untimed_guards() -> Iterator[None]:
    """torch times the guards of all that it compiles, for its log, and empties the processor's caches before it."""
    with patch("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0):
        yield


@pytest.fixture(scope="session", autouse=True)
def small_caches() -> Iterator[None]:
    """A KV cache whose size nobody gives has 64 MiB, not 1 GiB: zeroing that takes longer than all else in loading."""
    with patch("specdec.loading.sizes._CPU_CACHE_BYTES", 1 << 26):
        yield


_right_twins: dict[Any, Any] = {}
_right_targets: dict[Any, float] = {}
_right_heads: set[Any] = set()
_LONG_ENOUGH = 64
"""Tokens of a row over several pages of every size that tests use: the shortest row that stands for longer ones."""


def _form(probed: Any) -> tuple[Any, ...]:
    """What a model is, but for its weights."""
    from fakes import attention_form, experts_form

    model = probed.model
    layers = tuple(call.attention_spec for call in probed.calls)
    forms = attention_form(model), experts_form(model)
    return type(model), model.dtype, model.config.to_json_string(use_diff=False), *forms, layers


def _weights(model: torch.nn.Module) -> bytes:
    from attention.hf.weights import memory_of

    digest = hashlib.sha256()  # the processor has instructions for it
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        for part in memory_of(tensor):  # a quantised tensor may be made of several
            digest.update(part.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.digest()


def _twin_test_once(probed: Any, max_model_len: int) -> Any:
    """`twin_test`, run once in a process for each class, configuration and thresholds that comes out right.

    A twin is made of these and a fixed seed, not of the model's weights: its answer is always the same. How long its
    rows are, beyond a few pages, is not asked again.
    """
    from specdec.selftest.shrinking import thresholds
    from specdec.selftest.twin import twin_test

    key = *_form(probed), thresholds(probed.model.config, max_model_len), min(max_model_len, _LONG_ENOUGH)
    if key not in _right_twins:
        _right_twins[key] = twin_test(probed, max_model_len)
    return _right_twins[key]


def _check_target_once(target: Any, probed: Any, max_model_len: int, report: Any, quick: bool = False) -> float:
    """`check_target`, run once for the same weights over the same kinds of caches and kernels: most of what loading
    costs. How many pages there are, beyond those of the test's rows, is not asked again.

    A wrong target is never remembered; nor is one that a warning is due for.
    """
    from specdec.selftest.eager_reference import fewest_pages
    from specdec.selftest.selftest import check_target

    room = min(max_model_len, (fewest_pages(target) - 1) // 3 * target.runner.page_size, _LONG_ENOUGH)
    groups = [(runner.group, runner.routes) for runner in target.runner.runners]
    caches = tuple((replace(group, num_pages=max(room, 2)), routes) for group, routes in groups)
    if report.unbuilt is not None or probed.model.device.type != "cpu":
        return check_target(target, probed, max_model_len, report)
    states = None if target.states is None else (target.states.group, target.states.functions)
    key = *_form(probed), _weights(probed.model), caches, states, report.passed
    if key not in _right_targets:
        _right_targets[key] = check_target(target, probed, max_model_len, report)
    return _right_targets[key]


def _self_test_head_once(head: Any, model: Any, tokenizer: Any, num_drafts: int) -> None:
    """`self_test_head`, run once for the same modules, read in the same way, of the same target and tokenizer.

    A wrong head is never remembered.
    """
    from drafters.base import HasInputConvention
    from specdec.requests.prompts import encode_prompts
    from specdec.selftest.selftest import SELF_TEST_TEXT, self_test_head

    if not isinstance(head, HasInputConvention) or not num_drafts or model.device.type != "cpu":
        return self_test_head(head, model, tokenizer, num_drafts)
    weights = tuple(_weights(part) for part in (head, model))
    specs = repr([part.spec for part in head.modules() if hasattr(part, "spec")])
    texts = repr(encode_prompts(SELF_TEST_TEXT, tokenizer))
    key = type(head), specs, weights, model.config.to_json_string(use_diff=False), texts, num_drafts
    if key not in _right_heads:
        self_test_head(head, model, tokenizer, num_drafts)
        _right_heads.add(key)
    return None


@pytest.fixture(scope="session", autouse=True)
def right_targets_once() -> Iterator[None]:
    """Hundreds of tests load the same few tiny models: see `_twin_test_once` and the like."""
    import specdec.loading.assembly
    import specdec.loading.parts

    with (
        patch.multiple(specdec.loading.assembly, twin_test=_twin_test_once, check_target=_check_target_once),
        patch.object(specdec.loading.parts, "self_test_head", _self_test_head_once),
        patch.object(specdec.loading.parts, "fingerprint_of", lambda *_: None),  # no verdict is kept between tests
    ):
        yield


@pytest.fixture(scope="module")
def every_self_test(right_targets_once: None) -> Iterator[None]:
    """For tests of what loading does: every model, and its twin, is built and read, as it is for a user."""
    import specdec.loading.assembly
    import specdec.loading.parts
    from specdec.selftest.selftest import check_target, self_test_head
    from specdec.selftest.twin import twin_test

    with (
        patch.multiple(specdec.loading.assembly, twin_test=twin_test, check_target=check_target),
        patch.object(specdec.loading.parts, "self_test_head", self_test_head),
    ):
        yield


@pytest.fixture(scope="module")
def short_evaluations() -> Iterator[None]:
    """Training measures its finished head with a few tokens, and times no rounds: for tests that look at neither."""
    from specdec.extensions.training import run as plan

    def timed(model: object, head: object, num_drafts: int, prompt: object) -> plan.RoundSeconds:
        return plan.RoundSeconds(0.010, 0.015, num_drafts)

    with patch.object(plan, "_EVALUATED_TOKENS", 4), patch.object(plan, "time_rounds", timed):
        yield


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Without the validators, which look at every page: for tests that run thousands of rounds.

    (Setting SPECDEC_CHECK does nothing once `attention` is imported: it is read there.)
    """
    from fakes import check_mode

    with check_mode(False):
        yield


def pytest_configure(config: pytest.Config) -> None:
    """`make test-quick` tries a quarter of the examples of every property (`fakes.examples`); none has a time limit."""
    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")
    if "not slow" in config.getoption("markexpr"):
        settings.register_profile("quick", deadline=None, max_examples=settings.default.max_examples // 4)
        settings.load_profile("quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are deselected without one: two thousand that would each be reported as skipped.

    Tests of several ranks come first: of xdist's workers, which begin at different places, one runs them all. As the
    last ones they would be shared, and four processes that wait for each other share two processors badly.
    """
    items.sort(key=lambda item: item.path.parent.name != "parallel")
    _mark_further_cases(items)
    if torch.cuda.is_available():
        return
    of_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if of_gpu:
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=of_gpu)


def _mark_further_cases(items: list[pytest.Item]) -> None:
    """Of a test marked `cases(n)`, all cases but the first n that are not `long` are `thorough`."""
    seen = Counter[str]()
    for item in items:
        marked = item.get_closest_marker("cases")
        if marked is None or item.get_closest_marker("long"):
            continue
        name = item.nodeid.partition("[")[0]
        seen[name] += 1
        if seen[name] > marked.args[0]:
            item.add_marker(pytest.mark.thorough)


def pytest_collection_finish() -> None:
    """What importing and collecting left, half a million objects, is out of every later search for garbage.

    Each of the many collections that tests ask for, and that `close` makes, then walks over the tests' own objects.
    Those that Python makes by itself are rare: a test that needs one asks for it.
    """
    gc.enable()
    gc.set_threshold(10_000, 10, 10)
    _freeze()
    # Back in, so that the interpreter can free it at its exit: some libraries complain about what is left.
    atexit.register(gc.unfreeze)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """So is what a module's tests imported and cached for good: the compiler alone is some hundred thousand objects."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()
