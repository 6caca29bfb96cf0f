"""Brings what is generated in charts/moebius up to date. Run by `make chart`; a test compares the result."""

from pathlib import Path

from charts.schema import CHART, as_text

DEPLOY = Path(__file__).parents[1] / "deploy"
# Helm takes files of the chart's own folder only.
COPIED = (("dashboards", "*.json"), ("rules", "*.yaml"))


def generated() -> dict[Path, str]:
    """All files below the chart that are made, with their contents."""
    files = {CHART / "values.schema.json": as_text()}
    for folder, pattern in COPIED:
        for source in sorted((DEPLOY / folder).glob(pattern)):
            files[CHART / "files" / folder / source.name] = source.read_text()
    return files


def strangers() -> set[Path]:
    """Files in generated folders that nothing generates any more."""
    there = {path for folder, _ in COPIED for path in (CHART / "files" / folder).glob("*")}
    return there - set(generated())


def main() -> None:
    for path, text in generated().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path in strangers():
        path.unlink()


if __name__ == "__main__":
    main()
