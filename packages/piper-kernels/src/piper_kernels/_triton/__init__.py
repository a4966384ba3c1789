"""Building blocks of the Triton kernels: targets, launch support and device functions."""
