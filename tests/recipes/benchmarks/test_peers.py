import sys

import pytest
from peers import Group, Peer

ECHO = """
import json, os, sys
print("something else that a framework prints")
print(json.dumps({"options": json.loads(sys.argv[1]), "threads": os.environ["OMP_NUM_THREADS"]}), flush=True)
for line in sys.stdin:
    if json.loads(line) == "fail":
        raise SystemExit(f"rank {os.environ.get('RANK')} can't")
    print(json.dumps({"asked": json.loads(line), "rank": os.environ.get("RANK"), "size": os.environ.get("WORLD_SIZE")}))
    sys.stdout.flush()
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "echo.py"
    path.write_text(ECHO)
    return str(path)


def test_a_peer_answers(program, tmp_path):
    with Peer(sys.executable, program, {"threads": 3, "more": [1]}, tmp_path / "log") as peer:
        assert peer.read() == {"options": {"threads": 3, "more": [1]}, "threads": "3"}
        assert peer.ask({"steps": 2})["asked"] == {"steps": 2}
        with pytest.raises(RuntimeError, match=r"exit status 1:\nrank None can't"):
            peer.ask("fail")


def test_a_group_is_a_job_of_several_processes(program, tmp_path):
    with Group(sys.executable, program, {"threads": 1}, tmp_path / "log", num_processes=2) as group:
        assert len(group.read()) == 2
        answers = group.ask("hello")
        assert [(answer["asked"], answer["rank"], answer["size"]) for answer in answers] == [
            ("hello", "0", "2"),
            ("hello", "1", "2"),
        ]
        with pytest.raises(RuntimeError, match=r"rank [01] can't"):
            group.ask("fail")


def test_a_prefix_starts_the_program(program, tmp_path):
    prefix = [sys.executable, "-c", "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"]
    with Peer(sys.executable, program, {"threads": 1}, tmp_path / "log", {"RANK": "7"}, prefix) as peer:
        peer.read()
        assert peer.ask("hello")["rank"] == "7"
