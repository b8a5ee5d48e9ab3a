"""Command-line options that several commands share. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from specdec.config import BACKENDS

if TYPE_CHECKING:
    from drafters.mtp.spec import Concat, Feedback
    from specdec.model import SpeculativeModel

DEFAULT_MODEL = "gsm-llama"
_Command = TypeVar("_Command", bound=Callable[..., Any])

_DRAFT_HELP = "Folder or hub name; auto: a built-in target's own; mtp: the module in the target's checkpoint; none."
MTP_OPTIONS = (
    click.option(
        "--mtp-concat",
        type=click.Choice(["auto", "embedding_first", "hidden_first"]),
        default="auto",
        show_default=True,
        help="What a multi-token-prediction module's projection reads first.",
    ),
    click.option(
        "--mtp-feedback",
        type=click.Choice(["post_norm", "pre_norm"]),
        default="post_norm",
        show_default=True,
        help="What such a module's next step gets.",
    ),
)
KV_CACHE_DTYPE = click.option(
    "--kv-cache-dtype",
    type=click.Choice(["auto", "fp8"]),
    default="auto",
    show_default=True,
    help="fp8: the target's KV cache in 8 bits, half the memory; auto: in the dtype of the model.",
)
SOURCE_OPTIONS = (
    click.option("--revision", help="Branch, tag or commit of a target on the hub."),
    click.option("--trust-remote-code", is_flag=True, help="Run the Python files of the target's checkpoint."),
)
CUDA_GRAPHS = click.option("--cuda-graphs", is_flag=True, help="Compile, and run rounds from CUDA graphs (on a GPU).")
GENERATION_CONFIG = click.option(
    "--generation-config",
    type=click.Choice(["model", "ignore"]),
    default="model",
    show_default=True,
    help="ignore: of the model's own generation_config (penalties, suppressed tokens, …) only the eos ids apply.",
)
_MODEL_OPTIONS = (
    click.option("--model", default=DEFAULT_MODEL, show_default=True, help="Built-in name, folder or hub name."),
    *SOURCE_OPTIONS,
    click.option("--draft", default="auto", show_default=True, help=_DRAFT_HELP),
    click.option(
        "-k", "--num-speculative-tokens", type=click.IntRange(0), help="Drafts a round (default 5; 0 = none)."
    ),
    *MTP_OPTIONS,
    click.option("--backend", type=click.Choice(BACKENDS), default="auto", show_default=True),
    click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16, float16."),
    click.option("--device", help="cpu, cuda, cuda:1, … (default: CUDA where there is one)."),
    KV_CACHE_DTYPE,
    click.option("--kv-cache-tokens", type=click.IntRange(1), help="Size of the KV cache (default: what fits)."),
    click.option(
        "--gpu-memory-utilization",
        type=click.FloatRange(0, 1, min_open=True),
        default=0.9,
        show_default=True,
        help="Share of the GPU's memory that model, cache and graphs may take together.",
    ),
    CUDA_GRAPHS,
    GENERATION_CONFIG,
    click.option("--max-model-len", type=click.IntRange(1), help="Most tokens of one request."),
    click.option(
        "--max-num-seqs", type=click.IntRange(1), default=32, show_default=True, help="Most requests at once."
    ),
)


def examples(*lines: str) -> str:
    """The epilog of a command's help: command lines that work as they stand, kept as they are by click (its \\b)."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def model_options(command: _Command) -> _Command:
    """Add the options that say which model to load, and how."""
    for option in reversed(_MODEL_OPTIONS):
        command = option(command)
    return command


def load_model(
    model: str,
    draft: str,
    num_speculative_tokens: int | None,
    backend: str,
    dtype: str,
    device: str | None,
    max_model_len: int | None,
    max_num_seqs: int,
    mtp_concat: Concat,
    mtp_feedback: Feedback,
    kv_cache_dtype: str,
    kv_cache_tokens: int | None,
    gpu_memory_utilization: float,
    cuda_graphs: bool,
    generation_config: str,
    revision: str | None,
    trust_remote_code: bool,
) -> SpeculativeModel:
    """Load what the options of `model_options` say."""
    from specdec.loading.targets import has_builtin_head
    from specdec.model import SpeculativeModel

    auto_without_head = draft == "auto" and not has_builtin_head(model)
    return SpeculativeModel.from_pretrained(
        model,
        draft=None if draft == "none" or auto_without_head else draft,
        num_speculative_tokens=num_speculative_tokens,
        backend=backend,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        mtp_concat=mtp_concat,
        mtp_feedback=mtp_feedback,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_tokens=kv_cache_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        cuda_graphs=cuda_graphs,
        generation_config=generation_config,  # type: ignore[arg-type]
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
