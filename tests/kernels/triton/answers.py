"""What processes of trials do in tests. Without torch: that starts faster."""

import os
import signal
import time
from types import SimpleNamespace
from typing import Any


class Hardy:
    """Does what it is asked to, and lives on."""

    def __call__(self, request: Any) -> Any:
        match request:
            case "pid":
                return os.getpid()
            case "raise":
                raise ValueError("one\n\ntwo")
            case "launch":
                # As Triton and the door of launches have it: a place first, then another, then the reason.
                try:
                    try:
                        raise ValueError("sizes are powers of 2")
                    except ValueError as error:
                        raise RuntimeError("at 127:8:\n    products(\n    ^") from error
                except RuntimeError as error:
                    raise LookupError(300 * "a kernel of many arguments ") from error
            case "die":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "hang":
                time.sleep(600)

    def well(self) -> bool:
        return True


class Weak(Hardy):
    """What raises leaves the device of no use."""

    def well(self) -> bool:
        return False


class Clock(Hardy):
    """Times tilings of experts by `cost`; but one kills, and some raise."""

    def __call__(self, request: Any) -> Any:
        _, _, tiling = request
        if tiling.gate_up.columns == 64:
            os.kill(os.getpid(), signal.SIGKILL)
        if tiling.gate_up.rows == 32:
            raise ValueError("no kernel")
        return SimpleNamespace(error=1e-3, microseconds=cost(tiling))


def cost(tiling: Any) -> float:
    """Least for the narrowest with fewest warps: nobody's usual choice."""
    if hasattr(tiling, "gate_up"):
        return cost(tiling.gate_up) + 2 * cost(tiling.down)
    return float(tiling.rows + tiling.warps + tiling.columns / 1000 + tiling.stages / 100 + tiling.splits)
