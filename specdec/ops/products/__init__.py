"""Matmuls with a weight whose cuBLASLt algorithm is chosen by measurement, once for each shape and kept on disk."""
