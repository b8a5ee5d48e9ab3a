"""Checkpoints in FP8 (quant_method "fp8") through transformers, without the packages that its kernels come from.

transformers' own quantizer asks for accelerate, and without a GPU it multiplies the weights out in silence. Ours loads
them as they are; what runs them is in `specdec.wrapped.fp8`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from specdec.errors import UnsupportedModelError
from specdec.wrapped.fp8 import Scheme

METHOD = "fp8"


class Fp8Quantizer(FineGrainedFP8HfQuantizer):
    """transformers' quantizer for weights that stay in FP8, on any device."""

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is needed."""


@contextmanager
def fp8_checkpoint(config: Any, name: str) -> Iterator[None]:
    """Load a target of this configuration inside. Nothing is done for one that is not quantised in FP8.

    Raises:
        UnsupportedModelError: a scheme of FP8 that no operator serves, or `dequantize`, before weights are read.
    """
    stored = getattr(config, "quantization_config", None)
    values: Mapping[str, Any] = stored if isinstance(stored, Mapping) else vars(stored) if stored else {}
    if values.get("quant_method") != METHOD:
        yield
        return
    if values.get("dequantize"):
        raise UnsupportedModelError(
            f"{name}: quantization_config of its config.json has dequantize=true, another model whose activations are "
            "not rounded; leave it out, or load the model with transformers and give it as the target"
        )
    if (kind := values.get("fmt", "e4m3")) != "e4m3":
        raise UnsupportedModelError(f"{name} is quantised in FP8 with fmt={kind!r}; supported is 'e4m3'")
    _scheme(values).check(name)
    before = AUTO_QUANTIZER_MAPPING[METHOD]
    AUTO_QUANTIZER_MAPPING[METHOD] = Fp8Quantizer
    try:
        yield
    finally:
        AUTO_QUANTIZER_MAPPING[METHOD] = before


def _scheme(values: Mapping[str, Any]) -> Scheme:
    """As transformers reads it: 128 x 128 where nothing is said, one scale a weight where that is null."""
    blocks = values.get("weight_block_size", (128, 128))
    static = str(values.get("activation_scheme", "dynamic")).lower() == "static"
    return Scheme(None if blocks is None else tuple(blocks), static, values.get("scale_fmt", "float") == "ue8m0")
