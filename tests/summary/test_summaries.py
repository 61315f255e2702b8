import builtins
import io
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import torchstrategy as ts
from torchstrategy.summary.writer import _writer


@pytest.fixture
def writer(tmp_path):
    writer = ts.summary.create_file_writer(tmp_path)
    yield writer
    writer.close()


@pytest.fixture(autouse=True)
def _no_default_writer():
    yield
    _writer.get().value = None
    ts.summary.experimental.set_step(None)


def events(folder):
    return EventAccumulator(str(folder), size_guidance={"images": 0, "histograms": 0, "scalars": 0}).Reload()


def scalars(folder, name="loss"):
    return [(event.step, event.value) for event in events(folder).Scalars(name)]


def files(folder):
    return [path for path in Path(folder).rglob("*") if path.is_file()]


def test_scalars(writer, tmp_path):
    with writer.as_default():
        assert ts.summary.scalar("loss", 0.5, step=1) is True
        assert ts.summary.scalar("loss", torch.tensor(0.25, requires_grad=True), step=torch.tensor(2))
        assert ts.summary.scalar("loss", np.float32(2.0), step=np.int64(3))
        assert ts.summary.scalar("loss", torch.tensor(7), step=4)
        assert ts.summary.scalar("loss", torch.tensor(1.5, dtype=torch.bfloat16), step=5)
    assert scalars(tmp_path) == [(1, 0.5), (2, 0.25), (3, 2.0), (4, 7.0), (5, 1.5)]
    assert len(files(tmp_path)) == 1


def test_histogram(writer, tmp_path):
    values = torch.tensor([[0.0, 1.0], [1.0, 3.0]])
    with writer.as_default(step=4):
        assert ts.summary.histogram("weights", values, buckets=3)
        assert ts.summary.histogram("default", torch.arange(100))
        assert ts.summary.histogram("empty", torch.zeros(0, 3))
        assert ts.summary.histogram("equal", [2.0, 2.0])
    written = events(tmp_path).Histograms("weights")[0]
    assert written.step == 4
    value = written.histogram_value
    assert (value.num, value.min, value.max, value.sum, value.sum_squares) == (4, 0.0, 3.0, 5.0, 11.0)
    assert sum(value.bucket) == 4
    assert [count for count in value.bucket if count] == [1, 2, 1]
    assert len([count for count in events(tmp_path).Histograms("default")[0].histogram_value.bucket if count]) == 30
    assert events(tmp_path).Histograms("empty")[0].histogram_value.num == 0
    assert events(tmp_path).Histograms("equal")[0].histogram_value.num == 2


def decode(image):
    return np.asarray(Image.open(io.BytesIO(image.encoded_image_string)))


def test_images(writer, tmp_path):
    colours = torch.zeros(5, 2, 3, 3)
    colours[0, 0, 0] = torch.tensor([1.0, 0.5, 2.0])
    with writer.as_default(step=1):
        assert ts.summary.image("colours", colours)
        assert ts.summary.image("one", np.full((1, 2, 3, 1), 9, dtype=np.uint8))
        assert ts.summary.image("two", colours, max_outputs=2)
        for channels in (2, 4):
            assert ts.summary.image(f"channels{channels}", torch.rand(1, 2, 3, channels))
        assert ts.summary.image("half", torch.rand(1, 2, 3, 1, dtype=torch.float16))
        assert not ts.summary.image("none", torch.zeros(0, 2, 3, 1))
        assert not ts.summary.image("none", colours, max_outputs=0)
    found = events(tmp_path)
    assert {tag for tag in found.Tags()["images"] if "colours" in tag} == {"colours/0", "colours/1", "colours/2"}
    assert {tag for tag in found.Tags()["images"] if "two" in tag} == {"two/0", "two/1"}
    pixels = decode(found.Images("colours/0")[0])
    assert pixels.shape == (2, 3, 3)
    assert pixels[0, 0].tolist() == [255, 127, 255]  # tf clips and takes floor(255.5 x)
    assert pixels[1:].sum() == 0
    assert (decode(found.Images("one")[0]) == 9).all()
    assert "none" not in found.Tags()["images"]


def test_text_and_description(writer, tmp_path):
    with writer.as_default(step=1):
        assert ts.summary.text("notes", "some *text*", description="what")
        assert ts.summary.scalar("loss", 1.0, description="mean **loss**")
    found = events(tmp_path)
    assert found.Tensors("notes")[0].tensor_proto.string_val == [b"some *text*"]
    assert found.SummaryMetadata("notes").summary_description == "what"
    assert found.SummaryMetadata("loss").summary_description == "mean **loss**"


def test_without_a_writer_nothing_happens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ts.summary.scalar("loss", object()) is False
    assert ts.summary.should_record_summaries() is False
    ts.summary.flush()
    assert files(tmp_path) == []


def test_nothing_written_leaves_no_file(tmp_path):
    writer = ts.summary.create_file_writer(tmp_path / "logs")
    with writer.as_default(step=1), ts.summary.record_if(False):
        assert not ts.summary.scalar("loss", 1.0)
    writer.flush()
    writer.close()
    assert not (tmp_path / "logs").exists()


def test_init_makes_the_file(tmp_path):
    writer = ts.summary.create_file_writer(tmp_path, filename_suffix=".mine", max_queue=1, flush_millis=1000)
    writer.init()
    (file,) = files(tmp_path)
    assert file.name.endswith(".mine")
    writer.close()


def test_steps(writer, tmp_path):
    experimental = ts.summary.experimental
    with writer.as_default():
        with pytest.raises(ValueError, match=r"ts.summary.scalar\('loss'\) has no step"):
            ts.summary.scalar("loss", 1.0)
        experimental.set_step(3)
        ts.summary.scalar("loss", 1.0)
        with writer.as_default(step=7):
            assert experimental.get_step() == 7
            ts.summary.scalar("loss", 2.0)
            experimental.set_step(8)
            ts.summary.scalar("loss", 3.0)
        assert experimental.get_step() == 3
        ts.summary.scalar("loss", 4.0, step=0)
        step = torch.tensor(10)
        experimental.set_step(step)
        step += 1
        ts.summary.scalar("loss", 5.0)
        with pytest.raises(TypeError, match="step must be an integer"):
            ts.summary.scalar("loss", 1.0, step="three")
    assert scalars(tmp_path) == [(3, 1.0), (7, 2.0), (8, 3.0), (0, 4.0), (11, 5.0)]


def test_default_writers(tmp_path):
    first, second = (ts.summary.create_file_writer(tmp_path / name) for name in ("first", "second"))
    first.set_as_default(step=1)
    ts.summary.scalar("loss", 1.0)
    with second.as_default() as entered:
        assert entered is second
        ts.summary.scalar("loss", 2.0)
        with ts.summary.create_noop_writer().as_default():
            assert not ts.summary.scalar("loss", 3.0)
    ts.summary.scalar("loss", 4.0)
    ts.summary.flush()
    assert scalars(tmp_path / "first") == [(1, 1.0), (1, 4.0)]
    assert scalars(tmp_path / "second") == [(1, 2.0)]
    first.close()
    second.close()


def test_a_failure_inside_restores_the_default(writer):
    with pytest.raises(KeyError), writer.as_default(step=1):
        raise KeyError
    assert not ts.summary.should_record_summaries()


def test_record_if(writer, tmp_path):
    with writer.as_default(), ts.summary.record_if(lambda: ts.summary.experimental.get_step() % 2 == 0):
        for step in range(4):
            ts.summary.experimental.set_step(step)
            assert ts.summary.scalar("loss", step) is (step % 2 == 0)
            with ts.summary.record_if(True):
                assert ts.summary.should_record_summaries()
        with ts.summary.record_if(torch.tensor(False)):
            assert not ts.summary.should_record_summaries()
    assert [step for step, _ in scalars(tmp_path)] == [0, 2]


def test_closed_writer(writer, tmp_path):
    with writer.as_default(step=1):
        ts.summary.scalar("loss", 1.0)
        writer.close()
        with pytest.raises(RuntimeError, match="is closed"):
            ts.summary.scalar("loss", 2.0)
    for use in (writer.as_default, writer.set_as_default, writer.init):
        with pytest.raises(RuntimeError, match="is closed"):
            use()
    writer.close()
    assert scalars(tmp_path) == [(1, 1.0)]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: ts.summary.scalar("x", torch.ones(3)), r"needs one number\. Received shape \(3,\)"),
        (lambda: ts.summary.scalar("x", "text"), "needs numbers"),
        (lambda: ts.summary.scalar("x", 1j), "needs numbers"),
        (lambda: ts.summary.histogram("x", "text"), "needs numbers"),
        (lambda: ts.summary.histogram("x", [1.0, math.nan]), "Received 1 of 2"),
        (lambda: ts.summary.histogram("x", [1.0], buckets=0), "buckets must be at least 1"),
        (lambda: ts.summary.image("x", torch.rand(2, 28, 28)), r"\[k, h, w, c\].*Received shape \(2, 28, 28\)"),
        (lambda: ts.summary.image("x", torch.rand(1, 3, 28, 28)), r"images.permute\(0, 2, 3, 1\)"),
        (lambda: ts.summary.image("x", torch.ones(1, 2, 2, 3, dtype=torch.int64)), "uint8. Received dtype torch.int64"),
        (lambda: ts.summary.image("x", torch.rand(1, 2, 2, 3), max_outputs=-1), "max_outputs must not be negative"),
        (lambda: ts.summary.text("x", 3), "needs a string"),
    ],
)
def test_bad_data(call, match, writer, tmp_path):
    with writer.as_default(step=1), pytest.raises(ValueError, match=match):
        call()
    assert files(tmp_path) == []


def test_per_replica_values_are_to_be_reduced_first(writer, tmp_path):
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    value = strategy.run(lambda: torch.tensor(float(ts.get_replica_context().replica_id_in_sync_group)))
    with writer.as_default(step=1):
        with pytest.raises(ValueError, match=r"received a PerReplica.*strategy.reduce"):
            ts.summary.scalar("loss", value)
        assert ts.summary.scalar("loss", strategy.reduce("MEAN", value, axis=None))
    assert scalars(tmp_path) == [(1, 0.5)]


class Unreadable:
    """Fails when anything looks at it."""

    def __array__(self, *args, **kwargs):
        raise AssertionError

    __float__ = __array__


def log_everywhere(devices, folder):
    """Log inside ``run``, in a merge function, in the scope and outside; say who wrote."""
    strategy = ts.MirroredStrategy(devices) if devices != [] else ts.get_strategy()
    writer = ts.summary.create_file_writer(folder)
    written = []

    def merge(strategy, value):
        written.append(ts.summary.scalar("merged", 1.0))
        return value

    def step(value):
        context = ts.get_replica_context()
        i = context.replica_id_in_sync_group
        written.append(ts.summary.scalar("inside", 10.0 + i if i == 0 else Unreadable()))
        context.merge_call(merge, args=(value,))
        ts.summary.experimental.set_step(ts.summary.experimental.get_step())
        return ts.summary.scalar("late", float(i))

    with writer.as_default(step=5):
        late = strategy.experimental_local_results(strategy.run(step, args=(1,)))
        with strategy.scope():
            written.append(ts.summary.scalar("scope", 2.0))
        written.append(ts.summary.scalar("outside", 3.0))
    writer.close()
    return written, list(late)


def everything(folder):
    found = events(folder)
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


ONCE = {"inside": [(5, 10.0)], "merged": [(5, 1.0)], "late": [(5, 0.0)], "scope": [(5, 2.0)], "outside": [(5, 3.0)]}


@pytest.mark.parametrize("num_replicas", [0, 1, 2, 3])
def test_replicas_in_one_process_write_once(num_replicas, tmp_path):
    written, late = log_everywhere([f"cpu:{i}" for i in range(num_replicas)], tmp_path)
    assert everything(tmp_path) == ONCE
    assert late == [True] + [False] * max(0, num_replicas - 1)
    assert sum(written) == 4


def log_on_rank(folder, devices):
    return log_everywhere(devices, folder / str(int(ts.MirroredStrategy().is_chief)))


@pytest.mark.parametrize("devices", [None, ["cpu:0", "cpu:1"]])
def test_only_the_chief_process_writes(devices, process_pool, tmp_path):
    chief, other = process_pool(2).run(log_on_rank, tmp_path, devices)
    assert everything(tmp_path / "1") == ONCE
    assert sum(chief[0]) == 4
    assert chief[1][0] is True
    assert not any(other[0] + other[1])
    assert not (tmp_path / "0").exists()


def test_a_step_in_run_logs_what_the_loop_set(writer, tmp_path):
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])

    @ts.function
    def step():
        context = ts.get_replica_context()
        total = context.all_reduce("sum", torch.tensor(1.0))
        ts.summary.scalar("loss", total)

    with writer.as_default():
        for i in range(3):
            ts.summary.experimental.set_step(i)
            strategy.run(step)
    assert scalars(tmp_path) == [(0, 2.0), (1, 2.0), (2, 2.0)]


class Logging(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        ts.summary.scalar("activation", y.detach().mean())
        return y


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_inside_a_compiled_module(writer, tmp_path):
    model, x = Logging(3, 2), torch.ones(4, 3)
    apply = ts.function(lambda: model(x), jit_compile=True, backend="eager")
    with writer.as_default():
        for i in range(4):
            ts.summary.experimental.set_step(i)
            torch.testing.assert_close(apply(), torch.nn.functional.linear(x, model.weight, model.bias))
    written = scalars(tmp_path, "activation")
    assert [step for step, _ in written] == [0, 1, 2, 3]
    assert len({value for _, value in written}) == 1


@pytest.mark.slow
def test_files_are_complete_when_the_program_ends(tmp_path):
    program = f"""
import torchstrategy as ts
ts.summary.create_file_writer({str(tmp_path)!r}).set_as_default()
ts.summary.scalar("loss", 1.5, step=1)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
    assert scalars(tmp_path) == [(1, 1.5)]


def test_tensorboard_is_missing(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("tensorboard") or (name == "torch.utils" and "tensorboard" in (args[2] or ())):
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        ts.summary.create_file_writer(tmp_path)


def test_logdir_must_be_a_path():
    with pytest.raises(TypeError, match="logdir must be a path"):
        ts.summary.create_file_writer(3)
