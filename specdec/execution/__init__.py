"""A round on the device, operator by operator or from CUDA graphs, with one head or several modules."""
