"""Command-line options that several commands share, made from `LoadOptions`. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import Field, fields
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from specdec.errors import InvalidInputError
from specdec.loading.names import draft_name, model_name
from specdec.options.kinds import Below1, Choice, Flag, Fraction, Kind, Overrides, Switch, Whole
from specdec.options.load_options import LoadOptions, option_of
from specdec.values import MOST_COUNT, Options, only, without

if TYPE_CHECKING:
    from specdec.model import SpeculativeModel
    from specdec.requests.sampling import SamplingParams

Decorator = Callable[[Any], Any]
"""Adds an option to a command."""
COUNT = click.IntRange(1)
PATH = click.Path(path_type=Path)
FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
"""A file that is read: looked for before anything heavy is imported, as are names of models (`model_name`)."""


class Numbers(click.ParamType):
    """A list of whole numbers from `least` on, separated by commas."""

    name = "n,n,..."

    def __init__(self, least: int) -> None:
        self._each: click.ParamType = click.IntRange(least)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(self._each.convert(part.strip(), param, ctx) for part in str(value).split(","))


def option(names: str, help: str | None = None, type: Any = None, default: Any = None, **more: Any) -> Decorator:
    """`click.option` of names in one text, as "-k --num-speculative-tokens"; its help shows the default."""
    if not more.get("required"):  # to click None is a value, and it asks for no option that has one
        more["default"] = default
    return click.option(*names.split(), help=help, type=type, show_default=True, **more)


def flag(names: str, help: str) -> Decorator:
    """An option without a value, False where it is not given."""
    return click.option(*names.split(), help=help, is_flag=True)


TEMPERATURE = option("--temperature", "0 is greedy.", click.FloatRange(0), 0.0)
TOP_K = option("--top-k", "0 is off.", click.IntRange(0), 0)
TOP_P = option("--top-p", None, click.FloatRange(0, 1, min_open=True), 1.0)
SAMPLING_OPTIONS = (
    option("--max-new-tokens", None, COUNT, 256),
    TEMPERATURE,
    TOP_K,
    TOP_P,
    option("--min-p", None, click.FloatRange(0, 1), 0.0),
    option("--seed", "Fixes the random draws.", int),
    option("--stop", "A string that ends the text; may be given several times.", multiple=True),
)
SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop")
"""Names of these but the seed, which means a request's in some commands and a run's in others."""
DEFAULT_MODEL = "gsm-llama"
_Command = TypeVar("_Command", bound=Callable[..., Any])
_DRAFT_HELP = (
    "Folder or hub name, of a head or a small model; auto: a built-in target's own; mtp: the module in the target's "
    "checkpoint; lookup: the request's own text; HEAD,lookup: both; none."
)


def examples(*lines: str) -> str:
    """The epilog of a command's help: command lines that work as they stand, kept as they are by click (its \\b)."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def added(options: Sequence[Decorator]) -> Callable[[_Command], _Command]:
    """A decorator that adds options to a command, in their order."""
    return lambda command: reduce(lambda made, add: add(made), reversed(options), command)


def check_sampling(options: Options) -> None:
    """Raises click.UsageError: an option of sampling that would do nothing at temperature 0."""
    for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        if options["temperature"] == 0 and options.get(name, off) != off:
            given = f"--{name.replace('_', '-')} {options[name]}"
            raise click.UsageError(f"{given} decides nothing at temperature 0; leave it out, or give --temperature")


def sampling_of(options: Options, **more: Any) -> SamplingParams:
    """SamplingParams from a command's options. more: options of SamplingParams that it decides itself.

    Raises:
        click.UsageError: see `check_sampling`. InvalidInputError: a value that is not allowed.
    """
    from specdec.requests.sampling import SamplingParams

    check_sampling(options)
    return SamplingParams(**only(options, SAMPLING) | more)


def offered(command: str, without: Container[str] = ()) -> list[str]:
    """Names of the load options that a command ("run", "eval" or "train") offers.

    without: options that it has under a name of its own.
    """
    known = fields(LoadOptions)
    return [each.name for each in known if command in option_of(each).commands and each.name not in without]


def load_options(names: Container[str], changes: Mapping[str, Options] | None = None) -> Callable[[_Command], _Command]:
    """A decorator that adds these load options, in the order of `LoadOptions`.

    changes: by option, what `option` gets otherwise for this command.
    """
    chosen = [each for each in fields(LoadOptions) if each.name in names]
    return added([_click_option(each, **(changes or {}).get(each.name, {})) for each in chosen])


def _click_option(load: Field[Any], **changes: Any) -> Decorator:
    about = option_of(load)
    dashed = load.name.replace("_", "-")
    words = f"--{dashed}"
    settings = Options(help=about.help, default=load.default)
    if isinstance(about.kind, Flag):
        settings |= {"is_flag": True}
        words += f"/--no-{dashed}" if load.default else ""
    elif isinstance(about.kind, Switch):
        # Without a word it means yes, as it did when it was a flag.
        settings |= {"type": click.Choice(["auto", "yes", "no"]), "is_flag": False, "flag_value": "yes"}
    elif isinstance(about.kind, Overrides):
        words = f"{words.removesuffix('s')} {words}"  # one at a time: --head-override a=1 --head-override b=2
        settings |= {"multiple": True, "metavar": "KEY=VALUE"}
    else:
        settings |= {"type": _click_type(about.kind)}
    letter = f"-{about.letter} " if about.letter else ""
    return option(f"{letter}{words} {load.name}", **(settings | changes))


def _click_type(kind: Kind) -> click.ParamType | type[str]:
    if isinstance(kind, Whole):
        return click.IntRange(kind.least, None if kind.most == MOST_COUNT else kind.most)
    if isinstance(kind, Fraction):
        return click.FloatRange(0, 1, min_open=True)
    if isinstance(kind, Below1):
        return click.FloatRange(0, 1, max_open=True)
    return click.Choice(list(kind.words)) if isinstance(kind, Choice) else str


def load_options_of(options: Options, **more: Any) -> LoadOptions:
    """The load options among a command's options; `more`: those that it has under other names.

    Raises:
        InvalidInputError: a value that is not allowed.
    """
    return LoadOptions.from_words(only(options, LoadOptions.__dataclass_fields__) | more)


_model = option("--model", "Built-in name, folder or hub name.", model_name, DEFAULT_MODEL)
_draft = option("--draft", _DRAFT_HELP, draft_name, "auto")


def model_options(
    without: Container[str] = (), changes: Mapping[str, Options] | None = None
) -> Callable[[_Command], _Command]:
    """A decorator that adds the options for loading a model and a head. without: see `offered`. changes: see
    `load_options`."""
    return added((_model, _draft, load_options(offered("run", without), changes)))


def draft_of(model: str, draft: str, options: LoadOptions) -> str | None:
    """The head that the options of `model_options` name; None for no head.

    Raises:
        InvalidInputError: no head is wanted, and the model is one.
    """
    from specdec.loading.names import head_for, pair_of

    if draft == "none" and (pair := pair_of(model, None, options.revision)).named_by is not None:
        raise InvalidInputError(_NO_TARGET.format(model, pair.target))
    auto_without_head = draft == "auto" and head_for(model, options.gguf_file) is None
    return None if draft == "none" or auto_without_head else draft


_NO_TARGET = "--draft none: --model {} is a draft head; to run its target alone give --model {}"


def load_model(model: str, draft: str, options: LoadOptions) -> SpeculativeModel:
    """Load the model and head that the options of `model_options` name.

    Raises:
        InvalidInputError: no head is wanted, and the model is one. Others: see `SpeculativeModel.from_pretrained`.
    """
    from specdec.loading.names import pair_of
    from specdec.model import SpeculativeModel

    loaded = SpeculativeModel.from_pretrained(model, draft_of(model, draft, options), **options.as_arguments())
    if draft == "none" and loaded.head is not None:  # one of the hub, whose configuration was not here before
        loaded.close()
        raise InvalidInputError(_NO_TARGET.format(model, pair_of(model, None).target))
    return loaded


def load_for_sampling(options: Options) -> tuple[SpeculativeModel, SamplingParams]:
    """The model that a command's options name, and how it samples by its `SAMPLING_OPTIONS`.

    Raises:
        InvalidInputError, …: see `load_model`. click.UsageError: see `check_sampling`.
    """
    from specdec.requests.submission import filled

    params = sampling_of(options, seed=options["seed"])
    load = without(options, ("seed",))
    seed = {} if params.seed is None else {"seed": params.seed}
    model = load_model(options["model"], options["draft"], load_options_of(load, **seed))
    return model, filled(params, model)
