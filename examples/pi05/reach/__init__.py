"""Reach: a small 2-D manipulation task, its expert and the training of a pi0.5 policy for it."""
