"""A simulated engine: the real loop, scheduler and protocol over a model that only takes time.

For load tests of everything around a model without a GPU or PyTorch: `moebius up --engine sim`,
`moebius-worker --engine sim`, and `moebius sim`, which hosts many workers in one process.
"""
