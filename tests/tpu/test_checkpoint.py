"""Checkpoints go from ``TPUStrategy`` to other strategies and back."""

import pytest

from tests.fit.test_fit_equivalence import flat
from tests.tpu import model_programs


@pytest.mark.parametrize(
    ("writer", "reader"), [("tpu", "mirrored"), ("mirrored", "tpu"), ("tpu", "none"), ("tpu", "tpu")]
)
def test_training_goes_on_under_another_strategy(xla_process, tmp_path, writer, reader):
    kept, restored, here, there, devices = xla_process(2).run(
        model_programs.cross_checkpoint, str(tmp_path), writer, reader
    )
    assert flat(restored) == pytest.approx(flat(kept), abs=1e-6)
    if reader != "none":  # one replica has the batch statistics of the whole batch
        assert flat(there) == pytest.approx(flat(here), abs=1e-5)
    assert devices == {"cpu"}
