"""Where rounds run from CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from attention.backends.invariant import InvariantBackend
from attention.backends.reference import TorchBackend
from specdec.errors import InvalidInputError
from specdec.loading.backends import check_graphs, choose_graphs, made_in_inference_mode


class Backend(InvariantBackend):
    """It has graphs and needs none."""

    name, batch_invariant = "flexible", False


def test_a_backend_that_has_graphs_runs_from_them() -> None:
    check_graphs(InvariantBackend(), None, True)
    assert choose_graphs(Backend(), None, "auto").wanted
    assert not choose_graphs(Backend(), None, False).wanted


def test_a_backend_without_them_or_that_needs_them_says_so() -> None:
    torch_backend = TorchBackend(torch.device("cpu"))
    choice = choose_graphs(torch_backend, None, "auto")
    assert (choice.wanted, choice.expected) == (False, True)
    with pytest.raises(InvalidInputError, match="needs a backend for a GPU that has graphs, not 'torch'"):
        choose_graphs(torch_backend, None, True)
    with pytest.raises(InvalidInputError, match="backend='batch_invariant' needs cuda_graphs=True"):
        choose_graphs(InvariantBackend(), None, False)


def test_parameters_made_in_inference_mode_are_named() -> None:
    made = torch.nn.Linear(2, 2)
    assert made_in_inference_mode(made, None, object()) == ""
    with torch.inference_mode():
        inside = torch.nn.Linear(2, 2)
    reason = made_in_inference_mode(made, inside)
    assert choose_graphs(Backend(), None, "auto", reason).reason == reason != ""
    with pytest.raises(InvalidInputError, match=r"cuda_graphs=True: parameters were made in torch.inference_mode\(\)"):
        choose_graphs(Backend(), None, True, reason)
