"""Files of weights that are mapped into the process: pages that have been copied need not count as its memory.

Linux alone says where they are; elsewhere nothing is given back before the file is closed.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

from torch import Tensor

_SMAPS = Path("/proc/self/smaps")
_LINES = r"(?:\w+: .*\n)*?"
_UNWRITTEN = re.compile(rf"^(\w+)-(\w+) .+\.safetensors\n{_LINES}Anonymous: +0 kB\n{_LINES}Swap: +0 kB$", re.MULTILINE)
"""First and last address of a file's mapping in which no page was written: all can be read again from the file.
Source: proc(5), /proc/pid/smaps: a written page of a private mapping is anonymous, or in swap."""


class MappedFiles:
    """Files of weights that are mapped now, and were not written to."""

    def __init__(self) -> None:
        text = _SMAPS.read_text("utf-8", "replace") if _SMAPS.exists() else ""
        self._places = [(int(first, 16), int(last, 16)) for first, last in _UNWRITTEN.findall(text)]

    def give_back(self, weight: Tensor) -> None:
        """Take the pages that only this weight lies in out of the process; whoever reads them has them again.

        weight: contiguous.
        """
        first = weight.data_ptr()
        last = weight.data_ptr() + weight.nbytes
        page = mmap.PAGESIZE
        begin = -(-first // page) * page
        end = last // page * page
        if begin < end and any(start <= first and last <= stop for start, stop in self._places):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
