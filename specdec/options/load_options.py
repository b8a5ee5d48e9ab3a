"""LoadOptions: how a target is loaded, and the one list of these options.

Everything that offers or passes on load options is made from the fields here: the keyword arguments of
`SpeculativeModel.from_pretrained`, the options of the commands, the evaluation workers' ModelSpec, and lm-eval's model
arguments. It imports no torch: `--help` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import partial, wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, Concatenate, Literal, TypeVar, get_args

from attention.backends.kinds import KINDS
from attention.toml_tables import read_tables
from drafters.mtp.convention import Concat, Feedback
from specdec.config import (
    CPU_LINEARS,
    DRAFT_SAMPLING,
    KV_CACHE_DTYPES,
    KV_CACHE_LAYOUTS,
    MAX_NUM_PREFILL_TOKENS,
    SAMPLING,
    SEEDS,
    STATE_DTYPES,
)
from specdec.errors import InvalidInputError
from specdec.options.kinds import (
    Below1,
    Choice,
    Flag,
    Fraction,
    Kind,
    Name,
    OrAuto,
    Overrides,
    Scales,
    Switch,
    Tokens,
    Whole,
)
from specdec.values import Fields, Options, P, R, only_known, read_options, unknown

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from transformers import PreTrainedModel

    from drafters.base import Head

Use = Literal["model", "ignore"]
"""What of the model's own generation_config applies."""
SelfTests = Literal["cached", "full", "quick"]
"""How much a load tests."""
_Options = TypeVar("_Options", bound="LoadOptions")
_Class = TypeVar("_Class", bound=type)


_EVERYWHERE = frozenset({"run", "eval", "train"})
_NO_TRAINING = frozenset({"run", "eval"})
"""Not by `specdec train`: its target answers alone, with its cache in full precision; its --seed is the training's."""


@dataclass(frozen=True)
class Option:
    """Facts of an option that its name, type and default do not have.

    kind: the values it takes; None stays None where that is the default. help: one line for `--help`. commands: which
    commands offer it: "run" (generate, inspect), "eval" and "train". letter: its one-letter form, "" for none.
    """

    kind: Kind
    help: str
    commands: frozenset[str]
    letter: str = ""


def _option(default: Any, kind: Kind, help: str, commands: frozenset[str] = _EVERYWHERE, letter: str = "") -> Any:
    """A field of LoadOptions."""
    return field(default=default, metadata={"option": Option(kind, help, commands, letter)})


def option_of(option: Field[Any]) -> Option:
    """What is said about a field of LoadOptions. Raises TypeError: nothing is; every field of the class needs it."""
    found = option.metadata.get("option")
    if not isinstance(found, Option):
        raise TypeError(f"the field {option.name!r} of LoadOptions has no Option: declare it by _option(…)")
    return found


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """See `SpeculativeModel.from_pretrained` for what each means.

    Types and ranges are checked here, before anything is read from disk; device, dtype and tokenizer where they are
    used. A value of another integer type (numpy's, a scalar tensor) becomes an int.
    """

    num_speculative_tokens: int | None = _option(
        None, Whole(0), "Drafts a round (default 5 with a head, 1-8 with a model; 0 = none).", _NO_TRAINING, "k"
    )
    backend: str = _option("auto", Choice(KINDS.keys()), "Attention kernels.")
    dtype: str | torch.dtype = _option("auto", Kind(), "auto, float32, bfloat16 or float16.")
    device: str | torch.device | None = _option(None, Kind(), "cpu, cuda, cuda:1, …; default: CUDA if there is one.")
    cpu_linears: str = _option(
        "auto", Choice(CPU_LINEARS), "Linear layers on a CPU: packed for oneDNN, or plain; auto: packed where faster."
    )
    tokenizer: Any = _option(None, Kind(), "Folder or hub name (default: the target's own).")
    max_model_len: int | None = _option(None, Whole(1), "Most tokens of one request.")
    max_num_seqs: int = _option(32, Whole(1), "Most requests at once.")
    max_waiting_requests: int | None = _option(
        None, Whole(0), "Most requests that wait for others to end (default: any number)."
    )
    max_num_batched_tokens: int | None = _option(
        None, Whole(1), "Most tokens of one forward (default: 8192 on a GPU of 40 GiB and more, else 2048)."
    )
    max_num_prefill_tokens: int = _option(
        MAX_NUM_PREFILL_TOKENS, Whole(1), "Most prompt tokens of a forward in which requests of other calls decode."
    )
    page_size: int = _option(16, Whole(1), "Tokens a page of the KV cache.")
    kv_cache_tokens: int | None = _option(None, Whole(1), "Size of the KV cache (default: what fits).")
    kv_cache_dtype: str = _option(
        "auto",
        Choice(KV_CACHE_DTYPES),
        "fp8: the target's KV cache in 8 bits, half the memory; auto: in the dtype of the model.",
        _NO_TRAINING,
    )
    kv_cache_scales: Sequence[tuple[float, float]] | None = _option(
        None,
        Scales(),
        "With fp8, KEYS:VALUES of each layer, joined by ';' (default: the checkpoint's, or 1.0).",
        _NO_TRAINING,
    )
    recurrent_state_dtype: str = _option(
        "float32",
        Choice(STATE_DTYPES),
        "States of recurrent layers between forwards; bfloat16: in half the memory.",
        _NO_TRAINING,
    )
    kv_cache_layout: str = _option(
        "auto", Choice(KV_CACHE_LAYOUTS), "Order inside a page: NHD, token by token; HND, head by head; auto: NHD."
    )
    hybrid_kv_cache: bool = _option(
        True, Flag(), "Free pages behind sliding windows and before chunks of layers, where other layers see further."
    )
    enable_prefix_caching: OrAuto = _option(
        "auto",
        Switch(),
        "Requests begin with KV pages that earlier ones with the same first tokens left; auto: where possible.",
    )
    cascade_attention: bool = _option(
        False, Flag(), "Attend KV pages that requests share once for all: for many rows with one long common prompt."
    )
    gpu_memory_utilization: float = _option(
        0.9, Fraction(), "Share of the GPU's memory that model, cache and graphs may take together."
    )
    cuda_graphs: OrAuto = _option(
        "auto",
        Switch(),
        "Compile, and run rounds from CUDA graphs; auto: on a GPU, where the model allows.",
        _NO_TRAINING,
    )
    mtp_concat: Concat = _option(
        "auto", Choice(get_args(Concat)), "What a multi-token-prediction module's projection reads first.", _NO_TRAINING
    )
    mtp_feedback: Feedback = _option(
        "post_norm", Choice(get_args(Feedback)), "What such a module's next step gets.", _NO_TRAINING
    )
    draft_vocab: str | Sequence[int] | None = _option(
        None, Tokens(), "JSON file of the token ids that such a module drafts on (default: all).", _NO_TRAINING
    )
    head_overrides: Fields | None = _option(
        None,
        Overrides(),
        "KEY=VALUE, repeatable: an EAGLE head's aux_layers, feedback, or a key of its config.json, given anew.",
        _NO_TRAINING,
    )
    lookup_min: int = _option(2, Whole(1, 16), "Tokens of the shortest match of draft=lookup.", _NO_TRAINING)
    lookup_max: int = _option(32, Whole(1), "Tokens up to which its matches are compared.", _NO_TRAINING)
    lookup_shared: bool = _option(
        False, Flag(), "Look into ended requests' texts, too; seeds then repeat no run.", _NO_TRAINING
    )
    generation_config: Use = _option(
        "model",
        Choice(
            get_args(Use),
            'allowed are "model" (the model\'s own applies) and "ignore" (only its eos ids do); a '
            "transformers.GenerationConfig is given to generate(prompts, config)",
        ),
        "ignore: of the model's own generation_config (penalties, stop strings, …) only the eos ids apply.",
    )
    sampling: str = _option(
        "rejection",
        Choice(SAMPLING),
        "keyed: noise of its position decides a sampled token, so that K and head change none.",
        _NO_TRAINING,
    )
    draft_sampling: str = _option(
        "probabilistic",
        Choice(DRAFT_SAMPLING),
        "Drafts of sampled requests: drawn from the head's distribution (with keyed sampling by the noise of their "
        "positions), or its most probable token (greedy).",
        _NO_TRAINING,
    )
    min_confidence: float | None = _option(
        None,
        Below1(),
        "Drafts from the first one of less confidence on are not verified.",
        _NO_TRAINING,
    )
    tensor_parallel_size: int = _option(
        1, Whole(1), "GPUs of this machine that the target is divided among.", _NO_TRAINING
    )
    seed: int = _option(0, Whole(*SEEDS), "Randomness of requests without a seed of their own.", _NO_TRAINING)
    adapter: str | None = _option(
        None, Name("the folder or hub name of an adapter"), "Folder or hub name of a peft adapter."
    )
    merge_adapter: OrAuto = _option(
        "auto", Switch(), "Add an adapter to the weights at loading; auto: unless those are quantised. no: run it live."
    )
    self_test: SelfTests = _option(
        "cached",
        Choice(get_args(SelfTests)),
        "cached: test the target unless an earlier start did, and nothing has changed; full: test; quick: short rows.",
    )
    trust_remote_code: bool = _option(False, Flag(), "Run the Python files of the target's checkpoint.")
    revision: str | None = _option(
        None, Name("a branch, tag or commit of the model on the hub"), "Branch, tag or commit of a target on the hub."
    )
    gguf_file: str | None = _option(
        None, Name("a GGUF file in the target's folder or hub model"), "GGUF file in the target's folder or hub model."
    )

    def __post_init__(self) -> None:
        """Raises InvalidInputError for a wrong type or a value outside its range."""
        read_options(self, {each.name: option_of(each).kind.read for each in fields(self)})

    @classmethod
    def from_words(cls: type[_Options], given: Options) -> _Options:
        """Options by name, as a command line or lm-eval gives them; what is not given has its default.

        Raises:
            InvalidInputError: a name that is no option, or a value that is not allowed.
        """
        known = {each.name: option_of(each).kind for each in fields(cls)}
        if odd := sorted(given.keys() - known):
            raise unknown_options("unknown load options", odd, known)
        return cls(**{name: known[name].from_word(name, word) for name, word in given.items()})

    def as_arguments(self) -> Options:
        """The keyword arguments of `SpeculativeModel.from_pretrained`."""
        return dict(vars(self))


def other_names(table: str) -> dict[str, str]:
    """A table of other_names.toml: names that other projects have -> what they are here."""
    tables = read_tables("specdec", "options/other_names.toml")
    return {name: own for own, names in tables[table].items() for name in names}


_OTHER_NAMES = other_names("loading")
"""Load options that other projects have under another name."""


@dataclass(frozen=True)
class LoadArguments(LoadOptions):
    """All arguments of `SpeculativeModel.from_pretrained`, which has its signature from here."""

    target: str | Path | PreTrainedModel
    draft: str | Path | Head | PreTrainedModel | None = None


def with_load_options(
    arguments: Callable[P, LoadOptions],
) -> Callable[[Callable[[_Class, Any, Any, LoadOptions], R]], Callable[Concatenate[_Class, P], R]]:
    """A decorator of a classmethod's function, so that it is called with the keywords of LoadOptions in their place.

    arguments: LoadArguments, from which type checkers take the signature, too. An unknown keyword raises an
    InvalidInputError with the right name.
    """

    def decorate(load: Callable[[_Class, Any, Any, LoadOptions], R]) -> Callable[Concatenate[_Class, P], R]:
        @wraps(load)
        def called(cls: _Class, target: Any, draft: Any = None, **options: Any) -> R:
            return load(cls, target, draft, LoadOptions(**options))

        own = signature(load)
        shown = signature(arguments)
        parameters = [own.parameters["cls"], *shown.parameters.values()]
        called.__dict__["__signature__"] = own.replace(parameters=parameters)
        checked: Any = only_known(called, partial(unknown_options, "unexpected keyword argument"))
        return checked

    return decorate


def unknown_options(what: str, given: Collection[str], known: Collection[str]) -> InvalidInputError:
    """The error for names that are no options, with the right one for the first of these."""
    other = _OTHER_NAMES.get(next(iter(given)), "")
    hint = f"did you mean {other}? known are {', '.join(known)}" if other.partition("=")[0] in known else ""
    return unknown(what, given, known, hint)
