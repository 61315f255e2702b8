"""The programs of area 8 in NumPy give what Keras measured, so they can stand in for what was not measured."""

from dataclasses import replace

import pytest

import torchstrategy as ts
from tests.parity.area_keras_fit import built_and_compiled, data_of, program_of, run_program
from tests.parity.driver import load_cases, matches, normalise, strategy_for
from tests.parity.keras_fit import Program, Reference

MEASURED = [
    case
    for case in load_cases("core_cases.json")
    if case.name.startswith("8.fit_") and "raises" not in case.expected and case.name != "8.fit_in_scope"
]


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case.id)
def test_reference_follows_keras_rule_for_replicas(case):
    if case.num_replicas > 1 and case.name in ("8.fit_loss_none", "8.fit_loss_sum"):
        pytest.skip("Keras shows a number that depends on the replicas in another way")
    found = normalise(Reference(program_of(case), case.num_replicas).fit())
    assert matches(case.expected, found)


NOT_MEASURED = {
    "adam": Program(optimizer="adam", batch_size=3),
    "sample weights, validation split": Program(batch_size=3, has_sample_weight=True, validation="split"),
    "distributed dataset": Program(reads="distributed", batch_size=3),
    "classes, steps of an execution": Program(is_class=True, batch_size=3, steps_per_execution=3),
    "classes with class weights": Program(is_class=True, has_class_weight=True, batch_size=3),
    "steps of an epoch": Program(reads="dataset", batch_size=4, steps_per_epoch=2),
    "regularized": Program(l2=0.1, batch_size=4, validation="data"),
    "sum": Program(reduction="sum", batch_size=3),
    "no reduction": Program(reduction="none", batch_size=3),
    "no reduction, sample weights": Program(reduction="none", batch_size=4, has_sample_weight=True),
    "mean with sample weight": Program(reduction="mean_with_sample_weight", has_sample_weight=True, batch_size=3),
}


@pytest.mark.parametrize("host", ["none", "onedevice", "central2", "n1", "n2", "n3", "n4"])
@pytest.mark.parametrize("name", NOT_MEASURED)
def test_one_replica_rule_holds_for_every_strategy(name, host):
    program = NOT_MEASURED[name]
    found = normalise(run_program(strategy_for(host), program))
    assert matches(normalise(Reference(program).fit()), found)


@pytest.mark.parametrize("host", ["none", "n1", "n2", "n4"])
def test_one_replica_rule_holds_for_a_dataset_from_a_function(host):
    program = Program(reads="from_function", batch_size=4)
    found = normalise(run_program(strategy_for(host), program))
    assert matches(normalise(Reference(program).fit()), found)


class Recorder(ts.callbacks.Callback):
    """Keeps the logs of all batches."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append({name: float(value) for name, value in logs.items()})


@pytest.mark.parametrize("host", ["none", "n1", "n2", "n3", "n4"])
def test_batch_logs_are_means_over_the_epoch_so_far(host):
    program, recorder = Program(batch_size=3), Recorder()
    strategy = strategy_for(host)
    model = built_and_compiled(strategy, program)
    model.fit(**data_of(strategy, program), shuffle=False, verbose=0, callbacks=[recorder])
    after = [Reference(replace(program, steps_per_epoch=k + 1, epochs=1)).fit()["history"] for k in range(4)]
    assert recorder.logs == [pytest.approx({name: values[0] for name, values in row.items()}) for row in after]
