"""A round on the device. What varies: operator by operator or from CUDA graphs, one head or several modules."""
