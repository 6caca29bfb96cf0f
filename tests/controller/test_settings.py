"""The controller's settings, and the page that explains them."""

import re
from pathlib import Path

import pytest

from moebius_common.settings import read_settings
from moebius_controller.policy import LADDER, PODS, PROCESSES, Rung
from moebius_controller.settings import ControllerSettings
from moebius_controller.types import Step, Trouble

PAGE = Path(__file__).parents[2] / "docs" / "failure-modes.md"


def test_left_out_it_is_the_usual_policy() -> None:
    assert read_settings(ControllerSettings, ["--stack", "x"]).policy() == PROCESSES
    assert read_settings(ControllerSettings, ["--driver", "kubernetes"]).policy() == PODS
    assert PROCESSES.ladder == PODS.ladder == LADDER


def test_a_ladder_of_ones_own_comes_from_a_flag_or_a_file(tmp_path: Path) -> None:
    wanted = (Rung(Trouble.SILENT, Step.REPLACE, seconds=30), Rung(Trouble.DEATHS, Step.GIVE_UP, times=2))
    flag = (
        '[{"when": "silent", "step": "replace", "seconds": 30},'
        ' {"when": "deaths", "step": "give-up", "times": 2}]'
    )
    settings = read_settings(ControllerSettings, ["--stack", "x", "--ladder", flag])
    assert settings.policy().ladder == wanted
    file = tmp_path / "settings.toml"
    file.write_text(
        """
driver = "kubernetes"
min_ready = 2
ladder = [
  {when = "silent", step = "replace", seconds = 30},
  {when = "deaths", step = "give-up", times = 2},
]
"""
    )
    policy = read_settings(ControllerSettings, ["--config", str(file)]).policy()
    assert (policy.ladder, policy.min_ready, policy.retry_delay) == (wanted, 2, PODS.retry_delay)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--driver local needs --stack"),
        (["--stack", "x", "--worker-tls-cert", "c"], "--worker-tls-cert and --worker-tls-key go together"),
        (
            ["--stack", "x", "--worker-tls-cert", "c", "--worker-tls-key", "k"],
            "--worker-tls-cert needs --worker-tls-ca",
        ),
        (["--driver", "kubernetes", "--max-api-age", "20"], "--max-api-age"),
        (["--stack", "x", "--ladder", '[{"when": "silent"}]'], "--ladder.0.step: Field required"),
    ],
)
def test_mistakes_are_told(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        read_settings(ControllerSettings, flags)
    assert said in capsys.readouterr().err


def test_the_page_explains_every_rung() -> None:
    text = PAGE.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `") and "`when`" not in line]
    explained = [line.split("`")[1] for line in rows]
    assert sorted(explained) == sorted(Trouble)
    for step in Step:
        assert f"`{step}`" in text
    for rung in LADDER:
        row = rows[explained.index(rung.when)]
        assert f"`{rung.step}`" in row
        assert "`seconds`" in row or not rung.seconds
        assert "`times`" in row or rung.times == 1


def test_the_metrics_that_the_page_names_are_there() -> None:
    named = set(re.findall(r"`(moebius_\w+)`", PAGE.read_text()))
    assert named
    assert not {name for name in named if f"`{name}`" not in (PAGE.parent / "metrics.md").read_text()}
