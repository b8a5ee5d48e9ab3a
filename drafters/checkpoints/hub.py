"""Telling folders from hub names, and one quick test of whether the hub answers."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import get_session, validate_repo_id

HUB_SECONDS = 3.0
"""How long the hub may take to answer the first request."""

NO_ANSWER = "it does not answer (no network, or HF_HUB_OFFLINE is set), and the local cache has no such model"

HTTP_ERRORS: tuple[type[BaseException], ...] = (OSError, HfHubHTTPError.__mro__[1])
"""What a request to the hub raises: huggingface_hub's HTTP library differs by release, its root error is the base of
`HfHubHTTPError`; the older library's errors are OSErrors."""


def looks_local(name: str) -> bool:
    """Whether only a folder can be meant: more than one separator, or a beginning that no hub name has."""
    return len(Path(name).parts) > 2 or os.path.isabs(name) or name.startswith((".", "/", "~", "\\")) or "\\" in name


def is_hub_name(name: str) -> bool:
    """Whether the hub could have a model of this name ("owner/name", or an old "name")."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return bool(name)


def hub_answers() -> bool:
    """Whether the hub can be reached: one request of at most three seconds.

    huggingface_hub repeats each request for more than twenty seconds. Whoever knows beforehand that nobody answers asks
    for local files only, and neither a missing nor a cached model takes that long. Proxies, endpoint, certificates and
    offline mode are the user's: it is huggingface_hub's own session.
    """
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except HTTP_ERRORS:
        return False
    return True
