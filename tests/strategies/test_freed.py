"""What a program drops is freed: its memory, and what was changed in torch for its strategy."""

import pytest

from tests.programs import cpu_devices
from tests.strategies.freed_programs import PROGRAMS, left_by


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("program", PROGRAMS)
def test_in_one_process(program, count, tmp_path):
    assert left_by(program, cpu_devices(count), str(tmp_path)) == []


@pytest.mark.parametrize("program", sorted(PROGRAMS.keys() - {"a mismatch"}))
def test_in_two_processes(program, process_pool, tmp_path):
    assert process_pool(2).run(left_by, program, None, str(tmp_path)) == [[], []]
