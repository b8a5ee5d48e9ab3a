"""Recurrent layers: states by slot, and the inputs folded into them, for each recurrence in torch and in kernels."""
