import os
import time

import pytest

import torchstrategy as ts


def environment():
    return {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}, os.getpid()


def fail_on(rank):
    if int(os.environ["RANK"]) == rank:
        raise KeyError("lost")
    return rank


def sleep():
    time.sleep(60)


def unpicklable():
    return lambda: None


def leave():
    os._exit(5)


def test_processes_are_ranks_and_are_reused(process_pool):
    first = process_pool(2).run(environment)
    assert [row[0]["RANK"] for row in first] == ["0", "1"]
    assert {row[0]["WORLD_SIZE"] for row in first} == {"2"}
    assert [row[1] for row in process_pool(2).run(environment)] == [row[1] for row in first]


def test_errors_carry_rank_and_traceback():
    with ts.testing.ProcessPool(2) as pool:
        before = pool.run(environment)
        with pytest.raises(ts.testing.RemoteError, match="rank 1") as caught:
            pool.run(fail_on, 1)
        assert isinstance(caught.value.errors[1], KeyError)
        assert "fail_on" in caught.value.tracebacks[1]
        assert list(caught.value.errors) == [1]
        assert pool.run(environment)[0][1] != before[0][1]


@pytest.mark.parametrize(
    ("program", "message"), [(sleep, "no answer"), (unpicklable, "can't be pickled"), (leave, "exit code 5")]
)
def test_what_can_go_wrong_ends_the_call(program, message):
    with ts.testing.ProcessPool(1) as pool, pytest.raises(ts.testing.RemoteError, match=message):
        pool.run(program, timeout_s=3)


def test_size_is_checked():
    with pytest.raises(ValueError, match="at least 1"):
        ts.testing.ProcessPool(0)


class NeedsTwoError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def fail_oddly():
    raise NeedsTwoError("not", "picklable")


def fail_on_one_and_sleep_on_the_other():
    fail_on(1)
    time.sleep(100)


def test_an_error_that_cannot_travel_arrives_as_text():
    with ts.testing.ProcessPool(1) as pool, pytest.raises(ts.testing.RemoteError, match="not picklable") as caught:
        pool.run(fail_oddly)
    assert "fail_oddly" in caught.value.tracebacks[0]


def test_nobody_waits_long_for_a_rank_after_the_error_of_another():
    start = time.monotonic()
    with ts.testing.ProcessPool(2) as pool, pytest.raises(ts.testing.RemoteError) as caught:
        pool.run(fail_on_one_and_sleep_on_the_other)
    assert time.monotonic() - start < 50
    assert isinstance(caught.value.errors[0], TimeoutError)
    assert isinstance(caught.value.errors[1], KeyError)
