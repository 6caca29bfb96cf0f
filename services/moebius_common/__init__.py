"""What the programs share: log lines, settings, addresses, delays, child processes and how they ended, CPUs
and control groups, metrics and probes over HTTP. It knows none of the programs, and neither gRPC nor PyTorch.
"""
