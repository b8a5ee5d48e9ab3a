"""The server as a process, begun by a command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[4]


class Command:
    """A command that serves at a port, and what it has written."""

    def __init__(self, *words: str, **environment: str) -> None:
        own = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
        self.process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=own, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        self.lines = list[str]()
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if " at http://" in line:
                self.url = "http://" + line.partition("http://")[2].split("/v1")[0]
                return
        raise AssertionError(f"it ended: {self.lines}")

    def get(self, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
        """Status and text."""
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def end(self) -> tuple[int, float]:
        """SIGTERM: exit status, and the seconds until it. `lines` are complete then."""
        begun = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stderr is not None
        self.lines += list(self.process.stderr)
        return self.process.wait(60), time.monotonic() - begun


@contextmanager
def serving(*words: str, **environment: str) -> Iterator[Command]:
    """A command that is killed where the test left it running."""
    made = Command(*words, **environment)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
