"""A module run with the wrong convention is refused; right conventions and random weights never are."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fakes import LETTERS, LetterTokenizer, enlarge, wrap
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from attention.errors import InvalidInputError
from drafters.errors import HeadLoadError
from drafters.mtp.checkpoint import load_mtp
from drafters.mtp.convention import MtpConvention
from drafters.mtp.convention_check import check_convention, compare_conventions
from drafters.mtp.formats import MIMO
from drafters.mtp.head import MtpHead, MtpStack
from drafters.mtp.spec import MtpSpec, mtp_target
from drafters.unroll import unroll
from evals.data import arithmetic
from specdec.cli.generate import generate
from specdec.loading.names import builtin_path
from specdec.loading.tokenizers import load_tokenizer
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from specdec.selftest.selftest import read_text, self_test_head

FORMATS = ("deepseek_v3", "glm4_moe", "mimo", "ernie", "qwen3_next")
MODULE = "model.layers.12."


@pytest.fixture(scope="module")
def pair() -> tuple[Any, MtpHead]:
    """The built-in target and its module: trained weights."""
    folder = builtin_path("gsm-deepseek")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    (head,) = load_mtp(folder, mtp_target(model), torch.float32, "cpu")
    return model, head


@pytest.fixture(scope="module")
def text(pair: tuple[Any, MtpHead]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [T] of a text and the target's states on it [T, H], as the self-test takes them."""
    with torch.no_grad():
        return read_text(pair[0], load_tokenizer("gsm-deepseek"))


def copy_with(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """The built-in checkpoint with other tensors."""
    copytree(builtin_path("gsm-deepseek"), folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def swap_halves(tensors: dict[str, torch.Tensor]) -> None:
    """Planted: a checkpoint whose projection was trained as [hidden, embedding]."""
    name = f"{MODULE}eh_proj.weight"
    tensors[name] = torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1).contiguous()


def open_mtp(target: str | Path, **options: Any) -> SpeculativeModel:
    sizes = {"num_speculative_tokens": 3, "max_model_len": 128, "max_num_seqs": 1}
    return SpeculativeModel.from_pretrained(target, "mtp", **{**sizes, **options})


@pytest.mark.slow
@pytest.mark.thorough
def test_the_built_in_module_is_read_right(pair: Any, text: Any) -> None:
    found = compare_conventions(pair[1].mtp_modules, *text, 3)
    assert [(c.option, c.other) for c in found] == [("mtp_concat", "hidden_first"), ("mtp_feedback", "pre_norm")]
    assert all(c.chosen_nats < c.other_nats < c.limit * 3 and not c.other_is_right for c in found)
    assert open_mtp("gsm-deepseek").head is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_first": True}, "Give mtp_concat='embedding_first'"),
        ({"feedback": "pre_norm"}, "Give mtp_feedback='post_norm'"),
    ],
)
@pytest.mark.cases(1)
def test_each_wrong_convention_is_refused(pair: Any, text: Any, changes: Any, message: str) -> None:
    (head,) = load_mtp(builtin_path("gsm-deepseek"), mtp_target(pair[0]), torch.float32, "cpu")
    check_convention(head, *text, 3)
    head.spec = replace(head.spec, **changes)
    with pytest.raises(HeadLoadError, match=message):
        check_convention(head, *text, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"), [({"hidden_first": True}, "embedding_first"), ({"feedback": "pre_norm"}, "post_norm")]
)
@pytest.mark.cases(1)
def test_wrong_conventions_of_several_modules_are_refused(pair: Any, text: Any, changes: Any, message: str) -> None:
    """Three copies of the trained module: each reads its predecessor's state, as modules trained together do."""
    heads = [load_mtp(builtin_path("gsm-deepseek"), mtp_target(pair[0]), torch.float32, "cpu")[0] for _ in range(3)]
    check_convention(MtpStack(heads), *text, 3)
    for head in heads:
        head.spec = replace(head.spec, **changes)
    with pytest.raises(HeadLoadError, match=message):
        check_convention(MtpStack(heads), *text, 3)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_checkpoint_of_the_other_order_is_refused_and_can_be_loaded_by_naming_it(tmp_path: Path) -> None:
    folder = copy_with(tmp_path / "swapped", swap_halves)
    with pytest.raises(HeadLoadError, match=r"Give mtp_concat='hidden_first'"):
        open_mtp(folder)
    model = open_mtp(folder, mtp_concat="hidden_first")
    right = open_mtp("gsm-deepseek")
    assert isinstance(model.head, MtpHead) and model.head.spec.hidden_first
    params = SamplingParams(max_new_tokens=16, return_drafts=True)
    ours, theirs = (m.generate("Anna has 3 apples.", params)[0] for m in (model, right))
    assert ours.drafts == theirs.drafts and ours.token_ids == theirs.token_ids


@pytest.mark.slow
@pytest.mark.thorough
def test_a_wrong_recycle_norm_is_refused_where_drafts_are_fed_back() -> None:
    with pytest.raises(HeadLoadError, match=r"Give mtp_feedback='post_norm'"):
        open_mtp("gsm-deepseek", mtp_feedback="pre_norm", num_speculative_tokens=2)
    model = open_mtp("gsm-deepseek", mtp_feedback="pre_norm", num_speculative_tokens=1)
    assert isinstance(model.head, MtpHead) and model.head.spec.feedback == "pre_norm"


@pytest.mark.slow
def test_the_command_line_passes_the_convention_on() -> None:
    options = "--model gsm-deepseek --draft mtp -k 2 --device cpu --max-model-len 64 --mtp-feedback pre_norm"
    result = CliRunner().invoke(generate, ["Anna has 3 apples.", *options.split()])
    assert isinstance(result.exception, HeadLoadError) and "mtp_feedback='post_norm'" in str(result.exception)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "std"),
    [
        pytest.param(name, std, marks=[pytest.mark.long] * (i % 3 != j))
        for i, name in enumerate(FORMATS)
        for j, std in enumerate((0.02, 0.5, 1.5))
    ],
)
@pytest.mark.cases(1)
def test_random_weights_are_never_refused(name: str, std: float, tmp_path: Path, tiny_case: Callable[..., Any]) -> None:
    case = tiny_case(name, context=0.2)
    (head,) = load_mtp(case.write(tmp_path), mtp_target(case.model), torch.float32, "cpu")
    for seed in range(4):
        enlarge(head, seed, std)
        self_test_head(head, case.model, LetterTokenizer(), 3)


def train_together(model: Any, head: MtpHead) -> None:
    """A few seconds on generated problems, by letters: the target on the next one, the module on its choice."""
    text = " ".join(re.sub(r"[^A-Za-z0-9 .]+", " ", p.question) for p in arithmetic.problems("train", 200, seed=1))
    data = torch.tensor([LETTERS.index(c) for c in text])
    parameters = [*model.parameters(), *head.requires_grad_(True).parameters()]
    for parameter in parameters:
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    optimizer, generator = torch.optim.Adam(parameters, 3e-3), torch.Generator().manual_seed(0)
    for _ in range(180):
        starts = torch.randint(len(data) - 40, (16,), generator=generator).tolist()
        ids = torch.stack([data[start : start + 40] for start in starts])
        states = model.model(ids, use_cache=False).last_hidden_state
        logits = model.lm_head(states)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        (x,) = unroll(head, ids, states, 1)
        drafts = head.logits(x).unflatten(0, ids.shape)[:, :-1].flatten(0, 1)
        loss = loss + cross_entropy(drafts, logits[:, 1:].argmax(-1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    head.requires_grad_(False)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_family_that_reads_the_hidden_state_first(tmp_path: Path, tiny_case: Callable[..., Any]) -> None:
    """MiMo's order is believed and its opposite refused; so neither order is preferred."""
    case = tiny_case("mimo")
    (head,) = load_mtp(case.write(tmp_path / "random"), mtp_target(case.model), torch.float32, "cpu")
    train_together(case.model, head)
    back = {new: old for old, new in MIMO.renames.items()} | {"blocks.0.": ""}
    for name, tensor in head.state_dict().items():
        prefix = next(p for p in back if name.startswith(p))
        case.tensors[f"model.mtp_layers.0.{back[prefix]}{name.removeprefix(prefix)}"] = tensor.detach()
    folder = str(case.write(tmp_path / "trained"))
    case.model.eval().requires_grad_(False)
    assert wrap(case.model, folder, num_speculative_tokens=3).head.spec.hidden_first
    with pytest.raises(HeadLoadError, match="Give mtp_concat='hidden_first'"):
        wrap(case.model, folder, num_speculative_tokens=3, mtp_concat="embedding_first")


def test_without_a_norm_or_a_second_draft_nothing_is_fed_back(tmp_path: Path, tiny_case: Callable[..., Any]) -> None:
    ids, states = torch.arange(20), torch.randn(20, 32)
    for name, num_drafts in (("ernie", 3), ("deepseek_v3", 1)):
        case = tiny_case(name)
        (head,) = load_mtp(case.write(tmp_path / name), mtp_target(case.model), torch.float32, "cpu")
        assert [c.option for c in compare_conventions(head.mtp_modules, ids, states, num_drafts)] == ["mtp_concat"]


def test_options_that_do_not_fit(tiny_case: Callable[..., Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"mtp_feedback='post'.*post_norm, pre_norm"):
        MtpConvention(feedback="post")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="but this is an EAGLE head; leave it out"):
        SpeculativeModel.from_pretrained("gsm-llama", "auto", mtp_feedback="pre_norm")
    case = tiny_case("deepseek_v3")
    for option in ({"mtp_feedback": "pre_norm"}, {"head_overrides": {"aux_layers": [1, 2, 3]}}):
        with pytest.raises(InvalidInputError, match="there is no draft head; leave it out"):
            wrap(case.model, None, **option)
    with pytest.raises(InvalidInputError, match="loaded already"):
        wrap(case.model, MtpHead(MtpSpec(), mtp_target(case.model)), mtp_concat="hidden_first")
