"""CUDA C++ sources into binaries for one architecture."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from moebius_kernels.jit.cache import ArtefactCache
from moebius_kernels.jit.sources import digest, included

NVCC = "MOEBIUS_NVCC"

_BINARY = "kernels.cubin"
_VERSION_SECONDS = 60.0


class CompileError(RuntimeError):
    """The compiler is not there, or refuses the sources; says what it said."""


@dataclass(frozen=True, slots=True)
class CudaSource:
    """A translation unit; its kernels are `extern "C"`."""

    name: str
    file: Path
    includes: tuple[Path, ...] = ()
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Compiler:
    """`seconds`: how long a compilation may take."""

    path: str
    seconds: float = 600.0

    @cached_property
    def version(self) -> str:
        return _run(self.path, "--version", seconds=_VERSION_SECONDS)

    def compile(self, source: CudaSource, architecture: tuple[int, int], output: Path) -> None:
        """Raises CompileError."""
        directories = [f"-I{directory}" for directory in source.includes]
        _run(
            *(self.path, *_flags(source, architecture), *directories, str(source.file), "-o", str(output)),
            seconds=self.seconds,
        )


def _run(*command: str, seconds: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except OSError as error:
        raise CompileError(f"{command[0]} cannot be run: {error.strerror}.") from error
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{' '.join(command)} took more than {seconds:g} s.") from error
    if done.returncode:
        raise CompileError(f"{' '.join(command)} failed ({done.returncode}):\n{done.stderr.strip()}")
    return done.stdout


def find_compiler() -> Compiler:
    """MOEBIUS_NVCC, or CUDA_HOME's nvcc, or the one on PATH. Raises CompileError."""
    named = os.environ.get(NVCC) or shutil.which("nvcc", path=_search_path())
    if named is None:
        raise CompileError(f"There is no nvcc on PATH. Install the CUDA toolkit, or name it in {NVCC}.")
    return Compiler(named)


def build(
    source: CudaSource, architecture: tuple[int, int], cache: ArtefactCache, compiler: Compiler
) -> Path:
    """The binary of `source` for exactly this architecture, cached or compiled. Raises CompileError."""

    def compile_into(directory: Path) -> None:
        compiler.compile(source, architecture, directory / _BINARY)

    return cache.get(key_of(source, architecture, compiler), compile_into) / _BINARY


def key_of(source: CudaSource, architecture: tuple[int, int], compiler: Compiler) -> str:
    """Changes with every byte that the compiler reads, with how it is called and what loads the binary."""
    contents = included((source.file,), source.includes)
    content = digest(
        {
            **{f"file {name}": content for name, content in contents.items()},
            "flags": _flags(source, architecture),
            "compiler": compiler.version,
            "torch": torch.__version__,
        }
    )
    return f"{source.name}-sm{architecture[0]}{architecture[1]}-{content}"


def _flags(source: CudaSource, architecture: tuple[int, int]) -> tuple[str, ...]:
    major, minor = architecture
    return ("-cubin", f"-arch=sm_{major}{minor}", "-O3", "-std=c++17", *source.flags)


def _search_path() -> str:
    home = os.environ.get("CUDA_HOME")
    return os.pathsep.join([*([f"{home}/bin"] if home else []), os.environ.get("PATH", "")])
