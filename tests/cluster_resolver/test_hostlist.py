import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.profiles import quick
from torchstrategy.cluster_resolver.slurm import expand_hostlist, expand_tasks_per_node

PREFIX = st.text("abcn.-", min_size=1, max_size=4)
RANGE = st.tuples(st.integers(0, 30), st.integers(0, 5), st.integers(0, 2))


@quick(100)
@given(st.lists(st.tuples(PREFIX, st.lists(RANGE, max_size=3)), max_size=4))
def test_every_host_of_every_range_in_order(parts):
    texts, hosts = [], []
    for prefix, ranges in parts:
        shorts = []
        for first, more, zeros in ranges:
            low = f"{'0' * zeros}{first}"
            shorts.append(f"{low}-{first + more}" if more else low)
            hosts += [prefix + str(number).zfill(len(low)) for number in range(first, first + more + 1)]
        texts.append(f"{prefix}[{','.join(shorts)}]" if shorts else prefix)
        hosts += [] if shorts else [prefix]
    assert expand_hostlist(",".join(texts)) == hosts


@quick(100)
@given(st.text("n1-,[]", max_size=8))
def test_any_text_is_hosts_or_a_named_error(text):
    try:
        hosts = expand_hostlist(text)
    except ValueError as error:
        assert repr(text) in str(error)  # noqa: PT017 - most texts are good in neither way
    else:
        assert not any(re.search(r"[\[\],]", host) for host in hosts)


@pytest.mark.parametrize(
    "text", ["n[1-2]x", "n[1-2][3-4]", "n[1", "n1]", "n[]", "n[1,]", "n[1-]", "n[[1]]", ",", "a,,b"]
)
def test_bad_hostlists(text):
    with pytest.raises(ValueError, match="Host names must look like"):
        expand_hostlist(text)


@quick(100)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=5))
def test_counts_are_repeated(runs):
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert expand_tasks_per_node(text) == [count for count, times in runs for _ in range(times)]


@pytest.mark.parametrize("text", ["", "4,", "4, 2", "x", "4(2)", "4(x)", "4(x2", "-1"])
def test_bad_counts(text):
    with pytest.raises(ValueError, match="Numbers of tasks must look like"):
        expand_tasks_per_node(text)
