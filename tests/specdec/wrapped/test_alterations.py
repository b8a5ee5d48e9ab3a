"""What was done to a model is undone wherever the owner becomes garbage."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from specdec.compiler.siblings import SiblingLinear, fuse_siblings
from specdec.wrapped.alterations import Alterations


class Owner:
    """What needs the alterations."""


class Pair(nn.Module):
    """Two layers that read the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.first(x), self.second(x)), -1)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_an_owner_that_is_garbage_while_another_model_is_traced() -> None:
    """The compiler traces with tensors that are none, and the garbage collector may run meanwhile."""
    pair, x, owner = Pair().requires_grad_(False), torch.randn(5, 4), Owner()
    before = pair(x)
    fuse_siblings(pair, lambda: pair(x), Alterations(owner))
    assert isinstance(pair.first, SiblingLinear)
    with FakeTensorMode():
        del owner
    assert type(pair.first) is type(pair.second) is nn.Linear
    assert pair.first.weight.untyped_storage().data_ptr() != pair.second.weight.untyped_storage().data_ptr()
    torch.testing.assert_close(pair(x), before)
