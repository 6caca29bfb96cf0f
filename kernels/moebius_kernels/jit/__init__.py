"""CUDA C++ kernels, compiled when first needed or ahead, and kept by the content of all that went in.

`cache.py` keeps what was built, `sources.py` says what went in, `nvcc.py` compiles, `cuda.py` loads, and
`triton_cache.py` gives Triton a place in the same cache and counts what it compiles.
"""
