"""Backends in Triton. Each module may have a table `BACKENDS`, which the registry gathers."""
