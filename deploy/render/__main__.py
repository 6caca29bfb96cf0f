"""`python -m deploy.render`: a PNG for each dashboard, from what a Prometheus knows now."""

import argparse
import json
import sys
import time
from pathlib import Path

import matplotlib

from deploy.render.prometheus import Prometheus, PrometheusError, Span

FOLDER = Path(__file__).parents[1] / "dashboards"
POINTS = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="its URL")
    parser.add_argument("--minutes", type=float, default=15, help="how far back")
    parser.add_argument("--scrape-interval", type=float, default=5, help="seconds between its scrapes")
    parser.add_argument("--into", type=Path, default=Path("build/dashboards"), help="folder of the pictures")
    options = parser.parse_args()
    # Before pyplot is imported: no window is wanted.
    matplotlib.use("Agg")
    from deploy.render.draw import draw

    step = max(options.scrape_interval, 60 * options.minutes / POINTS)
    end = time.time() // step * step
    span = Span(end - step * round(60 * options.minutes / step), end, step)
    options.into.mkdir(parents=True, exist_ok=True)
    prometheus = Prometheus(options.prometheus)
    for file in sorted(FOLDER.glob("*.json")):
        picture = options.into / f"{file.stem}.png"
        try:
            draw(json.loads(file.read_text()), prometheus, span, options.scrape_interval).savefig(picture)
        except PrometheusError as error:
            sys.exit(f"deploy.render: {error}")
        sys.stdout.write(f"{picture}\n")


if __name__ == "__main__":
    main()
