"""A property that is computed once an object, without a lock."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property as cached_property
else:

    class cached_property:
        """As functools.cached_property of Python 3.12. Until 3.11 that has a lock, one for all objects of a class: a
        process that is forked while another thread holds it would wait for it without end."""

        def __init__(self, func):
            self.func = func
            self.attrname = func.__name__
            self.__doc__ = func.__doc__

        def __get__(self, owner, kind=None):
            if owner is None:
                return self
            value = vars(owner)[self.attrname] = self.func(owner)
            return value
