"""Preparation of attention operands and routing on accelerators, shared by native backends.

Modules here are device code: backends import them when they execute a call.
"""
