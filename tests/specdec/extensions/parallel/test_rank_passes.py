"""Two sums between ranks whose results are added become one; any other stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import CPU
from torch.fx.experimental.proxy_tensor import make_fx

from specdec.extensions.parallel.ranks import Ranks
from specdec.extensions.parallel.shares import sum_once, sum_ranks


class Counting:
    """Three ranks with the same parts."""

    name = "counting"

    def __init__(self) -> None:
        self.sums = 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return 3 * x


def experts_and_shared(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return sum_ranks(a * 2).view(1, 4, 6) + sum_ranks(b + 1)


def read_twice(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    first = sum_ranks(a * 2)
    return first.view(1, 4, 6) + sum_ranks(b + 1) + first.sum()


def one_whole(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return sum_ranks(a * 2).view(1, 4, 6) + b


def broadcast(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return sum_ranks(a[:1] * 2) + sum_ranks(b + 1)


@pytest.mark.parametrize(
    ("function", "sums"), [(experts_and_shared, 1), (read_twice, 2), (one_whole, 1), (broadcast, 2)]
)
def test_sums_that_are_added(function: Callable[..., torch.Tensor], sums: int) -> None:
    torch.manual_seed(0)  # a sum near zero is not close relative to itself
    a, b = torch.randn(4, 6), torch.randn(1, 4, 6)
    counting: Any = Counting()
    channel: Any = None
    with Ranks(0, 3, CPU, counting, channel).together():
        right = function(a, b)
        traced = make_fx(function, tracing_mode="fake")(a, b)
        before = counting.sums
        sum_once(traced.graph)
        traced.graph.lint()
        traced.recompile()
        assert torch.allclose(traced(a, b), right)
        assert counting.sums - before == sums
