"""Triton kernels, one op a file; installed as ``pyops.triton_kernels``. Importing needs no GPU, no driver."""
