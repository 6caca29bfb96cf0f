"""What gRPC's threads are to the event loop's."""

import subprocess
import sys

PROGRAM = """
import asyncio, os, threading
from moebius_proto.channel import keep_grpc, open_channel

async def main():
    before = set(os.listdir("/proc/self/task"))
    keep_grpc()
    # One that is really used, and fails.
    async with open_channel("127.0.0.1:1", None, ()) as channel:
        channel.get_state(try_to_connect=True)
        await asyncio.sleep(0.2)
    begun = set(os.listdir("/proc/self/task")) - before
    print(os.sched_getscheduler(0) == os.SCHED_OTHER, len(begun) > 0)
    print({os.sched_getscheduler(int(thread)) for thread in begun} == {os.SCHED_BATCH})

asyncio.run(main())
"""


def test_they_do_not_interrupt_it() -> None:
    # Without a channel that is held they end now and then, and begin anew like the loop's thread.
    for _ in range(8):
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["True", "True", "True"]
        assert done.stderr == ""
