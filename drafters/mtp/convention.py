"""The input convention of a multi-token-prediction module, as far as the user may choose it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from attention.errors import InvalidInputError

Feedback = Literal["post_norm", "pre_norm"]
Concat = Literal["auto", "embedding_first", "hidden_first"]


@dataclass(frozen=True)
class MtpConvention:
    """Choices about a module's inputs that are the user's because no checkpoint records them.

    concat: the order of the projection's halves; "auto" is the order of the checkpoint's family.
    feedback: input of the next draft step, the final norm's output or the block's. Engines agree on post_norm except
    for GLM-4.5, where vLLM feeds the block's output back.
    """

    concat: Concat = "auto"
    feedback: Feedback = "post_norm"

    def __post_init__(self) -> None:
        """Raises InvalidInputError for a value that is not allowed."""
        for name, allowed in (("concat", get_args(Concat)), ("feedback", get_args(Feedback))):
            if getattr(self, name) not in allowed:
                raise InvalidInputError(f"mtp_{name}={getattr(self, name)!r}: allowed are {', '.join(allowed)}")

    def hidden_first(self, family: bool) -> bool:
        """Whether the projection reads [hidden, embedding]; `family`: the family's order."""
        return family if self.concat == "auto" else self.concat == "hidden_first"
