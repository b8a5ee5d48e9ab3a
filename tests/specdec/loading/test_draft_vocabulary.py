"""The option draft_vocab: which tokens it names, what a load makes of them, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attention.transport.region_tables import check_fingerprints
from drafters.mtp.head import MtpHead
from specdec import SpeculativeModel, draft_vocab_of
from specdec.cli.tables import fit_lines
from specdec.errors import HandoffMismatchError, HeadLoadError, InvalidInputError
from specdec.extensions.handoff.link import fingerprint
from specdec.loading import heads, parts
from specdec.loading.heads import draft_on, read_draft_vocab
from specdec.loading.tokenizers import load_tokenizer
from specdec.options import LoadOptions
from specdec.requests.grammar import Grammar
from specdec.requests.sampling import SamplingParams

SIZES: dict[str, Any] = {"num_speculative_tokens": 3, "max_model_len": 160, "max_num_seqs": 4, "device": "cpu"}
CHAT = [{"role": "user", "content": "Tom has 3 boxes of 12 eggs. How many eggs?"}]
PARAMS = SamplingParams(max_new_tokens=48)
DIGITS = Grammar.regex("[0-9]{12}")


def opened(draft: Any = "mtp", target: Any = "gsm-deepseek", **options: Any) -> SpeculativeModel:
    return SpeculativeModel.from_pretrained(target, draft, **SIZES, **options)


@pytest.fixture(scope="module")
def model() -> Iterator[SpeculativeModel]:
    with opened(draft_vocab=range(300, 900)) as made:
        yield made


def test_the_most_frequent_tokens_come_first_and_the_smaller_of_equals() -> None:
    texts = [[5, 5, 9], np.array([9, 2, 7]), torch.tensor([40])]
    assert draft_vocab_of(texts, 2) == [5, 9] and draft_vocab_of(texts, 3) == [2, 5, 9]
    assert draft_vocab_of(texts, 99) == [2, 5, 7, 9, 40], "tokens that do not occur are not chosen"
    tokenizer = load_tokenizer("gsm-deepseek")
    found = draft_vocab_of(["eggs and eggs", "eggs"], 2000, tokenizer)
    assert set(found) == {*tokenizer.encode("eggs and eggs"), *tokenizer.encode("eggs")}
    encoded = tokenizer(["eggs and eggs", "eggs"], add_special_tokens=False)
    assert draft_vocab_of(encoded, 2000) == draft_vocab_of(encoded["input_ids"], 2000)


@pytest.mark.parametrize(
    ("texts", "size", "words"),
    [
        ([], 3, "0 tokens in the texts"),
        ([[1, 2]], 0, "size=0: allowed is 1 or more"),
        ([[1, 2]], 2.5, r"size=2.5 \(float\): allowed is 1 or more"),
        (None, 3, "texts=None: give a list"),
        ("eggs", 3, "give a list of texts"),
        (["eggs"], 3, "tokenizer"),
        ([[1, 2], [3, 10**9]], 3, "a token id of texts=1000000000: allowed is 0 … 16777215"),
        ([[1, 10**30]], 3, "a token id of texts=1000000000000000000000000000000: allowed is 0 … 16777215"),
        ([[1, -2]], 3, "a token id of texts=-2: allowed is 0 … 16777215"),
    ],
)
def test_texts_that_name_no_tokens(texts: Any, size: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        draft_vocab_of(texts, size)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (512, r"draft_vocab=512 \(int\): allowed is token ids"),
        ([], "allowed is token ids, one at least"),
        ("", "allowed is token ids, one at least"),
        ([1, -2], "draft_vocab=-2: allowed is 0 or more"),
        ([1, 2.0], r"draft_vocab=2.0 \(float\)"),
        ([3, 3, 4], "3 token ids, of which 2 differ; give each once"),
    ],
)
def test_values_that_are_no_tokens(given: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        LoadOptions(draft_vocab=given)


def test_any_sequence_is_taken_and_a_file(tmp_path: Path) -> None:
    for given in ([4, 2], np.array([4, 2]), torch.tensor([4, 2]), (4, 2)):
        assert LoadOptions(draft_vocab=given).draft_vocab == (4, 2)
    (tmp_path / "ids.json").write_text("[4, 2]")
    assert LoadOptions(draft_vocab=tmp_path / "ids.json").draft_vocab == str(tmp_path / "ids.json")  # type: ignore[arg-type]
    assert read_draft_vocab(str(tmp_path / "ids.json")) == (4, 2) and read_draft_vocab(None) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "json.dump"),
        ("four", "give a JSON file with a list of token ids"),
        ("4", "the file holds 4, not a list"),
        ("[4, -2]", "ids.json'=-2: allowed is 0 or more"),
        ("[]", "ids.json'=.*one at least"),
        ("[" * 100_000, "give a JSON file with a list of token ids.*recursion"),
    ],
)
def test_files_that_hold_no_tokens_are_named_before_a_model_is_read(
    text: str | None, words: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "ids.json").write_text(text)
    with pytest.raises(InvalidInputError, match=words):
        opened(target=str(tmp_path / "no model"), draft_vocab=str(tmp_path / "ids.json"))


@pytest.mark.parametrize(
    ("draft", "target", "words"),
    [
        (None, "gsm-deepseek", "there is no draft head; leave it out"),
        ("lookup", "gsm-deepseek", "there is no draft head; leave it out"),
        ("auto", "gsm-llama", "the checkpoint of Eagle3Head decides what that drafts on"),
    ],
)
@pytest.mark.cases(1)
def test_heads_that_it_means_nothing_for(draft: Any, target: str, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        opened(draft, target, draft_vocab=[1, 2, 3])


@pytest.mark.thorough
def test_end_and_special_tokens_are_added(model: SpeculativeModel) -> None:
    head, tokenizer = model.head, model.tokenizer
    assert isinstance(head, MtpHead) and head.target_ids is not None
    assert set(head.target_ids.tolist()) == {*range(300, 900), 1, *tokenizer.all_special_ids}
    added = {7: SimpleNamespace(special=True), 8: SimpleNamespace(special=False), 9999: SimpleNamespace(special=True)}
    tokenizer = SimpleNamespace(all_special_ids=[3], added_tokens_decoder=added)
    other: Any = SimpleNamespace(draft_rows=None, draft_on=lambda ids: found.append(ids.tolist()))
    other.renew_draft_rows = other.draft_on
    found, probed = list[list[int]](), SimpleNamespace(vocab_size=2048, model=model.hf_model)
    draft_on(other, (30, 20), probed, tokenizer)  # type: ignore[arg-type]
    assert found == [[1, 3, 7, 20, 30]]


@pytest.mark.slow
def test_the_copy_is_there_before_the_cache_is_sized(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the cache gets what is free then."""
    order: list[str] = []
    for module, name in ((heads, "draft_on"), (parts, "divide_cache")):
        plain = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, name=name, plain=plain: order.append(name) or plain(*a))
    opened(draft_vocab=[5, 6]).close()
    assert order == ["draft_on", "divide_cache"]


def test_what_is_refused_of_a_head_that_is_read(model: SpeculativeModel) -> None:
    with pytest.raises(InvalidInputError, match="draft_vocab: token 2048; the target has the tokens 0 … 2047"):
        opened(draft_vocab=[5, 2048])
    with pytest.raises(InvalidInputError, match=r"the head is loaded already \(it has `draft_on`\); leave it out"):
        SpeculativeModel.from_pretrained(model.hf_model, model.head, draft_vocab=[5])


@pytest.mark.slow
def test_a_wrong_convention_is_found_all_the_same() -> None:
    """Of a vocabulary that has almost none of the text's tokens."""
    with pytest.raises(HeadLoadError, match="read the wrong way"):
        opened(draft_vocab=[5, 6, 7], mtp_concat="hidden_first")


@pytest.mark.slow
@pytest.mark.thorough
def test_answers_are_the_targets_and_inspect_says_what_is_drafted_on(model: SpeculativeModel) -> None:
    (alone,) = model.generate(CHAT, PARAMS, num_speculative_tokens=0)
    (drafted,) = model.generate(CHAT, PARAMS)
    assert drafted.token_ids == alone.token_ids and drafted.pooled.tau > 1.05
    rows, facts = model.head.draft_vocab_size, model.describe()  # type: ignore[union-attr]
    assert facts["draft_rows_bytes"] == rows * 192 * 4
    assert any(f"drafts {rows} of its 2,048 tokens (0.442 MiB of lm_head, gathered)" in x for x in fit_lines(facts)), (
        rows
    )


@pytest.mark.slow
@pytest.mark.parametrize("draft", [pytest.param("mtp", marks=pytest.mark.long), ["mtp", "lookup"]])
@pytest.mark.thorough
def test_drafts_by_lookup_and_grammars_go_with_it(draft: Any) -> None:
    with opened(draft, draft_vocab=range(300, 900)) as own:  # no digit is drafted on: the grammar masks all that are
        for params in (PARAMS, SamplingParams(max_new_tokens=20, grammar=DIGITS)):
            (alone,) = own.generate(CHAT, params, num_speculative_tokens=0)
            assert own.generate(CHAT, params)[0].token_ids == alone.token_ids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "renewed"),
    [
        *(("refresh", True), ("assigned", True), ("update_weights", True)),
        *(pytest.param(how, False, marks=pytest.mark.long) for how in ("refresh", "assigned", "update_weights")),
    ],
)
@pytest.mark.cases(1)
def test_new_values_of_lm_head_are_copied(how: str, renewed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: they are not."""
    with opened(draft_vocab=range(300, 900)) as own:
        head: Any = own.head
        if not renewed:
            monkeypatch.setattr(MtpHead, "renew_draft_rows", lambda self, *lm_head: None)
        weight, place = own.hf_model.lm_head.weight, head.draft_rows.data_ptr()
        if how == "refresh":
            weight.data.mul_(2)
            own.refresh()
        elif how == "assigned":
            own.hf_model.lm_head.weight = weight = torch.nn.Parameter(weight.detach() * 2)
            own.refresh()
        else:
            own.update_weights({"lm_head.weight": weight * 2})
        assert torch.equal(head.draft_rows, weight[head.target_ids]) == renewed and head.draft_rows.data_ptr() == place


def test_engines_of_other_draft_vocabularies_hand_no_request_over(model: SpeculativeModel) -> None:
    first, tokens = fingerprint(model, "", []), model.describe()["draft_tokens"]
    assert fingerprint(model, "", []) == first
    head: Any = model.head
    ids = head.target_ids
    head.draft_on(torch.where(ids == ids[-1], ids[-1] + 1, ids))  # as many
    other = fingerprint(model, "", [])
    assert other != first and model.describe()["draft_tokens"] != tokens
    with pytest.raises(HandoffMismatchError, match=r"draft_vocab: \d+ tokens, .* in the engine that read"):
        check_fingerprints(other, first)
    head.draft_on(ids)
