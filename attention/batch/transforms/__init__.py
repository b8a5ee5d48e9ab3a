"""Pure functions HostBatch -> HostBatch that choose the rows of a kernel, before any builder plans the batch."""
