"""Schedules of ConvRot INT8 convolutions for AMD GPUs."""
