"""The images of docker/, packed for a lab cluster without a container engine: the same packages and sources.

    python -m tests.cluster.images --lab PATH OUT       # or with the lab's path in MOEBIUS_LAB

The lab has a Debian 12 base with Python 3.11, for which packages are taken, and a tool that packs archives.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "docker" / "requirements"
PRUNE = ROOT / "docker" / "prune.sh"
TAG = "test"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
SITE = "/usr/local/lib/python3.11/dist-packages"


@dataclass(frozen=True)
class Image:
    program: str
    requirements: str
    tag: str
    no_deps: bool = True
    # Bytes that it may have, base and all.
    limit: int = 250_000_000

    @property
    def name(self) -> str:
        return f"moebius/{self.program}:{self.tag}"


IMAGES = (
    Image("gateway", "gateway.txt", TAG),
    Image("controller", "controller.txt", TAG),
    # PyPI's torch is the CUDA build; where pip has an index with the CPU build it takes that.
    Image("worker", "worker.txt", f"{TAG}-cpu", no_deps=False, limit=1_300_000_000),
)


def lab_tool() -> Path | None:
    """The `lab` command: MOEBIUS_LAB, or the one on PATH."""
    named = os.environ.get("MOEBIUS_LAB") or shutil.which("lab")
    return Path(named) if named else None


def site(image: Image, out: Path) -> Path:
    """The packages of an image as a folder; kept by the content of its requirements."""
    requirements = REQUIREMENTS / image.requirements
    folder = out / f"{image.program}-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]}"
    if folder.exists():
        return folder
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    subprocess.run(
        [
            *(*PIP, "--no-compile", "--only-binary", ":all:", "--python-version", "3.11"),
            *("--target", str(part)),
            *("--no-deps",) * image.no_deps,
            *("--requirement", str(requirements)),
        ],
        check=True,
    )
    # It compiles for the Python that runs here; if that is another, each start compiles again.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run([str(PRUNE), str(part)], check=True, env=os.environ | {"PATH": path})
    return part.rename(folder)


def pack(image: Image, lab: Path, base: Path, out: Path) -> Path:
    """Writes the image's archive below `out`."""
    archive = out / f"{image.program}.tar"
    packages = site(image, out)
    layer = packages.with_suffix(".tar")
    mkimage = [sys.executable, str(lab.with_name("mkimage.py"))]
    if not layer.exists():
        # As a layer of its own it is packed once, whatever changes in the sources.
        root = out / "root"
        shutil.rmtree(root, ignore_errors=True)
        (root / SITE[1:]).parent.mkdir(parents=True)
        packages.rename(root / SITE[1:])
        subprocess.run([*mkimage, "layer", str(root), str(layer)], check=True)
        (root / SITE[1:]).rename(packages)
    own = out / "own"
    shutil.rmtree(own, ignore_errors=True)
    subprocess.run([*PIP, "--no-deps", "--target", str(own), str(ROOT)], check=True)
    shutil.rmtree(own / "bin")  # its programs name the Python that runs here
    program = out / f"moebius-{image.program}"
    program.write_text(f'#!/bin/sh\nexec python3 -m moebius_{image.program} "$@"\n')
    program.chmod(0o755)
    subprocess.run(
        [
            *(*mkimage, "image", image.name, str(archive), "--layer", str(base), "--layer", str(layer)),
            *("--add", f"{own}:{SITE}", "--add", f"{program}:/usr/local/bin/{program.name}"),
            *("--user", "10001:10001", "--env", "PYTHONUNBUFFERED=1", "--entrypoint", program.name),
        ],
        check=True,
    )
    size = archive.stat().st_size
    if size > image.limit:
        raise RuntimeError(f"{image.name} has {size} bytes, more than {image.limit}")
    return archive


def build(lab: Path, out: Path) -> list[Path]:
    """Packs all images; returns their archives."""
    out.mkdir(parents=True, exist_ok=True)
    base = (
        Path(os.environ.get("LAB_DIR") or "~/.cache/kube-lab").expanduser() / "cache" / "rootfs-bookworm.tar"
    )
    if not base.exists():
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([str(lab), "rootfs", folder], check=True)
    return [pack(image, lab, base, out) for image in IMAGES]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lab", type=Path, default=lab_tool(), required=lab_tool() is None)
    options = parser.parse_args(arguments)
    for archive in build(options.lab.absolute(), options.out.absolute()):
        print(archive)  # noqa: T201


if __name__ == "__main__":
    main()
