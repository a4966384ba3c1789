"""Operators that fuse several layers, and the graph rewrites that use them."""
