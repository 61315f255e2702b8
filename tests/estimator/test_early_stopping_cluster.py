"""Early stopping in clusters: the chief finds that it is time to, and every task ends."""

import pytest

from tests.estimator.cluster_tasks import Tasks


@pytest.mark.slow
def test_tasks_that_step_together_end_together(tmp_path):
    with Tasks(tmp_path, ["chief", "worker"], strategy="multi_worker", max_steps=1000, stop_early_at=3) as tasks:
        tasks.start("chief0", "worker0")
        chief, worker = tasks.results("chief0", "worker0")
        assert chief["variables"] == worker["variables"]
        assert chief["variables"]["global_step"] == 3
        assert "Requesting early stopping at global step 3" in tasks.log("chief0")


@pytest.mark.slow
def test_asynchronous_workers_learn_of_it(tmp_path):
    settings = {"strategy": "parameter_server", "max_steps": 100_000, "stop_early_at": 20, "step_s": 0.01}
    with Tasks(tmp_path, ["ps", "chief", "worker", "worker"], **settings) as tasks:
        names = ["ps0", "chief0", "worker0", "worker1"]
        tasks.start(*names)
        assert tasks.wait(*names) == [0] * 4
        assert len(tasks.steps("chief0")) == 20
        for name in ("worker0", "worker1"):
            assert "Early stopping requested, suspending run." in tasks.log(name)
            assert tasks.steps(name)
