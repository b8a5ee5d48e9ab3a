"""Pure functions HostBatch -> HostBatch, before any builder sees a batch. What varies: which rows a kernel is given."""
