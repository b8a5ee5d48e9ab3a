"""What a row reads next: its prefill in chunks, then its bonus token."""

from __future__ import annotations

import numpy as np

from specdec.requests.sampling import SamplingParams
from specdec.rounds.rows import RowTable

ROWS = np.array([0, 1])


def opened() -> RowTable:
    """Row 0 is new, with a prompt of 7 tokens; row 1 comes back with 9 tokens, the last of them its bonus token."""
    table = RowTable(2, 32)
    assert table.open(np.arange(7), 20, 3, 1, SamplingParams()) == 0
    assert table.open(np.arange(9), 20, 3, 1, SamplingParams(), prefill=8) == 1
    return table


def test_a_new_row_reads_its_whole_prompt_and_a_resumed_one_all_but_its_bonus_token() -> None:
    table = opened()
    assert table.prefilling(ROWS).tolist() == [True, True] and table.pending(ROWS).tolist() == [7, 8]
    table.computed[ROWS] += 5
    assert table.prefilling(ROWS).tolist() == [True, True] and table.pending(ROWS).tolist() == [2, 3]


def test_then_both_are_at_their_bonus_tokens() -> None:
    table = opened()
    table.computed[ROWS] = (7, 8)
    table.length[0] += 1  # the first token, of the prompt's last position
    assert table.prefilling(ROWS).tolist() == [False, False] and table.pending(ROWS).tolist() == [1, 1]


def test_a_row_used_again_keeps_nothing() -> None:
    table = opened()
    table.computed[1] = 8
    table.close(1)
    assert table.open(np.arange(4), 20, 0, 2, SamplingParams()) == 1
    assert table.prefilling(ROWS).tolist() == [True, True] and table.pending(ROWS).tolist() == [7, 4]


def test_rows_are_sampled_by_their_own_temperature_alone() -> None:
    table = RowTable(3, 32)
    for temperature in (0.0, 0.7, 0.0):
        table.open(np.arange(7), 20, 3, 1, SamplingParams(temperature=temperature, top_k=5))
    assert [table.any_sampled(np.array(rows)) for rows in ([0, 2], [1], [2, 1])] == [False, True, True]
    table.close(1)
    table.open(np.arange(4), 20, 0, 2, SamplingParams())
    assert not table.any_sampled(np.arange(3))


COLUMNS = ("length", "computed", "begin", "head_computed", "prefill", "limit", "longest", "variant", "drafts")


def columns(table: RowTable, row: int) -> dict[str, object]:
    own: dict[str, object] = {name: getattr(table, name)[row].item() for name in (*COLUMNS, "previous", "key")}
    sampling = {name: values[row].item() for name, values in vars(table.sampling(np.arange(2))).items()}
    return (
        own
        | sampling
        | {"eos": [e for e in table.eos[row].tolist() if e >= 0], "tokens": table.committed(row).tolist()}
    )


def test_a_row_used_again_is_a_new_one_in_every_column() -> None:
    """After a request that left something else in each of them."""
    fresh, used = RowTable(2, 32), RowTable(2, 32)
    odd = SamplingParams(temperature=0.7, top_k=5, top_p=0.5, min_p=0.2)
    assert used.open(np.arange(9), 20, 2, 5, odd, (3, 4, 5), 8, 4, longest=16, variant=1) == 0
    assert used.open(np.arange(3), 20, 2, 5, odd, (6,)) == 1
    for name in ("computed", "head_computed"):
        getattr(used, name)[0] = 9
    used.mark_batch(np.array([1, 0]))
    used.close(0)
    assert used.previous.tolist() == [-1, 0]
    for table in (fresh, used):
        table.previous[0] = 1 if table is used else -1  # whatever stands there
        assert table.open(np.arange(7, 11), 12, 3, 9, SamplingParams(temperature=1.0), (8,), 3, 2, longest=20) == 0
    assert columns(used, 0) == columns(fresh, 0)
    assert used.longest[0] == 20 and used.begin[0] == used.head_computed[0] == 2 and used.eos[1, 0] == 6
    assert (used.eos[1, 1:] == -1).all(), "no id of a longer list of another row's"


def test_more_eos_ids_than_before_end_nobody_else() -> None:
    table = RowTable(2, 32)
    table.open(np.arange(3), 20, 2, 5, SamplingParams(), (6,))
    table.open(np.arange(3), 20, 2, 5, SamplingParams(), (7, 8))
    assert table.eos.tolist() == [[6, -1], [7, 8]]


def test_only_rows_of_the_last_batch_have_a_place_in_it() -> None:
    table = opened()
    table.mark_batch(np.array([1, 0]))
    assert table.previous.tolist() == [1, 0]
    table.mark_batch(np.array([1]))
    assert table.previous.tolist() == [-1, 0]


def test_committed_tokens_are_a_copy() -> None:
    """A request that waits keeps them while another one has its row."""
    table = opened()
    kept = table.committed(0)
    table.tokens[0] = 0
    assert kept.tolist() == list(range(7))


def test_every_sampling_parameter_is_the_requests_own() -> None:
    table = RowTable(2, 32)
    for params in (SamplingParams(temperature=0.7, top_k=5, top_p=0.5, min_p=0.25), SamplingParams()):
        table.open(np.arange(3), 20, 2, 5, params)
    own = table.sampling(np.array([1, 0]))
    assert own.temperature.tolist() == [0.0, np.float32(0.7)] and own.top_k.tolist() == [0, 5]
    assert own.top_p.tolist() == [1.0, 0.5] and own.min_p.tolist() == [0.0, 0.25]
