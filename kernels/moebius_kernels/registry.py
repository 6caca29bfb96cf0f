"""Which implementations of the operations exist, and what each says it needs. None is trusted on its word."""

import contextlib
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moebius_kernels.calls import CALLS, MatrixShape, key_of
from moebius_kernels.jit.nvcc import CudaSource
from moebius_kernels.operations import OPERATION_NAMES, REFERENCE

# Packages each of whose modules may have a table `BACKENDS`.
PROVIDERS = ("moebius_kernels.triton", "moebius_kernels.flashinfer", "moebius_kernels.cuda")

# References that look at what is on the device.
_WAITING = frozenset({"routed_experts", "paged_attention"})

# Compute capability, major and minor. Never a family: what runs on 10.0 need not run on 12.0.
Architecture = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TokenRange:
    """`first` to `last`, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


@dataclass(frozen=True, slots=True)
class Device:
    """`kind` as PyTorch has it: "cpu", "cuda". `name` and `driver` are for people and for cache keys."""

    kind: str
    name: str
    architecture: Architecture | None = None
    driver: str = ""


@dataclass(frozen=True, slots=True)
class Query:
    """An operation that a model needs, for some range of token counts.

    `arguments`: by the names of the reference's parameters, what of each is the model's: `TensorShape`
    (without the leading dimension where that counts tokens, pages or slots), `MatrixShape`, numbers, None,
    tuples of these, and mappings for records. Of `plan`, which describes the step, only the window is here.
    """

    operation: str
    arguments: Mapping[str, Any]
    tokens: TokenRange
    device: Device

    @property
    def key(self) -> str:
        """The same for all token counts and devices."""
        return key_of(self.arguments)

    @property
    def matrices(self) -> Iterator[MatrixShape]:
        """All stored matrices among the arguments."""
        yield from _matrices(self.arguments.values())


def _anything(query: Query) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Backend:
    """An implementation of `operation` with the signature of its reference.

    `architectures`: of CUDA devices, exactly these; empty on other devices. `formats`: the names of the
    stored forms it reads, None for whatever `admits` lets through. `admits`: why it cannot serve a query,
    None if it can for every count in its range; looks at nothing but the query. `capturable`: in a CUDA
    graph. `reference`: what it computes, if that is not quite what the operation's does, but what the stored
    forms that it admits declare; None for the operation's.
    `own`: makes one that keeps something from call to call, for a user whose calls are in one order.
    `build_seconds`: that its first call may take, where that is more than others get.
    """

    operation: str
    name: str
    function: Callable[..., Any]
    devices: tuple[str, ...] = ("cuda",)
    architectures: frozenset[Architecture] = frozenset()
    formats: frozenset[str] | None = None
    admits: Callable[[Query], str | None] = _anything
    capturable: bool = True
    reference: Callable[..., Any] | None = None
    own: Callable[[], Callable[..., Any]] | None = None
    build_seconds: float = 0.0

    def bind(self) -> Callable[..., Any]:
        """What computes it for one user."""
        return self.function if self.own is None else self.own()

    @property
    def is_reference(self) -> bool:
        return self.name == "reference"

    @property
    def is_triton(self) -> bool:
        """Triton compiles it, which needs no GPU."""
        return self.name.startswith("triton")

    def __str__(self) -> str:
        return f"{self.operation}:{self.name}"


@dataclass(frozen=True, slots=True)
class Registry:
    """`backends`: the references first. `missing`: modules that cannot be imported here, and why."""

    backends: tuple[Backend, ...]
    missing: Mapping[str, str]

    def of(self, operation: str) -> tuple[Backend, ...]:
        return tuple(backend for backend in self.backends if backend.operation == operation)

    def without(self, excluded: Iterable[str]) -> "Registry":
        """Without the backends named "operation:name". References stay: something has to compute."""
        names = frozenset(excluded)
        kept = (one for one in self.backends if one.is_reference or str(one) not in names)
        return Registry(tuple(kept), self.missing)

    def mistaken(self, excluded: Iterable[str]) -> dict[str, str]:
        """The names that `without` takes nothing away for, each with the reason."""
        names = {str(one) for one in self.backends if not one.is_reference}
        return {name: self._why_kept(name) for name in excluded if name not in names}

    def _why_kept(self, name: str) -> str:
        operation, _, backend = name.partition(":")
        if operation not in OPERATION_NAMES:
            return "there is no such operation"
        if backend == "reference":
            return "the reference stays: something has to compute"
        others = ", ".join(one.name for one in self.of(operation) if not one.is_reference)
        return f"of {operation} there are here: {others or 'none'}"


def references() -> tuple[Backend, ...]:
    """One for each operation, on every device, in plain PyTorch."""
    return tuple(
        Backend(
            name,
            "reference",
            getattr(REFERENCE, name),
            devices=("cpu", "cuda", "meta"),
            # Graphs have rows that do not exist: the place -1, where these write, is none to a reference.
            capturable=name not in _WAITING and not CALLS[name].written,
        )
        for name in OPERATION_NAMES
    )


def gather(providers: Sequence[str] = PROVIDERS) -> Registry:
    """Everything that is installed. Raises ValueError for tables that contradict themselves."""
    backends = list(references())
    missing: dict[str, str] = {}
    for module in _modules(providers):
        try:
            found = importlib.import_module(module)
        except Exception as error:
            # Whatever is wrong with somebody's binary, the reference still computes.
            missing[module] = f"{type(error).__name__}: {error}"
        else:
            backends += getattr(found, "BACKENDS", ())
    seen: set[str] = set()
    for backend in backends:
        if backend.operation not in OPERATION_NAMES:
            raise ValueError(f"{backend} implements no operation that there is")
        if str(backend) in seen:
            raise ValueError(f"two backends are called {backend}")
        seen.add(str(backend))
    return Registry(tuple(backends), missing)


def cuda_sources(providers: Sequence[str] = PROVIDERS) -> tuple[CudaSource, ...]:
    """The tables `SOURCES` of the same modules: what can be compiled ahead."""
    return tuple(declared("SOURCES", providers))


def declared(table: str, providers: Sequence[str] = PROVIDERS) -> Iterator[Any]:
    """What is in the tables of this name in the same modules. Those that cannot be imported have none."""
    for module in _modules(providers):
        with contextlib.suppress(Exception):
            yield from getattr(importlib.import_module(module), table, ())


def refusal(backend: Backend, query: Query) -> str | None:
    """Why the backend is not even tried, None if it may be."""
    device = query.device
    if device.kind not in backend.devices:
        return f"runs on {', '.join(backend.devices)}, not on {device.kind}"
    if (
        not backend.is_reference
        and device.kind == "cuda"
        and device.architecture not in backend.architectures
    ):
        known = ", ".join(f"{major}.{minor}" for major, minor in sorted(backend.architectures)) or "none"
        mine = "unknown" if device.architecture is None else "{}.{}".format(*device.architecture)
        return f"architecture {mine} is not among those it is made for ({known})"
    if backend.formats is not None:
        foreign = {matrix.format.name for matrix in query.matrices} - backend.formats
        if foreign:
            return f"does not read {', '.join(sorted(foreign))}"
    try:
        return backend.admits(query)
    except Exception as error:
        return f"its admission raised {type(error).__name__}: {error}"


def _modules(providers: Sequence[str]) -> Iterator[str]:
    for provider in providers:
        try:
            spec = importlib.util.find_spec(provider)
        except ModuleNotFoundError:
            spec = None
        if spec is None:
            continue
        for module in sorted(pkgutil.iter_modules(spec.submodule_search_locations), key=lambda one: one.name):
            yield f"{provider}.{module.name}"


def _matrices(values: Iterable[Any]) -> Iterator[MatrixShape]:
    for value in values:
        if isinstance(value, MatrixShape):
            yield value
        elif isinstance(value, Mapping):
            yield from _matrices(value.values())
        elif isinstance(value, tuple):
            yield from _matrices(value)
