"""FlashInfer's kernels and their plans. What varies: fa2, fa3, MLA, or a packed kernel of ours, by batch and layer."""
