"""Build FlashInfer's kernels for a Hopper GPU on a machine without one: nvcc is enough.

    python -m benchmarks.prebuild_kernels --out aot.tar.xz          # some minutes a kernel on one core

Unpack the archive into flashinfer/data/aot on the GPU machine; FlashInfer then compiles nothing at the first start.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.document import usage

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def kernels(head_dims: tuple[int, ...], latent: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and FlashInfer's recipe of each kernel: plain full attention on fa2, and MLA on fa3."""
    from flashinfer.jit.attention.modules import gen_batch_mla_module, gen_batch_prefill_module

    def prefill(dtype: torch.dtype, dim: int) -> Callable[[], Any]:
        return lambda: gen_batch_prefill_module(
            "fa2", dtype, dtype, dtype, torch.int32, dim, dim, 0, False, False, False
        )

    def mla(dtype: torch.dtype) -> Callable[[], Any]:
        return lambda: gen_batch_mla_module("fa3", dtype, dtype, dtype, torch.int32, 512, 64, False)

    for name, dtype in HALF.items():
        for dim in head_dims:
            yield f"fa2 {name} {dim}", prefill(dtype, dim)
        if latent:
            yield f"latent {name}", mla(dtype)


def with_libcuda_stub(folder: Path) -> None:
    """Let the linker find a libcuda: the real one comes with the driver."""
    stub = [shutil.which("gcc") or "gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null"]
    subprocess.run([*stub, "-o", str(folder / "libcuda.so")], check=True)
    os.environ["LIBRARY_PATH"] = f"{folder}:/usr/local/cuda/lib64"


@click.command(help=usage(__doc__))
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--head-dims", default="64,128", show_default=True)
@click.option("--latent/--no-latent", default=True, show_default=True)
def main(out: Path, head_dims: str, latent: bool) -> None:
    """Build and pack."""
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    dims = tuple(int(dim) for dim in head_dims.split(","))
    with tempfile.TemporaryDirectory() as folder, tarfile.open(out, "w:xz") as archive:
        with_libcuda_stub(Path(folder))
        for name, recipe in kernels(dims, latent):
            click.echo(name)
            spec = recipe()
            spec.build()
            library = Path(shutil.copy(spec.get_library_path(), folder))
            subprocess.run(["strip", "-s", str(library)], check=True)
            archive.add(library, f"{library.stem}/{library.name}")


if __name__ == "__main__":
    main()
