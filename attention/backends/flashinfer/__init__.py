"""FlashInfer's kernels and their plans. The batch and the layer select fa2, fa3, MLA, or specdec's packed kernel."""
