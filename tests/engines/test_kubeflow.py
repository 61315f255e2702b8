"""The TrainJob and its runtime, read by the models of Kubeflow Trainer's API."""

import pytest
import yaml

from tests.recipes import layouts

models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs Kubeflow's models: make test-engines")
MODELS = {"TrainingRuntime": "TrainerV1alpha1TrainingRuntime", "TrainJob": "TrainerV1alpha1TrainJob"}


@pytest.mark.parametrize("kind", MODELS)
def test_a_manifest_is_all_that_the_api_has_read(kind):
    """The models check types and pass over what they do not know, which is then not there."""
    path = layouts.ROOT / "docs" / "deploy" / "kubernetes" / "train_job.yaml"
    (document,) = [item for item in yaml.safe_load_all(path.read_text()) if item["kind"] == kind]
    read = getattr(models, MODELS[kind]).from_dict(document)
    assert read.to_dict() == document
