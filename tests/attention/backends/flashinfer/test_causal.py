"""Modules of FlashInfer with causal kernels alone: what is compiled, what is changed, under which name."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from attention.backends.flashinfer.wrapper import causal_module, write_causal

HOST = """
template <MaskMode MASK_MODE, typename Params>
cudaError_t BatchPrefillWithRaggedKVCacheDispatched(Params& params, bool enable_pdl,
                                                    cudaStream_t stream);
template <MaskMode MASK_MODE, typename Params>
cudaError_t BatchPrefillWithPagedKVCacheDispatched(Params& params, cudaStream_t stream);
void BatchPrefillWithRaggedKVCacheSM90Run() {
  cudaError_t status = BatchPrefillWithRaggedKVCacheDispatched<MASK_MODE>(params, enable_pdl, stream);
}
"""
CONFIG = "#define DISPATCH_context(...) DISPATCH_MASK_MODE(mask_mode, MASK_MODE, {__VA_ARGS__();})\n"


@dataclass
class Spec:
    """FlashInfer's JitSpec, as far as it matters."""

    name: str
    sources: list[Path]
    is_compiled: bool = False

    def build_and_load(self) -> Any:
        return self


@pytest.fixture(params=["", "_sm90"])
def sources(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    """A module's sources, laid out as FlashInfer's."""
    own, folder = request.param, tmp_path / "whole"
    folder.mkdir()
    kernels = [f"batch_prefill_{kind}{own}_kernel_mask_{mask}.cu" for mask in range(4) for kind in ("paged", "ragged")]
    texts = dict.fromkeys(kernels, "template cudaError_t Dispatched<MaskMode::kCausal>();")
    texts |= {f"batch_prefill{own}.cu": HOST, f"batch_prefill{own}_jit_binding.cu": "TVM_FFI_DLL_EXPORT(plan);"}
    for name, text in (
        texts | {f"batch_prefill{own}_config.inc": CONFIG, "batch_prefill_paged.cuh": "// used"}
    ).items():
        (folder / name).write_text(text)
    return [folder / name for name in texts]


def test_one_kernel_is_compiled_and_the_others_are_left_out(sources: list[Path], tmp_path: Path) -> None:
    written = write_causal(sources, tmp_path / "own")
    own = "_sm90" if "sm90" in sources[0].name else ""
    kernel, host, binding = (path.name for path in written)
    assert kernel == f"batch_prefill_paged{own}_kernel_mask_1.cu"
    assert (host, binding) == (f"batch_prefill{own}.cu", f"batch_prefill{own}_jit_binding.cu")
    assert written[0].read_text() == (tmp_path / "whole" / kernel).read_text()
    text = written[1].read_text()
    # The ragged kernels have a body, that of the paged ones is in the file that is compiled.
    assert "bool enable_pdl,\n" + " " * 52 + "cudaStream_t stream) { return cudaErrorNotSupported; }" in text
    assert text.count("cudaErrorNotSupported") == 1 and "DISPATCH" not in text
    config = (tmp_path / "own" / f"batch_prefill{own}_config.inc").read_text()
    assert config.startswith(CONFIG) and "mask_mode != MaskMode::kCausal" in config
    assert (tmp_path / "own" / "batch_prefill_paged.cuh").read_text() == "// used"


def test_written_again_nothing_is_compiled_again(sources: list[Path], tmp_path: Path) -> None:
    times = [[path.stat().st_mtime_ns for path in write_causal(sources, tmp_path / "own")] for _ in range(2)]
    assert times[0] == times[1]


@pytest.mark.parametrize("change", ["host", "config", "kernel"])
def test_other_sources_are_refused(sources: list[Path], tmp_path: Path, change: str) -> None:
    folder = sources[0].parent
    if change == "host":
        sources[8].write_text(HOST.replace("WithRagged", "WithContiguous"))
    elif change == "config":
        next(folder.glob("*.inc")).write_text("#define DISPATCH_context(...)")
    else:
        sources.pop(3)
    with pytest.raises(ValueError, match="not of the form that is known"):
        write_causal(sources, tmp_path / "own")
    assert not (tmp_path / "own").exists()


def install(monkeypatch: pytest.MonkeyPatch, spec: Spec) -> Any:
    """A FlashInfer whose generators give `spec`."""
    package, prefill = ModuleType("flashinfer"), ModuleType("flashinfer.prefill")
    exec(
        "import functools\n@functools.cache\ndef get_batch_prefill_module(backend, *args):\n"
        "    make = _gen_batch_prefill_primary_module if backend == 'fa2' else gen_batch_prefill_module\n"
        "    return make(backend, *args).build_and_load()\n",
        vars(prefill),
    )
    vars(prefill).update(gen_batch_prefill_module=lambda *_: spec, _gen_batch_prefill_primary_module=lambda *_: spec)
    package.prefill = prefill  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", prefill)
    return prefill


@pytest.mark.parametrize("route", ["fa2", "fa3"])
def test_flashinfers_own_modules_stay_whole(monkeypatch: pytest.MonkeyPatch, sources: list[Path], route: str) -> None:
    whole = Spec("batch_prefill_bf16", sources)
    prefill = install(monkeypatch, whole)
    ours, again = causal_module(route, 128), causal_module(route, 128)
    assert ours.name == again.name != whole.name and ours.name.startswith("specdec_causal_")
    assert len(ours.sources) == 3 and ours.sources[0].parent.name == ours.name
    assert prefill.get_batch_prefill_module(route, 128) is whole and len(whole.sources) == 10


def test_a_module_that_is_there_already_is_taken(monkeypatch: pytest.MonkeyPatch, sources: list[Path]) -> None:
    whole = Spec("batch_prefill_bf16", sources, is_compiled=True)
    install(monkeypatch, whole)
    assert causal_module("fa3", 128) is whole


def test_sources_of_another_form_are_built_as_they_are(
    monkeypatch: pytest.MonkeyPatch, sources: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    sources[8].write_text("")
    whole = Spec("batch_prefill_bf16", sources)
    install(monkeypatch, whole)
    with caplog.at_level(logging.INFO, "specdec"):
        assert causal_module("fa3", 128) is whole
    assert "the whole module is built" in caplog.text
