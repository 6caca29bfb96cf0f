"""What holds for all tests: which may run side by side (pytest-xdist), and what a process keeps for them."""

import asyncio
import gc
import inspect
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import structlog
from xdist.scheduler import LoadScopeScheduling

# What the mark `timed` means.
pytest_plugins = ["tests.timed"]

# Triton is told when it is first imported, which any test may do: without a GPU its interpreter runs kernels.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The background jobs of a shell's script ignore interrupts, and so would what tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Their tests start processes, wait more than they compute, and share what a session starts: a folder is for
# one process, whatever runs beside it. They begin first, the longest first: what ends late is short then.
TOGETHER = (
    "tests/faults/",
    "tests/cli/",
    "tests/worker/front/",
    "tests/controller/",
    "tests/integration/",
    "tests/worker/sim/",
)
# Each of their tests compiles kernels of its own, where there is a GPU: all processes take part in that.
APART = (
    "tests/gpu/test_attention_gpu.py",
    "tests/gpu/test_engine_gpu.py",
    "tests/gpu/test_experts_gpu.py",
    "tests/gpu/test_faults_gpu.py",
    "tests/gpu/test_run_ahead_gpu.py",
    "tests/kernels/triton/test_attention.py",
    "tests/kernels/triton/test_experts.py",
    "tests/kernels/triton/test_linear.py",
)


class Together(LoadScopeScheduling):
    """Processes take first what belongs together, folder by folder, then what is left, file by file or in
    single tests."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(TOGETHER):
            return TOGETHER[_place(nodeid)]
        if nodeid.startswith(APART):
            return nodeid
        return nodeid.partition("::")[0]

    def remove_node(self, node):
        """What took its process with it is told once and is not run again; what waited behind it is."""
        waiting = {
            scope: left
            for scope, work in self.assigned_work.pop(node).items()
            if (left := {nodeid: False for nodeid, done in work.items() if not done})
        }
        if not waiting:
            return None
        scope, left = next(iter(waiting.items()))
        ended = next(iter(left))
        del left[ended]
        if not left:
            del waiting[scope]
        self.workqueue.update(waiting)
        for other in self.nodes:
            self._reschedule(other)
        return ended

    def add_node_collection(self, node, collection):
        """Nobody would wait for one that finds other tests than the process in whose place it is."""
        super().add_node_collection(node, collection)
        if node not in self.registered_collections:
            raise RuntimeError("tests were changed while they ran: a new process finds others")

    def _reschedule(self, node):
        """A process runs a test only when it knows the next: one in another's place, too, gets two at once.
        It asks for them once it has collected."""
        if node not in self.registered_collections:
            return
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)


def _place(nodeid: str) -> int:
    """Among the folders that belong together; behind them all for others."""
    return next((place for place, folder in enumerate(TOGETHER) if nodeid.startswith(folder)), len(TOGETHER))


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: _place(item.nodeid))


# Nobody asks for it under `-p no:xdist`.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    # Else those with most tests begin first, which says little of how long they take.
    config.option.loadscopereorder = False
    return Together(config, log)


def pytest_sessionstart(session):
    """Keeps what grpc.aio has for a process as a whole: all event loops of the tests share it.

    With each last channel it is ended else, and begun anew with the next. One time in some thousand that left
    a loop that never heard of its answers again, or waited for grpc's own thread for ever (grpc/grpc#40989).
    """
    with suppress(ImportError):
        import grpc

        loop = asyncio.new_event_loop()
        loop.run_until_complete(_call(grpc.aio.init_grpc_aio))
        loop.close()


async def _call(function):
    function()


def _lost_gpu():
    """The error after which this process can compute nothing on its GPU any more; None: there is none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    error = None
    # What can be forgotten is told once.
    for _ in range(2):
        try:
            torch.cuda.synchronize()
        except RuntimeError as found:
            error = str(found).partition("\n")[0]
        else:
            return None
    return error


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Names the test that lost the GPU, whether it noticed or not."""
    report = yield
    if call.when == "teardown" and (error := _lost_gpu()):
        said = f"the GPU is lost to this process, in which nothing more is run: {error}"
        report.outcome, report.longrepr = "failed", f"{said}\n{report.longreprtext}".rstrip()
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """All that comes after a test that lost the GPU would fail too. xdist replaces the process."""
    done = yield
    if error := _lost_gpu():
        if hasattr(item.config, "workerinput"):
            os._exit(1)
        left = len(item.session.items) - item.session.items.index(item) - 1
        item.session.shouldfail = f"{item.nodeid} lost the GPU, {left} tests were not run: {error}"
    return done


@pytest.fixture(autouse=True)
def _logs_are_not_set_up():
    """They are for a whole process, and loggers keep them: a program's main is tested in one of its own."""
    yield
    assert not structlog.get_config()["cache_logger_on_first_use"]


@pytest.fixture(autouse=True)
def _threads_are_as_before():
    """PyTorch's, which a model sets for the whole process. Two that share a small product wait for each other
    without rest: where others compute beside them, all that came later took ten times as long."""
    torch = sys.modules.get("torch")
    before = torch and torch.get_num_threads()
    yield
    if before is not None and torch.get_num_threads() != before:
        torch.set_num_threads(before)


class _ForgottenErrors(logging.Filter):
    """Of tasks that nobody asked for them: asyncio tells them when a task is collected, in the midst of any
    test that comes later. Traces are left out, for to write one is to parse Python, and where the collector
    had interrupted the parser, Python 3.11's then fails (python/cpython#106905)."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def filter(self, record):
        message = record.getMessage()
        if "was never retrieved" in message:
            self.messages.append(message)
            record.exc_info = None
        return True


@pytest.fixture(scope="session")
def _forgotten():
    forgotten = _ForgottenErrors()
    logging.getLogger("asyncio").addFilter(forgotten)
    return forgotten


@pytest.fixture(scope="module", autouse=True)
def _every_tasks_error_is_looked_at(request, _forgotten):
    yield
    if any(inspect.iscoroutinefunction(found) for found in vars(request.module).values()):
        gc.collect()
    ours = [message for message in _forgotten.messages if "moebius_" in message]
    _forgotten.messages.clear()
    assert not ours
