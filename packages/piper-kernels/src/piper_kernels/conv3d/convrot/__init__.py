"""Convolutions with ConvRot weights."""
