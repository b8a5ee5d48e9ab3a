"""Pages and kernels: the paged KV cache, the attention metadata and the backends. Knows nothing of drafting."""
