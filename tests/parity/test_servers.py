"""tf.distribute's measured cases of ``Server``.

Each case gives what TF gave, or what a known difference makes of it: these are listed here, with the title of their
entry in ``docs/differences.md`` and with what has to come instead.
"""

import inspect
import json
import re
from pathlib import Path

import pytest

import torchstrategy as ts
from tests.clusters import new_cluster

HERE = Path(__file__).parent
DIFFERENCES_PATH = HERE.parents[1] / "docs" / "differences.md"
CASES = {case["id"]: case for case in json.loads((HERE / "server_cases.json").read_text())}
SECTION = "Differences of parameter servers"
OWN_PROTOCOL = "A server serves one coordinator after another"

EXCEPTIONS = {
    "ValueError": ValueError,
    "TypeError": TypeError,
    "InternalError": ts.errors.InternalError,
    "NotFoundError": ts.errors.NotFoundError,
}

# A case's id -> title of the entry in docs/differences.md, and what comes instead of TF's
KNOWN_DIFFERENCES = {
    "server.infer": (OWN_PROTOCOL, ["worker", 0, "zmq"]),
    "server.local": (OWN_PROTOCOL, ["localhost", 0, "zmq", "zmq://localhost"]),
    "server.protocol": (OWN_PROTOCOL, "zmq"),
}


def signature():
    parameters = inspect.signature(ts.Server.__init__).parameters.values()
    return f"({', '.join(str(parameter.replace(annotation=parameter.empty)) for parameter in parameters)})"


def served(read, *args, **kwargs):
    server = ts.Server(*args, **kwargs)
    try:
        return read(server.server_def)
    finally:
        server.stop()


def local():
    server = ts.Server.create_local_server()
    server.stop()
    definition = server.server_def
    return [
        definition.job_name,
        definition.task_index,
        definition.protocol,
        server.target.rpartition(":")[0],
    ]


ONE, TWO, BOTH = (new_cluster(jobs) for jobs in (["worker"], ["worker", "worker"], ["worker", "ps"]))
SPARSE = {"worker": {3: ONE["worker"][0]}}


def task(definition):
    return definition.task_index


def redefined():
    definition = ts.train.ServerDef(ts.train.ClusterSpec(TWO), "worker", 1)
    return [served(task, definition), served(task, definition, task_index=0)]


RESULTS = {
    "server.signature": signature,
    "server.nojob": lambda: served(task, BOTH),
    "server.notask": lambda: served(task, TWO),
    "server.infer": lambda: served(lambda d: [d.job_name, d.task_index, d.protocol], ONE),
    "server.local": local,
    "server.nojob.index": lambda: served(task, BOTH, task_index=0),
    "server.sparse": lambda: served(lambda d: [d.job_name, d.task_index], SPARSE),
    "server.unknown_job": lambda: served(task, ONE, "ps"),
    "server.unknown_job.index": lambda: served(task, ONE, "ps", 0),
    "server.unknown_task": lambda: served(task, ONE, "worker", 3),
    "server.negative_task": lambda: served(task, ONE, "worker", -1),
    "server.task_type": lambda: served(task, ONE, task_index="0"),
    "server.cluster_type": lambda: served(task, None),
    "server.protocol": lambda: served(lambda d: d.protocol, ONE, protocol="zmq"),
    "server.unknown_protocol": lambda: served(task, ONE, protocol="carrier pigeon"),
    "server.config_type": lambda: served(task, ONE, config=3),
    "server.def": redefined,
}


@pytest.mark.parametrize("name", CASES)
def test_measured_cases(name):
    expected = CASES[name]["expected"]
    if name in KNOWN_DIFFERENCES:
        assert expected != {"output": KNOWN_DIFFERENCES[name][1]}
        expected = {"output": KNOWN_DIFFERENCES[name][1]}
    if "exception" in expected:
        with pytest.raises(EXCEPTIONS[expected["exception"]]):
            RESULTS[name]()
    else:
        assert RESULTS[name]() == expected["output"]


def test_programs_for_tf_name_its_protocol():
    assert served(lambda d: d.protocol, ONE, protocol="grpc") == "zmq"


def test_all_cases_are_there():
    assert CASES.keys() == RESULTS.keys()
    assert KNOWN_DIFFERENCES.keys() <= CASES.keys()


def test_every_difference_is_explained():
    section = DIFFERENCES_PATH.read_text().partition(f"\n## {SECTION}\n")[2].partition("\n## ")[0]
    titles = set(re.findall(r"^### (.*)$", section, re.MULTILINE))
    assert {title for title, _ in KNOWN_DIFFERENCES.values()} <= titles
