"""Write a quantised GGUF file again with its weights multiplied out, for llama.cpp.

    python -m benchmarks.gguf_dequantised MODEL.gguf OUT.gguf --type F16

Matrices become F16 (rounded to nearest) or F32 (exact), vectors F32, as llama.cpp's own conversion writes them. Names,
shapes, tokenizer and all other fields are the file's. The values are those that transformers reads from the file: both
dequantise by the package gguf.
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, dequantize
from gguf.gguf_reader import ReaderField

from benchmarks.given import usage

TYPES = {"F16": (np.float16, LlamaFileType.MOSTLY_F16), "F32": (np.float32, LlamaFileType.ALL_F32)}
_FILE_TYPE = "general.file_type"
_WRITTEN = (_FILE_TYPE, "general.architecture", "general.quantization_version")
"""What the writer adds by itself, or what no longer holds."""


def copy_field(writer: GGUFWriter, name: str, field: ReaderField) -> None:
    """The same key, type and value."""
    kind, *inner = field.types
    writer.add_key_value(name, field.contents(), kind, sub_type=inner[-1] if kind == GGUFValueType.ARRAY else None)


def write(source: Path, out: Path, kind: str) -> int:
    """Write the file; the number of its tensors."""
    reader, (dtype, file_type) = GGUFReader(source), TYPES[kind]
    writer = GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in _WRITTEN:
            copy_field(writer, name, field)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, weight.astype(dtype if weight.ndim > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return len(reader.tensors)


@click.command(help=usage(__doc__))
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--type", "kind", type=click.Choice(sorted(TYPES)), default="F16", show_default=True)
def main(source: Path, out: Path, kind: str) -> None:
    """Write the file."""
    click.echo(f"{write(source, out, kind)} tensors in {out}")


if __name__ == "__main__":
    main()
