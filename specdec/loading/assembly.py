"""A target and a head -> what runs their rounds: caches allocated, target tested, code compiled, graphs captured."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from attention.backends.base import AttentionBackend
from attention.backends.building import Builds
from attention.backends.kinds import CascadeBackend
from attention.cache.kv_cache import CacheGroup, KVFormat, KVLayout
from attention.groups import runner_of
from attention.runner import GroupRunner
from drafters.base import Head
from drafters.loops.base import AnyLoop, SharesPages
from specdec.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.errors import InvalidInputError
from specdec.execution.base import CapturesLate, Drafter
from specdec.execution.eager import EagerExecutor
from specdec.loading.backends import runs_evenly
from specdec.loading.checkpoint import Checkpoint
from specdec.loading.cuda_graphs import GraphChoice, Graphs, choose_graphs, uncapturable
from specdec.loading.progress import log
from specdec.options.generation_config import eos_ids
from specdec.options.kinds import OrAuto
from specdec.selftest.kept import FULL, SelfTest
from specdec.selftest.selftest import check_target, invariance_test, matmul_test
from specdec.selftest.shrinking import thresholds
from specdec.selftest.twin import TwinReport, twin_test
from specdec.user_warnings import warn_user
from specdec.wrapped.changes import LiveModel, WeightVersions
from specdec.wrapped.even_rows import check_operators, even_values
from specdec.wrapped.group import Group
from specdec.wrapped.linears import pack_linears
from specdec.wrapped.probing import TargetProbe
from specdec.wrapped.settings import Settings
from specdec.wrapped.target import Target

if TYPE_CHECKING:
    from attention.recurrence.states import StateGroup


@dataclass(frozen=True)
class Parts:
    """What an engine is built of. Only the weights take memory yet.

    Attributes:
        probed: the target. head: the draft head that fits it, or None. backend: computes attention.
        checkpoint: where the target was read from; None for a loaded model without a name.
        tokenizer: the given one, else the target's; None without one.
        config: sizes and limits; with prefix caching if possible. loop: the head's draft loop; None without one.
        format: how the target's keys and values are stored. layout: order inside a page, of the head's cache too.
        linears: why linear layers on a CPU stay as they are; "" where they are packed.
        prefix_caching: "on", or "off: " and the reason. cascade: likewise, of cascade attention.
        cache_tokens: tokens of the KV cache. cache_bytes: bytes of all caches and the states of recurrent layers.
        states: of recurrent layers; None without any.
        self_test: how the target is tested.
    """

    probed: TargetProbe
    head: Head | None
    checkpoint: Checkpoint | None
    tokenizer: Any
    backend: AttentionBackend
    config: EngineConfig
    loop: AnyLoop | None
    format: KVFormat
    layout: KVLayout
    linears: str
    prefix_caching: str
    cascade: str
    cache_tokens: int
    cache_bytes: int
    states: StateGroup | None
    self_test: SelfTest = FULL


def choose_prefix_caching(loop: AnyLoop | None, asked: OrAuto, recurrent: bool = False) -> str:
    """ "on", or "off: " and the reason.

    Args:
        loop: of the head; None without one. asked: True, False, or "auto" (on if possible).
        recurrent: whether the target has recurrent layers, whose state at the end of a prefix is kept nowhere; then
            True only leads to a SpecdecWarning.

    Raises:
        InvalidInputError: True, but the head's draft loop cannot share pages.
    """
    if asked is False:
        return "off: enable_prefix_caching=False"
    if recurrent:
        reason = "the target's recurrent layers keep the state of a row's last token alone, none of a prefix"
        if asked is True:
            warn_user(f"enable_prefix_caching=True has no effect: {reason}")
        return f"off: {reason}"
    if loop is None or isinstance(loop, SharesPages):
        return "on"
    reason = f"{loop.name} do not say on how many following tokens their cache entries depend (num_following)"
    if asked is True:
        raise InvalidInputError(f"enable_prefix_caching=True: {reason}; give False or 'auto'")
    return f"off: {reason}"


def choose_cascade(backend: AttentionBackend, prefix_caching: str, asked: bool) -> str:
    """ "on", and the backend does so from now on; or "off: " and the reason. Which layers it does so for is its route.

    Raises:
        InvalidInputError: True, but the backend has no cascade attention or `prefix_caching` is off.
    """
    if not asked:
        return "off: cascade_attention=False"
    if not isinstance(backend, CascadeBackend):
        raise InvalidInputError(
            f"cascade_attention=True: backend {backend.name!r} attends every row by itself; give backend='flashinfer' "
            "(a GPU with FlashInfer), or False"
        )
    if prefix_caching != "on":
        raise InvalidInputError(
            f"cascade_attention=True: requests share no pages, because prefix caching is {prefix_caching}; give False, "
            "or have prefixes cached"
        )
    backend.cascade()
    return "on"


@dataclass(frozen=True)
class Assembly:
    """What runs the rounds of a target.

    Attributes:
        target: the wrapped model, which carries its hooks and handles now.
        runners: attention of the target, by cache group, and, with a head, of the head.
        engine: runs the rounds. live: notices that the model is no longer what it was.
        twin: what a small float32 copy of the model showed. self_test_error: relative logit error of the self-test.
        graphs: "on" when rounds run from CUDA graphs, or "off: " and the reason.
    """

    target: Target
    runners: tuple[GroupRunner, ...]
    engine: Engine
    live: LiveModel
    twin: TwinReport
    self_test_error: float
    graphs: str


def assemble(parts: Parts, cuda_graphs: OrAuto, group: Group) -> Assembly:
    """Allocate caches, test the target, compile and capture, and wait for kernels. An error leaves the model as it was.

    Args:
        cuda_graphs: see `SpeculativeModel.from_pretrained`. group: the processes that run the target together.

    Raises:
        InvalidInputError: the backend, the head or the target cannot use CUDA graphs, or needs them; a layer
            attends in chunks that the page size does not divide.
        UnsupportedModelError: the target would come out wrong.
        UnsupportedAttentionError: the backend lacks a variant.
    """
    probed = parts.probed
    head = parts.head
    config = parts.config
    loop = parts.loop
    choice = choose_graphs(parts.backend, loop, cuda_graphs, uncapturable(probed, head))
    if group.size > 1:  # one without graphs among others with them would wait for sums that never come
        choice = replace(choice, required=not choice.reason)
    target = _target(parts, group)
    with target.alterations.undone_on_error():
        drafter = None
        if head is not None and loop is not None:
            specs = tuple(head.attention_specs)
            pages = CacheGroup("head", specs, config.num_head_pages, config.page_size, parts.layout)
            runner = GroupRunner(parts.backend, pages, probed.model.dtype, probed.model.device)
            drafter = Drafter(head, loop, runner)
        if not parts.linears and choice.reason:
            log.info("packing the weights of linear layers")
            pack_linears((probed.model, head), target.alterations, runs_evenly(parts.backend))
        return _checked(target, drafter, parts, choice)


def _target(parts: Parts, group: Group) -> Target:
    """The wrapped model over its own caches and states."""
    probed = parts.probed
    head = parts.head
    config = parts.config
    specs = tuple(call.attention_spec for call in probed.calls)
    pages = CacheGroup("target", specs, config.num_pages, config.page_size, parts.layout, parts.format)
    runner = runner_of(parts.backend, pages, config.windowed, probed.model.dtype, probed.model.device)
    aux_layers = () if head is None else tuple(head.aux_layers)
    positions = config.max_model_len + config.num_speculative_tokens + 1
    states = None
    if parts.states is not None:
        from attention.recurrence.runner import StateRunner

        states = StateRunner(parts.states, probed.model.dtype, probed.model.device)
    even = even_values(probed.model) if runs_evenly(parts.backend) else ()
    return Target(probed, runner, aux_layers, config.max_num_batched_tokens, states, positions, group, even)


def _checked(target: Target, drafter: Drafter | None, parts: Parts, choice: GraphChoice) -> Assembly:
    """Test the target, and build engine and executor. Compiling overlaps with the building of attention kernels.

    Raises:
        UnsupportedModelError: the target comes out wrong; this is raised before any other error.
    """
    probed = parts.probed
    config = parts.config
    model = parts.probed.model
    head = parts.head
    graphs = Graphs(target, drafter, config, choice)
    tests = parts.self_test
    error = parts.self_test.error
    if error is None:
        log.info("testing a small copy of the model")
        twin = twin_test(probed, config.max_model_len)
    else:
        twin = TwinReport(thresholds(model.config, config.max_model_len))
    graphs.compile()
    before = Settings.of(model, *([head] if isinstance(head, Module) else ()))
    if error is None:
        log.info("self-test")
        error = check_target(target, probed, config.max_model_len, twin, tests.mode == "quick")
        if runs_evenly(parts.backend):
            check_operators(target)
            matmul_test(target.hf_model)
            invariance_test(target)
    settings = before.settled()  # those that the forwards of the self-test did not change themselves
    if settings.moving == before.moving and twin.unbuilt is None:
        tests.keep(error)  # else the next start must warn again, or find out which settings move
    executor = graphs.executor()
    captured = not isinstance(executor, EagerExecutor)
    if not captured and not parts.linears and not probed.recurrent_calls:
        from specdec.wrapped.recorded import RecordedSteps

        target.steps = RecordedSteps(model)
    versions = WeightVersions(model, head, captured=captured, settings=settings)
    eos = eos_ids(model.generation_config)
    engine = target.group.engine(Engine, target, drafter, parts.tokenizer, config, eos, executor, versions)
    live = LiveModel.of(model, captured, settings, target.uncalled, target.tabulated)
    if isinstance(executor, CapturesLate):
        executor.before_capture = live.check
    runners = target.runner.runners if drafter is None else (*target.runner.runners, drafter.runner)
    for build in builds_of(runners):
        build.wait()
    return Assembly(target, runners, engine, live, twin, error, graphs.state)


def dismantle(model: Any, freed_names: Iterable[str]) -> None:
    """Free everything made for a `SpeculativeModel` whose engine is closed, its attributes `freed_names`, and restore
    its transformers model. Every step can be done twice."""
    model.group.close()
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        if model.group.lost:
            return  # a sum on the device may wait for the lost rank for ever, and so would a synchronisation
        torch.cuda.synchronize(model.device)
    # vars(): they are made at first use, see `transfers_of`, which this must not import.
    if (transfers := vars(model).get("_transfers")) is not None:
        transfers.close()
    freed = bool([vars(model).pop(name) for name in freed_names if name in vars(model)])
    if freed and not model._shared.forked:  # a fork would first copy the memory of all objects
        gc.collect()  # compiled code and graphs refer to themselves
    model._alterations.undo()
    if on_gpu:
        torch.cuda.empty_cache()


def builds_of(runners: Iterable[GroupRunner]) -> Builds:
    """Attention kernels of these runners that were built or loaded in the background."""
    return tuple(dict.fromkeys(build for runner in runners for build in runner.builds))
