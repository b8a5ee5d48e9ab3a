"""LoadOptions: the options of `SpeculativeModel.from_pretrained` besides target, head and tokenizer, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from attention.cache.kv_cache import KVFormat
from drafters.mtp.spec import Concat, Feedback, MtpReading
from specdec.arguments import choice, flag, scale_pairs, share, shown, whole
from specdec.config import BACKENDS, SEEDS
from specdec.errors import InvalidInputError
from specdec.loading.backends import KV_CACHE_DTYPES, kv_format
from specdec.loading.memory import check_tables_fit
from specdec.requests.generation_config import Use, check_use

_WHOLE = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "page_size": 1}
_WHOLE_OR_NONE = {"num_speculative_tokens": 0, "max_model_len": 1, "kv_cache_tokens": 1}


@dataclass(frozen=True)
class LoadOptions:
    """See `SpeculativeModel.from_pretrained` for what each means.

    Types and ranges are checked here, before anything is read from disk. A value of another integer type (numpy's, a
    tensor of one element) becomes an int.
    """

    num_speculative_tokens: int | None
    backend: str
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    kv_cache_tokens: int | None
    kv_cache_dtype: str
    kv_cache_scales: Sequence[tuple[float, float]] | None
    gpu_memory_utilization: float
    cuda_graphs: bool
    mtp_concat: str
    mtp_feedback: str
    generation_config: Use
    seed: int
    trust_remote_code: bool
    revision: str | None

    def __post_init__(self) -> None:
        """Raises InvalidInputError for a wrong type, a value outside its range, or tables no memory could hold."""
        for name, least in _WHOLE.items():
            self._set(name, whole(name, getattr(self, name), least))
        for name, least in _WHOLE_OR_NONE.items():
            if getattr(self, name) is not None:
                self._set(name, whole(name, getattr(self, name), least))
        self._set("seed", whole("seed", self.seed, *SEEDS))
        self._set("gpu_memory_utilization", share("gpu_memory_utilization", self.gpu_memory_utilization))
        for name in ("cuda_graphs", "trust_remote_code"):
            flag(name, getattr(self, name))
        choice("backend", self.backend, BACKENDS)
        choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        choice("mtp_concat", self.mtp_concat, get_args(Concat))
        check_use(self.generation_config)
        choice("mtp_feedback", self.mtp_feedback, get_args(Feedback))
        self._set("kv_cache_scales", scale_pairs("kv_cache_scales", self.kv_cache_scales) or None)
        if self.revision is not None and (not isinstance(self.revision, str) or not self.revision):
            raise InvalidInputError(
                f"revision={shown(self.revision)}: allowed is a branch, tag or commit of the model on the hub, or None"
            )
        if self.max_model_len is not None:
            check_tables_fit(self.max_num_seqs, self.max_model_len)

    @property
    def format(self) -> KVFormat:
        """How the target's keys and values are stored."""
        return kv_format(self.kv_cache_dtype, self.kv_cache_scales)

    @property
    def reading(self) -> MtpReading:
        """How a multi-token-prediction module is read."""
        return MtpReading(cast(Concat, self.mtp_concat), cast(Feedback, self.mtp_feedback))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
