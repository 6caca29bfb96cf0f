"""What grpc.aio has for a process as a whole is not taken down while a gateway has no worker."""

import subprocess
import sys

# In a process of its own: here the tests keep it themselves.
SCRIPT = """
import asyncio, gc, threading
from prometheus_client import CollectorRegistry
from moebius_gateway.workers.dispatcher import Dispatcher, DispatcherOptions
from moebius_gateway.workers.metrics import DispatcherMetrics
from moebius_gateway.workers import link

opened, pollers = [], set()

def counted(*arguments, real=link.open_channel):
    gc.collect()
    opened.append(arguments)
    return real(*arguments)

async def main():
    link.open_channel = counted
    options = DispatcherOptions(workers=("127.0.0.1:1",), reconnect_pause=0.01)
    dispatcher = Dispatcher(options, DispatcherMetrics(CollectorRegistry()))
    await dispatcher.start()
    while len(opened) < 5:
        pollers.update(thread for thread in threading.enumerate() if "_poll_wrapper" in thread.name)
        await asyncio.sleep(0.001)
    await dispatcher.stop()
    print(len(pollers), all(thread.is_alive() for thread in pollers))

asyncio.run(main())
"""


def test_one_poller_serves_all_attempts_to_attach() -> None:
    told = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert told.stdout.splitlines()[-1:] == ["1 True"], told.stderr
