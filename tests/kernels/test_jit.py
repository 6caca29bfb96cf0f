"""The cache of compiled kernels: keyed by all that went in, built once, never seen half-done."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from moebius_kernels.jit import flashinfer_cache
from moebius_kernels.jit.cache import ArtefactCache, cache_root
from moebius_kernels.jit.nvcc import CompileError, Compiler, CudaSource, build, find_compiler, key_of
from moebius_kernels.jit.sources import digest, included, package_digest
from moebius_kernels.jit.triton_cache import triton_directory, use_directory
from tests.kernels import fake_compiler

HOPPER = (9, 0)


@dataclass(frozen=True)
class World:
    """A compiler stand-in, a source with headers, a cache."""

    home: Path

    @property
    def compiler(self) -> Compiler:
        return Compiler(str(self.home / "bin" / "nvcc"), seconds=20.0)

    @property
    def cache(self) -> ArtefactCache:
        return ArtefactCache(self.home / "cache")

    @property
    def source(self) -> CudaSource:
        return CudaSource("scale", self.home / "src" / "scale.cu", (self.home / "include",))

    @property
    def runs(self) -> int:
        runs = self.home / "bin" / "runs"
        return len(runs.read_text().splitlines()) if runs.exists() else 0

    def build(self) -> Path:
        return build(self.source, HOPPER, self.cache, self.compiler)

    def key(self) -> str:
        return key_of(self.source, HOPPER, self.compiler)


@pytest.fixture
def world(tmp_path: Path) -> World:
    for name in ("bin", "src", "include/deep"):
        (tmp_path / name).mkdir(parents=True)
    compiler = tmp_path / "bin" / "nvcc"
    compiler.write_text(f"#!{sys.executable}\n" + Path(fake_compiler.__file__).read_text())
    compiler.chmod(0o755)
    (tmp_path / "bin" / "version").write_text("release 13.0")
    (tmp_path / "src" / "scale.cu").write_text('#include "near.h"\n#include <deep/far.h>\nint a;')
    (tmp_path / "src" / "near.h").write_text("#include <cuda_fp16.h>")
    (tmp_path / "include" / "deep" / "far.h").write_text('  #  include "further.h"')
    (tmp_path / "include" / "deep" / "further.h").write_text('#include "far.h"')
    return World(tmp_path)


def test_what_was_built_is_not_built_again(world: World) -> None:
    first = world.build()
    assert first.read_text().endswith("INT A;")
    assert world.build() == first
    assert world.runs == 1
    assert [path.name for path in world.cache.root.iterdir()] == [world.key()]


@pytest.mark.parametrize(
    "file", ["src/scale.cu", "src/near.h", "include/deep/far.h", "include/deep/further.h", "bin/version"]
)
def test_a_change_of_anything_that_is_read_is_another_key(world: World, file: str) -> None:
    before = world.key()
    path = world.home / file
    path.write_text(path.read_text() + " ")
    # The compiler's version is asked for once in its life.
    assert world.key() != before


def test_flags_architecture_and_pytorch_are_part_of_the_key(world: World, monkeypatch) -> None:
    keys = {
        world.key(),
        key_of(world.source, (10, 0), world.compiler),
        key_of(replace(world.source, flags=("-lineinfo",)), HOPPER, world.compiler),
        key_of(replace(world.source, flags=("-line", "info")), HOPPER, world.compiler),
    }
    monkeypatch.setattr("torch.__version__", "9.9.9")
    keys.add(world.key())
    assert len(keys) == 5


def test_times_and_places_are_not_part_of_the_key(world: World, tmp_path_factory) -> None:
    before = world.key()
    for path in world.home.rglob("*"):
        os.utime(path, (1, 1))
    moved = World(tmp_path_factory.mktemp("elsewhere") / "tree")
    shutil.copytree(world.home, moved.home)
    assert before == world.key() == moved.key()


def test_a_header_that_appears_in_an_earlier_place_is_another_key(world: World) -> None:
    before = world.key()
    (world.home / "src" / "cuda_fp16.h").write_text("// not the toolkit's")
    assert world.key() == before, "it is included in <>"
    (world.home / "include" / "cuda_fp16.h").write_text("// not the toolkit's")
    assert world.key() != before


def test_headers_are_found_as_the_compiler_finds_them(world: World) -> None:
    found = included((world.source.file,), world.source.includes)
    assert set(found) == {"scale.cu", "near.h", "deep/far.h", "further.h"}


def test_no_two_mixtures_look_alike() -> None:
    mixtures = [{"a": "bc"}, {"ab": "c"}, {"a": ["b", "c"]}, {"a": "b", "c": ""}, {"a": ["bc", ""]}]
    assert len({digest(one) for one in mixtures}) == len(mixtures)
    assert digest({"a": "1", "b": "2"}) == digest({"b": "2", "a": "1"})


def test_a_source_that_is_refused_leaves_nothing_and_says_what_the_compiler_said(world: World) -> None:
    world.source.file.write_text("broken")
    for _ in range(2):
        with pytest.raises(CompileError, match="expected a ';'"):
            world.build()
    assert world.runs == 2
    assert list(world.cache.root.iterdir()) == []


def test_a_compiler_that_takes_too_long_is_stopped(world: World) -> None:
    world.source.file.write_text("slow")
    with pytest.raises(CompileError, match=r"took more than 0\.2 s"):
        build(world.source, HOPPER, world.cache, replace(world.compiler, seconds=0.2))
    assert list(world.cache.root.iterdir()) == []


def test_a_compiler_that_is_not_there_is_named(world: World, monkeypatch) -> None:
    with pytest.raises(CompileError, match="/no/nvcc cannot be run"):
        build(world.source, HOPPER, world.cache, Compiler("/no/nvcc"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("MOEBIUS_NVCC", raising=False)
    with pytest.raises(CompileError, match="MOEBIUS_NVCC"):
        find_compiler()
    monkeypatch.setenv("MOEBIUS_NVCC", world.compiler.path)
    assert find_compiler().version.strip() == "release 13.0"


def test_builders_at_the_same_time_build_once(world: World) -> None:
    world.source.file.write_text("slow, but briefly")
    with ThreadPoolExecutor(4) as pool:
        built = {future.result() for future in [pool.submit(world.build) for _ in range(4)]}
    assert len(built) == 1
    assert built.pop().read_text() == "SLOW, BUT BRIEFLY"
    assert world.runs == 1


def test_who_waits_for_another_builder_is_called_until_it_is_done(tmp_path: Path) -> None:
    cache = ArtefactCache(tmp_path)
    lock = (tmp_path / ".key.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    calls = 0

    def waiting() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            # As when its owner dies.
            lock.close()

    assert cache.get("key", lambda directory: None, waiting) == tmp_path / "key"
    assert calls == 3
    cache.get("key", lambda directory: None, lambda: pytest.fail("nobody holds it"))
    cache.get("other", lambda directory: None, lambda: pytest.fail("nobody holds it"))


BUILDER = """
import sys
from pathlib import Path
from moebius_kernels.jit.nvcc import Compiler, CudaSource, build
from moebius_kernels.jit.cache import ArtefactCache
home = Path(sys.argv[1])
source = CudaSource("scale", home / "src" / "scale.cu", (home / "include",))
build(source, (9, 0), ArtefactCache(home / "cache"), Compiler(str(home / "bin" / "nvcc")))
"""


def test_a_killed_builder_is_succeeded_by_the_next(world: World) -> None:
    world.source.file.write_text("slow")
    started = world.home / "bin" / "started"
    builder = subprocess.Popen([sys.executable, "-c", BUILDER, str(world.home)], start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not started.exists():
            assert builder.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.killpg(builder.pid, signal.SIGKILL)
        builder.wait()
    # Half of an artefact, and the lock file of a dead owner.
    assert len(list(world.cache.root.iterdir())) == 2
    key = world.key()
    path = world.cache.get(key, lambda directory: (directory / "kernels.cubin").write_text("whole"))
    assert (path / "kernels.cubin").read_text() == "whole"
    assert [path.name for path in world.cache.root.iterdir()] == [key]


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOEBIUS_CACHE_DIR", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("MOEBIUS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert cache_root() == Path("/var/cache/me/moebius")


def test_triton_keeps_its_kernels_in_our_cache(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    directories = {triton_directory(tmp_path, {"triton": version, "torch": "2"}) for version in "34"}
    assert len(directories) == 2
    directory = directories.pop()
    use_directory(directory)
    assert directory.is_dir()
    assert os.environ["TRITON_CACHE_DIR"] == str(directory)


def test_flashinfer_keeps_its_kernels_there_too_and_compiles_as_many_at_a_time_as_fit(
    monkeypatch, tmp_path: Path
) -> None:
    directory = flashinfer_cache.flashinfer_directory(tmp_path, {"flashinfer-python": "0.7.2"})
    assert directory != flashinfer_cache.flashinfer_directory(tmp_path, {"flashinfer-python": "0.7.3"})
    for memory, jobs in ((100 << 30, "8"), (20 << 30, "3"), (1 << 30, "1")):
        for name in ("FLASHINFER_WORKSPACE_BASE", "MAX_JOBS"):
            monkeypatch.delenv(name, raising=False)
        flashinfer_cache.use_directory(directory, cpus=8, memory=memory)
        assert os.environ["FLASHINFER_WORKSPACE_BASE"] == str(directory)
        assert os.environ["MAX_JOBS"] == jobs
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "/elsewhere")
    flashinfer_cache.use_directory(directory, cpus=8, memory=8 << 30)
    assert os.environ["FLASHINFER_WORKSPACE_BASE"] == "/elsewhere"


def test_compilations_are_counted_and_what_is_read_from_the_cache_is_none(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    # In a process of its own: in this one, kernels may be for Triton's interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.copy_kernel"],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["copy_one"]


def test_a_packages_digest_is_that_of_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    files = ("kernel.py", "inner/kernel.cu", "inner/table.json")
    for name in files:
        (tmp_path / name).write_text("one")
    before = package_digest(tmp_path)
    (tmp_path / "compiled.pyc").write_text("not a source")
    assert package_digest(tmp_path) == before
    for name in files:
        (tmp_path / name).write_text("another")
        assert package_digest(tmp_path) != before, name
        (tmp_path / name).write_text("one")
    assert package_digest(tmp_path) == before
    (tmp_path / "kernel.py").rename(tmp_path / "inner" / "kernel.py")
    assert package_digest(tmp_path) != before


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_a_real_compiler_makes_a_real_binary(tmp_path: Path) -> None:
    file = tmp_path / "scale.cu"
    file.write_text('extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= 2; }')
    binary = build(CudaSource("scale", file), HOPPER, ArtefactCache(tmp_path / "cache"), find_compiler())
    assert binary.read_bytes().startswith(b"\x7fELF")
