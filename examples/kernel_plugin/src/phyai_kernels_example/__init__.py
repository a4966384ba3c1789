"""Kernels for PhyAI from a package of its own."""
