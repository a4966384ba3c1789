"""Schedules and kernels of ConvRot INT8 convolutions for NVIDIA GPUs."""
