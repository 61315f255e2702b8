"""Which evaluations are exported, and which exports are kept."""

import math
import os

import pytest
import torch

import torchstrategy as ts
from tests.estimator.lines import input_fn, make_estimator, receiver_fn
from torchstrategy.estimator.eval_metrics import write_eval_metrics

est = ts.estimator


@pytest.fixture
def trained(tmp_path):
    return make_estimator(tmp_path / "model").train(input_fn, steps=1)


def export(exporter, estimator, loss, is_final=False, **metrics):
    path = os.path.join(estimator.model_dir, "export", exporter.name)
    return exporter.export(estimator, path, estimator.latest_checkpoint(), {"loss": loss, **metrics}, is_final)


def kept(estimator, name):
    return sorted(os.listdir(os.path.join(estimator.model_dir, "export", name)))


def test_an_exporter_can_be_written(trained):
    with pytest.raises(TypeError, match="abstract"):
        est.Exporter()


@pytest.mark.slow
def test_the_final_exporter_exports_once(trained):
    exporter = est.FinalExporter("final", receiver_fn)
    assert export(exporter, trained, 1.0) is None
    assert not os.path.exists(os.path.join(trained.model_dir, "export"))
    path = export(exporter, trained, 1.0, is_final=True)
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]


def test_the_latest_exporter_keeps_some(trained):
    exporter = est.LatestExporter("latest", receiver_fn, exports_to_keep=2)
    paths = [export(exporter, trained, 1.0) for _ in range(3)]
    assert [os.path.join(trained.model_dir, "export", "latest", name) for name in kept(trained, "latest")] == paths[1:]
    assert paths == sorted(paths)


def test_other_directories_are_not_deleted(trained):
    exporter = est.LatestExporter("latest", receiver_fn, exports_to_keep=1)
    export(exporter, trained, 1.0)
    for name in ("123", "notes", "1000000000x"):
        os.mkdir(os.path.join(trained.model_dir, "export", "latest", name))
    export(exporter, trained, 1.0)
    assert len(kept(trained, "latest")) == 4


def test_none_keeps_all(trained):
    exporter = est.LatestExporter("latest", receiver_fn, exports_to_keep=None)
    for _ in range(6):
        export(exporter, trained, 1.0)
    assert len(kept(trained, "latest")) == 6


def test_the_best_exporter_exports_what_is_better(trained):
    exporter = est.BestExporter(serving_input_receiver_fn=receiver_fn, exports_to_keep=2)
    assert exporter.name == "best_exporter"
    exported = [export(exporter, trained, loss) is not None for loss in (3.0, 4.0, 2.0, 2.0, 1.0)]
    assert exported == [True, False, True, False, True]
    assert len(kept(trained, "best_exporter")) == 2


def test_what_is_better_can_be_said(trained):
    def compare_fn(best_eval_result, current_eval_result):
        return current_eval_result["accuracy"] > best_eval_result["accuracy"]

    exporter = est.BestExporter("best", receiver_fn, compare_fn=compare_fn)
    values = [(1.0, 0.5), (0.5, 0.4), (2.0, 0.6)]
    assert [export(exporter, trained, loss, accuracy=accuracy) is not None for loss, accuracy in values] == [
        True,
        False,
        True,
    ]


def test_any_loss_is_better_than_one_that_is_no_number(trained):
    exporter = est.BestExporter("best", receiver_fn, event_file_pattern=None)
    found = [export(exporter, trained, loss) is not None for loss in (math.nan, 5.0, math.nan, 6.0)]
    assert found == [True, True, False, False]


def test_a_new_best_exporter_knows_earlier_evaluations(trained):
    write_eval_metrics(trained.eval_dir(), 1, {"loss": 0.1, "global_step": 1})
    write_eval_metrics(trained.eval_dir(), 2, {"loss": 5.0, "global_step": 2})  # the one that is exported
    assert export(est.BestExporter("best", receiver_fn), trained, 5.0) is None
    assert export(est.BestExporter("other", receiver_fn, event_file_pattern=None), trained, 5.0) is not None
    better = est.BestExporter("best", receiver_fn)
    write_eval_metrics(trained.eval_dir(), 3, {"loss": 0.05, "global_step": 3})
    assert export(better, trained, 0.05) is not None
    assert export(better, trained, 0.05) is None


def test_the_first_evaluation_is_exported_though_the_files_hold_it_already(trained):
    result = trained.evaluate(input_fn, steps=1)  # writes its result
    path = os.path.join(trained.model_dir, "export", "best")
    exporter = est.BestExporter("best", receiver_fn)
    assert exporter.export(trained, path, trained.latest_checkpoint(), result, False) is not None
    assert exporter.export(trained, path, trained.latest_checkpoint(), result, False) is None


def test_a_directory_is_no_pattern(tmp_path):
    estimator = make_estimator(tmp_path / "lr[0.1]").train(input_fn, steps=1)
    write_eval_metrics(estimator.eval_dir(), 1, {"loss": 0.1})
    assert export(est.BestExporter("best", receiver_fn), estimator, 0.5) is None


def test_evaluations_with_a_name_have_files_of_their_own(trained):
    write_eval_metrics(trained.eval_dir("test"), 1, {"loss": 0.1})
    exporter = est.BestExporter("best", receiver_fn, event_file_pattern="eval_test/*.tfevents.*")
    assert export(exporter, trained, 0.5) is None


@pytest.mark.parametrize("cls", [est.BestExporter, est.LatestExporter])
@pytest.mark.parametrize("number", [0, -1])
def test_the_number_of_exports_must_be_positive(cls, number):
    with pytest.raises(ValueError, match="must be a positive number"):
        cls("name", receiver_fn, exports_to_keep=number)


def test_wrong_comparisons_are_refused(trained):
    with pytest.raises(ValueError, match="must not be None"):
        est.BestExporter("best", receiver_fn, compare_fn=None)
    with pytest.raises(ValueError, match="must include best_eval_result"):
        est.BestExporter("best", receiver_fn, compare_fn=lambda best, current: True)
    exporter = est.BestExporter("best", receiver_fn)
    export(exporter, trained, 1.0)
    with pytest.raises(ValueError, match="without a loss"):
        exporter.export(trained, "path", trained.latest_checkpoint(), {"accuracy": 1.0}, False)


def test_all_three_in_train_and_evaluate(tmp_path):
    exporters = [
        est.BestExporter("best", receiver_fn),
        est.LatestExporter("latest", receiver_fn),
        est.FinalExporter("final", receiver_fn),
    ]
    _, exports = est.train_and_evaluate(
        make_estimator(tmp_path),
        est.TrainSpec(input_fn, max_steps=4),
        est.EvalSpec(input_fn, steps=2, throttle_secs=0, exporters=exporters),
    )
    assert [path is not None for path in exports[1:]] == [True, True]
    loaded = est.export.load(exports[2]).signatures["serving_default"]
    expected = next(make_estimator(tmp_path).predict(lambda: torch.tensor([3.0])))["y"]
    assert float(loaded(torch.tensor([3.0]))["y"]) == float(expected)
