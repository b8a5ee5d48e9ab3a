"""flashinfer."""
