"""Preflight: every kernel that a model will use proves itself on this device, for these shapes and weights,
before the worker says that it is ready.

`run.py` has the kernels compiled on all CPUs (`ahead.py`, which needs no GPU), starts a sacrificial process
(`child.py`) and draws up the plan from what that reports. The child runs a few layers of the model with
operations (`probe.py`) that, at each call, put every candidate through the gates (`gates.py`) with the call's
own arguments. A candidate that takes the process with it is known by the process's last words, and the next
process goes on without it.
"""
