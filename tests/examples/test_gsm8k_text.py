"""The training script's text changes: one notation, other names, other numbers with every calculation redone."""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "examples" / "builtin_models" / "gsm8k_text.py"
SPEC = importlib.util.spec_from_file_location("gsm8k_text", SOURCE)
assert SPEC is not None and SPEC.loader is not None
text = importlib.util.module_from_spec(SPEC)
sys.modules["gsm8k_text"] = text  # dataclasses look their module up there
SPEC.loader.exec_module(text)

PAIR = text.Pair(
    "Anna has 40 pens and buys 8 boxes of 11 pens. How many pens does Anna have?",
    "Anna buys 8*11 = <<8*11=88>>88 pens.\nAnna has 40+88 = <<40+88=128>>128 pens.\n#### 128",
)


@pytest.mark.parametrize(
    ("raw", "tidied"),
    [
        ("She pays 12 x 2 = $<<12*2=24>>24.", "She pays 12*2 = $<<12*2=24>>24."),
        ("In 3 days 5 cups * 4 cups/day = <<5*4=20>>20", "In 3 days 5*4 = <<5*4=20>>20."),
        ("$1,000 + $500 = $<<1000+500=1500>>1,500 in all.", "1000+500 = $<<1000+500=1500>>1500 in all."),
        ("So 9/2=<<9/2=4.5>>4.5 and 1+1=<<1+1=2>>2.", "So 9/2 = <<9/2=4.5>>4.5 and 1+1 = <<1+1=2>>2."),
        ("The total is <<5+5=10>>10.", "The total is <<5+5=10>>10."),
        ("It is 20% of 50 = <<50*.2=10>>10.", "It is 20% of 50 = <<50*.2=10>>10."),
        ("#### 1,234", "#### 1234"),
    ],
)  # fmt: skip
def test_calculations_get_one_notation_and_others_stay(raw: str, tidied: str) -> None:
    assert text.tidy(raw) == tidied
    assert text.tidy(tidied) == tidied


def test_renumbered_pair_has_new_numbers_and_right_calculations() -> None:
    changed = text.renumbered(PAIR, random.Random(0))
    a, b, c = (int(n) for n in re.findall(r"\d+", changed.question))
    assert (a, b, c) != (40, 8, 11)
    assert changed.answer == (
        f"Anna buys {b}*{c} = <<{b}*{c}={b * c}>>{b * c} pens.\n"
        f"Anna has {a}+{b * c} = <<{a}+{b * c}={a + b * c}>>{a + b * c} pens.\n#### {a + b * c}"
    )


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Tom has 5 red and 5 blue pens. How many?", "5+5 = <<5+5=10>>10\n#### 10"),  # one number, two meanings
        ("Tom eats 20% of 50 pies. How many?", "50*20/100 = <<50*20/100=10>>10\n#### 10"),
        ("Tom has 40 pens and buys 31. How many?", "40+31 = <<40+31=71>>71, that is 17 dozen.\n#### 71"),
        ("Tom has 9 pens and 5 cups. How many?", "9+5 = <<9+5=14>>14\n14-9 = <<14-9=5>>5\n#### 5"),  # result is given
        ("Tom has 40 pens. How many?", "He has 40.\n#### 40"),  # no calculation
    ],
)
def test_unsafe_pairs_are_not_renumbered(question: str, answer: str) -> None:
    assert text.renumbered(text.Pair(question, answer), random.Random(0)) is None


def test_names_change_alike_in_question_and_answer() -> None:
    changed = text.renamed(PAIR, random.Random(1))
    new = changed.question.split()[0]
    assert new != "Anna" and new in text.WOMEN
    assert changed == text.Pair(PAIR.question.replace("Anna", new), PAIR.answer.replace("Anna", new))


def test_a_pair_without_known_names_stays() -> None:
    pair = text.Pair("A shop has 3 pens.", "#### 3")
    assert text.renamed(pair, random.Random(1)) == pair


def test_missing_data_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECDEC_DATA", str(tmp_path))
    with pytest.raises(text.InvalidInputError, match=r"train\.jsonl.*SPECDEC_DATA"):
        text.read("train")


def test_dev_part_is_fixed_and_shares_nothing_with_the_training_part() -> None:
    pairs = [text.Pair(f"Question {i}?", f"#### {i}") for i in range(2_000)]
    train, dev = text.split_dev(pairs)
    assert len(dev) == text.DEV_SIZE and len(train) == 1_500
    assert not {p.question for p in train} & {p.question for p in dev}
    assert text.split_dev(pairs) == (train, dev)
