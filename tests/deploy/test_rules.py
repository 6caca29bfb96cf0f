"""The rules are sound, each alert is tested, and each has its page."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.queries import DEPLOY, RULES, rules

ALERTS = [rule for rule in rules() if "alert" in rule]
TESTS = sorted((DEPLOY / "rules" / "tests").glob("*.yaml"))
PAGE = (DEPLOY.parent / "docs" / "operations.md").read_text()
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not there (Debian, Ubuntu: apt install prometheus)"
)


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_the_rules_are_sound() -> None:
    promtool("check", "rules", *RULES)


@needs_promtool
def test_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", *TESTS)


@needs_promtool
def test_the_local_prometheus_takes_its_configuration() -> None:
    promtool("check", "config", DEPLOY / "local" / "prometheus.yml")


def test_each_alert_is_tested_both_ways() -> None:
    fired, quiet = set(), set()
    for file in TESTS:
        for test in yaml.safe_load(file.read_text())["tests"]:
            for case in test["alert_rule_test"]:
                (fired if case["exp_alerts"] else quiet).add(case["alertname"])
    assert fired == {rule["alert"] for rule in ALERTS}
    # The objective's test has a model that is well beside those that are not.
    assert quiet >= fired - {"LatencySLOBurn"}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: f"{rule['alert']}-{rule['labels']['severity']}")
def test_an_alert_has_its_page(rule: dict) -> None:
    assert rule["labels"]["app"] == "moebius"
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{rule['alert'].lower()}"
    page = _section(rule["alert"])
    for part in ("Means", "Users notice", "Look at", "Do"):
        assert f"- **{part}.** " in page, part


def test_no_page_is_about_an_alert_that_is_not_there() -> None:
    headings = set(re.findall(r"^## ([A-Z]\w+[A-Z]\w+)$", PAGE, re.MULTILINE))
    assert headings == {rule["alert"] for rule in ALERTS}


def test_pages_name_panels_that_there_are() -> None:
    boards = "\n".join(file.read_text() for file in (DEPLOY / "dashboards").glob("*.json"))
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    named = {
        name
        for text in sections
        if _is_alert(text)
        for name in re.findall(r"(?<!\*)\*(\w[^*]+)\*(?!\*)", text)
    }
    assert len(named) > 10
    missing = {name for name in named if f'"title": "{name}' not in boards}
    assert not missing


def _section(alert: str) -> str:
    found = re.search(rf"^## {alert}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/operations.md has no section {alert}"
    return found[1]


def _is_alert(section: str) -> bool:
    return section.partition("\n")[0] in {rule["alert"] for rule in ALERTS}
