"""Multi-token-prediction modules of the DeepSeek kind. They differ in tensor names, block, and input convention."""
