"""LoadOptions is the one list of load options: what is written out beside it or made from it has them all."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import Field, dataclass, field, fields, make_dataclass
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
import torch
from fakes import tiny_llama

from attention.backends.reference import TorchBackend
from specdec import SamplingParams, SpeculativeModel, attach
from specdec.cli.generate import generate
from specdec.cli.inspect import inspect as inspect_command
from specdec.cli.options import load_options, offered
from specdec.cli.train import train
from specdec.errors import InvalidInputError
from specdec.loading.cache_format import kv_format, kv_layout
from specdec.options.kinds import Choice, Kind, Switch, Whole
from specdec.options.load_options import _OTHER_NAMES, LoadOptions, Option, option_of


def keywords() -> list[tuple[str, Any, str]]:
    """Name, default and annotation of from_pretrained's keyword-only parameters."""
    parameters = inspect.signature(SpeculativeModel.from_pretrained).parameters.values()
    return [(p.name, p.default, str(p.annotation)) for p in parameters if p.kind is p.KEYWORD_ONLY]


def described(kind: type[LoadOptions]) -> list[tuple[str, Any, str]]:
    return [(each.name, each.default, str(each.type)) for each in fields(kind)]


@dataclass(frozen=True)
class OneMore(LoadOptions):
    """A planted field, which nothing but the generated lists knows."""

    attention_sinks: int = field(
        default=4, metadata={"option": Option(Whole(0), "Planted.", frozenset({"run", "eval", "train"}))}
    )


def test_from_pretrained_has_the_fields_with_their_defaults_types_and_order() -> None:
    assert keywords() == described(LoadOptions)


def test_a_planted_field_is_missed_in_from_pretrained() -> None:
    assert keywords() != described(OneMore)
    assert [row for row in described(OneMore) if row not in keywords()] == [("attention_sinks", 4, "int")]


def test_every_argument_reaches_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """What from_pretrained was given is what LoadOptions is made of, field by field."""
    found: dict[str, Any] = {}

    def stop(self: Any) -> None:
        found.update(vars(self))
        raise InterruptedError

    monkeypatch.setattr(LoadOptions, "__post_init__", stop)
    given = {each.name: object() for each in fields(LoadOptions)}
    with pytest.raises(InterruptedError):
        SpeculativeModel.from_pretrained("gsm-llama", **given)  # type: ignore[arg-type]
    assert found == given


def names_of(command: click.Command) -> set[str]:
    return {str(parameter.name) for parameter in command.params}


def bare(command: str) -> click.Command:
    """A command with the load options and no others."""
    return load_options(offered(command))(click.command()(lambda **_: None))


@pytest.mark.parametrize("kind", [LoadOptions, OneMore], ids=["options", "planted"])
@pytest.mark.parametrize("command", ["run", "eval", "train"])
def test_the_options_of_a_command_are_made_from_the_fields(
    kind: type[LoadOptions], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.cli.options.LoadOptions", kind)
    made = bare(command)
    assert names_of(made) == set(offered(command))
    defaults = {each.name: each.default for each in fields(kind)}
    assert {p.name: p.get_default(click.Context(made)) for p in made.params} == {
        name: defaults[name] for name in offered(command)
    }


@pytest.mark.parametrize(
    ("command", "group"),
    [(generate, "run"), (inspect_command, "run"), *((each, "train") for each in train.commands.values())],
    ids=lambda x: x.name if isinstance(x, click.Command) else x,
)
def test_every_command_offers_what_its_group_does(
    command: click.Command, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(offered(group)) - names_of(command) == set()
    monkeypatch.setattr("specdec.cli.options.LoadOptions", OneMore)
    assert set(offered(group)) - names_of(command) == {"attention_sinks"}


def test_every_option_is_a_command_line_option_somewhere() -> None:
    assert set(offered("run")) == set(offered("eval")) == {each.name for each in fields(LoadOptions)}
    assert set(offered("train")) < set(offered("run"))


def test_a_field_without_a_description_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = make_dataclass("Silent", [("sinks", int, field(default=0))], bases=(LoadOptions,), frozen=True)
    monkeypatch.setattr("specdec.cli.options.LoadOptions", silent)
    with pytest.raises(TypeError, match="the field 'sinks' of LoadOptions has no Option"):
        load_options(offered("run"))


def test_help_of_an_option_is_one_sentence_of_its_own() -> None:
    helps = [option_of(each).help for each in fields(LoadOptions)]
    assert all(helps) and len(set(helps)) == len(helps)


def test_the_list_is_read_without_torch() -> None:
    heavy = "{'torch', 'numpy', 'transformers'}"
    code = f"import sys, specdec.options, specdec.cli.options; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def wrong_value(each: Field[Any]) -> Any:
    kind = option_of(each).kind
    return None if type(kind) is Kind else object()


def test_every_field_with_a_kind_refuses_an_object_of_another_type() -> None:
    checked = [each for each in fields(LoadOptions) if wrong_value(each) is not None]
    assert {each.name for each in fields(LoadOptions)} - {each.name for each in checked} == {
        "dtype",
        "device",
        "tokenizer",
    }
    for each in checked:
        with pytest.raises(InvalidInputError, match=each.name):
            LoadOptions(**{each.name: wrong_value(each)})


def test_numbers_of_other_types_are_kept_as_pythons() -> None:
    options = LoadOptions(
        max_num_seqs=np.int64(3),  # type: ignore[arg-type]
        page_size=torch.tensor(8),  # type: ignore[arg-type]
        gpu_memory_utilization=np.float32(0.5),  # type: ignore[arg-type]
        cuda_graphs=np.bool_(True),  # type: ignore[arg-type]
    )
    assert [type(x) for x in (options.max_num_seqs, options.page_size, options.cuda_graphs)] == [int, int, bool]
    assert options == LoadOptions(max_num_seqs=3, page_size=8, gpu_memory_utilization=0.5, cuda_graphs=True)


def test_words_of_a_command_line() -> None:
    options = LoadOptions.from_words({"kv_cache_scales": "0.5:0.25;1:2", "revision": 123})
    assert options.kv_cache_scales == ((0.5, 0.25), (1.0, 2.0)) and options.revision == "123"
    with pytest.raises(InvalidInputError, match=r"kv_cache_scales='0.5': give a pair for each layer"):
        LoadOptions.from_words({"kv_cache_scales": "0.5"})
    with pytest.raises(InvalidInputError, match=r"unknown load options 'drfat': known are num_speculative_tokens, "):
        LoadOptions.from_words({"drfat": 1})
    with pytest.raises(InvalidInputError, match=r"'torch_dtype', 'unknown': did you mean dtype\? known are"):
        LoadOptions.from_words({"unknown": 2, "torch_dtype": 1})


@pytest.mark.parametrize(("word", "value"), [("auto", "auto"), ("yes", True), ("no", False), (True, True)])
def test_words_for_cuda_graphs(word: Any, value: Any) -> None:
    assert LoadOptions().cuda_graphs == "auto"
    assert LoadOptions.from_words({"cuda_graphs": word}).cuda_graphs is value or value == "auto"
    with pytest.raises(InvalidInputError, match="cuda_graphs='maybe': allowed are 'auto', True and False"):
        LoadOptions.from_words({"cuda_graphs": "maybe"})


@pytest.mark.parametrize(
    ("line", "value"),
    [([], "auto"), (["--cuda-graphs"], "yes"), (["--cuda-graphs", "no"], "no"), (["--cuda-graphs", "auto"], "auto")],
)
def test_cuda_graphs_on_a_command_line(line: list[str], value: str) -> None:
    found: dict[str, Any] = {}
    command = load_options(offered("run"))(click.command()(lambda **given: found.update(given)))
    command.main([*line, "--seed", "3"], standalone_mode=False)
    assert found["cuda_graphs"] == value and LoadOptions.from_words(found).seed == 3


def test_every_word_of_the_list_is_known_where_it_is_used() -> None:
    kinds = {each.name: option_of(each).kind for each in fields(LoadOptions)}
    stored, order = kinds["kv_cache_dtype"], kinds["kv_cache_layout"]
    assert isinstance(stored, Choice) and isinstance(order, Choice) and isinstance(kinds["cuda_graphs"], Switch)
    assert [kv_layout(word, TorchBackend(torch.device("cpu"))) for word in order.words] == ["NHD", "NHD", "HND"]
    probed: Any = SimpleNamespace(calls=("a layer",))
    formats = [kv_format(None, probed, LoadOptions(kv_cache_dtype=word)) for word in stored.words]
    assert [format.dtype for format in formats] == [None, torch.float8_e4m3fn]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"num_spec_tokens": 3}, "num_speculative_tokens"),
        ({"torch_dtype": "bfloat16"}, "dtype"),
        ({"max_modellen": 9}, "max_model_len"),
    ],
)
def test_a_name_that_there_is_not_is_answered_with_the_right_one(given: dict[str, Any], meant: str) -> None:
    words = f"unexpected keyword argument.*did you mean {meant}\\?.*known are target"
    with pytest.raises(InvalidInputError, match=words):
        SpeculativeModel.from_pretrained("gsm-llama", **given)


def test_what_is_given_by_its_place_is_not_given_again() -> None:
    for call in (SpeculativeModel.from_pretrained, attach):
        with pytest.raises(InvalidInputError, match="target='a' is given by its place, too: give it once"):
            call(tiny_llama(), target="a")
    with pytest.raises(InvalidInputError, match="max_new_tokens=4 is given by its place, too"):
        SamplingParams(3, max_new_tokens=4)  # type: ignore[misc]


@pytest.mark.parametrize("name", ["quantization_config", "speculative_config", "token", "max_new_tokens"])
def test_names_of_something_else_have_no_hint(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"unexpected keyword argument '{name}': known are target"):
        SpeculativeModel.from_pretrained("gsm-llama", **{name: 1})


def test_other_projects_names_lead_to_names_that_exist() -> None:
    known = inspect.signature(SpeculativeModel.from_pretrained).parameters
    assert not {name.partition("=")[0] for name in _OTHER_NAMES.values()} - set(known)
    assert not set(_OTHER_NAMES) & set(known)
