"""A target and a head -> what runs their rounds: caches allocated, target tested, code compiled, graphs captured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch.nn import Module

from attention.backends.base import AttentionBackend
from attention.cache.kv_cache import CacheGroup, KVFormat, KVLayout
from attention.groups import runner_of
from attention.runner import GroupRunner
from drafters.base import Head
from specdec.config import EngineConfig
from specdec.execution.base import Drafter, Executor
from specdec.loading.backends import GraphChoice, choose_graphs, made_in_inference_mode, uncaptured_state
from specdec.loading.graphs import Graphs
from specdec.loading.progress import log
from specdec.loading.states import state_runner, uncapturable
from specdec.parallel.ranks import Ranks
from specdec.rounds.buckets import loop_limits
from specdec.target.probing import TargetProbe
from specdec.target.selftest import check_target
from specdec.target.settings import Settings
from specdec.target.target import Target
from specdec.target.twin import TwinReport, twin_test


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
