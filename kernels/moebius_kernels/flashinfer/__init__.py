"""FlashInfer's kernels (flashinfer-python) as further backends, where the package is installed."""
