from moebius_common.backoff import backoff


def test_pauses_double_up_to_the_longest_however_many_failures_there_are() -> None:
    assert [backoff(0.5, n, 3.0) for n in (0, 1, 2, 3, 5000)] == [0.5, 1.0, 2.0, 3.0, 3.0]
