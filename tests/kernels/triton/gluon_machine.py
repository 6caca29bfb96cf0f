"""Runs kernels in Gluon on the CPU, where Triton has no interpreter for them: a partition is a thread.

Nothing is modelled of layouts, which say where a number is and not which it is. Barriers count arrivals and
bytes as the hardware does. Copies are made as early, and products as late, as the kernel allows, so that a
stage that is read or given back too early changes the result. Memory that nobody wrote holds NaN. A pointer
that leaves its tensor raises, and so does a wait that does not end.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

_COMPILED = (JITFunction, InterpretedFunction)
# A wait of so many seconds is one for something that does not come.
_PATIENCE = 20.0
# Of the first partition.
_WARPS = 4
_TYPES = {name: getattr(torch, name) for name in ("int32", "int64", "float32", "bfloat16")}
_TYPES["float8e4nv"] = torch.float8_e4m3fn
_OPTIONS = ("num_warps", "maxnreg")


class Block(torch.Tensor):
    """A tensor with Gluon's own methods."""

    def split(self, *_: Any) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return torch.unbind(self, -1)

    @property
    def type(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(layout=None)


def _block(value: Any) -> torch.Tensor:
    return torch.as_tensor(value).as_subclass(Block)


@dataclass(frozen=True)
class Pointer:
    numbers: torch.Tensor
    offset: Any = 0

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.numbers, self.offset + offset)

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.numbers.dtype)

    def places(self, mask: Any, *others: Any) -> tuple[torch.Tensor, ...]:
        """Offsets and mask, and the others, in one shape."""
        found = torch.broadcast_tensors(*map(torch.as_tensor, (self.offset, mask, *others)))
        used = found[0][found[1]]
        if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < self.numbers.numel():
            raise IndexError(f"{int(used.min())} to {int(used.max())} of {self.numbers.numel()}")
        return found


@dataclass
class Memory:
    """Shared memory."""

    numbers: torch.Tensor

    def index(self, place: Any) -> Any:
        return Memory(self.numbers[int(place)])

    def slice(self, first: int, count: int, axis: int = 0) -> "Memory":
        return Memory(self.numbers.narrow(axis, first, count))

    def permute(self, order: Sequence[int]) -> "Memory":
        return Memory(self.numbers.permute(*order))

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> "Memory":
        """Swizzled lines of a tile's columns, line after line, as they lie."""
        lines, rows, columns = shape
        assert self.numbers.shape == (rows, lines * columns)
        return Memory(self.numbers.unflatten(1, (lines, columns)).transpose(0, 1))

    def load(self, layout: Any) -> torch.Tensor:
        return _block(self.numbers.clone())


@dataclass
class Barrier:
    changed: threading.Condition
    count: int = 0
    pending: int = 0
    missing: int = 0
    phase: int = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, count: int = 1, expected: int = 0) -> None:
        with self.changed:
            self.missing += expected
            self.pending -= count
            assert self.pending >= 0, "more arrivals than the barrier counts"
            self._complete()

    def arrived(self, nbytes: int) -> None:
        with self.changed:
            self.missing -= nbytes
            self._complete()

    def _complete(self) -> None:
        if not self.pending and not self.missing:
            self.phase ^= 1
            self.pending = self.count
            self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase != parity, _PATIENCE):
                raise TimeoutError("a barrier that nobody completes")


@dataclass
class Barriers:
    changed: threading.Condition
    all: list[Barrier] = field(default_factory=list)

    def index(self, place: Any) -> Barrier:
        return self.all[int(place)]


@dataclass(eq=False)
class Product:
    """One that may be under way."""

    a: Any
    b: Memory
    total: Any
    sums: torch.Tensor | None = None

    def run(self) -> None:
        total = self.total.sums if isinstance(self.total, Product) else self.total
        a = self.a.numbers if isinstance(self.a, Memory) else self.a
        self.sums = total + a.float() @ self.b.numbers.float()


class Machine:
    def __init__(self, programs: int = 3, replaced: Mapping[str, Any] | None = None) -> None:
        """`replaced`: what the kernel's module calls by such names is another function."""
        self._programs = programs
        self._own = threading.local()
        self._changed = threading.Condition()
        self._program = 0
        self._bound: dict[int, Callable[..., Any]] = {}
        self._stand_ins = self._language()
        self._replaced = replaced or {}

    def launch(self, kernel: Any, grid: tuple[int, ...], /, *args: Any, **constants: Any) -> None:
        """As `moebius_kernels.launch.launch`."""
        function = self._bind(kernel)
        given = [Pointer(_memory_of(one)) if isinstance(one, torch.Tensor) else one for one in args]
        constants = {name: value for name, value in constants.items() if name not in _OPTIONS}
        self._grid = grid[0]
        for self._program in range(grid[0]):
            function(*given, **constants)

    def multiprocessors(self, tensor: torch.Tensor) -> int:
        """As `hopper_tiles.multiprocessors`."""
        return self._programs

    def _bind(self, kernel: Any) -> Callable[..., Any]:
        """The function that was compiled, among stand-ins for what it names."""
        if id(kernel) not in self._bound:
            function = kernel.fn
            names = {name: self._stand_in(value) for name, value in function.__globals__.items()}
            names |= {name: value for name, value in self._replaced.items() if name in names}
            self._bound[id(kernel)] = FunctionType(
                function.__code__, names, function.__name__, function.__defaults__
            )
        return self._bound[id(kernel)]

    def _stand_in(self, value: Any) -> Any:
        if id(value) in self._stand_ins:
            return self._stand_ins[id(value)]
        if isinstance(value, gl.constexpr | tl.constexpr):
            return value.value
        if isinstance(value, _COMPILED):
            return lambda *args: self._bind(value)(*args)
        return value

    def _language(self) -> dict[int, Any]:
        own = _Language(self)
        barrier = SimpleNamespace(
            MBarrierLayout=hopper.mbarrier.MBarrierLayout,
            init=lambda barrier, count: barrier.init(count),
            wait=lambda barrier, phase: barrier.wait(int(phase)),
            expect=lambda barrier, nbytes: barrier.arrive(expected=nbytes),
            arrive=lambda barrier, count=1, pred=True: barrier.arrive(count) if pred else None,
        )
        copy = SimpleNamespace(
            async_copy_global_to_shared=_gathered,
            mbarrier_arrive=lambda barrier, increment_count: barrier.arrive(self._own.threads),
        )
        return {
            id(gl): own,
            id(tl): own,
            id(hopper.mbarrier): barrier,
            id(hopper.async_copy): copy,
            id(hopper.tma): SimpleNamespace(async_copy_global_to_shared=_tile_copied),
            id(hopper.fence_async_shared): lambda: None,
            id(hopper.warpgroup_mma): self._multiply,
            id(hopper.warpgroup_mma_wait): self.wait_for_products,
        }

    def _multiply(self, a: Any, b: Memory, total: Any, is_async: bool, use_acc: bool = True) -> Product:
        product = Product(a, b, total if use_acc else 0.0)
        self._under_way().append(product)
        return product

    def wait_for_products(self, count: int, values: Sequence[Any]) -> Any:
        queue = self._under_way()
        while len(queue) > count:
            queue.pop(0).run()
        settled = [one.sums if isinstance(one, Product) and one.sums is not None else one for one in values]
        return settled[0] if len(settled) == 1 else settled

    def _under_way(self) -> list[Product]:
        if not hasattr(self._own, "products"):
            self._own.products = []
        found: list[Product] = self._own.products
        return found


class _Language(ModuleType):
    """What stands in for Gluon's language and Triton's."""

    def __init__(self, machine: Machine) -> None:
        super().__init__("language")
        self._machine = machine

    def __getattr__(self, name: str) -> Any:
        if name in _TYPES:
            return _TYPES[name]
        return getattr(gl, name)

    def program_id(self, axis: int) -> int:
        return self._machine._program

    def num_programs(self, axis: int) -> int:
        return self._machine._grid

    def allocate_shared_memory(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
        if isinstance(layout, hopper.mbarrier.MBarrierLayout):
            changed = self._machine._changed
            made = [Barrier(changed) for _ in range(shape[0])]
            return Barriers(changed, made) if len(shape) > 1 else made[0]
        worst = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
        return Memory(torch.full(tuple(shape), worst, dtype=dtype))

    def warp_specialize(
        self, partitions: Sequence[tuple[Callable[..., None], Sequence[Any]]], warps: Any, registers: Any
    ) -> None:
        wrong: list[BaseException] = []

        def run(function: Callable[..., None], args: Sequence[Any], warps: int) -> None:
            # Each thread of a partition arrives when its own copies are there.
            self._machine._own.threads = 32 * warps
            try:
                function(*args)
            except BaseException as error:
                wrong.append(error)

        threads = [
            threading.Thread(target=run, args=(*one, count), daemon=True)
            for one, count in zip(partitions, (_WARPS, *warps), strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if wrong:
            raise wrong[0]

    def thread_barrier(self) -> None: ...

    def static_range(self, *args: int) -> range:
        return range(*args)

    def static_assert(self, true: bool, text: str = "") -> None:
        assert true, text

    def to_tensor(self, value: Any) -> Any:
        return value

    def arange(self, first: int, last: int, layout: Any = None) -> torch.Tensor:
        return _block(torch.arange(first, last, dtype=torch.int32))

    def full(self, shape: Sequence[int], value: float, dtype: torch.dtype, layout: Any) -> torch.Tensor:
        return _block(torch.full(tuple(shape), value, dtype=dtype))

    def convert_layout(self, value: Any, layout: Any, assert_trivial: bool = False) -> Any:
        return value

    def where(self, true: Any, one: Any, other: Any) -> Any:
        if isinstance(one, Pointer):
            return Pointer(one.numbers, self.where(true, one.offset, other.offset))
        return _block(torch.where(torch.as_tensor(true), one, other))

    def minimum(self, one: Any, other: Any) -> torch.Tensor:
        return _block(torch.minimum(torch.as_tensor(one), torch.as_tensor(other)))

    def maximum(self, one: Any, other: Any) -> torch.Tensor:
        return _block(torch.maximum(torch.as_tensor(one), torch.as_tensor(other)))

    def max(self, value: torch.Tensor, axis: int) -> torch.Tensor:
        return _block(value.amax(axis))

    def sum(self, value: torch.Tensor, axis: int) -> torch.Tensor:
        return _block(value.sum(axis))

    def exp2(self, value: torch.Tensor) -> torch.Tensor:
        return _block(torch.exp2(value))

    def abs(self, value: torch.Tensor) -> torch.Tensor:
        return _block(value.abs())

    def div_rn(self, one: torch.Tensor, other: Any) -> torch.Tensor:
        return _block(one / other)

    def sigmoid(self, value: torch.Tensor) -> torch.Tensor:
        return _block(torch.sigmoid(value))

    def load(self, pointer: Pointer, mask: Any = True, other: Any = 0) -> torch.Tensor:
        at, keep = pointer.places(mask)
        found = pointer.numbers[torch.where(keep, at, 0).long()]
        return _block(torch.where(keep, found, torch.as_tensor(other, dtype=found.dtype)))

    def store(self, pointer: Pointer, value: Any, mask: Any = True) -> None:
        at, keep, numbers = pointer.places(mask, value)
        pointer.numbers[at[keep].long()] = numbers[keep].to(pointer.numbers.dtype)


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All from its first element on, in the order of addresses."""
    first = tensor.storage_offset()
    count = tensor.untyped_storage().nbytes() // tensor.itemsize - first
    return tensor.as_strided((count,), (1,), first)


def _gathered(memory: Memory, pointer: Pointer, mask: Any = True) -> None:
    at, keep = pointer.places(mask)
    found = pointer.numbers[torch.where(keep, at, 0).long()]
    memory.numbers.copy_(torch.where(keep, found, torch.zeros_like(found)))


def _tile_copied(descriptor: TensorDescriptor, place: Sequence[Any], ready: Barrier, memory: Memory) -> None:
    """What is outside of the tensor is 0."""
    row, column = map(int, place)
    rows, columns = descriptor.block_shape
    assert tuple(memory.numbers.shape) == (rows, columns)
    first = max(row, 0)
    inside = descriptor.base[first : max(row + rows, 0), column : column + columns]
    memory.numbers.zero_()
    memory.numbers[first - row :][: inside.shape[0], : inside.shape[1]] = inside
    ready.arrived(memory.numbers.nbytes)
