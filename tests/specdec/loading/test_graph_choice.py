"""Where rounds run from CUDA graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention.backends.invariant import InvariantBackend
from attention.backends.reference import TorchBackend
from specdec.errors import InvalidInputError
from specdec.loading.cuda_graphs import choose_graphs, uncapturable


class Backend(InvariantBackend):
    """It has graphs and needs none."""

    name, batch_invariant = "flexible", False


def test_a_backend_that_has_graphs_runs_from_them() -> None:
    assert choose_graphs(InvariantBackend(), None, True).required
    assert not choose_graphs(Backend(), None, "auto").reason
    assert choose_graphs(Backend(), None, False).reason == "cuda_graphs=False"


def test_a_backend_without_them_or_that_needs_them_says_so() -> None:
    torch_backend = TorchBackend(torch.device("cpu"))
    choice = choose_graphs(torch_backend, None, "auto")
    assert choice.reason and choice.expected
    with pytest.raises(InvalidInputError, match="needs a backend for a GPU that has graphs, not 'torch'"):
        choose_graphs(torch_backend, None, True)
    with pytest.raises(InvalidInputError, match="backend='batch_invariant' needs cuda_graphs=True"):
        choose_graphs(InvariantBackend(), None, False)


def test_parameters_made_in_inference_mode_are_named() -> None:
    made = torch.nn.Linear(2, 2)
    probed: Any = SimpleNamespace(model=made, recurrent_calls=())
    assert uncapturable(probed, None) == ""
    with torch.inference_mode():
        inside = torch.nn.Linear(2, 2)
    head: Any = inside
    reason = uncapturable(probed, head)
    assert choose_graphs(Backend(), None, "auto", reason).reason == reason != ""
    with pytest.raises(InvalidInputError, match=r"cuda_graphs=True: parameters were made in torch.inference_mode\(\)"):
        choose_graphs(Backend(), None, True, reason)
