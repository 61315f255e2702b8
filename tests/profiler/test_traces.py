import gzip
import json

import pytest

import torchstrategy as ts
from torchstrategy.profiler import traces

MAIN, OTHER = 1, 2


def event(name, start, end, thread=MAIN, category="user_annotation"):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "pid": 7, "tid": thread}


def trace_of(*events, steps=((0, 1000),)):
    spans = [event(f"ProfilerStep#{number}", *span) for number, span in enumerate(steps)]
    meta = [{"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}}]
    meta += [{"ph": "M", "name": "thread_name", "pid": 7, "tid": t, "args": {"name": "t"}} for t in (MAIN, OTHER)]
    return {"traceEvents": [*meta, *events, *spans]}


def parts(*events, **options):
    """Return the parts that took time, in microseconds a step."""
    found = traces.summarise(trace_of(*events, **options)).parts
    return {name: round(1000 * value) for name, value in found.items() if round(1000 * value)}


def test_the_innermost_label_counts():
    events = [
        event("ts::input", 0, 100),
        event("ts::replica 0", 100, 900),
        event("autograd::engine::evaluate_function: MulBackward0", 300, 400, category="cpu_op"),
        event("Optimizer.step#Adam.step", 400, 880),
        event("ts::merge the sum of gradients", 410, 800),
        event("ts::wait the sum of gradients", 420, 600),
        event("ts::wait for rank 1", 430, 590),
        event("ts::move the sum of gradients 8 bytes by gloo", 600, 700),
        event("ts::wait for process 1 of this host", 620, 650),
    ]
    assert parts(*events) == {
        "forward pass, loss": 220,
        "backward pass": 100,
        "optimizer": 90,
        "moving data": 70,
        "waiting for other processes": 210,
        "combining, checking": 110,
        "waiting for input": 100,
        "the rest of the program": 100,
    }
    figures = traces.summarise(trace_of(*events))
    assert figures.step == 1.0
    assert figures.waits == {"rank 1": pytest.approx(0.16)}
    assert figures.transfers == {"the sum of gradients 8 bytes by gloo": (pytest.approx(0.07), 1)}
    assert figures.replicas == {"replica 0": pytest.approx(0.41)}


def test_threads_at_the_same_time():
    """What is moved beside a replica's computation costs nothing; a replica that waits for another one does not."""
    events = [
        event("ts::replica 0", 0, 600),
        event("ts::meet all_reduce(SUM)", 200, 600),
        event("ts::replica 1", 0, 500, OTHER),
        event("ts::move 8 bytes", 450, 550, OTHER),
    ]
    found = traces.summarise(trace_of(*events))
    assert parts(*events) == {
        "forward pass, loss": 450,
        "moving data": 100,
        "combining, checking": 50,
        "the rest of the program": 400,
    }
    assert found.hidden == 0
    assert found.replicas == {"replica 0": pytest.approx(0.2), "replica 1": pytest.approx(0.45)}
    hidden = [event("ts::replica 0", 0, 600), event("ts::move 8 bytes", 450, 700, OTHER)]
    assert parts(*hidden) == {"forward pass, loss": 600, "moving data": 100, "the rest of the program": 300}
    assert traces.summarise(trace_of(*hidden)).hidden == pytest.approx(0.15)


def test_a_mean_over_steps():
    """What is outside of the steps does not count."""
    events = [event("ts::input", start, start + 100) for start in (-500, 0, 400, 900)]
    events += [event("aten::add", start, start + 10, category="cpu_op") for start in (-10, 200, 300, 950)]
    events.append(event("aten::empty", 202, 204, category="cpu_op"))
    events.append(event("aten::cos", 20, 30, category="gpu_user_annotation"))
    found = traces.summarise(trace_of(*events, steps=[(0, 400), (400, 800)]))
    assert (found.num_steps, found.step) == (2, 0.4)
    assert found.parts["waiting for input"] == pytest.approx(0.1)
    assert found.operations == (1, pytest.approx(0.01))


def test_a_trace_without_steps_is_one():
    assert parts(event("ts::input", 100, 200), event("aten::add", 200, 300), steps=()) == {
        "waiting for input": 100,
        "the rest of the program": 100,
    }
    with pytest.raises(ValueError, match="empty"):
        traces.summarise(trace_of(steps=()))


def test_a_step_that_was_broken_off_does_not_count():
    trace = trace_of(steps=((0, 100), (100, 110)))
    traces.drop_last_step(trace)
    found = traces.summarise(trace)
    assert (found.num_steps, found.step) == (1, 0.1)


def test_rows_get_names():
    trace = trace_of(event("ts::replica 3", 0, 10, OTHER))
    traces.name_rows(trace, "rank 1")
    names = {(entry["name"], entry.get("tid")): entry["args"]["name"] for entry in trace["traceEvents"][:3]}
    assert names == {("process_name", None): "rank 1", ("thread_name", MAIN): "t", ("thread_name", OTHER): "replica 3"}
    assert traces.summarise(trace).name == "rank 1"


def test_the_table_has_a_column_for_each_process():
    fast = trace_of(
        event("ts::replica 0", 0, 900), event("ts::wait x 9 bytes", 300, 800), event("ts::wait for rank 1", 310, 800)
    )
    slow = trace_of(event("ts::replica 1", 0, 900), event("ts::move x 8 bytes by gloo", 800, 890))
    for rank, trace in enumerate((fast, slow)):
        traces.name_rows(trace, f"rank {rank}")
    lines = traces.make_table([traces.summarise(fast), traces.summarise(slow)]).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["rank", "0", "rank", "1"],
        ["forward", "pass,", "loss", "0.40", "40%", "0.81", "81%"],
        ["moving", "data", "0.00", "0%", "0.09", "9%"],
        ["waiting", "for", "other", "processes", "0.50", "50%", "0.00", "0%"],
        ["the", "rest", "of", "the", "program", "0.10", "10%", "0.10", "10%"],
        ["a", "step", "1.00", "100%", "1.00", "100%"],
        *[["rank", "0:", "waited", "longest", "for", "rank", "1,", "0.49", "ms", "a", "step"]],
        *[["rank", "1:", "x", "8", "bytes", "by", "gloo:", "0.09", "ms,", "1", "a", "step"]],
    ]


def test_processes_that_recorded_different_numbers_of_steps():
    spans = [((0, 100),), ((0, 100), (100, 200), (200, 300)), ((0, 100), (100, 200))]
    figures = [traces.summarise(trace_of(steps=steps)) for steps in spans]
    assert "(means of 1 to 3 steps)" in traces.make_table(figures)
    assert "(means of 2 steps)" in traces.make_table(figures[2:])


def test_a_table_of_files(tmp_path):
    """A trace of torch's profiler has no name of its own: it gets that of its file, however long."""
    own, other = tmp_path / "rank_0.json", tmp_path / "a_host_with_a_name.1234.pt.trace.json.gz"
    trace = trace_of()
    other.write_bytes(gzip.compress(json.dumps(trace).encode()))
    traces.name_rows(trace, "rank 0")
    own.write_text(json.dumps(trace))
    assert ts.profiler.table([own, other]).splitlines()[1].split() == ["rank", "0", "a_host_with_a_name.1234"]
    assert ts.profiler.table(str(own)) == ts.profiler.table([own]) == ts.profiler.table(iter([own]))
    with pytest.raises(ValueError, match="at least one trace"):
        ts.profiler.table([])


@pytest.mark.parametrize("is_compressed", [False, True])
def test_traces_are_read_from_files(tmp_path, is_compressed):
    data = json.dumps(trace_of()).encode()
    path = tmp_path / ("trace.json.gz" if is_compressed else "trace.json")
    path.write_bytes(gzip.compress(data) if is_compressed else data)
    assert traces.read_trace(path) == trace_of()
