"""Measured comparisons of pyops with its peers: `python -m pyops bench`, `make bench`, or `pytest bench/`."""
