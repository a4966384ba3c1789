"""Schedules of ConvRot INT8 linear for AMD GPUs."""
