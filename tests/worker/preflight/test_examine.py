"""The plan of a checkpoint: kept, found again, made anew when anything that it depends on is another."""

import fcntl
import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from moebius_kernels.kv_pages import KvFormat
from moebius_kernels.plan import Choice, Plan, Verdict
from moebius_kernels.registry import Device, Registry, TokenRange, gather, references
from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.engine.runner import RunnerOptions
from moebius_worker.preflight import examine
from moebius_worker.preflight.examine import Wanted, find_plan
from moebius_worker.preflight.gates import MEMORY
from moebius_worker.preflight.run import Examination
from tests.tiny import write_checkpoint
from tests.worker.preflight import bad

OPTIONS = RunnerOptions(device="cpu", max_running=2, max_step_tokens=4, threads=1)
WANTED = Wanted(OPTIONS)
CANDIDATES = bad.registry("good")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> list:
    root = tmp_path_factory.mktemp("checkpoints")
    paths = [write_checkpoint(root / str(layers), num_hidden_layers=layers) for layers in (1, 2)]
    return [open_checkpoint(str(path)) for path in paths]


@pytest.fixture
def made(monkeypatch) -> list[Examination]:
    """The examinations that were asked for; each gives a plan of its own."""
    asked: list[Examination] = []

    def preflight(examination: Examination, identity: dict[str, str], progress, meanwhile, waiting) -> Plan:
        asked.append(examination)
        return Plan((), identity)

    monkeypatch.setattr(examine, "preflight", preflight)
    return asked


def test_a_plan_is_made_once(checkpoints, made, tmp_path: Path) -> None:
    first = find_plan(checkpoints[0], WANTED, CANDIDATES, root=tmp_path)
    assert find_plan(checkpoints[0], WANTED, CANDIDATES, root=tmp_path) == first
    assert len(made) == 1
    find_plan(checkpoints[0], WANTED, CANDIDATES, root=tmp_path, fresh=True)
    assert len(made) == 2
    assert {"device", "torch", "kernels", "model", "settings"} <= set(first.identity)
    assert (made[0].steps[0].kind, max(one.tokens for one in made[0].steps)) == ("decode", 4)


def test_another_model_setting_or_kernel_is_another_plan(
    checkpoints, made, tmp_path: Path, monkeypatch
) -> None:
    def find(checkpoint=checkpoints[0], wanted=WANTED) -> None:
        find_plan(checkpoint, wanted, CANDIDATES, root=tmp_path)

    find()
    find(checkpoint=checkpoints[1])
    find(wanted=replace(WANTED, options=replace(OPTIONS, max_running=3)))
    find(wanted=replace(WANTED, options=replace(OPTIONS, kv_format=KvFormat.INT8)))
    # Of no concern to kernels.
    find(wanted=replace(WANTED, options=replace(OPTIONS, threads=2, kv_cache_bytes=1 << 20, dtype="float32")))
    own = examine.package_digest()
    monkeypatch.setattr(examine, "package_digest", lambda *root: "other forms" if root else own)
    find()
    monkeypatch.setattr(examine, "package_digest", lambda *root: "other kernels")
    find()
    monkeypatch.setattr("torch.__version__", "9.9.9")
    find()
    monkeypatch.setattr(examine, "tilings_digest", lambda root, device: f"measured anew in {root}")
    find()
    assert len(made) == 8
    find()
    assert len(made) == 8


def test_random_weights_need_no_checkpoint_and_each_form_of_them_has_a_plan(
    checkpoints, made, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((checkpoints[0].path / "config.json").read_text())
    bare = open_checkpoint(str(tmp_path))
    for form in ("bf16", "nvfp4", "bf16"):
        wanted = replace(WANTED, options=replace(OPTIONS, dummy_weights=form))
        find_plan(bare, wanted, CANDIDATES, root=tmp_path / "cache")
    assert [one.options["dummy_weights"] for one in made] == ["bf16", "nvfp4"]


def test_what_is_excluded_needs_no_new_plan_but_is_not_tried_if_there_is_none(
    checkpoints, made, tmp_path: Path
) -> None:
    excluding = replace(WANTED, excluded=("gated:slow",))
    candidates = bad.registry("good", "slow")
    for _ in range(2):
        find_plan(checkpoints[0], excluding, candidates, root=tmp_path)
    assert [one.excluded for one in made] == [("gated:slow",)]
    find_plan(checkpoints[0], WANTED, candidates, root=tmp_path)
    find_plan(checkpoints[0], replace(WANTED, excluded=("gated:good",)), candidates, root=tmp_path)
    assert [one.excluded for one in made] == [("gated:slow",), ()]


@pytest.mark.parametrize("contents", ["", "{}", json.dumps({"choices": 1, "identity": {}})])
def test_a_plan_that_cannot_be_read_is_made_anew(checkpoints, made, tmp_path: Path, contents: str) -> None:
    find_plan(checkpoints[0], WANTED, CANDIDATES, root=tmp_path)
    [path] = (tmp_path / "plans").iterdir()
    (path / "plan.json").write_text(contents)
    find_plan(checkpoints[0], WANTED, CANDIDATES, root=tmp_path)
    find_plan(checkpoints[0], WANTED, CANDIDATES, root=tmp_path)
    assert len(made) == 2


def test_without_a_place_to_keep_it_the_plan_is_made_each_time(checkpoints, made, tmp_path: Path) -> None:
    root = tmp_path / "a file"
    root.write_text("")
    for _ in range(2):
        find_plan(checkpoints[0], WANTED, CANDIDATES, root=root)
    assert len(made) == 2


def test_a_plan_of_backends_for_which_memory_ran_out_is_used_and_not_kept(
    checkpoints, monkeypatch, tmp_path: Path
) -> None:
    """That somebody else had it is no fault of theirs."""
    verdicts = Verdict("good"), Verdict("runs_out", MEMORY, bad.RAN_OUT)
    one = TokenRange(1, 1)
    plans = [Plan((Choice("gated", "a key", one, "good", False, some),)) for some in (verdicts, verdicts[:1])]
    monkeypatch.setattr(examine, "preflight", lambda *_: left.pop(0))
    left = [*plans, Plan()]
    found = [find_plan(checkpoints[0], WANTED, CANDIDATES, root=tmp_path) for _ in range(3)]
    assert found == [*plans, plans[1]]


def test_what_fails_in_making_a_plan_is_not_tried_again(checkpoints, monkeypatch, tmp_path: Path) -> None:
    """As weights that cannot be read, which has nothing to do with where plans are kept."""
    asked: list[Examination] = []

    def preflight(examination: Examination, *_) -> Plan:
        asked.append(examination)
        raise OSError("the weights cannot be read")

    monkeypatch.setattr(examine, "preflight", preflight)
    with pytest.raises(OSError, match="cannot be read"):
        find_plan(checkpoints[0], WANTED, CANDIDATES, root=tmp_path)
    assert len(asked) == 1


def test_without_a_place_to_keep_kernels_there_is_a_plan(
    checkpoints, made, tmp_path: Path, monkeypatch
) -> None:
    root = tmp_path / "a file"
    root.write_text("")
    monkeypatch.setattr(examine, "device_here", lambda kind: Device("cuda", "a GPU", (9, 0)))
    for name in ("TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "MAX_JOBS"):
        monkeypatch.setenv(name, "as it was")
    for_gpus = bad.registry("wrong_architecture")
    assert "kernels" in find_plan(checkpoints[0], WANTED, for_gpus, root=root).identity
    assert len(made) == 1
    assert os.environ["TRITON_CACHE_DIR"] == "as it was"


def test_workers_that_start_together_make_one_plan(checkpoints, monkeypatch, tmp_path: Path) -> None:
    asked: list[Examination] = []

    def preflight(examination: Examination, identity: dict[str, str], progress, meanwhile, waiting) -> Plan:
        asked.append(examination)
        time.sleep(0.3)
        return Plan((), identity)

    monkeypatch.setattr(examine, "preflight", preflight)
    with ThreadPoolExecutor(3) as pool:
        futures = [
            pool.submit(find_plan, checkpoints[0], WANTED, CANDIDATES, root=tmp_path) for _ in range(3)
        ]
        plans = [future.result() for future in futures]
    assert len(asked) == 1
    assert plans[0] == plans[1] == plans[2]


def test_who_waits_for_another_s_plan_reads_weights_and_says_so_again_and_again(
    checkpoints, monkeypatch, tmp_path: Path
) -> None:
    """Each word keeps a worker that loads from being killed as stalled."""
    held, enough = threading.Event(), threading.Event()
    doing: list[str] = []

    def preflight(*_: object) -> Plan:
        held.set()
        assert enough.wait(60)
        return Plan((), {"made": "by the first"})

    def progress(phase: str, done: int, total: int) -> None:
        doing.append(phase)
        if len(doing) == 6:
            enough.set()

    monkeypatch.setattr(examine, "preflight", preflight)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(find_plan, checkpoints[0], WANTED, CANDIDATES, root=tmp_path)
        try:
            assert held.wait(60)
            found = find_plan(
                checkpoints[0],
                WANTED,
                CANDIDATES,
                progress,
                meanwhile=lambda: doing.append("reading weights"),
                root=tmp_path,
            )
        finally:
            enough.set()
    assert found == first.result()
    assert doing == ["reading weights", "waiting for another worker's kernel plan"] * 3


def test_a_model_that_cannot_be_read_while_another_makes_the_plan_is_no_fault_of_the_cache(
    checkpoints, made, tmp_path: Path
) -> None:
    def fails() -> None:
        raise FileNotFoundError("the weights are gone")

    find_plan(checkpoints[0], WANTED, CANDIDATES, root=tmp_path)
    [kept] = (tmp_path / "plans").iterdir()
    shutil.rmtree(kept)
    with (tmp_path / "plans" / f".{kept.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(FileNotFoundError, match="the weights are gone"):
            find_plan(checkpoints[0], WANTED, CANDIDATES, meanwhile=fails, root=tmp_path)
    assert len(made) == 1


def test_references_alone_have_nothing_to_prove(checkpoints, made, tmp_path: Path) -> None:
    for registry, wanted in (
        (Registry(references(), {}), WANTED),
        (gather(()), WANTED),
        (CANDIDATES, replace(WANTED, excluded=("gated:good",))),
        # For GPUs only.
        (bad.registry("wrong_architecture"), WANTED),
    ):
        assert find_plan(checkpoints[0], wanted, registry, root=tmp_path).choices == ()
    assert not made
    assert list(tmp_path.iterdir()) == []
