"""What an interrupt leaves behind is mended before the next change, and only then."""

from __future__ import annotations

import pytest

from specdec.engine.engine import Change


def test_an_interrupted_change_is_mended_once_before_the_next() -> None:
    mended: list[str] = []
    change = Change(lambda: mended.append("mended"))
    with pytest.raises(KeyboardInterrupt), change:
        raise KeyboardInterrupt
    assert mended == []
    for _ in range(2):
        with change:
            assert mended == ["mended"]


def test_an_interrupt_of_the_mending_leaves_it_to_do() -> None:
    tries: list[int] = []

    def mend() -> None:
        tries.append(len(tries))
        if len(tries) == 1:
            raise KeyboardInterrupt

    change = Change(mend)
    with pytest.raises(ZeroDivisionError), change:
        _ = 1 / 0
    with pytest.raises(KeyboardInterrupt), change:
        raise AssertionError("not entered")
    with change:
        assert tries == [0, 1]
