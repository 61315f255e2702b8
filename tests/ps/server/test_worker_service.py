"""A worker's service, with a connection and a workshop that the test holds."""

import itertools
import queue
import sys
import threading
import weakref

import pytest
import torch

from torchstrategy.errors import OutOfRangeError, UnavailableError
from torchstrategy.ps.current_worker import current_worker_index
from torchstrategy.ps.results import decode_error, decode_result, decode_side
from torchstrategy.ps.server.worker_service import WorkerService
from torchstrategy.ps.transport.limits import Limits
from torchstrategy.ps.transport.messages import Message, RefusedError

WAIT_S = 20


class FakeSession:
    numbers = itertools.count()

    def __init__(self):
        self.id = f"session {next(self.numbers)}"
        self.replies = queue.Queue()

    def reply(self, number, message):
        self.replies.put((number, message))

    def next(self, number=None):
        found, message = self.replies.get(timeout=WAIT_S)
        assert number is None or found == number
        return message


class FakeBench:
    """Runs functions of the test's own, by name."""

    def __init__(self, functions):
        self.functions = functions
        self.configured = None
        self.is_closed = False

    def configure(self, fields):
        if "error" in fields:
            raise UnavailableError(fields["error"])
        self.configured = fields

    def define(self, message, resources):
        self.functions[message.fields["key"]] = message.fields["function"]

    def load(self, blob, resources):
        return eval(blob)

    def run(self, key, arguments, resources):
        return self.functions[key](resources), {"side": 1} if key == "side" else None

    def forget(self, keys):
        for key in keys:
            self.functions.pop(key, None)

    def failed_ps(self, error):
        return 3 if isinstance(error, UnavailableError) else None

    def close(self):
        self.is_closed = True


class Worker:
    """A service and what a coordinator does with it."""

    def __init__(self, **functions):
        self.functions = functions
        self.benches = []
        self.service = WorkerService("/job:worker/task:2", 2, self.make_bench, Limits(max_control_bytes=10_000))
        self.session = FakeSession()
        self.numbers = itertools.count(1)

    def make_bench(self):
        self.benches.append(FakeBench(self.functions))
        return self.benches[-1]

    def send(self, kind, /, *, session=None, blobs=(), **fields):
        number = next(self.numbers)
        reply = self.service.control(session or self.session, Message(kind, fields, (), blobs, number))
        return number if reply is None else reply

    def ask(self, kind, /, **fields):
        return self.session.next(self.send(kind, **fields))

    def run(self, function, closure=0, session=None):
        return self.send("run", function=function, closure=closure, blobs=(b"",), session=session)

    def result_of(self, function):
        reply = self.session.next(self.run(function))
        return decode_result(reply) if reply.kind == "done" else decode_error(reply.fields)


@pytest.fixture
def make_worker():
    workers = []

    def make(**functions):
        worker = Worker(**functions)
        workers.append(worker)
        assert worker.ask("configure", incarnation=1).kind == "ok"
        return worker

    yield make
    for worker in workers:
        worker.service.close()


class Gate:
    """A function that is inside until the test opens it."""

    def __init__(self):
        self.is_inside = threading.Event()
        self.is_open = threading.Event()

    def __call__(self, resources):
        self.is_inside.set()
        assert self.is_open.wait(WAIT_S)
        return "through"


def test_closures_run_in_order_and_know_their_worker(make_worker):
    order = []
    worker = make_worker(a=lambda _: order.append(1), b=lambda _: (order.append(2), current_worker_index()))
    numbers = [worker.run("a", 10), worker.run("b", 11), worker.run("side", 12)]
    first, second = worker.session.next(numbers[0]), worker.session.next(numbers[1])
    assert (first.kind, first.fields) == ("done", {"closure": 10})
    assert decode_result(second) == (None, 2)
    assert order == [1, 2]
    assert current_worker_index() is None


def test_what_is_beside_the_result_comes_with_it(make_worker):
    worker = make_worker(side=lambda _: torch.ones(2))
    reply = worker.session.next(worker.run("side"))
    assert decode_result(reply).tolist() == [1, 1]
    assert decode_side(reply) == {"side": 1}


def test_errors_of_closures(make_worker):
    def end(_):
        return next(iter(()))

    def lose(_):
        raise UnavailableError("/job:ps/task:3")

    worker = make_worker(
        end=end, lose=lose, quit=lambda _: sys.exit(3), set=lambda _: {1}, large=lambda _: "x" * 10_000
    )
    assert isinstance(worker.result_of("end"), OutOfRangeError)
    assert str(worker.result_of("end")) == "End of sequence"
    assert str(worker.result_of("quit")) == "SystemExit: 3"
    assert isinstance(worker.result_of("set"), TypeError)
    assert "at most 10,000 are allowed" in str(worker.result_of("large"))
    reply = worker.session.next(worker.run("lose", 5))
    assert (reply.kind, reply.fields["ps"], reply.fields["closure"]) == ("failed", 3, 5)
    assert worker.session.next(worker.run("end")).fields["ps"] is None


def test_what_was_sent_before_a_failure_was_known_does_not_begin(make_worker):
    ran = []
    started, go_on = threading.Event(), threading.Event()

    def fail(_):
        started.set()
        go_on.wait(10)
        raise ValueError("oh")

    worker = make_worker(fail=fail, note=lambda _: ran.append(1))

    def run(function, closure, failures):
        return worker.send("run", function=function, closure=closure, failures=failures, blobs=(b"",))

    failing = run("fail", 1, 0)
    assert started.wait(10)
    waiting = [run("note", 2, 0), run("note", 3, 0)]
    go_on.set()
    assert worker.session.next(failing).kind == "failed"
    assert [worker.session.next(number).kind for number in waiting] == ["cancelled", "cancelled"]
    assert worker.session.next(run("note", 4, 0)).fields == {"closure": 4}  # it came later, and was sent before
    assert ran == []
    assert worker.session.next(run("note", 5, 1)).kind == "done"
    assert ran == [1]


def test_the_traceback_begins_with_the_program(make_worker):
    def fail(_):
        raise ValueError("oh")

    worker = make_worker(fail=fail, set=lambda _: {1})
    trace = worker.session.next(worker.run("fail")).fields["traceback"]
    assert "in fail" in trace
    assert "assignment.py" not in trace
    # One that is the library's own is shown as it is.
    assert "assignment.py" in worker.session.next(worker.run("set")).fields["traceback"]


def test_what_has_not_begun_is_cancelled(make_worker):
    gate = Gate()
    worker = make_worker(gate=gate, later=lambda _: "later")
    numbers = {closure: worker.run(name, closure) for closure, name in enumerate(["gate", "later", "later"])}
    assert gate.is_inside.wait(WAIT_S)
    assert worker.send("cancel", closures=[0, 2, 77]).fields == {"cancelled": [2]}
    cancelled = worker.session.next(numbers[2])
    assert (cancelled.kind, cancelled.fields) == ("cancelled", {"closure": 2})
    gate.is_open.set()
    assert decode_result(worker.session.next(numbers[0])) == "through"
    assert decode_result(worker.session.next(numbers[1])) == "later"


def test_some_requests_are_answered_while_a_closure_runs(make_worker):
    gate = Gate()
    worker = make_worker(gate=gate)
    number = worker.run("gate", 4)
    assert gate.is_inside.wait(WAIT_S)
    assert worker.send("ping").kind == "ok"
    text = worker.send("stacks").fields["text"]
    assert "worker 2 is doing closure 4 for" in text
    assert "Thread closures of worker 2" in text
    assert "in __call__" in text
    gate.is_open.set()
    worker.session.next(number)


def test_definitions_and_resources(make_worker):
    worker = make_worker()
    assert worker.ask("define", key="f", function=lambda resources: next(resources[1])).kind == "ok"
    assert worker.ask("resource", id=0, kind="dataset", of=None, blobs=(b"lambda: [7, 8]",)).kind == "ok"
    assert worker.ask("resource", id=1, kind="iterator", of=0).kind == "ok"
    assert [worker.result_of("f"), worker.result_of("f")] == [7, 8]
    assert isinstance(worker.result_of("f"), OutOfRangeError)
    assert worker.ask("resource", id=1, kind="iterator", of=0).kind == "ok"  # begins anew
    assert worker.result_of("f") == 7
    assert worker.ask("forget", keys=[], resources=[1]).kind == "ok"
    assert isinstance(worker.result_of("f"), KeyError)


def test_errors_of_other_requests(make_worker):
    worker = make_worker()
    for kind, fields, message in [
        ("resource", {"id": 0, "kind": "dataset", "of": None, "blobs": (b"lambda a, b: 0",)}, "This one needs: a, b"),
        ("resource", {"id": 0, "kind": "dataset", "of": None, "blobs": (b"1 / 0",)}, "division"),
        ("resource", {"id": 1, "kind": "iterator", "of": 0}, "no dataset 0"),
        ("resource", {"id": 1, "kind": "table", "of": 0}, "'table'"),
        ("define", {}, "function"),
    ]:
        reply = worker.ask(kind, **fields)
        assert reply.kind == "error"
        assert message in str(decode_error(reply.fields))
    assert worker.ask("forget").kind == "ok"


def test_an_unknown_request_is_refused_at_once(make_worker):
    worker = make_worker()
    with pytest.raises(ValueError, match="knows no request 'dance'"):
        worker.send("dance")
    with pytest.raises(ValueError, match="no tensors"):
        worker.service.tensor(worker.session, Message("pull", {}))


def test_nothing_is_done_before_the_configuration(make_worker):
    worker = make_worker(f=lambda _: 1)
    reply = worker.ask("configure", error="ps 0 is gone")
    assert isinstance(decode_error(reply.fields), UnavailableError)
    assert "was not configured" in str(decode_error(worker.ask("define", key="f", function=None).fields))
    assert "was not configured" in str(worker.result_of("f"))
    assert worker.ask("configure").kind == "ok"
    assert worker.result_of("f") == 1


def test_a_new_configuration_begins_anew(make_worker):
    worker = make_worker(f=lambda resources: len(resources))
    worker.ask("resource", id=0, kind="dataset", of=None, blobs=(b"[1]",))
    assert worker.result_of("f") == 1
    worker.ask("configure")
    assert worker.result_of("f") == 0
    assert [bench.is_closed for bench in worker.benches] == [True, False]


@pytest.mark.parametrize("end", ["lost", "superseded"])
def test_what_a_lost_connection_asked_for_is_dropped(make_worker, end):
    gate, ran = Gate(), []
    worker = make_worker(gate=gate, later=lambda _: ran.append(1), now=lambda _: "now")
    worker.run("gate")
    worker.run("later")
    assert gate.is_inside.wait(WAIT_S)
    old = worker.session
    if end == "lost":
        worker.service.lost(old)
    else:
        worker.service.superseded(2)
        worker.service.lost(old)  # the listener says so later
    assert worker.benches[0].is_closed
    worker.session = FakeSession()
    assert worker.ask("configure").kind == "ok"
    assert worker.result_of("now") == "now"  # while the old function still runs
    thread = next(thread for thread in threading.enumerate() if thread.name == "closures of worker 2")
    gate.is_open.set()
    thread.join(WAIT_S)
    assert ran == []
    assert old.replies.empty()


def test_cancelling_over_one_connection_leaves_others_alone(make_worker):
    gate = Gate()
    worker = make_worker(gate=gate, f=lambda _: 1)
    other = FakeSession()
    worker.run("gate", 0)
    number = worker.run("f", 1)
    assert worker.send("cancel", closures=[1], session=other).fields == {"cancelled": []}
    gate.is_open.set()
    worker.session.next()
    assert worker.session.next(number).kind == "done"


def test_datasets_are_freed_with_the_connection(make_worker):
    class Data(list):
        pass

    data = Data([1])
    worker = make_worker(f=lambda resources: resources.update({5: data}))
    worker.result_of("f")
    reference, data = weakref.ref(data), None
    worker.functions.clear()
    assert reference() is not None
    worker.service.lost(worker.session)
    for thread in threading.enumerate():
        if thread.name == "closures of worker 2":
            thread.join(WAIT_S)
    assert reference() is None


def test_only_coordinators_are_admitted():
    service = WorkerService("/job:worker/task:2", 2, lambda: FakeBench({}), Limits())
    assert service.admit({"role": "coordinator"}) == {"job": "worker", "task": ["worker", 2]}
    with pytest.raises(RefusedError, match="works for coordinators only"):
        service.admit({"role": "worker"})


def test_closing_does_not_wait_for_ever(make_worker, caplog):
    gate = Gate()
    worker = make_worker(gate=gate)
    worker.run("gate")
    assert gate.is_inside.wait(WAIT_S)
    worker.service.close()
    assert "stops while a function runs" in caplog.text
    gate.is_open.set()


def test_closing_knows_of_functions_whose_connection_is_just_being_lost(make_worker):
    gate, closing = Gate(), Gate()
    worker = make_worker(gate=gate)
    worker.run("gate")
    assert gate.is_inside.wait(WAIT_S)
    worker.benches[0].close = lambda: closing(None)  # takes its time
    loser = threading.Thread(target=worker.service.lost, args=(worker.session,))
    loser.start()
    assert closing.is_inside.wait(WAIT_S)
    assert worker.service.close() is False  # the interpreter must not end while the function runs
    closing.is_open.set()
    gate.is_open.set()
    loser.join(WAIT_S)
