"""The command `specdec export`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from specdec.cli.options import COUNT, PATH, examples, load_options, option
from specdec.errors import InvalidInputError
from specdec.loading.names import draft_name, model_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from drafters.eagle3.export import ExportLayout
    from drafters.eagle3.head import Eagle3Head
    from specdec.loading.heads import TargetOutline
    from specdec.options import LoadOptions

_LAYOUTS = ("speculators", "specforge", "z-lab", "custom_generate")
_DTYPES = ("float32", "bfloat16", "float16")
_ONLY_SPECULATORS = {
    "verifier": "--verifier",
    "with_target_tensors": "--with-target-tensors/--without-target-tensors",
    "num_speculative_tokens": "--num-speculative-tokens",
}


@click.command(
    epilog=examples(
        "specdec export run/head --layout specforge --out for-sglang",
        "specdec export run/head --layout speculators --target gsm-llama --out for-vllm",
        "specdec export run/head --layout speculators --target ./llama --verifier meta-llama/Llama-3.1-8B --out o",
        "specdec export run/head --layout custom_generate --target ./llama --out llama-that-speculates",
        "specdec export blocks/head --layout z-lab --target ./llama --out for-sglang",
    )
)
@click.argument("head", type=draft_name)
@option(
    "--layout",
    "speculators: vLLM's; specforge: SGLang's; z-lab: of block-parallel heads, SGLang's; "
    "custom_generate: a model folder whose own generate, in transformers, speculates.",
    click.Choice(_LAYOUTS),
    required=True,
)
@option("--out", "Folder; it must be empty, or not exist.", PATH, required=True)
@option("--target", "The head's target: built-in name, folder or hub name. Default: what the head names.", model_name)
@option("--verifier", "speculators: the target's name in the configuration. Default: --target.")
@option("--dtype", "Of the stored weights. Default: as they are stored.", click.Choice(_DTYPES))
@option(
    "--with-target-tensors/--without-target-tensors",
    "speculators: write the embedding (and lm_head) that the head shares with its target, as that package does. "
    "custom_generate: the target's own files, so that the folder is a whole model.",
    default=True,
)
@option("--num-speculative-tokens -k", "speculators: K that the configuration proposes.", COUNT, 5)
@load_options(["head_overrides"])
@click.pass_context
def export(
    context: click.Context, head: str, layout: ExportLayout, out: Path, target: str | None, **options: Any
) -> None:
    """Write HEAD, an EAGLE-3 or block-parallel head in any layout that is read, in the layout of another project.

    A block-parallel head needs --target, and is written without tensors of it; K is what its block gives.
    What a layout cannot express is refused by name, and nothing is written.
    """
    from specdec.options import LoadOptions

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidInputError(f"--out {out}: it exists and is not empty; give another folder")
    # Options that decide nothing in another layout are refused when they are given.
    names = dict(_ONLY_SPECULATORS)
    if layout == "custom_generate":
        del names["with_target_tensors"]
    given = _given(context, names)
    if given and layout != "speculators":
        raise InvalidInputError(f"{given}: only --layout speculators has a place for it; leave it out")
    if layout == "custom_generate":
        _write_repository(head, target, out, options["with_target_tensors"])
        return
    overrides = LoadOptions.from_words({"head_overrides": options.pop("head_overrides")})
    folder = _exported(head, layout, out, target, overrides, **options)
    click.echo(f"{head} is in {folder}, in the {layout} layout")


def _write_repository(head: str, target: str | None, out: Path, with_target: bool) -> None:
    """See `specdec.extensions.attached.custom.write_repository`."""
    from drafters.checkpoints.tensor_files import locate
    from specdec.extensions.attached.custom import write_repository
    from specdec.loading.names import resolve, target_of_head

    path = _eagle_head(head, target)
    named = target_of_head(path) if target is None else target
    folder = Path(resolve(named)) if named is not None and with_target else None
    if with_target and (folder is None or not folder.is_dir()):
        raise InvalidInputError(
            f"--target {named}: its files are not on this machine; give a folder, or --without-target-tensors, and put "
            "what is written into the target's repository"
        )
    write_repository(locate(path), folder, out)
    click.echo(
        f"{out}: AutoModelForCausalLM.from_pretrained({str(out)!r}, trust_remote_code=True).generate(…) speculates"
        if with_target
        else f"{out}/custom_generate: put it into the target's repository"
    )


def _exported(
    head: str,
    layout: ExportLayout,
    out: Path,
    target: str | None,
    options: LoadOptions,
    *,
    verifier: str | None,
    dtype: str | None,
    with_target_tensors: bool,
    num_speculative_tokens: int,
) -> Path:
    import torch

    from drafters.eagle3.checkpoint import load_eagle, stored_dtype, target_of_files
    from drafters.eagle3.export import Verifier, export_eagle3
    from drafters.eagle3.overrides import Eagle3Overrides
    from drafters.families import FAMILIES, family_of
    from specdec.loading.heads import outline_target
    from specdec.loading.names import is_available, target_of_head

    path = _eagle_head(head, target, blocks=layout in ("z-lab", "speculators"))
    if target and family_of(path) is FAMILIES["block"]:
        return _exported_block(path, layout, out, outline_target(target), verifier, dtype)
    if layout == "z-lab":
        raise InvalidInputError(f"{head}: --layout z-lab is for block-parallel heads; give speculators or specforge")
    overrides = Eagle3Overrides.of(options.head_overrides or {})
    named = target_of_head(path) if target is None else target
    outline = outline_target(named) if named is not None and (target or is_available(named)) else None
    facts = target_of_files(path, overrides) if outline is None else outline.facts
    loaded = load_eagle(path, facts, torch.float32, "cpu", overrides)
    stored = stored_dtype(path)
    missing = "its files name no target" if named is None else f"its target {named} is not on this machine"
    if layout == "specforge":
        loaded = _sharing(loaded, None if outline is None else outline.facts.embedding, stored, missing)
    shares = not (loaded.spec.own_embed and loaded.spec.own_lm_head)
    if outline is None and layout == "speculators" and with_target_tensors and shares:
        raise InvalidInputError(
            f"what the head shares with its target is written, too, and {missing}: give --target, or "
            "--without-target-tensors" + ("" if named or verifier else " and --verifier")
        )
    name = verifier or (named if outline is None else outline.name)
    if layout == "speculators" and name is None:
        raise InvalidInputError(
            "a speculators configuration names the target: give --target, or its name by --verifier"
        )
    kinds = () if outline is None else outline.architectures
    return export_eagle3(
        loaded,
        out,
        layout,
        verifier=None if name is None else Verifier(name, kinds),
        dtype=getattr(torch, dtype) if dtype else stored,
        num_speculative_tokens=num_speculative_tokens,
        with_target_tensors=with_target_tensors,
    )


def _exported_block(
    path: str, layout: str, out: Path, target: TargetOutline, verifier: str | None, dtype: str | None
) -> Path:
    import torch

    from drafters.block.checkpoint import export_block, load_block
    from drafters.eagle3.checkpoint import stored_dtype
    from drafters.eagle3.export import Verifier

    names = {name: _ONLY_SPECULATORS[name] for name in ("with_target_tensors", "num_speculative_tokens")}
    if given := _given(click.get_current_context(), names | {"head_overrides": "--head-override"}):
        raise InvalidInputError(f"{given}: it decides nothing of a block-parallel head; leave it out")
    stored = getattr(torch, dtype) if dtype else stored_dtype(path)
    named = Verifier(verifier or target.name, target.architectures)
    loaded = load_block(path, target.facts, torch.float32, "cpu")
    return export_block(loaded, out, layout, target.facts, named, stored)


def _sharing(head: Eagle3Head, embedding: Tensor | None, stored: torch.dtype, missing: str) -> Eagle3Head:
    """The head without the copy of its target's embedding that the speculators layout holds; specforge has no place.

    Raises:
        InvalidInputError: it has an embedding and no place for it, and the target is not there to say whose it is.
    """
    from drafters.eagle3.export import problems_of, shares_embedding

    problems = problems_of(head.spec, "specforge")
    if embedding is None and any(said.startswith("own_embed") for said in problems):
        raise InvalidInputError(
            f"this head cannot be written in the specforge layout: {'; '.join(problems)}. A copy of the target's "
            f"embedding, as the speculators layout holds it, is left out, but {missing}: give --target"
        )
    if embedding is None or not shares_embedding(head, embedding, stored):
        return head  # an embedding of its own is refused by name
    return head.reread(replace(head.spec, own_embed=False), embedding)


def _eagle_head(head: str, target: str | None, blocks: bool = False) -> str:
    """The head's folder or hub name, "auto" resolved; a multi-token-prediction module is refused, and a block-parallel
    head without a target, or unless `blocks`."""
    from drafters.families import FAMILIES, family_of
    from specdec.loading.heads import IN_TARGET, resolve_head
    from specdec.loading.names import BUILTIN_HEADS

    if head in (*BUILTIN_HEADS, *IN_TARGET) and target is None:
        raise InvalidInputError(f"HEAD {head!r} belongs to a target: give --target")
    path = head if head in IN_TARGET else resolve_head(head, target)
    family = IN_TARGET.get(head) or family_of(path)
    served = blocks and target and family is FAMILIES["block"]
    if not served and (problem := family.code().not_exportable(path)) is not None:
        raise InvalidInputError(f"{head}: {problem}")
    return path


def _given(context: click.Context, names: Mapping[str, str]) -> str:
    """Which of these options were given, in words. names: by parameter, as a user writes them."""
    default = ParameterSource.DEFAULT
    return ", ".join(words for name, words in names.items() if context.get_parameter_source(name) is not default)
