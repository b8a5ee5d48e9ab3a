"""torch.compile of target and head: the compiler's settings, and a backend that compiles equal layers once.

The backend cuts a graph at its attentions, which the compiler cannot look into, and compiles the nodes between two of
them the first time only. Parameters are inputs of such a region, so one region serves all layers that are alike; it
crosses the border between two layers, so that a norm keeps the residual sum before it.

Source: vllm-project/vllm, vllm/compilation/backends.py ("piecewise" compilation); torch/_dynamo/backends/distributed.py
(DDPOptimizer), for several graphs of one trace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental import _config as size_config

from attention.hf.custom_op import opaque_operator
from attention.hf.mixing import MIXING_OPERATORS
from specdec.compiler.passes import Rewriting
from specdec.errors import SpecdecError
from specdec.interrupts import causes
from specdec.values import Options
from specdec.wrapped.alterations import Alterations

_LEAST_ATTENTIONS = 3
"""The fewest attentions of which one region is between two others, and may come again."""
_SIZES = (int, torch.SymInt)
_GIVEN = ("placeholder", "get_attr")
"""Nodes that compute nothing: a graph's inputs and its constants."""
Compiled = Callable[..., Any]
"""A function or a model, compiled or to be compiled."""


@dataclass(frozen=True)
class _Region:
    """Nodes in order; inputs: outside nodes that they read, by first use; outputs: own nodes that others read."""

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


def compile_regions(module: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """A backend of torch.compile: inference graphs, region by region, each form compiled once. Returns the function.

    A graph of few attentions is compiled as it is, and so is one whose regions pass on anything but tensors and sizes.
    """
    regions = cut(module.graph)
    if regions is None:
        return _compiled(module, example_inputs)
    compiled: dict[str, Compiled] = {}
    graph = Graph()
    made = dict[Node, Node]()
    for node in module.graph.nodes:
        if node.op in _GIVEN:
            made[node] = graph.node_copy(node)
    starts = {region.nodes[0]: region for region in regions}
    inside = {node for region in regions for node in region.nodes}.union(made)
    for node in module.graph.nodes:
        if region := starts.get(node):
            form = form_of(region)
            if form not in compiled:
                own = _compiled(_module_of(module, region), [value_of(i) for i in region.inputs])
                compiled[form] = _named(own, f"region_{len(compiled)}")
            called = graph.call_function(compiled[form], tuple(made[i] for i in region.inputs))
            for place, output in enumerate(region.outputs):
                made[output] = graph.call_function(operator.getitem, (called, place))
        elif node not in inside:
            made[node] = graph.node_copy(node, made.__getitem__)
    return GraphModule(module, graph)


def cut(graph: Graph) -> tuple[_Region, ...] | None:
    """The regions of a graph in order; None where it is to be compiled as it is."""
    # The operators at which a graph is cut: attention, and recurrences' if registered, by the file that calls them.
    # That may come later, so they are looked up for each graph anew.
    there = (name for name in ("attend", *MIXING_OPERATORS) if hasattr(torch.ops.specdec, name))
    attentions = tuple(
        op for name in there for op in (getattr(torch.ops.specdec, name), getattr(torch.ops.specdec, name).default)
    )
    parts = list[list[Node]]([[]])
    for node in graph.nodes:
        if node.target in attentions:
            parts.append([])
        elif node.op not in (*_GIVEN, "output"):
            parts[-1].append(node)
    if len(parts) <= _LEAST_ATTENTIONS:
        return None
    regions = tuple(_region(nodes) for nodes in parts if nodes)
    values = [value_of(node) for region in regions for node in region.inputs + region.outputs]
    return regions if all(isinstance(value, (Tensor, *_SIZES)) for value in values) else None


def _region(nodes: list[Node]) -> _Region:
    own = set(nodes)
    inputs = dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes if arg not in own)
    outputs = tuple(node for node in nodes if any(user not in own for user in node.users))
    return _Region(tuple(nodes), tuple(inputs), outputs)


def form_of(region: _Region) -> str:
    """The key by which regions share compiled code: their operators and their inputs' layouts."""
    names = {node: f"i{place}" for place, node in enumerate(region.inputs)}
    lines = [f"{names[node]}: {_layout(value_of(node))}" for node in region.inputs]
    for place, node in enumerate(region.nodes):
        names[node] = f"n{place}"
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), names.__getitem__)
        target: Any = node.target
        called = target if isinstance(target, str) else f"{target!r} {id(target)}"  # two functions may have one repr
        lines.append(f"{names[node]} = {node.op} {called} {arguments!r}")
    return "\n".join([*lines, f"-> {[names[node] for node in region.outputs]}"])


def _layout(value: Any) -> str:
    """Properties of an input that compiled code assumes. Equal sizes have equal symbols, in all regions of a graph."""
    if not isinstance(value, Tensor):
        return f"{type(value).__name__} {value}"
    layout = (value.dtype, value.device, tuple(value.shape), value.stride(), value.storage_offset())
    return f"{type(value).__name__} {layout} {value.requires_grad}"


def value_of(node: Node) -> Any:
    """A node's fake value, as Dynamo left it; None where it left none."""
    return node.meta.get("example_value")


def _compiled(module: GraphModule, inputs: Sequence[Any]) -> Compiled:
    """A graph as the compiler's default backend makes it."""
    return cast(Compiled, compile_fx(module, list(inputs)))


def _named(function: Compiled, name: str) -> Compiled:
    """The function under a unique name, by which a graph's code finds it."""

    def call(*arguments: Any) -> Any:
        return function(*arguments)

    call.__name__ = call.__qualname__ = name
    return call


def _module_of(module: GraphModule, region: _Region) -> GraphModule:
    """The region as a separate graph: its inputs -> tuple of its outputs."""
    graph = Graph()
    made = dict[Node, Node]()
    for place, node in enumerate(region.inputs):
        made[node] = graph.placeholder(f"input_{place}")
        made[node].meta = node.meta.copy()
    for node in region.nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[node] for node in region.outputs))
    return GraphModule(module, graph)


@opaque_operator(lambda x: torch.empty_like(x))
def stored(x: Tensor) -> Tensor:
    """A copy that the compiler cannot compute again where it is read."""
    return x.clone()


def store_cos_sin(model: nn.Module, alterations: Alterations) -> int:
    """Keep rotary cos and sin as tensors in compiled code; left alone, every layer's kernel computes them again.

    Rotary modules, whose number is returned, are those with `inv_freq`, transformers' name of the frequencies.
    """

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() and isinstance(output, tuple):
            return tuple(map(stored, output))
        return None

    found = [module for module in model.modules() if hasattr(module, "inv_freq")]
    for module in found:
        alterations.hook_after(module, hook)
    return len(found)


@contextmanager
def compiler_settings(batch_invariant: bool = False) -> Iterator[None]:
    """The compiler's settings while our code is compiled (compilation happens at the first call).

    Floats such as an epsilon are constants: taken as inputs, they make the compiler start over once it has found out
    that they are not, which doubles the time of tracing. And one process may hold many models: they share the code of
    `HeadPasses`, and each compiles it a few times, more than the eight times in all that are allowed by default.

    One code for all sizes: two sizes that happen to be equal at the first call (tokens and logits indices) stay two.

    batch_invariant: it rounds where eager code rounds, whatever it fuses, and its kernels are not chosen by timing.
    """
    options: Options = {"post_grad_custom_pre_pass": Rewriting(batch_invariant)}
    if batch_invariant:
        options |= {"emulate_precision_casts": True, "deterministic": True}
    sizes = size_config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    dynamo = torch._dynamo.config.patch(specialize_float=True, recompile_limit=256)
    with torch._inductor.config.patch(options), sizes, dynamo:
        yield


@contextmanager
def unwrapped(kind: type[SpecdecError]) -> Iterator[None]:
    """Unwrap specdec errors that the compiler raised wrapped in its own.

    Raises:
        SpecdecError: the error of that kind among the causes of the exception raised inside; without one, the exception
            itself is raised.
    """
    try:
        yield
    except Exception as error:  # any class of the compiler's: it wraps errors of the code that it traces or calls
        found = next((each for each in causes(error) if isinstance(each, kind)), error)
        if found is error:
            raise
        raise found from None


def for_any_batch(model: Compiled, batch_invariant: bool = True) -> Compiled:
    """A compiled model for the self-test's calls: it runs the code of the graphs, compiled once.

    The self-test calls in inference mode, whose tensors have guards that differ from the capture's.
    """

    def run(**inputs: Any) -> Any:
        # Clones made here are normal tensors, as in the capture; inference tensors would trigger a recompilation.
        with torch.inference_mode(False), torch.no_grad(), compiler_settings(batch_invariant):
            return model(**{name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()})

    return run


def compiled_model(model: nn.Module) -> Compiled:
    """The model as one compiled graph for any number of tokens >= 2. Call it first inside `compiler_settings`."""
    return compiled(model)


def compiled(function: Compiled) -> Compiled:
    """A function of tensors as one compiled graph for any number of rows. Call it first inside `compiler_settings`."""
    return torch.compile(function, backend=compile_regions, fullgraph=True, dynamic=True)
