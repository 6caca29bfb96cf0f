"""Programs of the tests that need what Triton's interpreter takes away: its compiler. They see no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def told(module: str, *arguments: str, cache: Path) -> Any:
    """What a module prints as JSON; what it compiles is kept in `cache`."""
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": ""}
    settings["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)
