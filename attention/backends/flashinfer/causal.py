"""FlashInfer's prefill modules with the causal kernels of paged caches alone.

FlashInfer builds a module of eight large files, four masks over paged and over contiguous keys, of which we launch one:
causal, paged. Two modules at once would keep sixteen cores busy for more than a minute. Here a module has the one file
that we launch, unchanged, and the host code with the other kernels left out: asked for one of them, it raises. It has a
name of its own, so that FlashInfer's modules are whole for everybody else in the process.

Source: flashinfer-ai/flashinfer, flashinfer/jit/attention/modules.py (gen_batch_prefill_module), csrc/batch_prefill.cu,
csrc/batch_prefill_sm90.cu.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

from attention.backends.building import ASIDE

log = logging.getLogger("specdec")
_RAGGED = re.compile(r"(cudaError_t BatchPrefillWithRaggedKVCacheDispatched\([^;{}]*\));")
"""The host code's declaration of the kernels over contiguous keys."""
_KERNEL = re.compile(r"batch_prefill_paged(_sm90)?_kernel_mask_1\.cu")
_OTHER_KERNEL = re.compile(r"batch_prefill_(paged|ragged)(_sm90)?_kernel_mask_\d\.cu")
_CAUSAL_ONLY = """
#include <flashinfer/utils.cuh>
#undef DISPATCH_MASK_MODE
#define DISPATCH_MASK_MODE(mask_mode, MASK_MODE, ...)                    \\
  if (mask_mode != MaskMode::kCausal) {                                  \\
    FLASHINFER_ERROR("this module was built for causal attention only"); \\
  } else {                                                               \\
    constexpr MaskMode MASK_MODE = MaskMode::kCausal;                    \\
    __VA_ARGS__                                                          \\
  }
"""


def causal_module(route: str, *arguments: Any) -> Any:
    """As FlashInfer's get_batch_prefill_module, with causal paged kernels only. Builds it where it is not built yet.

    Args:
        route, arguments: as there.
    """
    from flashinfer import prefill

    made = prefill.get_batch_prefill_module.__wrapped__
    # The same function over other generators of sources: it finds them among its globals.
    generators = ("gen_batch_prefill_module", "_gen_batch_prefill_primary_module")
    own = {name: _causal(getattr(prefill, name)) for name in generators}
    function = FunctionType(made.__code__, made.__globals__ | own, made.__name__, made.__defaults__, made.__closure__)
    return function(route, *arguments)


def _causal(generate: Any) -> Any:
    def generated(*arguments: Any) -> Any:
        whole = generate(*arguments)
        if whole.is_compiled:  # by somebody else, or it came with FlashInfer
            return whole
        name = f"specdec_causal_{hashlib.sha256(whole.name.encode()).hexdigest()[:16]}"
        folder = Path(whole.sources[0]).parent
        try:
            sources = write_causal(map(Path, whole.sources), folder.with_name(name))
        except ValueError as error:
            log.info("%s: the whole module is built, which takes longer", error, extra=ASIDE)
            return whole
        return replace(whole, name=name, sources=sources)

    return generated


def write_causal(sources: Iterable[Path], folder: Path) -> list[Path]:
    """Write the sources of a causal module beside those of the whole one; files that are right already stay.

    Args:
        sources: of the whole module, all in one folder with the headers that they include.

    Returns:
        The sources to compile.

    Raises:
        ValueError: they are not what this is written for.
    """
    sources = list(sources)
    kept = [path for path in sources if _KERNEL.fullmatch(path.name) or not _OTHER_KERNEL.fullmatch(path.name)]
    texts = {path.name: path.read_text(encoding="utf-8") for path in kept}
    headers = {
        path.name: path.read_text(encoding="utf-8")
        for path in sources[0].parent.iterdir()
        if path.suffix in (".inc", ".cuh")
    }
    hosts = [name for name, text in texts.items() if _RAGGED.search(text)]
    configs = [name for name, text in headers.items() if "DISPATCH_MASK_MODE" in text]
    if len(kept) != len(sources) - 7 or len(hosts) != 1 or len(configs) != 1:
        raise ValueError(f"FlashInfer's sources in {sources[0].parent} are not of the form that is known")
    texts[hosts[0]] = _RAGGED.sub(r"\1 { return cudaErrorNotSupported; }", texts[hosts[0]])
    headers[configs[0]] += _CAUSAL_ONLY
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (texts | headers).items():
        _write(folder / name, text)
    return [folder / name for name in texts]


def _write(path: Path, text: str) -> None:
    """A file that changes is compiled again."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
