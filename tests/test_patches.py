"""What the library does to torch and Python ends when its last strategy is gone."""

import contextlib
import subprocess
import sys
import textwrap
import threading
import types

import pytest

from torchstrategy import patches

#: Every function, class and descriptor in torch's modules and classes, and its global hooks.
SNAPSHOT = """
import gc, sys
import torch
import torch.nn.functional, torch.optim.lr_scheduler, torch.amp


def is_of_torch(name):
    return (name + ".").startswith("torch.") and not name.startswith("torch._C")


def snapshot():
    found = {}
    for module_name, module in sorted(sys.modules.items()):
        if not is_of_torch(module_name):
            continue
        for name, value in list(vars(module).items()):
            if callable(value) or isinstance(value, torch.Generator):
                found[module.__name__, name] = value
            if isinstance(value, type) and is_of_torch(value.__module__):
                for attribute, member in list(vars(value).items()):
                    if callable(member) or isinstance(member, (staticmethod, classmethod, property)):
                        found[value.__module__, value.__qualname__, attribute] = member
    for hooks in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        for key, hook in getattr(sys.modules["torch.optim.optimizer"], hooks).items():
            found[hooks, key] = hook
    found["excepthook"] = sys.excepthook
    return found


def changed(before):
    now = snapshot()
    gone = [key for key in before if now.get(key) is not before[key]]
    kept = {"_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"}
    return gone + [key for key in now if key not in before and key[0] in kept]


model = torch.nn.Linear(1, 1)  # torch changes some of its own on the first steps
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(1, 1)).backward()
optimizer.step()
del model, optimizer
before = snapshot()
import torchstrategy as ts
from torchstrategy import patches
assert not changed(before), changed(before)
assert not patches.active()
"""

TRAIN = """
def train(make):
    strategy = make()
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x):
        optimizer.zero_grad()
        ts.nn.compute_average_loss(model(x).sum(1)).backward()
        optimizer.step()

    dataset = strategy.experimental_distribute_dataset(torch.arange(12.0).reshape(6, 2), batch_size=4)
    for batch in dataset:
        strategy.run(step, args=(batch,))
    return changed(before), [patch.what for patch in patches.active()]
"""


def run(code):
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SNAPSHOT + TRAIN + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        "ts.MirroredStrategy(['cpu:0', 'cpu:1'])",
        "ts.experimental.CentralStorageStrategy(['cpu:0', 'cpu:1'])",
        "ts.MultiWorkerMirroredStrategy(devices=['cpu:0', 'cpu:1'])",
    ],
)
def test_torch_is_as_it_was_after_the_last_strategy(make):
    run(f"""
    for _ in range(2):  # the second time what had ended is done again
        during, listed = train(lambda: {make})
        assert ("torch.nn.modules.batchnorm", "SyncBatchNorm", "forward") in during, during
        assert ("torch.nn.functional", "batch_norm") in during, during
        assert any("zero_grad" in what for what in listed) and any("step pre hooks" in what for what in listed), listed
        gc.collect()
        assert not changed(before), changed(before)
        assert not patches.active(), patches.active()
    """)


@pytest.mark.slow
def test_replicate_patches_no_constructor():
    run("""
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer = strategy.replicate(model, optimizer)

    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()

    strategy.run(step)
    names = {"__init__", "__setstate__", "__copy__", "__deepcopy__"}
    constructors = [key for key in changed(before) if key[-1] in names]
    assert not constructors, constructors
    assert not any("constructors" in patch.what for patch in patches.active()), patches.active()
    with strategy.scope():
        during = changed(before)
    assert ("torch.optim.optimizer", "Optimizer", "__init__") in during, during
    del strategy, model, optimizer, scheduler, step
    gc.collect()
    assert not changed(before), changed(before)
    """)


@pytest.mark.slow
def test_one_replica_changes_nothing():
    run("""
    during, listed = train(lambda: ts.OneDeviceStrategy("cpu:0"))
    assert not during and not listed, (during, listed)
    """)


@pytest.mark.slow
def test_replicas_at_once_leave_only_what_they_say():
    """That is mallopt, which can't be undone."""
    run("""
    for _ in range(2):
        during, listed = train(lambda: ts.MirroredStrategy(["cpu:0", "cpu:1"], concurrent=True))
        assert ("torch.random", "default_generator") in during, during
        assert any("random numbers" in what for what in listed), listed
        gc.collect()
        (left,) = patches.active()
        assert "mallopt" in left.what and left.until == patches.PROCESS, left
        assert not changed(before), changed(before)
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"], concurrent=True)
    streams = [strategy.run(lambda: torch.rand(3)).values for _ in range(2)]
    assert len({tuple(value.tolist()) for row in streams for value in row}) == 4, streams
    del strategy
    gc.collect()
    assert not changed(before), changed(before)
    """)


@pytest.mark.slow
def test_the_limit_of_open_files_is_raised_once():
    run("""
    import resource
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    for _ in range(2):
        patches.allow_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        (left,) = patches.active()
        assert "open files" in left.what and left.until == patches.PROCESS, left
    """)


@pytest.mark.slow
def test_a_function_that_compiles_leaves_modules_as_they_were():
    run("""
    assert vars(torch.nn.Module)["_compiled_call_impl"] is None
    for _ in range(2):
        model = torch.nn.Linear(2, 1)
        step = ts.function(lambda x: model(x), jit_compile=True, backend="eager")
        for _ in range(3):
            step(torch.ones(1, 2))
        assert type(vars(torch.nn.Module)["_compiled_call_impl"]).__name__ == "_Finder"
        assert any("_compiled_call_impl" in patch.what for patch in patches.active()), patches.active()
        del model, step
        gc.collect()
        assert vars(torch.nn.Module)["_compiled_call_impl"] is None
        assert not patches.active(), patches.active()
    """)


def test_a_replaced_attribute_of_another_package_stays():
    class Owner:
        value = 1

    class Inherits(Owner):
        pass

    undo = patches.replace(Inherits, "value", 2, "a test", "it is over")
    assert Inherits.value == 2
    assert "Inherits.value" in patches.active()[-1].what
    undo()
    undo()
    assert "value" not in vars(Inherits)
    undo = patches.replace(Owner, "value", 2, "a test", "it is over")
    Owner.value = 3
    undo()
    assert Owner.value == 3
    assert not [patch for patch in patches.active() if "Owner" in patch.what]


class User:
    pass


def test_changes_last_as_long_as_their_users():
    events = []

    def install():
        events.append("begins")
        return [lambda: events.append("ends")]

    change = patches.WhileUsed(install)
    first, second = User(), User()
    change.use(first)
    change.use(second)
    change.use(first)
    del first
    assert events == ["begins"]
    del second
    assert events == ["begins", "ends"]
    change.use(third := User())
    assert events == ["begins", "ends", "begins"]
    del third
    assert events[-1] == "ends"


def test_the_last_user_goes_while_the_lock_is_taken():
    """It goes in another thread, or in a collection on this one, in the middle of what ends the changes."""
    events = []
    users = [User(), User()]

    def end():
        events.append("ends")

    change = patches.WhileUsed(lambda: [end])
    change.use(users[0])
    change.use(users[1])
    users.pop()
    taken = change._lock.acquire()
    assert taken
    thread = threading.Thread(target=users.clear)
    thread.start()
    thread.join()
    assert events == []
    change._lock.release()
    change._leave()  # as whoever had the lock does
    assert events == ["ends"]


def test_the_last_user_goes_while_the_compiler_is_imported(monkeypatch):
    """A collection in the middle of the import finds a module without its lock."""
    events = []
    change = patches.WhileUsed(lambda: [lambda: events.append("ends")])
    user = User()
    change.use(user)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch._dynamo.convert_frame", types.ModuleType("torch._dynamo.convert_frame"))
        del user
        assert events == []
    change._leave()  # as the timer does
    assert events == ["ends"]


@pytest.mark.parametrize("at_end", ["hook of another", "multiprocessing", "prompt"])
@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(0), SystemExit(3), None])
def test_the_error_that_ends_the_program_is_known_at_its_end(monkeypatch, at_end, error):
    registered, told = [], []
    monkeypatch.setattr(patches.atexit, "register", registered.append)
    monkeypatch.delattr(sys, "last_value", raising=False)
    end = patches.watch_end(sys.excepthook, told.append, lambda: told.append("end"), threading.get_ident())
    (leave,) = registered
    if at_end == "multiprocessing":  # which calls it before its own handler
        with contextlib.suppress(BaseException):
            try:
                if error is not None:
                    raise error
            finally:
                leave()
    else:
        if isinstance(error, Exception):  # which Python notes before it asks any hook
            monkeypatch.setattr(sys, "last_value", error, raising=False)
        if at_end == "prompt":
            monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
        leave()
    end()
    is_known = {"multiprocessing": error is not None, "prompt": False}.get(at_end, isinstance(error, Exception))
    assert told == ([error] if is_known and getattr(error, "code", 1) else []) + ["end"]


def test_of_an_exit_by_torch_multiprocessing_the_error_is_known(monkeypatch):
    registered, told = [], []
    monkeypatch.setattr(patches.atexit, "register", registered.append)
    end = patches.watch_end(sys.excepthook, told.append, lambda: None, threading.get_ident())
    with contextlib.suppress(SystemExit):
        try:
            try:
                raise ValueError("boom")
            except ValueError:
                sys.exit(1)
        finally:
            registered[0]()
    end()
    assert [str(error) for error in told] == ["boom"]
