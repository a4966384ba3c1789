"""The implementations of every operation, one module per operation.

Each module has ``populate(catalog)``, which declares the operation and its rows: what exists and
when each is valid. Optional libraries are imported by a row's ``prepare``, never here.
"""
