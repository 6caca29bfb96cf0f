"""Stands for nvcc: the output is the source in capitals. Counts its runs in `runs` beside itself.

A source with "slow" in it takes its time, and with "broken" is refused.
"""

import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        sys.stdout.write((HERE / "version").read_text())
        return 0
    with (HERE / "runs").open("a") as runs:
        runs.write("run\n")
    output = Path(arguments[arguments.index("-o") + 1])
    [source] = [Path(one) for one in arguments if one.endswith(".cu")]
    text = source.read_text()
    # As a compiler does that is killed half-way.
    output.write_text(text[: len(text) // 2])
    if "slow" in text:
        (HERE / "started").touch()
        time.sleep(0.5 if "briefly" in text else 60)
    if "broken" in text:
        sys.stderr.write("error: expected a ';'")
        return 2
    output.write_text(text.upper())
    return 0


if __name__ == "__main__":
    sys.exit(main())
