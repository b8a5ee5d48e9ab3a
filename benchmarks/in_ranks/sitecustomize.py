"""Python imports this when it starts, where the folder is on its path: see `benchmarks.drawn_weights`."""

import sys

if "specdec.extensions.parallel.worker" in sys.orig_argv:
    from benchmarks.drawn_weights import install

    install()
