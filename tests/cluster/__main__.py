"""`python -m tests.cluster [PYTEST ARGUMENTS]`: the tests of this folder on a cluster.

With KUBECONFIG set that cluster is used, in a namespace of its own. It needs the project's images and a small
model: MOEBIUS_TEST_VALUES names a values file of the chart that says where they are, with one model called
`tiny`; MOEBIUS_TEST_URL how the gateway's Service is reached from here, if not by its name in the cluster.

Otherwise a lab is started, with the command that MOEBIUS_LAB names, and ended again; that takes root.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.images import ROOT, build, lab_tool

# By default a node that says nothing for 40 s is held for dead and its pods are taken out of Services: all of
# them, if an API server was away for so long.
PATIENT = {"LAB_ARGS_KUBE_CONTROLLER_MANAGER": "--node-monitor-grace-period=80s"}
OUT = ROOT / "build" / "images"


def main(arguments: Sequence[str]) -> int:
    options = ("--numprocesses", "0", "-p", "no:cacheprovider", "--durations", "0")
    pytest = [sys.executable, "-m", "pytest", *options, "tests/cluster", *arguments]
    if "KUBECONFIG" in os.environ:
        return _run(pytest, os.environ)
    lab = lab_tool()
    if lab is None or os.geteuid() != 0:
        sys.stdout.write(
            "test-cluster: SKIPPED: no KUBECONFIG, and "
            + ("no lab: MOEBIUS_LAB names its command\n" if lab is None else "a lab needs root\n")
        )
        return 0
    running = subprocess.run([str(lab), "status"], capture_output=True).returncode == 0
    if not running:
        subprocess.run([str(lab), "up", "--fake-nodes", "2"], check=True, env=os.environ | PATIENT)
    try:
        subprocess.run([str(lab), "image", *map(str, build(lab, OUT))], check=True)
        with tempfile.TemporaryDirectory(prefix="moebius-model-") as folder:
            Path(folder).chmod(0o755)
            return _run([str(lab), "run", *pytest], os.environ | {"MOEBIUS_TEST_MODEL": folder})
    finally:
        if not running:
            subprocess.run([str(lab), "down"], check=False)


def _run(command: Sequence[str], env: os._Environ[str] | dict[str, str]) -> int:
    return subprocess.run(command, cwd=ROOT, env={**env, "MOEBIUS_TEST_CLUSTER": "1"}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
