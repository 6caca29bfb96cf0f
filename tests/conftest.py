"""What holds for all tests: which may run side by side (pytest-xdist), and what a process keeps for them."""

import asyncio
import gc
import inspect
import logging
import os
from contextlib import suppress
from pathlib import Path

import pytest
import structlog
from xdist.scheduler import LoadScopeScheduling

# Triton is told when it is first imported, which any test may do: without a GPU its interpreter runs kernels.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

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


@pytest.fixture(autouse=True)
def _logs_are_not_set_up():
    """They are for a whole process, and loggers keep them: a program's main is tested in one of its own."""
    yield
    assert not structlog.get_config()["cache_logger_on_first_use"]


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
