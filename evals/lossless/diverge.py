"""The operators whose results for a token depend on what else is in the batch.

Rows of tokens are read, and what every module is given and returns is kept, token by token. Then the same tokens are
read in other company. Other bits are noted, and the kept ones are passed on: each operator gets equal arguments, and is
judged apart from those before it. Attention counts as one operator.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from attention.hf.patches import Value, borrowed
from evals.runs.conversations import ModelSpec
from evals.runs.verdict import Verdict
from specdec.errors import UnsupportedModelError
from specdec.requests.prompts import encode_prompts
from specdec.selftest.eager_reference import DummyRows, ReadPiece
from specdec.selftest.selftest import invariance_test
from specdec.values import Function, Json

_TOKENS = 64
"""Tokens of the first row; each other row has one more than the one before."""
_REFUSALS = (
    *("loading.assembly.check_operators", "loading.assembly.matmul_test", "loading.assembly.invariance_test"),
    *("execution.graphs.matmul_test", "execution.graphs.experts_test", "execution.graphs.invariance_test"),
)
"""Tests that let no model be loaded whose results depend on the batch."""


class _Watch:
    """Reads rows, and compares the operators that run meanwhile with themselves in the first reading.

    Attributes:
        names: of operators. caller: the module that is running.
        calls: how often each operator ran in this forward.
        kept: of each tensor with a token dimension, by operator, call and place, [tokens, n] of each row.
        found: what differed, by the same key; of each tensor the first time.
    """

    def __init__(self, rows: DummyRows) -> None:
        target = rows.target
        self.rows = rows
        self.ids = rows.ids
        self.names = {module: name for name, module in target.hf_model.named_modules()} | {target.runner: "attention"}
        self.caller: Any = target.hf_model
        self.kept: dict[Any, Any] = {}
        self.found: dict[Any, Json] = {}

    def read_by_row(self, piece: ReadPiece, model: Function | None) -> list[Tensor]:
        """See `DummyRows`."""
        self.piece = piece
        self.calls = Counter[Any]()
        return self.rows.read_by_row(piece, model)

    def run(self, operator: Any, function: Function, *args: Any, **kwargs: Any) -> Any:
        """Call an operator with the kept arguments, of which the caller's own code makes others; its kept results."""
        caller = self.caller
        args, kwargs = self._same(operator, caller, (args, kwargs))
        self.caller = operator
        results = function(*args, **kwargs)
        self.caller = caller
        return self._same(operator, operator, results, (args, kwargs))

    def _same(self, operator: Any, maker: Any, values: Any, given: Any = ()) -> Any:
        """Arguments or results of an operator with the bits that were kept. maker: made them, by arguments `given`."""
        leaves, form = tree_flatten(values)
        call = operator, not given
        self.calls[call] += 1
        lens = [*map(len, self.ids)]
        for place, x in enumerate(leaves):
            key = (*call, self.calls[call], place)
            if key in self.kept:
                right = torch.cat(self.piece.right_tokens(self.kept[key]))
                own = x.contiguous().clone().view(-1, right.shape[1])
                part = own[: len(right)]  # compiled code reads two tokens at least
                differs = (part.view(torch.uint8) != right.view(torch.uint8)).any(1)
                if not differs.any():
                    continue
                shape = getattr(getattr(maker, "weight", None), "shape", ())
                about = {
                    "name": self.names[maker],
                    "kind": f"{type(maker).__name__} {[*shape]}",
                    "caller": self.names[self.caller],
                    "rows": [*self.piece.rows],
                    "start": self.piece.start.tolist(),
                    "stop": self.piece.stop.tolist(),
                    "tokens": int(differs.sum()),
                    "largest": float((part.double() - right.double()).abs().max()),
                }
                self.found.setdefault(key, about)
                part.copy_(right)
                leaves[place] = own.view(x.shape)
            elif isinstance(x, Tensor) and sum(lens) in x.shape[:-1][:2]:  # the first reading
                self.kept[key] = x.reshape(sum(lens), -1).clone().split(lens)
        return tree_unflatten(leaves, form)


def diverge(model: Any, texts: list[str]) -> Json:
    """Every operator of a SpeculativeModel's target that differs, in order of execution, and how its logits do.

    Texts are cut or repeated to about 64 tokens. With rounds from CUDA graphs, modules without submodules are
    compiled by the same settings as the whole. Nothing else may call modules meanwhile, on any thread.
    """
    target = model.target
    whole = target.hf_model
    ids = [np.resize(prompt, _TOKENS + row) for row, prompt in enumerate(encode_prompts(texts, model.tokenizer))]
    rows = DummyRows.of(target, np.array([*map(len, ids)]))
    rows = replace(rows, ids=[torch.from_numpy(row).to(whole.device) for row in ids])
    watch = _Watch(rows)
    form = served = None
    settings: Any = nullcontext()
    values: list[Value] = [
        (target, "steps", None),
        (target.runner, "attend", partial(watch.run, target.runner, target.runner.attend)),
    ]
    if model.graphs == "on":
        from specdec.compiler.compiling import compiled, compiler_settings, for_any_batch

        invariant = target.runner.batch_invariant
        settings = compiler_settings(invariant)
        form, served = (for_any_batch(each, invariant) for each in (whole, compiled(whole)))
        alone = (module for module in whole.modules() if not [*module.children()])
        values += [(module, "forward", compiled(module.forward)) for module in alone]
    call = nn.Module.__call__

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A module without submodules may call some all the same: code of its own, which is compiled as such.
        own = nullcontext() if module._modules else patch.object(nn.Module, "__call__", call)
        with own:
            return watch.run(module, call, module, *args, **kwargs)

    # Logits that differ beyond all modules end the first test; the second one reports them.
    with suppress(UnsupportedModelError), patch.object(nn.Module, "__call__", called), borrowed(values), settings:
        invariance_test(target, form, watch)
    found = [watch.found[key] for key in watch.kept if key in watch.found]
    logits = ""
    try:
        invariance_test(target, served, rows)
    except UnsupportedModelError as error:
        logits = str(error)
    verdict = Verdict.FAIL if found or logits else Verdict.PASS
    return {"model": model.describe(), "operators": found, "logits": logits, "verdict": verdict}


def load(spec: ModelSpec) -> Any:
    """A model, also where its self-test would find that results depend on the batch."""
    with ExitStack() as patches:
        for name in _REFUSALS:
            patches.enter_context(patch(f"specdec.{name}"))
        return spec.load()
