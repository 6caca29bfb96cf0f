#!/bin/sh
# Makes a folder of installed packages small: prune.sh SITE-PACKAGES. Needs python3 and, to strip symbols, binutils.
set -eu
cd "$1"
# The asynchronous half of the Kubernetes client, torch's tests and headers: nothing here uses them.
rm -rf kubernetes/aio torch/test torch/include
python3 -m compileall -q -j 0 . || true
# Of the client's 1,500 generated files the compiled form is enough.
if [ -d kubernetes/client ]; then
    python3 -m compileall -q -b -j 0 kubernetes/client
    find kubernetes/client -name '*.py' -delete
    find kubernetes/client -name __pycache__ -prune -exec rm -rf {} +
fi
if command -v strip >/dev/null; then
    find . -name '*.so' -not -path './torch/*' -not -path './*.libs/*' -exec strip --strip-unneeded {} + 2>/dev/null || true
fi
