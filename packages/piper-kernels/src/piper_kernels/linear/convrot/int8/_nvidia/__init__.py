"""Schedules and kernels of ConvRot INT8 linear for NVIDIA GPUs."""
