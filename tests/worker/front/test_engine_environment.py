"""What an engine's process is told by its environment."""

from moebius_worker.front.engine_process import environment


def test_threads_do_not_burn_cpus_that_others_want() -> None:
    assert environment({"PATH": "/bin"}) == {"PATH": "/bin", "GOMP_SPINCOUNT": "1000"}


def test_who_says_how_threads_wait_is_heard() -> None:
    for said in ({"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "ACTIVE"}):
        assert environment(said) == said
