"""Kernels, compiled when first needed or ahead, and kept by the content of all that went in.

`cache.py` keeps what was built and `sources.py` says what went in. Of CUDA C++, `nvcc.py` compiles and
`cuda.py` loads. `triton_cache.py` and `flashinfer_cache.py` give others a place in the same cache, the first
also counts what Triton compiles, and `triton_ahead.py` has that done on all CPUs, with `triton_launcher.py`
for what launches it.
"""
