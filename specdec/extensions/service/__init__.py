"""For services: asynchronous calls, draining, metrics."""
