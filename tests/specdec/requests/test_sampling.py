"""The target distribution: filters equal transformers' warpers; draws stay in the support; values are checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fakes import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.errors import InvalidInputError
from specdec.requests.sampling import SamplingArrays, SamplingParams, SamplingTensors
from specdec.requests.target_probs import draw, target_probs


def tensors(params: list[SamplingParams]) -> SamplingTensors:
    a = SamplingArrays.of(params)
    return SamplingTensors(
        *(torch.from_numpy(x) for x in (a.temperature, a.top_k, a.top_p, a.min_p)), filters=a.filters
    )


def warped(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What transformers' own warpers make of one row of logits [V]."""
    steps = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        steps.append(MinPLogitsWarper(params.min_p))
    return steps(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0].softmax(-1)


sampled = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 11, 50]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.31, 0.05]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 0.9, 1.0]),
)


@settings(max_examples=examples(120), deadline=None)
@given(st.lists(sampled, min_size=1, max_size=4), st.integers(0, 10_000))
def test_filters_equal_transformers_warpers(params: list[SamplingParams], seed: int) -> None:
    """Row by row with different parameters in one batch, V = 11."""
    logits = torch.randn(len(params), 11, generator=torch.Generator().manual_seed(seed)) * 3
    ours = target_probs(logits, tensors(params))
    right = torch.stack([warped(row, p) for row, p in zip(logits, params, strict=True)])
    assert torch.equal(ours > 0, right > 0), "the same support"
    assert torch.allclose(ours, right, atol=1e-6)


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.9}, {"top_k": 3, "top_p": 0.4}])
def test_ties_are_those_of_transformers(params: dict[str, Any]) -> None:
    logits = torch.tensor([2.0, 1.0, 2.0, 2.0, 1.0, 0.0])
    own = SamplingParams(temperature=1.0, **params)
    ours = target_probs(logits[None], tensors([own]))[0]
    assert torch.allclose(ours, warped(logits, own), atol=1e-7)


def test_a_greedy_row_is_one_hot_beside_sampled_rows() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2], [0.1, 0.4, 0.2], [5.0, 5.0, 1.0]])
    params = [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams()]
    probs = target_probs(logits, tensors(params))
    assert probs[0].tolist() == [0.0, 1.0, 0.0]
    assert torch.allclose(probs[1], logits[1].softmax(-1))
    assert probs[2].tolist() == [1.0, 0.0, 0.0], "argmax takes the first of equals"


@given(
    st.lists(st.floats(0, 1).map(lambda x: x if x > 1e-3 else 0.0), min_size=2, max_size=12).filter(any),
    st.floats(0, 1, exclude_max=True, width=32),
)
def test_drawing_inverts_the_cumulative_distribution(weights: list[float], uniform: float) -> None:
    index = int(draw(torch.tensor([weights], dtype=torch.float64), torch.tensor([uniform]))[0])
    assert weights[index] > 0
    cumulative = np.cumsum(np.array(weights, np.float64)) / np.sum(np.array(weights, np.float64))
    assert uniform <= cumulative[index] + 1e-9
    assert index == 0 or cumulative[index - 1] <= uniform + 1e-9


def test_uniform_zero_and_almost_one_stay_inside_the_support() -> None:
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]] * 2)
    assert draw(weights, torch.tensor([0.0, 1 - 2**-24])).tolist() == [1, 3]


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "max_new_tokens": (lambda: SamplingParams(max_new_tokens=0), "max_new_tokens=0: allowed is at least 1"),
    "temperature": (lambda: SamplingParams(temperature=-0.1), "temperature=-0.1: allowed is 0"),
    "nan": (lambda: SamplingParams(temperature=float("nan")), "temperature=nan"),
    "top_k": (lambda: SamplingParams(top_k=-1), "top_k=-1: allowed is 0"),
    "top_p 0": (lambda: SamplingParams(top_p=0.0), "top_p=0.0: allowed is in"),
    "top_p 2": (lambda: SamplingParams(top_p=2.0), "top_p=2.0"),
    "min_p": (lambda: SamplingParams(min_p=1.5), "min_p=1.5"),
    "stop": (lambda: SamplingParams(stop=("a", "")), "stop=.*non-empty strings"),
    "k": (lambda: SamplingParams(num_speculative_tokens=-1), "num_speculative_tokens=-1"),
    "unknown": (lambda: SamplingParams.from_dict({"topk": 3, "beams": 2}), "unknown sampling option 'beams', 'topk'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_value_out_of_range_is_refused_by_name(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(InvalidInputError, match=message):
        make()


def test_a_single_stop_string_is_one_stop() -> None:
    assert SamplingParams(stop="abc").stop == ("abc",)  # type: ignore[arg-type]
    assert SamplingParams.from_dict({"top_k": 3, "stop": ["a"]}) == SamplingParams(top_k=3, stop=("a",))


@pytest.mark.parametrize("top_p", [1e-9, 1e-8, 6e-8])
def test_the_smallest_top_p_keeps_the_most_probable_token(top_p: float) -> None:
    """1 - top_p is 1 in float32: every token's mass lies below it."""
    logits = torch.tensor([[0.0, 2.0, 1.0, -9.0], [3.0, 3.0, 3.0, 3.0]])
    probs = target_probs(logits, tensors([SamplingParams(temperature=1.0, top_p=top_p)] * 2))
    assert probs[0].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert probs[1].tolist() == [0.0, 0.0, 0.0, 1.0], "of equal ones that which the sort puts last"


def test_top_p_of_one_keeps_every_token() -> None:
    """Beside a row with a filter; one whose share of the mass rounds to nothing, too."""
    logits = torch.tensor([[0.0, -80.0, 1.0], [0.0, -80.0, 1.0]])
    params = [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9)]
    probs = target_probs(logits, tensors(params))
    assert probs[0, 1] > 0 and probs[1, 1] == 0


def test_top_p_drops_a_token_at_the_very_border() -> None:
    """Masses that floats hold exactly: the smaller half is all that may go."""
    logits = torch.tensor([[0.25, 0.5, 0.25]]).log()
    probs = target_probs(logits, tensors([SamplingParams(temperature=1.0, top_p=0.5)]))
    assert probs[0].tolist() == [0.0, 1.0, 0.0]


def test_filters_renormalise_in_their_order() -> None:
    """top-k first: of the two that it keeps, 0.55 and 0.45, top-p 0.5 keeps one; before it, two are needed."""
    logits = torch.tensor([[0.44, 0.36, 0.2]]).log()
    probs = target_probs(logits, tensors([SamplingParams(temperature=1.0, top_k=2, top_p=0.5)]))
    assert probs[0].tolist() == [1.0, 0.0, 0.0]


def test_min_p_alone_is_a_filter() -> None:
    arrays = SamplingArrays.of([SamplingParams(temperature=1.0, min_p=0.2)])
    assert arrays.filters and not SamplingArrays.of([SamplingParams(temperature=1.0)]).filters


def test_the_smallest_probabilities_of_a_large_vocabulary_are_drawn() -> None:
    """Sums rounded to float32 stand still over a hundred tokens of them."""
    weights = torch.full((1, 200_000), 1e-9)
    weights[0, 0] = 1.0
    cumulative = np.cumsum(weights[0].double().numpy())
    for uniform in (0.99985, 0.9999, 1 - 2**-24):
        u = float(np.float32(uniform))
        right = np.searchsorted(cumulative, u * cumulative[-1], side="right")
        assert int(draw(weights, torch.tensor([u]))[0]) == right > 100


def test_several_greedy_completions_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="n=2 with temperature=0: greedy decoding has one completion"):
        SamplingParams(n=2)
    assert SamplingParams(n=2, temperature=0.5).n == 2
