"""A notice on any process leads to one step at which all save and end."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types

import pytest
import torch

import torchstrategy as ts
from torchstrategy.checkpoint import preemption
from torchstrategy.checkpoint.preemption import AgreedStop
from torchstrategy.experimental import PreemptionCheckpointHandler, PreemptionWatcher, TerminationConfig
from torchstrategy.testing.faults import file_fault

NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def _handlers_are_given_back():
    before = [signal.getsignal(number) for number in NOTICES]
    yield
    assert [signal.getsignal(number) for number in NOTICES] == before
    assert signal.set_wakeup_fd(-1) == -1


class TestWatcher:
    @pytest.mark.parametrize("number", NOTICES)
    def test_signals(self, number):
        with PreemptionWatcher() as watcher:
            assert (watcher.preemption_message, watcher.elapsed) == (None, 0.0)
            os.kill(os.getpid(), number)
            assert watcher.preemption_message == number.name
            assert watcher.elapsed >= 0

    def test_a_second_signal_does_what_it_did_before(self):
        caught = []
        before = signal.signal(signal.SIGUSR1, lambda *_: caught.append(1))
        try:
            with PreemptionWatcher() as watcher:
                os.kill(os.getpid(), signal.SIGUSR1)
                assert caught == []
                os.kill(os.getpid(), signal.SIGUSR1)
                assert caught == [1]
                watcher.close(resend=True)
                assert caught == [1, 1]
        finally:
            signal.signal(signal.SIGUSR1, before)

    def test_a_function_that_is_asked(self, caplog):
        answers = iter([False, OSError("no server"), True])
        asked = threading.Event()

        def ask():
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            if answer:
                asked.set()
            return answer

        with PreemptionWatcher(TerminationConfig(termination_watcher_fn=ask, signals=())) as watcher:
            assert asked.wait(60)
            until(lambda: watcher.preemption_message == "termination_watcher_fn")
        assert "termination_watcher_fn failed: OSError: no server" in caplog.text

    def test_in_another_thread(self):
        raised = []

        def make():
            try:
                PreemptionWatcher()
            except RuntimeError as error:
                raised.append(str(error))
            PreemptionWatcher(TerminationConfig(signals=())).close()

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        assert "in the main thread only" in raised[0]

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (TerminationConfig(signals=(signal.SIGTERM, signal.SIGKILL)), "can't handle 9"),
            (TerminationConfig(grace_period=-1), "grace_period=...\\) must be a number of seconds"),
            (TerminationConfig(deadline=float("nan")), "deadline=...\\) must be"),
            (TerminationConfig(deadline=5, grace_period=10), "before the end of the grace_period"),
        ],
    )
    def test_bad_configurations(self, config, message):
        with pytest.raises(ValueError, match=message):
            PreemptionWatcher(config)

    @pytest.mark.parametrize("deadline", [None, 1000])
    def test_a_forked_process_does_nothing(self, deadline):
        """A signal to it is none to its parent; as a worker of a loader it ignores the notices of SLURM."""
        with PreemptionWatcher(TerminationConfig(deadline=deadline)) as watcher:
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                os.kill(os.getpid(), signal.SIGUSR1)
                os.kill(os.getpid(), signal.SIGUSR2)
                os.write(writing, b"on")
                signal.pause()
                os._exit(0)
            assert os.read(reading, 2) == b"on"
            os.kill(child, signal.SIGTERM)
            assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
            time.sleep(0.05)  # for a wrong word to arrive
            assert watcher.preemption_message is None
            for descriptor in (reading, writing):
                os.close(descriptor)

    def test_watchers_that_are_closed_in_the_order_in_which_they_were_made(self):
        caught = []
        before = signal.signal(signal.SIGUSR1, lambda *_: caught.append(1))
        try:
            first, second = PreemptionWatcher(), PreemptionWatcher()
            first.close()
            second.close()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert caught == [1]
        finally:
            for number in NOTICES:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGUSR1, before)

    def test_a_handler_of_the_program_stays(self):
        def own(number, frame):
            pass

        with PreemptionWatcher(TerminationConfig(signals=(signal.SIGUSR1, signal.SIGUSR1))):
            before = signal.signal(signal.SIGUSR1, own)
        assert signal.getsignal(signal.SIGUSR1) is own
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        assert before != own

    def test_the_deadline_of_a_closed_one_is_over(self):
        watcher = PreemptionWatcher(TerminationConfig(signals=(), deadline=1000))
        watcher.note("test")
        watcher.close()
        watcher._give_up()  # as a timer that was just about to
        watcher.note("again")


def until(condition):
    while not condition():
        time.sleep(0.01)


@pytest.mark.parametrize(("save_s", "reserved"), [(5.0, 2 * 5.0), (None, 30.0)])
def test_the_grace_is_used(monkeypatch, save_s, reserved):
    """But for what the last save took, twice; if there was none, for half of it."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    watcher = PreemptionWatcher(TerminationConfig(signals=(), grace_period=60))
    others = [None]
    checkpoint = ts.train.Checkpoint(step=torch.tensor(0))
    stop = AgreedStop(lambda own, what: [own, [*others, 0.0, 0.0, save_s]], watcher, checkpoint)
    saved_at = None
    for step in range(100):
        now[0] += 2.0  # a step
        if step == 10:
            watcher.note("SIGTERM")
        if stop.is_due(at_once=False):
            saved_at = now[0] - watcher._noticed_at
            break
    watcher.close()
    assert saved_at is not None
    assert 60 - 2 * 2 - reserved <= saved_at <= 60 - 2 - reserved


def test_a_quick_first_step_does_not_keep_processes_from_asking(monkeypatch):
    now, asked_at = [0.0], []
    monkeypatch.setattr(preemption, "time", types.SimpleNamespace(monotonic=lambda: now[0]))

    def agree(own, what):
        asked_at.append(now[0])
        return [own, own]

    stop = AgreedStop(agree, types.SimpleNamespace(preemption_message=None, elapsed=0.0), None)
    for seconds in (0.001, *[0.5] * 20):
        now[0] += seconds
        assert not stop.is_due(at_once=False)
    assert max(b - a for a, b in itertools.pairwise(asked_at)) <= 2.0
    for _ in range(1000):  # and quick ones do not ask all the time
        now[0] += 0.001
        stop.is_due(at_once=False)
    assert len(asked_at) < 50


@pytest.fixture
def known_saves(monkeypatch):
    """How long the last save took, as far as it is known when it is asked whether to end; nobody ends."""
    known = []
    monkeypatch.setattr(AgreedStop, "is_due", lambda stop, **_: known.append(stop._checkpoint._background.write_s))
    return known


def test_how_long_a_save_takes_is_known(tmp_path, known_saves):
    """To the handler, whoever saves; to the callback; to the hook of an Estimator."""
    manager = ts.train.CheckpointManager(ts.train.Checkpoint(step=torch.tensor(0)), tmp_path / "handler", 2)
    with PreemptionCheckpointHandler(None, manager) as handler:
        handler.run(lambda: None)
        manager.save(options=ts.train.CheckpointOptions(enable_async=True))
        manager.sync()
        handler.run(lambda: None)
    model = ts.Model(torch.nn.Linear(1, 1))
    model.compile("sgd", "mse")
    backup = ts.callbacks.BackupAndRestore(tmp_path / "fit", 1, save_before_preemption=True)
    model.fit(torch.ones(4, 1), torch.ones(4, 1), batch_size=2, callbacks=[backup], verbose=0)

    def model_fn(features, labels, mode):
        module = torch.nn.Linear(1, 1)
        loss, optimizer = torch.nn.functional.mse_loss, torch.optim.SGD(module.parameters(), lr=0.1)
        return ts.estimator.EstimatorSpec(mode, module=module, loss=loss, train_op=optimizer)

    data = [(torch.ones(2, 1), torch.ones(2, 1))]
    hooks = [ts.estimator.PreemptionHook()]
    ts.estimator.Estimator(model_fn, tmp_path / "estimator").train(lambda: data, hooks=hooks)
    is_known = [seconds is not None for seconds in known_saves]
    assert is_known[:4] == [False, False, True, True]  # before the first call, after each of two, at the end
    assert is_known[4:6] == [False, True]  # before the first batch, after it
    assert is_known[-1]


def job(folder, *, last=12, notice=None, rank=0, config=None, in_scope=False, number=signal.SIGTERM):
    """Train; at a step a rank gets a notice. Return what was trained, or how it ended."""
    strategy = ts.MirroredStrategy() if "RANK" in os.environ else ts.MirroredStrategy(["cpu:0", "cpu:1"])
    own = 0 if strategy.workers is None else strategy.workers.rank
    with strategy.scope():
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.arange(48.0, dtype=torch.float64).view(24, 2) / 48
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    dataset = strategy.experimental_distribute_dataset(loader)
    seen = []

    def step(batch):
        optimizer.zero_grad()
        loss = (model(batch[0]) - batch[1]).square().sum() / 4
        loss.backward()
        optimizer.step()

    def train(batch):
        seen.extend(row[0] for leaf in strategy.experimental_local_results(batch[0]) for row in leaf.tolist())
        strategy.run(step, args=(batch,))
        if handler.total_run_calls + 1 == notice and own == rank:
            os.kill(os.getpid(), number)

    checkpoint = ts.train.Checkpoint(model=model, optimizer=optimizer, dataset=dataset)
    handler = PreemptionCheckpointHandler(None, checkpoint, folder, config)
    begun = handler.total_run_calls
    try:
        with handler:
            while handler.total_run_calls < last:
                for batch in dataset:
                    if in_scope:
                        with handler.watch_preemption_scope():
                            train(batch)
                            handler.save_checkpoint_if_preempted()
                    else:
                        handler.run(train, batch)
                    if handler.total_run_calls == last:
                        break
    except SystemExit as error:
        return error.code, begun, handler.total_run_calls, seen
    return model.weight.tolist(), begun, handler.total_run_calls, seen


@pytest.mark.parametrize("in_scope", [False, True])
@pytest.mark.parametrize("notice", [1, 5, 6, 11])
def test_goes_on_where_it_was(tmp_path, notice, in_scope):
    whole = job(str(tmp_path / "whole"))
    code, begun, done, seen = job(str(tmp_path / "cut"), notice=notice, in_scope=in_scope)
    assert (code, begun, done) == (143, 0, notice)
    weight, begun, done, rest = job(str(tmp_path / "cut"), in_scope=in_scope)
    assert (begun, done) == (notice, 12)
    assert seen + rest == whole[3]
    assert weight == whole[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_of_two_is_told(process_pool, tmp_path, rank):
    whole = process_pool(2).run(job, str(tmp_path / "whole"))
    first, second = process_pool(2).run(job, str(tmp_path / "cut"), notice=5, rank=rank, number=signal.SIGUSR1)
    assert first[:3] == second[:3]
    assert first[0] == 143
    assert 5 <= first[2] <= 12
    for one, before, unbroken in zip(
        process_pool(2).run(job, str(tmp_path / "cut")), (first, second), whole, strict=True
    ):
        assert one[0] == unbroken[0]
        assert before[3] + one[3] == unbroken[3]


def test_own_functions(tmp_path):
    called = []
    config = TerminationConfig(save_fn=lambda: called.append("save"), exit_fn=lambda: called.append("exit"))
    weight, _, done, _ = job(str(tmp_path), notice=5, config=config)
    assert called == ["save", "exit"]  # once; the program has decided to go on
    assert done == 12
    assert weight
    assert ts.train.latest_checkpoint(tmp_path) is None


def test_before_the_first_step(tmp_path):
    checkpoint = ts.train.Checkpoint(step=torch.tensor(0))
    with PreemptionCheckpointHandler(None, checkpoint, tmp_path) as handler:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as raised:
            handler.run(pytest.fail, "the step was made")
    assert raised.value.code == 143
    assert not tmp_path.exists() or os.listdir(tmp_path) == []


def test_a_save_that_fails_is_told(tmp_path, caplog):
    caught = []
    before = signal.signal(signal.SIGTERM, lambda *_: caught.append(1))
    try:
        checkpoint = ts.train.Checkpoint(step=torch.tensor(0))
        with (
            pytest.raises(OSError, match="No space left"),
            file_fault("full", 1, tmp_path),
            PreemptionCheckpointHandler(None, checkpoint, tmp_path) as handler,
        ):
            handler.run(os.kill, os.getpid(), signal.SIGTERM)
        assert caught == [1]
        assert "SIGTERM came, and this error ended the training" in caplog.text
    finally:
        signal.signal(signal.SIGTERM, before)


def test_checkpoints_of_others_are_not_deleted(tmp_path):
    manager = ts.train.CheckpointManager(ts.train.Checkpoint(step=torch.tensor(0)), tmp_path, None)
    for _ in range(3):
        manager.save()
    with pytest.raises(
        ValueError,
        match=r"the directory holds other checkpoints, such as 'ckpt-3', which would be .* or the CheckpointM",
    ):
        PreemptionCheckpointHandler(None, ts.train.Checkpoint(step=torch.tensor(0)), tmp_path)
    assert len(manager.checkpoints) == 3


def test_mistakes(tmp_path):
    checkpoint = ts.train.Checkpoint(step=torch.tensor(0))
    manager = ts.train.CheckpointManager(ts.train.Checkpoint(step=torch.tensor(0)), tmp_path, 1)
    with pytest.raises(ValueError, match="pass checkpoint_dir="):
        PreemptionCheckpointHandler(None, checkpoint)
    with pytest.raises(ValueError, match="checkpoint_dir must be None"):
        PreemptionCheckpointHandler(None, manager, tmp_path)
    with pytest.raises(ValueError, match=r"save_freq=\.\.\.\) must be a positive number of calls, or None"):
        PreemptionCheckpointHandler(None, manager, save_freq=0)
    with pytest.raises(TypeError, match="Received a Linear"):
        PreemptionCheckpointHandler(None, torch.nn.Linear(1, 1), tmp_path)
    with PreemptionCheckpointHandler(None, manager) as handler:
        assert handler.checkpoint_manager is manager
        with pytest.raises(ValueError, match=r"within handler\.watch_preemption_scope"):
            handler.save_checkpoint_if_preempted()
        with pytest.raises(RuntimeError, match=r"run was called inside of the step"):
            handler.run(handler.run, print)
        with pytest.raises(TypeError, match=r"takes a function and its arguments, which it calls: .* Received: None"):
            handler.run(None)


@pytest.mark.parametrize("in_scope", [False, True])
def test_what_the_checkpoint_does_not_hold_is_said(tmp_path, caplog, in_scope):
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    dataset, other = (strategy.experimental_distribute_dataset(torch.ones(4, 1), batch_size=2) for _ in range(2))
    list(other)  # which is at its end, as an evaluation's

    def go_on(**more):
        caplog.clear()
        folder = tmp_path / str(len(more))
        with PreemptionCheckpointHandler(None, ts.train.Checkpoint(model=model, **more), folder) as handler:
            iterator = iter(dataset)
            next(iterator)
            if in_scope:
                with handler.watch_preemption_scope():
                    handler.save_checkpoint_if_preempted()
            for _ in range(2):
                handler.run(int)
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    (line,) = go_on(scheduler=scheduler)
    assert "does not hold the optimizer SGD, the dataset that is read. If" in line
    assert go_on(scheduler=scheduler, optimizer=optimizer, dataset=dataset) == []


@pytest.mark.end_to_end
@pytest.mark.parametrize("where", ["step", "data"])
def test_the_deadline(tmp_path, where):
    """The main thread is in a call that does not come back to Python."""
    program = textwrap.dedent("""
        import ctypes, os, signal, sys, threading, time, torch, torchstrategy as ts
        config = ts.experimental.TerminationConfig(deadline=0.5)
        checkpoint = ts.train.Checkpoint(step=torch.tensor(3))
        handler = ts.experimental.PreemptionCheckpointHandler(None, checkpoint, sys.argv[1], config)
        handler.run(lambda: None)
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        def data():
            if sys.argv[2] == "step":
                ctypes.CDLL(None).sleep(1000)  # without the interpreter's lock
            lock = threading.Lock(); lock.acquire(); lock.acquire()  # for ever, in C
        handler.run(data)
    """)
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path, where], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 143, done.stderr
    assert "Nothing could be saved within 0.5 s after SIGTERM" in done.stderr
