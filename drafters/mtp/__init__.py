"""Multi-token-prediction modules of the DeepSeek kind. What varies: tensor names, the block, the input convention."""
