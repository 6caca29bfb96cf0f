"""A plan in force: operations that find, for each call, the backend that was chosen for it."""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from moebius_kernels.calls import CALLS, key_of, named_arguments, shapes_of
from moebius_kernels.operations import OPERATION_NAMES, Operations
from moebius_kernels.plan import Choice, Plan
from moebius_kernels.registry import Registry

# Called with an operation and the key of a call that the plan does not know.
Unplanned = Callable[[str, str], None]


class Recorder(Protocol):
    """Notes what is done last, for those who find out why a process died."""

    def prepare(self, operation: str, backend: str, shapes: str) -> Callable[[int], None]:
        """What is called, with the number of tokens, each time before this is done."""
        ...


class Watch(Protocol):
    """Finds out whose work failed on the device."""

    def wait(self) -> bool:
        """Waits for what has been launched, if anybody watches; whether that is so. Raises RuntimeError for
        work that failed."""
        ...


class _Step(NamedTuple):
    """What serves the calls of a site up to some token count."""

    function: Callable[..., Any]
    note: Callable[[int], None] | None


class _Site(NamedTuple):
    # The last token count of each step, ascending; one step more than these serves larger counts.
    edges: tuple[int, ...]
    steps: tuple[_Step, ...]


@dataclass(frozen=True, slots=True)
class _Dispatch:
    """Finds the backends of one operation's sites, when the first call of each comes."""

    operation: str
    plan: Plan
    registry: Registry
    recorder: Recorder | None
    unplanned: Unplanned

    def site(self, args: Sequence[Any], kwargs: dict[str, Any]) -> _Site:
        key = key_of(shapes_of(self.operation, named_arguments(self.operation, args, kwargs)))
        choices = [one for one in self.plan.choices if (one.operation, one.key) == (self.operation, key)]
        if not choices:
            self.unplanned(self.operation, key)
        choices.sort(key=lambda choice: choice.tokens.last)
        steps = [self._step(choice.backend, key) for choice in choices]
        return _Site(tuple(choice.tokens.last for choice in choices), (*steps, self._step("reference", key)))

    def _step(self, name: str, key: str) -> _Step:
        backends = {backend.name: backend for backend in self.registry.of(self.operation)}
        note = None if self.recorder is None else self.recorder.prepare(self.operation, name, key)
        return _Step(backends[name].bind(), note)


def bind(
    plan: Plan,
    registry: Registry,
    recorder: Recorder | None = None,
    unplanned: Unplanned = lambda operation, key: None,
    watch: Watch | None = None,
) -> Operations:
    """The operations of a plan. Calls that it does not know, and larger ones, go to the reference. While
    somebody watches, what `recorder` has last is what is computed, or a reference if nothing of ours is.

    Raises ValueError if the plan chose a backend that the registry has not.
    """
    known = {str(backend) for backend in registry.backends}
    if lost := {_full_name(choice) for choice in plan.choices} - known:
        raise ValueError(f"the plan chose {', '.join(sorted(lost))}, which is not there")
    return Operations(
        **{
            name: _bound(_Dispatch(name, plan, registry, recorder, unplanned), watch)
            for name in OPERATION_NAMES
        }
    )


def _full_name(choice: Choice) -> str:
    return f"{choice.operation}:{choice.backend}"


def _bound(dispatch: _Dispatch, watch: Watch | None) -> Callable[..., Any]:
    site_of = CALLS[dispatch.operation].site
    sites: dict[Hashable, _Site] = {}
    # What comes after an operation and before the next one is PyTorch's.
    rest = None if dispatch.recorder is None else dispatch.recorder.prepare("none", "reference", "")

    def call(*args: Any, **kwargs: Any) -> Any:
        site_key = site_of(*args, **kwargs)
        site = sites.get(site_key)
        if site is None:
            site = sites[site_key] = dispatch.site(args, kwargs)
        tokens = args[0].shape[0]
        function, note = site.steps[bisect_left(site.edges, tokens)]
        if watch is not None:
            watch.wait()
        if note is not None:
            note(tokens)
        result = function(*args, **kwargs)
        if watch is not None and watch.wait() and rest is not None:
            rest(0)
        return result

    return call
