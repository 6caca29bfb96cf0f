"""Writes deploy/dashboards: `python -m deploy.boards`."""

from pathlib import Path

from deploy.boards.all import BOARDS
from deploy.boards.grafana import write

FOLDER = Path(__file__).parents[1] / "dashboards"

if __name__ == "__main__":
    for board in BOARDS:
        (FOLDER / f"moebius-{board.name}.json").write_text(write(board))
