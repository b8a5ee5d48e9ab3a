"""The lm-eval model "specdec", as its users name it. Imported only where lm-eval is installed (extra [eval]).

Importing this file makes `lm_eval.simple_evaluate(model="specdec", model_args=...)` work.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Any

import lm_eval.models  # noqa: F401 - lm-eval reads its own list of models only while nothing is registered
import torch
import torch.distributed as dist
from lm_eval.api.registry import model_registry
from torch import Tensor

from evals.accuracy.engine_lm import EngineLM
from evals.accuracy.generation import Thinking
from evals.runs.conversations import Configuration, ModelSpec
from specdec.errors import InvalidInputError
from specdec.model import SpeculativeModel
from specdec.options.load_options import LoadOptions, unknown_options
from specdec.values import Options

NAME = "specdec"
_LOG = logging.getLogger(__name__)
_TIMEOUT = timedelta(weeks=52)  # of a process that waits for a slower one; lm-eval's own


_ANSWERING = (
    *("max_gen_toks", "add_bos_token", "prefix_token_id", "think_end_token", "enable_thinking", "chat_template_args"),
    "schema_field",
)
"""Arguments of `EngineLM` that are model arguments, too."""


class SpecdecLM(EngineLM):
    """The lm-eval model "specdec", as its command line makes it from `--model_args pretrained=...,draft=...`."""

    def __init__(
        self,
        pretrained: Any,
        draft: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        **options: Any,
    ) -> None:
        """Load the model.

        Args:
            pretrained: the target, or a loaded SpeculativeModel; draft: its head.
            batch_size: lm-eval's. All requests go to the engine at once; more than 1 is the most that run together
                (max_num_seqs). "auto" and "auto:N" leave that to max_batch_size, or to max_num_seqs.
            max_length: lm-eval's name for max_model_len.
            options: what `EngineLM` takes, schema_field for documents with a JSON schema each (json_schema in
                jsonschema_bench) among it; and load options, see LoadOptions. lm-eval's command line gives
                device="cuda:0" by default, so on a machine without CUDA, and for a model divided among
                GPUs, that means the default device; and each of several processes, of `accelerate launch`, takes the
                GPU of its own.

        Raises:
            InvalidInputError: an unknown model argument; what `SpeculativeModel.from_pretrained` raises.
        """
        answering = {name: options.pop(name) for name in _ANSWERING if name in options}
        # checked before a model is loaded, which takes a while
        Thinking.of(*(answering.get(name) for name in ("enable_thinking", "think_end_token", "chat_template_args")))
        given = _load_options(options, batch_size, max_length, max_batch_size)
        model = _model(pretrained, draft, given, sorted(set(options) - {"device"}))
        arm = Configuration(NAME, model.num_speculative_tokens)
        super().__init__(model, arm, seed=given.seed, progress=True, **answering)
        self._group: Any = None
        if (size := _processes()) > 1:  # of `accelerate launch` or torchrun, each with a model of its own
            if not dist.is_initialized():
                dist.init_process_group("gloo", timeout=_TIMEOUT)
            self._rank = dist.get_rank()
            self._world_size = size
            self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes [size, ...], on the CPU."""
        if self._group is None:
            return tensor
        found = [torch.empty_like(tensor, device="cpu") for _ in range(self._world_size)]
        dist.all_gather(found, tensor.cpu(), group=self._group)
        return torch.stack(found)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Every process's object at process `dst`, None elsewhere."""
        if self._group is None:
            return [obj]
        found: list[Any] | None = [None] * self._world_size if self._rank == dst else None
        dist.gather_object(obj, found, dst=dst, group=self._group)
        return found

    def barrier(self) -> None:
        """Wait for all processes."""
        if self._group is not None:
            dist.barrier(group=self._group)


def _model(pretrained: Any, draft: str | None, given: LoadOptions, names: Sequence[str]) -> SpeculativeModel:
    """The model under test: loaded now, or before.

    Raises:
        InvalidInputError: options of loading beside a loaded model; what `from_pretrained` raises.
    """
    if not isinstance(pretrained, SpeculativeModel):
        return ModelSpec(str(pretrained), draft, given).load()
    if draft is not None or names:
        late = ", ".join([*(["draft"] if draft is not None else []), *names])
        raise InvalidInputError(f"pretrained is a loaded model, so {late} come too late: give them to from_pretrained")
    return pretrained


def _load_options(
    given: Options, batch_size: int | str, max_length: int | None, max_batch_size: int | None = None
) -> LoadOptions:
    """lm-eval's model arguments as load options.

    Raises:
        InvalidInputError: an unknown one, a value that is not allowed, or max_length beside max_model_len.
    """
    known = [each.name for each in fields(LoadOptions)]
    if unknown := sorted(set(given) - set(known)):
        raise unknown_options("unknown model_args", unknown, ("pretrained", "draft", "max_length", *_ANSWERING, *known))
    if max_length is not None and given.get("max_model_len") is not None:
        raise InvalidInputError("max_length and max_model_len are the same model argument; give one of them")
    options = dict(given)
    if max_length is not None:
        options["max_model_len"] = max_length
    if (rows := _rows(batch_size, max_batch_size)) is not None:
        options["max_num_seqs"] = rows
    divided = str(options.get("tensor_parallel_size", 1)) != "1"  # whose rank 0 is on cuda:0 anyway
    several = _processes() > 1
    if divided and several:
        raise InvalidInputError(
            "tensor_parallel_size starts its own processes: start lm-eval without accelerate launch or torchrun"
        )
    if options.get("device") == "cuda:0" and (divided or not torch.cuda.is_available()):
        del options["device"]
    if several and torch.cuda.is_available() and options.get("device") in (None, "cuda", "cuda:0"):
        options["device"] = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"  # its own of this machine's
    return LoadOptions.from_words(options)


def _rows(batch_size: int | str, max_batch_size: int | None) -> int | None:
    """Most requests that run together, or None for the default.

    Raises:
        InvalidInputError: batch_size is neither a number from 1 nor "auto" or "auto:N".
    """
    automatic, _, times = str(batch_size).partition(":")
    if automatic == "auto" and (not times or times.isdigit()):
        return max_batch_size
    if not str(batch_size).isdigit() or int(batch_size) < 1:
        raise InvalidInputError(f"batch_size={batch_size!r}: a number from 1, auto, or auto:N")
    return int(batch_size) if int(batch_size) > 1 else None


def _processes() -> int:
    """How many processes were started together; 1 where a launcher started none."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def register() -> None:
    """Make `--model specdec` known to lm-eval, of which no release up to 0.4.13 reads entry points.

    Source: EleutherAI/lm-evaluation-harness lm_eval/api/registry.py: the stock models register on import, and a second
    registration under a name raises unless it is the same.
    """
    found = dict(model_registry.items()).get(NAME)
    if found is None:
        model_registry.register(NAME, target=SpecdecLM)
    elif found is not SpecdecLM and __name__ not in str(getattr(found, "value", found)):
        _LOG.warning("lm-eval has another model of the name %r: %s", NAME, found)


register()
