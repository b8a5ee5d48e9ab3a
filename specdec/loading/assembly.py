"""A target and a head -> what runs their rounds: caches allocated, target tested, code compiled, graphs captured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch.nn import Module

from attention.backends.base import AttentionBackend, CascadeBackend
from attention.cache.kv_cache import CacheGroup, KVFormat, KVLayout
from attention.groups import runner_of
from attention.runner import GroupRunner
from drafters.base import Head
from drafters.loops.base import DraftLoop, SharesPages
from specdec.config import EngineConfig
from specdec.errors import InvalidInputError
from specdec.execution.base import Drafter, Executor
from specdec.loading.backends import GraphChoice, Graphs, choose_graphs, made_in_inference_mode, uncaptured_state
from specdec.loading.progress import log
from specdec.loading.states import state_runner, uncapturable
from specdec.parallel.ranks import Ranks
from specdec.rounds.buckets import loop_limits
from specdec.selftest.selftest import check_target
from specdec.selftest.twin import TwinReport, twin_test
from specdec.user_warnings import warn_user
from specdec.wrapped.probing import TargetProbe
from specdec.wrapped.settings import Settings
from specdec.wrapped.target import Target

"""Niceness of the compiler's processes."""
"""Of a version with other names, or where it wants no such processes: it starts what it needs when it compiles."""


def choose_prefix_caching(
    loop: DraftLoop[Any, Any] | None,
    asked: bool | Literal["auto"],
    recurrent: bool = False,
) -> str:
    """ "on", or "off: " and the reason.

    Args:
        loop: of the head; None without one. asked: True, False, or "auto" for wherever it can be done.
        recurrent: whether the target has recurrent layers: their state at the end of a prefix is kept nowhere. A
            SpecdecWarning says so where it was asked for.

    Raises:
        InvalidInputError: True where it cannot be done.
    """
    if asked is False:
        return "off: enable_prefix_caching=False"
    if recurrent:
        reason = "the target's recurrent layers keep the state of a row's last token alone, none of a prefix"
        if asked is True:
            warn_user(f"enable_prefix_caching=True has no effect: {reason}")
        return f"off: {reason}"
    reason = ""
    if loop is not None and not isinstance(loop, SharesPages):
        reason = f"{loop.name} do not say on how many following tokens their cache entries depend (num_following)"
    if reason and asked is True:
        raise InvalidInputError(f"enable_prefix_caching=True: {reason}; give False or 'auto'")
    return f"off: {reason}" if reason else "on"


def choose_cascade(backend: AttentionBackend, prefix_caching: str, asked: bool) -> str:
    """ "on", and the backend does so from now on; or "off: " and the reason. Which layers it does so for is its route.

    Args:
        prefix_caching: what `choose_prefix_caching` gave.

    Raises:
        InvalidInputError: asked for where it cannot be done.
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
        target: the wrapped model, which carries its hooks and handles now. drafter: of the head; None without one.
        runners: attention of the target, by cache group, and, with a head, of the head.
        executor: how rounds run on the device.
        settings: of the model and the head, those that the forwards of the self-test did not change themselves.
        twin: what a small float32 copy of the model showed. self_test_error: relative logit error of the self-test.
        graphs: "on" when rounds run from CUDA graphs, or "off: " and the reason.
    """

    target: Target
    drafter: Drafter | None
    runners: tuple[GroupRunner, ...]
    executor: Executor
    settings: Settings
    twin: TwinReport
    self_test_error: float
    graphs: str


def assemble(
    probed: TargetProbe,
    head: Head | None,
    backend: AttentionBackend,
    config: EngineConfig,
    cuda_graphs: bool | Literal["auto"],
    format: KVFormat,
    layout: KVLayout,
    ranks: Ranks | None = None,
) -> Assembly:
    """Allocate, test, compile and capture; arguments as of `SpeculativeModel`. An error leaves the model as it was.

    Raises:
        InvalidInputError: the backend, the head or the target cannot do with CUDA graphs, or not without; a layer
            attends in chunks that the page size does not divide.
        UnsupportedModelError: the target would come out wrong.
        UnsupportedAttentionError: the backend lacks a variant.
    """
    loop = None if head is None else head.draft_loop(loop_limits(config))
    prevented = uncapturable(probed) or made_in_inference_mode(probed.model, head) or uncaptured_state(probed.model)
    choice = choose_graphs(backend, loop, cuda_graphs, prevented)
    if ranks is not None:  # a rank without graphs among others with them would wait for sums that never come
        choice = replace(choice, required=choice.wanted)
    target = _target(probed, head, backend, config, format, layout, ranks)
    with target.alterations.undone_on_error():
        drafter = None
        if head is not None and loop is not None:
            specs = tuple(head.attention_specs)
            group = CacheGroup("head", specs, config.num_head_pages, config.page_size, layout)
            runner = GroupRunner(backend, group, probed.model.dtype, probed.model.device)
            drafter = Drafter(head, loop, runner)
        return _checked(target, drafter, probed, config, choice)


def _target(
    probed: TargetProbe,
    head: Head | None,
    backend: AttentionBackend,
    config: EngineConfig,
    format: KVFormat,
    layout: KVLayout,
    ranks: Ranks | None,
) -> Target:
    """The wrapped model over its own caches and states."""
    specs = tuple(call.attention_spec for call in probed.calls)
    group = CacheGroup("target", specs, config.num_pages, config.page_size, layout, format)
    runner = runner_of(backend, group, config.windowed, probed.model.dtype, probed.model.device)
    aux_layers = () if head is None else tuple(head.aux_layers)
    positions = config.max_model_len + config.num_speculative_tokens + 1
    states = state_runner(probed, config)
    return Target(probed, runner, aux_layers, config.max_num_batched_tokens, states, positions, ranks)


def _checked(
    target: Target, drafter: Drafter | None, probed: TargetProbe, config: EngineConfig, choice: GraphChoice
) -> Assembly:
    """Test the target, and build what runs its rounds. Compiling comes before the kernels are there.

    Raises:
        UnsupportedModelError: the target comes out wrong; whatever else is wrong, this is said first.
    """
    graphs = Graphs(target, drafter, config, choice)
    log.info("testing a small copy of the model")
    twin = twin_test(probed, config.max_model_len)
    graphs.compile()
    log.info("self-test")
    parts = [probed.model, *([drafter.head] if drafter is not None and isinstance(drafter.head, Module) else ())]
    before = Settings.of(*parts)
    error = check_target(target, probed, config.max_model_len, twin)
    settings = before.settled()
    executor = graphs.executor()
    runners = target.runner.runners if drafter is None else (*target.runner.runners, drafter.runner)
    return Assembly(target, drafter, runners, executor, settings, twin, error, graphs.state)
