"""Options of loading and of requests: what each is called, here and in other projects, and how its value is read."""

from specdec.options.load_options import LoadOptions as LoadOptions
