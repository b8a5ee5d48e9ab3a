"""The attention backend of a device, and its cache's format. User or device decide, never an exception."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from attention.backends.base import AttentionBackend, GraphBackend, PrefersLayout
from attention.backends.kinds import KINDS, chosen
from attention.cache.kv_cache import FP8, KVFormat, KVLayout
from attention.hf.weights import runs_plainly
from attention.spec import AttentionSpec
from drafters.loops.base import DraftLoop, GraphLoop
from specdec.config import EngineConfig
from specdec.errors import InvalidInputError, InvariantError, KernelBuildError, UnsupportedModelError
from specdec.execution.base import Drafter, Executor
from specdec.execution.eager import EagerExecutor
from specdec.interrupts import interrupt_in
from specdec.loading.progress import log
from specdec.loading.warming import loading_thread
from specdec.user_warnings import warn_user
from specdec.wrapped.probing import TargetProbe
from specdec.wrapped.target import Target
from specdec.wrapped.versions import unseen_state

if TYPE_CHECKING:
    from specdec.execution.graphs import GraphExecutor

_WITHOUT_SOFTCAP = "sdpa"
"""transformers' function of this name ignores a softcap that it is given; newer versions (5.23) raise an error.

Source: transformers, integrations/sdpa_attention.py; in 5.17 it is the default of Gemma 2 and VaultGemma.
"""


def name_what_is_left_out(probed: TargetProbe) -> None:
    """Warn where this model's own `generate` may give other tokens than its layers describe."""
    caps = [call.attention_spec.softcap for call in probed.calls if call.attention_spec.softcap is not None]
    if not caps or probed.model.config.get_text_config()._attn_implementation != _WITHOUT_SOFTCAP:
        return
    warn_user(
        f"{type(probed.model).__name__} has attn_implementation={_WITHOUT_SOFTCAP!r}, by which transformers leaves out "
        f"(or refuses) the softcap of {max(caps):g} that its layers ask for. Here it is computed, as by 'eager': its "
        "tokens may be others than those of this model's own generate; loaded with attn_implementation='eager' it says "
        "the same"
    )


_MOST_LETTERS = 200
_NO_REASON = (InvariantError, KernelBuildError)
"""Bugs of specdec, and kernels that rounds without graphs need as well: never a reason to run without graphs."""


class Graphs:
    """The attempt to run a target's rounds from CUDA graphs. state: "on", or "off: " and the reason."""

    def __init__(self, target: Target, drafter: Drafter | None, config: EngineConfig, choice: GraphChoice) -> None:
        self._parts = (target, drafter, config)
        self._choice = choice
        self._made: GraphExecutor | None = None
        self._error: Exception | None = None
        self.state = "on" if choice.wanted else f"off: {choice.reason}"

    def compile(self) -> None:
        """Compile target and head for CUDA graphs, if `GraphChoice.wanted`. Errors are raised by `executor`."""
        if not self._choice.wanted:
            return
        log.info("loading the compiler")
        if self._parts[0].hf_model.device.type == "cuda":
            loading_thread().join()  # else two threads could start the compiler's processes, see `make_pool`
        from specdec.execution.graphs import GraphExecutor

        gc.collect()  # dropped SpeculativeModels remove their hooks from this model now, not while it is traced
        try:
            self._made = GraphExecutor(*self._parts)
        except Exception as error:
            if interrupt_in(error) is not None:
                raise
            self._error = error

    def executor(self) -> Executor:
        """Capture, and return the executor of rounds; without graphs, and with a warning, where these are optional and
        fail.

        The model is then as it was before `compile`.

        Raises:
            Exception: the error of compiling or capturing, if graphs are required.
        """
        try:
            if self._error is not None:
                raise self._error
            if self._made is not None:
                self._made.capture()
                gc.collect()  # else Python looks through all that compiling left in the midst of a round: half a second
                return self._made
        except Exception as error:
            if self._made is not None:
                self._made.release()
            if self._choice.required or isinstance(error, _NO_REASON) or interrupt_in(error) is not None:
                raise
            # Anything that the compiler, a kernel or the allocator may raise: graphs are optional here.
            self._made = self._error = None
            reason = _in_words(error)
            self.state = f"off: {reason}"
            self._warn(reason)
            gc.collect()
            # After gc: graphs refer to themselves and hold their memory until they are collected.
            if self._parts[0].hf_model.device.type == "cuda":
                torch.cuda.empty_cache()
        else:
            if not self._choice.expected:
                self._warn(self._choice.reason)
        return EagerExecutor(*self._parts)

    def _warn(self, reason: str) -> None:
        model = self._parts[0].hf_model
        quantised = dict.fromkeys(type(layer).__name__ for layer in model.modules() if not runs_plainly(layer))
        name = type(model).__name__ + (f" with quantised layers ({', '.join(quantised)})" if quantised else "")
        warn_user(
            f"{name} runs without CUDA graphs, several times slower in small batches: {reason}. "
            "cuda_graphs=True shows the whole error, cuda_graphs=False is silent"
        )


def _in_words(error: Exception) -> str:
    """The first line of an error's message, with its type."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    said = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return said if len(said) <= _MOST_LETTERS else f"{said[:_MOST_LETTERS]}…"


_STORED = {"auto": None, "fp8": FP8}
_LAYOUTS: dict[str, KVLayout | None] = {"auto": None, "NHD": "NHD", "HND": "HND"}


def kv_format(dtype: str, scales: Sequence[tuple[float, float]] | None, source: str = "") -> KVFormat:
    """How the target's keys and values are stored; the head's single layer always keeps the dtype of the model.

    dtype: "auto" is the dtype of the model, "fp8" is e4m3 with static scales. scales: (scale of keys, scale of values)
    of each layer; default 1.0 everywhere. source: see `KVFormat`.

    Raises:
        InvalidInputError: an unknown name, scales without fp8, or scales that are none.
    """
    if dtype not in _STORED:
        raise InvalidInputError(f"kv_cache_dtype={dtype!r}: allowed are {', '.join(_STORED)}")
    return KVFormat(_STORED[dtype], tuple((keys, values) for keys, values in scales or ()), source)


def kv_layout(layout: str, backend: AttentionBackend) -> KVLayout:
    """The order inside a page of the target's cache and the head's; see `attention.cache.kv_cache.CacheGroup`.

    Every backend serves both, with all cache dtypes, page sizes and variants of attention that it serves at all. In
    MLA's cache, which has one head, the two are the same bytes. "auto" is what the backend's kernels read best on its
    GPU (HND on Blackwell), else NHD.

    Raises:
        InvalidInputError: an unknown name.
    """
    if layout not in _LAYOUTS:
        raise InvalidInputError(f"kv_cache_layout={layout!r}: allowed are {', '.join(_LAYOUTS)}")
    return _LAYOUTS[layout] or (backend.preferred_layout if isinstance(backend, PrefersLayout) else "NHD")


@dataclass(frozen=True)
class GraphChoice:
    """CUDA graphs: required, attempted with fallback, or off.

    Attributes:
        wanted: whether they are attempted. required: a failure is an error; else rounds run without them.
        reason: why they are off, "" if they are attempted. expected: whether being off needs no warning.
    """

    wanted: bool
    required: bool = False
    reason: str = ""
    expected: bool = True


def choose_graphs(
    backend: AttentionBackend,
    loop: DraftLoop[Any, Any] | None,
    cuda_graphs: bool | Literal["auto"],
    uncapturable: str = "",
) -> GraphChoice:
    """Decide on CUDA graphs: True and False decide; "auto" uses them if they can be captured.

    loop: the head's draft loop; None without a head. uncapturable: why the target cannot be captured, in words, see
    `specdec.loading.states`; "" if it can.

    Raises:
        InvalidInputError: see `check_graphs`; or True with what no graph can hold.
    """
    if cuda_graphs is True and uncapturable:
        raise InvalidInputError(f"cuda_graphs=True: {uncapturable}; give 'auto' or False")
    if backend.batch_invariant and uncapturable:
        raise InvalidInputError(f"backend={backend.name!r} runs from CUDA graphs alone: {uncapturable}")
    if cuda_graphs != "auto" or backend.batch_invariant:
        check_graphs(backend, loop, cuda_graphs is not False)
        return GraphChoice(True, required=True) if cuda_graphs else GraphChoice(False, reason="cuda_graphs=False")
    if not isinstance(backend, GraphBackend):
        return GraphChoice(False, reason=f"backend {backend.name!r} has none")
    if loop is not None and not isinstance(loop, GraphLoop):
        return GraphChoice(False, reason=f"{loop.name} run without CUDA graphs", expected=False)
    if uncapturable:
        return GraphChoice(False, reason=uncapturable, expected=False)
    return GraphChoice(True)


def made_in_inference_mode(*modules: object) -> str:
    """Why modules whose parameters were made in inference mode cannot run from CUDA graphs; "" where none was.

    They are compiled and captured outside of it, where torch counts no writes to such tensors.
    """
    tensors = (tensor for module in modules if isinstance(module, nn.Module) for tensor in module.parameters())
    if not any(tensor.is_inference() for tensor in tensors):
        return ""
    return "parameters were made in torch.inference_mode(); load the model outside of it"


def uncaptured_state(model: nn.Module) -> str:
    """Why CUDA graphs cannot run a model whose hooks, parametrizations or forwards they would not call; "" for none."""
    found = unseen_state(model)
    return f"the model has {found}, which a replayed graph does not call" if found else ""


def check_graphs(backend: AttentionBackend, loop: DraftLoop[Any, Any] | None, cuda_graphs: bool) -> None:
    """Check that backend and draft loop (None without a head) can run from CUDA graphs, or without them.

    Raises:
        InvalidInputError: a backend or a draft loop that has no graphs, or a backend that needs them.
    """
    if cuda_graphs and not isinstance(backend, GraphBackend):
        raise InvalidInputError(f"cuda_graphs=True needs a backend for a GPU that has graphs, not {backend.name!r}")
    if loop is not None and not isinstance(loop, GraphLoop) and (cuda_graphs or backend.batch_invariant):
        raise InvalidInputError(
            f"{loop.name} run without CUDA graphs, and so not with backend='batch_invariant'; use "
            "backend='flashinfer', cuda_graphs=False"
        )
    if backend.batch_invariant and not cuda_graphs:
        raise InvalidInputError(f"backend={backend.name!r} needs cuda_graphs=True: its model is a compiled one")


def expected_keys(config: Any) -> list[AttentionSpec]:
    """The attention kernels that a configuration's layers will need, before a model exists to probe.

    Only the fields that decide which kernel is built are filled in. [] if the configuration does not determine them.
    """
    text = config.get_text_config()
    if getattr(text, "is_heterogeneous", False):  # Gemma 4: heads differ by layer, and reading head_dim raises
        return []
    heads, hidden = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return []
    if getattr(text, "kv_lora_rank", None):
        # MLA as in DeepSeek: keys of a latent of 512 and 64 rotary dimensions, values are the latent.
        return [AttentionSpec(heads, 1, 576, 512, 1.0, value_in_key=True)]
    dim = getattr(text, "head_dim", None) or hidden // heads
    kinds = set(getattr(text, "layer_types", None) or ())
    window = getattr(text, "sliding_window", None)
    if config.model_type == "gpt_oss" or not kinds <= {"full_attention", "sliding_attention"} or (window and not kinds):
        return []
    plain = AttentionSpec(heads, heads, dim, dim, 1.0, softcap=getattr(text, "attn_logit_softcapping", None))
    windowed = [replace(plain, window=window)] if "sliding_attention" in kinds and window else []
    return windowed + ([] if kinds == {"sliding_attention"} else [plain])


def begin_kernels(
    name: str, device: torch.device, keys: Iterable[AttentionSpec], dtype: torch.dtype, kv_cache_dtype: str
) -> None:
    """Start building the kernels of such layers, on backends that build any; arguments are named as load options."""
    kind = KINDS["flashinfer"]
    is_wanted = device.type == "cuda" and chosen(name, device) == "flashinfer"
    if is_wanted and kind.is_installed and torch.version.hip is None:
        from attention.backends.flashinfer.backend import start_building

        cache = _STORED.get(kv_cache_dtype) or dtype
        for key in dict.fromkeys(keys):
            start_building(key, dtype, cache, device)


def make_backend(name: str, device: torch.device) -> AttentionBackend:
    """The attention backend: "auto" is FlashInfer on CUDA, Flex (with a SpecdecWarning) if that is not installed or on
    a ROCm build, the torch reference elsewhere.

    Raises:
        InvalidInputError: unknown name, a backend for CUDA elsewhere, one for NVIDIA GPUs on ROCm, or FlashInfer not
            installed.
    """
    if name not in KINDS:
        raise InvalidInputError(f"backend={name!r}: allowed are {', '.join(KINDS)}")
    kind = KINDS[name]
    if kind.needs_cuda and device.type != "cuda":
        raise InvalidInputError(f"backend={name!r} needs a CUDA device, not {device}; use backend='torch'")
    if kind.needs_nvidia and torch.version.hip is not None:
        raise InvalidInputError(
            f"backend={name!r} has kernels for NVIDIA GPUs only, and this torch is built for ROCm (HIP "
            f"{torch.version.hip}); use backend='flex' or 'torch'"
        )
    if not kind.is_installed:
        raise InvalidInputError(kind.install)
    if name == "auto" and chosen(name, device) == "flex":
        reason = 'FlashInfer is not installed (pip install "specdec-hf[cuda]")'
        if torch.version.hip is not None:
            reason = "this torch is built for ROCm, on which this library is not tested"
        warn_user(
            f"{reason}: backend='auto' is 'flex', which has no CUDA graphs and is slower; backend='flex' says this no "
            "more"
        )
    return kind.make(device)


def check_backend_fits(probed: TargetProbe, backend: AttentionBackend) -> None:
    """Check that layers compute every token alone where a batch-invariant backend promises it.

    Raises:
        UnsupportedModelError: the backend is batch-invariant and the target has recurrent or quantised layers.
    """
    if probed.fp8 is not None and backend.batch_invariant:
        raise UnsupportedModelError(
            f"{type(probed.model).__name__} is quantised in FP8, whose matmuls run through other kernels for more "
            "tokens: not with backend='batch_invariant'; use backend='flashinfer'"
        )
    quantised = next((layer for layer in probed.model.modules() if not runs_plainly(layer)), None)
    if quantised is not None and backend.batch_invariant:
        raise UnsupportedModelError(
            f"{type(probed.model).__name__} has quantised layers ({type(quantised).__name__}), whose matmuls are their "
            "library's and may sum otherwise in another batch: not with backend='batch_invariant'; use "
            "backend='flashinfer'"
        )
    if probed.recurrent_calls and backend.batch_invariant:
        kinds = ", ".join(dict.fromkeys(spec.kind for spec in probed.recurrence_specs))
        raise UnsupportedModelError(
            f"{type(probed.model).__name__} has recurrent layers ({kinds}), which sum a prompt in chunks and a "
            "verification token by token: not with backend='batch_invariant'; use backend='flashinfer'"
        )


def check_format_fits(probed: TargetProbe, format: KVFormat) -> None:
    """Check that a target with an 8-bit KV cache has a cache.

    Raises:
        InvalidInputError: no layer attends.
    """
    if format.dtype is not None and not probed.calls:
        raise InvalidInputError(
            f"kv_cache_dtype='fp8': no layer of {type(probed.model).__name__} attends, so it has no KV cache; give "
            "'auto' (states of recurrent layers are float32)"
        )
