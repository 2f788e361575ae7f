"""Triton kernels, one file per op; installed as ``pyops.triton_kernels``. Importing needs no GPU and no driver."""
