"""The engine's own Triton kernels. Importing a module of this package needs Triton."""
