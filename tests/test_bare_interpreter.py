"""Each promise, from a program that has imported ``torchstrategy`` and nothing else of it, without pytest.

One new interpreter does the imports, which are the first lines of every program, and is forked for each.
"""

import subprocess
import sys
import textwrap

import pytest

#: Runs the programs whose files it is told of, a line each, and answers with their exit statuses.
INTERPRETER = """
import os
import runpy
import sys
import traceback

import torch
import torchstrategy

for line in sys.stdin:
    child = os.fork()
    if not child:
        status = 1
        try:
            runpy.run_path(line.strip())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

START = """
import torch
import torchstrategy as ts

strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
"""

PROGRAMS = {
    "a metric of torchmetrics is merged": """
        import torchmetrics

        with strategy.scope():
            metric = torchmetrics.MeanMetric()
        for x in strategy.experimental_distribute_dataset(torch.arange(5.0), batch_size=5):
            strategy.run(metric.update, args=(x,))
        assert metric.compute() == 2.0, metric.compute()
        """,
    "a mean loss is warned of": """
        import warnings

        with strategy.scope():
            model = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x):
            torch.nn.functional.mse_loss(model(x), x).backward()
            optimizer.step()

        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for x in strategy.experimental_distribute_dataset(torch.ones(4, 1), batch_size=4):
                strategy.run(step, args=(x,))
        texts = [str(warning.message) for warning in found]
        assert sum("mse_loss" in text and "scale_mean_loss" in text for text in texts) == 1, texts
        """,
    "gradients are summed at the step, for every batch tail": """
        found = []
        for devices in (["cpu:0"], ["cpu:0", "cpu:1"], ["cpu:0", "cpu:1", "cpu:2"]):
            strategy = ts.MirroredStrategy(devices)
            with strategy.scope():
                torch.manual_seed(0)
                model = torch.nn.Linear(3, 1, dtype=torch.float64)
                optimizer = torch.optim.SGD(model.parameters(), 0.1)

            def step(x):
                optimizer.zero_grad()
                loss = ts.nn.compute_average_loss(model(x).square().sum(1), global_batch_size="actual")
                (loss + ts.nn.scale_regularization_loss(model.weight.square().sum())).backward()
                optimizer.step()

            inputs = torch.linspace(-1, 1, 21, dtype=torch.float64).reshape(7, 3)
            for x in strategy.experimental_distribute_dataset(inputs, batch_size=4):
                strategy.run(step, args=(x,))
            found.append(model.weight.detach().clone())
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=0, atol=1e-12)
        """,
    "values are gathered and reduced in the order of replicas": """
        numbers = strategy.run(lambda: torch.tensor([float(ts.get_replica_context().replica_id_in_sync_group)]))
        assert strategy.gather(numbers, axis=0).tolist() == [0.0, 1.0]
        assert strategy.reduce("SUM", numbers, axis=None).tolist() == [1.0]
        assert strategy.reduce("MEAN", numbers, axis=0).tolist() == 0.5
        """,
    "a write past the version counter reaches all replicas": """
        with strategy.scope():
            model = torch.nn.Linear(1, 1)
        strategy.run(lambda: None)
        model.weight.data.fill_(0.25)
        values = strategy.run(lambda: model.weight.item())
        assert strategy.experimental_local_results(values) == (0.25, 0.25), values
        """,
    "fit gives the numbers of one replica": """
        weights = []
        for devices in (["cpu:0"], ["cpu:0", "cpu:1"]):
            strategy = ts.MirroredStrategy(devices)
            with strategy.scope():
                torch.manual_seed(0)
                model = ts.Model(torch.nn.Linear(2, 1, dtype=torch.float64))
                model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
            x = torch.linspace(-1, 1, 14, dtype=torch.float64).reshape(7, 2)
            history = model.fit(x, x.sum(1, keepdim=True), batch_size=3, epochs=2, shuffle=False, verbose=0)
            weights.append([*history.history["loss"], *history.history["mae"]])
        assert all(abs(a - b) < 1e-10 for a, b in zip(*weights)), weights
        """,
    "replicas that drift apart are named": """
        with strategy.scope():
            model = torch.nn.Linear(1, 1)

        def drift():
            with torch.no_grad():
                model.weight.add_(ts.get_replica_context().replica_id_in_sync_group)

        try:
            strategy.run(drift)
        except ts.errors.DivergenceError as error:
            assert "'weight'" in str(error), error
        else:
            raise AssertionError("It was not noticed.")
        """,
}


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    """A new interpreter that has done the imports, and the file that gets what its programs print of errors."""
    folder = tmp_path_factory.mktemp("interpreter")
    command = [sys.executable, "-c", INTERPRETER]
    with (
        open(folder / "errors", "w", encoding="utf-8") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder
        ) as process,
    ):
        yield process, folder / "errors"
        process.stdin.close()


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", PROGRAMS)
def test_promise(name, interpreter, tmp_path):
    process, errors = interpreter
    program = tmp_path / "program.py"
    program.write_text(START + textwrap.dedent(PROGRAMS[name]), encoding="utf-8")
    print(program, file=process.stdin, flush=True)
    assert process.stdout.readline() == "0\n", errors.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_default_device_does_not_matter_to_an_import(device, tmp_path):
    program = f"""
    import torch
    torch.set_default_device("{device}")
    with torch.inference_mode():
        import torchstrategy
    from torchstrategy.gradients import plan
    assert 0 < plan._HOLDERS_OF_OWN < 8, plan._HOLDERS_OF_OWN
    assert 0 < plan._USES_OF_OWN < 8, plan._USES_OF_OWN
    """
    program = textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
