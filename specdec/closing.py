"""The end of a SpeculativeModel: what it holds is freed, and the model that it wraps is as it was before."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch

from specdec.errors import ClosedModelError, NotCopyableError
from specdec.generation import Generation
from specdec.parallel.ranks import Ranks
from specdec.wrapped.alterations import Alterations

_FREED = ("target", "head", "runners", "engine", "_live")
"""What `close` lets go of."""


class Closing(Generation):
    """`close`, the with-block, and no copies. Whoever inherits it makes the attributes.

    Attributes:
        hf_model, ranks: see `specdec.model.SpeculativeModel`.
    """

    ranks: Ranks | None
    _alterations: Alterations

    @property
    def device(self) -> torch.device:
        """Where the target lives."""
        return self.hf_model.device

    def close(self) -> None:
        """End what runs, free caches, buffers and graphs, and leave `hf_model` as it was before. Idempotent.

        Requests and streams that are not finished raise ClosedModelError, after what was reported to them before. Waits
        for a round or a forward that runs on another thread. `hf_model`, `tokenizer`, `config`, `engine_stats` and what
        the self-test found stay readable. Of a tensor-parallel model the other ranks' processes end; where a GPU waits
        for a lost one, nothing can be freed before this process ends.

        Raises:
            SpecdecError: called from inside a round (from the tokenizer or a hook of the model).
        """
        self._shared.close()  # from here on every step can be done twice: an interrupted close() is called again
        if self.ranks is not None:
            self.ranks.close()
        device = self.device
        if device.type == "cuda" and self.ranks is not None and self.ranks.lost:
            return  # a sum may still wait on the device for a rank that is gone, and so would whoever waits for it
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if (transfers := vars(self).get("_transfers")) is not None:
            transfers.close()
        freed = bool([vars(self).pop(name) for name in _FREED if name in vars(self)])
        if freed and not self._shared.forked:  # a fork would first copy the memory of all objects
            gc.collect()  # compiled code and graphs refer to themselves
        self._alterations.undo()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Only for what `close` has freed. Raises ClosedModelError, or AttributeError for any other name."""
            if name in _FREED and "_shared" in vars(self):
                raise ClosedModelError(f"this SpeculativeModel is closed: its {name.lstrip('_')} is freed")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises NotCopyableError: pickle, copy and deepcopy end here."""
        raise NotCopyableError(
            "a SpeculativeModel cannot be copied or pickled: it holds caches and device memory; call "
            "SpeculativeModel.from_pretrained where it is needed (in the other process)"
        )
