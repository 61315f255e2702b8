"""What TensorBoard shows of a training: logs, weights, the model's graph, and profiles of some batches."""

from __future__ import annotations

import contextlib
import copy
import operator
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn, profiler
from typing_extensions import override

from torchstrategy.base.labels import make_profiler
from torchstrategy.base.log import info_once, warning_once
from torchstrategy.base.values import RemoteTensor
from torchstrategy.errors import InvalidArgumentError, UnimplementedError
from torchstrategy.fit.callbacks.callback import Callback, Logs, is_chief
from torchstrategy.fit.callbacks.rates import learning_rates
from torchstrategy.replicas.mirrored import bodies
from torchstrategy.replicas.record import unrecorded
from torchstrategy.summary import SummaryWriter, create_file_writer, histogram, scalar
from torchstrategy.summary.writer import import_tensorboard

__all__ = ["TensorBoard", "model_graph", "parse_profile_batch"]


class BatchProfiler:
    """Profiles the batches from one to another, once.

    Args:
        folder: where the trace goes.
        batches: the first and the last batch, counted from 1; ``None`` for no profile.
    """

    def __init__(self, folder: str, batches: tuple[int, int] | None) -> None:
        self._folder = folder
        self._batches = batches
        self._running: Any = None
        self._done = False

    def before(self, batch: int) -> None:
        """Begin if it is time to, before a batch."""
        if self._batches is None or self._done or batch < self._batches[0]:
            return
        if self._running is None:
            handler = profiler.tensorboard_trace_handler(self._folder)
            self._running = make_profiler(on_trace_ready=handler, record_shapes=True)
            self._running.start()

    def after(self, batch: int) -> None:
        """End if it is time to, after a batch."""
        if self._batches is not None and batch >= self._batches[1]:
            self.stop()

    def stop(self) -> None:
        """Write the trace, if one is being made."""
        if self._running is not None:
            self._running.stop()
            self._running, self._done = None, True


def parse_profile_batch(value: Any) -> tuple[int, int] | None:
    """Return the first and last batch of Keras' argument ``profile_batch``; ``None`` for no profile.

    Raises:
        ValueError: it is no batch and no range of them.
    """
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, Sequence) else [value]
    try:
        batches = [operator.index(int(part) if isinstance(part, str) else part) for part in parts]
    except (TypeError, ValueError):
        batches = []
    if batches == [0]:
        return None
    if len(batches) in (1, 2) and 1 <= batches[0] <= batches[-1]:
        return batches[0], batches[-1]
    raise ValueError(
        "TensorBoard(profile_batch=...) must be a batch, counted from 1, or the first and last one of several, such as "
        f"(10, 20); 0 means no profile. Received: {value!r}"
    )


def model_graph(model: nn.Module) -> tuple[Any, Any] | None:
    """Return a ``GraphDef`` and ``RunMetadata``, or ``None`` if the model's operations depend on its data.

    Args:
        model: the model. ``forward`` is called with stand-ins for tensors, on a copy that shares the model's tensors,
            because it may keep what it gets.
    """
    from tensorboard.compat.proto.config_pb2 import RunMetadata  # noqa: PLC0415 - optional
    from tensorboard.compat.proto.graph_pb2 import GraphDef  # noqa: PLC0415
    from tensorboard.compat.proto.node_def_pb2 import NodeDef  # noqa: PLC0415

    graph = _trace(_wrapped(bodies(model)[0]))
    if graph is None:
        return None
    names: dict[fx.Node, str] = {}
    nodes = []
    for node in graph.nodes:
        names[node] = _free_name(_name(node), names)
        inputs = [names[source] for source in node.all_input_nodes]
        nodes.append(NodeDef(name=names[node], op=_operation(node), input=inputs))
    return GraphDef(node=nodes), RunMetadata()


def _wrapped(model: nn.Module) -> nn.Module:
    """Return the module that a ``ts.Model`` was made of, or the model itself."""
    is_ours = type(model).forward.__module__.startswith(f"{__name__.split('.')[0]}.")
    module = model._modules.get("module")
    return module if is_ours and module is not None else model


def _trace(model: nn.Module) -> fx.Graph | None:
    tensors: dict[int, Any] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    try:
        with unrecorded():
            return fx.Tracer().trace(copy.deepcopy(model, tensors))
    except Exception:  # noqa: BLE001 - user code that gets stand-ins for tensors may raise anything
        return None


def _name(node: fx.Node) -> str:
    """Return a name whose parts, between slashes, are the modules that a node stands in."""
    paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    inside = paths[-1].replace(".", "/") if paths else ""
    if node.op == "call_module":
        return inside or str(node.target).replace(".", "/")
    return f"{inside}/{node.name}" if inside else node.name


def _free_name(name: str, names: dict[fx.Node, str]) -> str:
    taken = set(names.values())
    free, count = name, 1
    while free in taken:
        count += 1
        free = f"{name}_{count}"
    return free


def _operation(node: fx.Node) -> str:
    if node.op == "call_module":
        module = node.graph.owning_module
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        return stack[-1][1].__name__ if stack else type(module).__name__
    if node.op in ("placeholder", "output", "get_attr"):
        return {"placeholder": "Input", "output": "Output", "get_attr": "Parameter"}[node.op]
    return str(getattr(node.target, "__name__", node.target))


class TensorBoard(Callback):
    """Writes losses, metrics and more for TensorBoard, on the chief, into the runs ``train`` and ``validation``.

    Values of epochs are named ``epoch_loss`` and so on, those of batches ``batch_loss``; the learning rate is
    ``epoch_learning_rate``. Evaluations, also those inside ``fit``, are written as ``evaluation_loss_vs_iterations``.
    With an ``update_freq`` other than ``"epoch"``, what the steps of training write by ``ts.summary`` goes to ``train``
    as well.

    Args:
        log_dir: the folder, see it by ``tensorboard --logdir``.
        histogram_freq: epochs between histograms of the weights; 0 means none.
        write_graph: write the graph of the model's operations, if ``torch.fx`` can find it: not if ``forward`` has
            branches that depend on values.
        write_images: not supported; must be false.
        write_steps_per_second: write how many batches are done in a second.
        update_freq: ``"epoch"``, ``"batch"``, or a number of batches after which losses and metrics are written.
            Reading them waits for the device, and makes the processes of a job exchange their metrics.
        profile_batch: a batch, or the first and last one of several, counted from 1 over the whole training, whose
            profile ``torch.profiler`` writes into ``train``, to be seen by TensorBoard's plugin ``torch-tb-profiler``
            or Chrome's ``chrome://tracing``; 0 means none.
        embeddings_freq: not supported; must be 0.
        embeddings_metadata: not supported; must be ``None``.

    Raises:
        ImportError: TensorBoard is not installed.
        UnimplementedError: an argument is not supported.
        ValueError: ``update_freq`` or ``profile_batch`` is none of these.

    Example:
        >>> import os, tempfile
        >>> model = ts.Model(torch.nn.Linear(1, 1))
        >>> model.compile("sgd", "mse")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     board = ts.callbacks.TensorBoard(folder)
        ...     _ = model.fit(torch.ones(4, 1), torch.ones(4, 1), callbacks=[board], verbose=0)
        ...     os.listdir(folder)
        ['train']
    """

    def __init__(  # noqa: PLR0913 - Keras' signature
        self,
        log_dir: str | os.PathLike[str] = "logs",
        histogram_freq: int = 0,
        write_graph: bool = True,  # noqa: FBT001, FBT002 - Keras' signature
        write_images: bool = False,  # noqa: FBT001, FBT002
        write_steps_per_second: bool = False,  # noqa: FBT001, FBT002
        update_freq: int | str = "epoch",
        profile_batch: int | str | tuple[int, int] = 0,
        embeddings_freq: int = 0,
        embeddings_metadata: Any = None,
    ) -> None:
        super().__init__()
        import_tensorboard()
        _check_supported(
            write_images=write_images, embeddings_freq=embeddings_freq, embeddings_metadata=embeddings_metadata
        )
        self.log_dir = os.fspath(log_dir)
        self.histogram_freq = histogram_freq
        self.write_graph = write_graph
        self.write_steps_per_second = write_steps_per_second
        self.update_freq = _parse_update_freq(update_freq)
        self.log_interval = self.update_freq
        self._profiler = BatchProfiler(os.path.join(self.log_dir, "train"), parse_profile_batch(profile_batch))
        self._writers: dict[str, SummaryWriter] = {}
        self._in_batch = contextlib.ExitStack()
        self._step = self._epoch_step = self._first_batch = 0
        self._epoch_begin_s = self._batch_begin_s = 0.0

    @override
    def on_train_begin(self, logs: Logs = None) -> None:
        self._step = 0
        if self.write_graph and is_chief(self.model):
            self._write_graph()

    @override
    def on_train_end(self, logs: Logs = None) -> None:
        self._release()

    @override
    def _release(self) -> None:
        self._in_batch.close()
        self._profiler.stop()
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    @override
    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch_step, self._epoch_begin_s = self._step, time.monotonic()

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if not is_chief(self.model):
            return
        values = dict(logs or {})
        of_validation = {name[4:]: value for name, value in values.items() if name.startswith("val_")}
        of_training = {name: value for name, value in values.items() if not name.startswith("val_")}
        if self.model.optimizer is not None:
            of_training["learning_rate"] = learning_rates(self.model.optimizer)[0]
        if self.write_steps_per_second:
            seconds = time.monotonic() - self._epoch_begin_s
            of_training["steps_per_second"] = (self._step - self._epoch_step) / max(seconds, 1e-9)
        self._write("train", of_training, "epoch_{}", epoch)
        self._write("validation", of_validation, "epoch_{}", epoch)
        if self.histogram_freq and epoch % self.histogram_freq == 0:
            self._write_histograms(epoch)

    @override
    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        self._first_batch = batch
        self._batch_begin_s = time.monotonic()
        if not is_chief(self.model):
            return
        if self.update_freq is not None and (self._step + 1) % self.update_freq == 0:
            self._in_batch.enter_context(self._writer("train").as_default(self._step + 1))
        self._profiler.before(self._step + 1)

    @override
    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        num_batches = batch - self._first_batch + 1  # several with steps_per_execution
        before, self._step = self._step, self._step + num_batches
        if not is_chief(self.model):
            return
        self._in_batch.close()
        self._profiler.after(self._step)
        if self.update_freq is None or self._step // self.update_freq == before // self.update_freq:
            return
        values = dict({} if logs is None else logs)
        if self.write_steps_per_second:
            values["steps_per_second"] = num_batches / max(time.monotonic() - self._batch_begin_s, 1e-9)
        self._write("train", values, "batch_{}", self._step)

    @override
    def on_test_end(self, logs: Logs = None) -> None:
        if logs and is_chief(self.model):
            self._write("validation", logs, "evaluation_{}_vs_iterations", self.model.iterations)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
        if self.update_freq is not None and is_chief(self.model):
            self._writer("train").add_start(self._step + 1)  # those that were written after it come again

    def _writer(self, run: str) -> SummaryWriter:
        if run not in self._writers:
            self._writers[run] = create_file_writer(os.path.join(self.log_dir, run))
        return self._writers[run]

    def _write(self, run: str, values: Mapping[str, Any], form: str, step: int) -> None:
        if not values:
            return
        with self._writer(run).as_default(step):
            for name, value in values.items():
                with contextlib.suppress(InvalidArgumentError):  # no number: a metric that has several
                    scalar(form.format(name), value)

    def _write_histograms(self, epoch: int) -> None:
        with self._writer("train").as_default(epoch):
            for name, parameter in self.model.named_parameters():
                values = parameter.snapshot() if isinstance(parameter, RemoteTensor) else parameter.detach()
                finite = values[torch.isfinite(values)]
                if finite.numel() < values.numel():
                    warning_once(f"The histogram of {name} leaves out values that are not finite.")
                histogram(f"{name}/histogram", finite)

    def _write_graph(self) -> None:
        graph = model_graph(self.model)
        if graph is None:
            info_once("TensorBoard gets no graph of the model: torch.fx can't follow its forward.")
        else:
            self._writer("train").add_graph(graph)


def _parse_update_freq(update_freq: int | str) -> int | None:
    """Return the number of batches, or ``None`` for epochs."""
    if update_freq == "epoch":
        return None
    number = 1 if update_freq == "batch" else update_freq
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(
            "TensorBoard(update_freq=...) must be 'epoch', 'batch' or a positive number of batches. Received: "
            f"{update_freq!r}"
        )
    return number


def _check_supported(**arguments: Any) -> None:
    given = [name for name, value in arguments.items() if value]
    if given:
        raise UnimplementedError(
            f"TensorBoard({given[0]}=...) is not supported. Write what you need in a callback of your own, by "
            "ts.summary.image and its kin."
        )
