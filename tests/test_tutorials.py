"""The notebooks of the documentation run, and their losses don't depend on where the replicas are."""

import base64
import contextlib
import io
import json
import os
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(path for path in (ROOT / "docs").rglob("*.ipynb") if "_build" not in path.parts)
CUSTOM_TRAINING = ROOT / "docs" / "tutorials" / "custom_training.ipynb"
#: Beside these: the first has tests of its own here, the other one in tests/tpu/test_docs.py.
NOTEBOOKS_TO_RUN = [path for path in NOTEBOOKS if path.stem not in ("custom_training", "tpu")]
NOT_COMPARED = {"performance"}  # prints what it measures
MAX_PICTURE = 40_000
SMALL = {
    "DATA_PATH": str(ROOT / "recipes" / "data" / "fashion_mnist_slice.npz"),
    "EPOCHS": 2,
    "GLOBAL_BATCH_SIZE": 20,
    "NUM_IMAGES": 205,  # the last batch has 5
}
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?")


def code_cells(path):
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def run_notebook(path, parameters, folder, dtype=torch.float32):
    """Run the cells in order in a folder; what the cell "parameters" sets is replaced. Return what each cell prints."""
    names = {"__name__": "__main__"}
    outputs = []
    before, dtype_before = Path.cwd(), torch.get_default_dtype()
    os.chdir(folder)
    torch.set_default_dtype(dtype)
    try:
        for number, cell in enumerate(code_cells(path), start=1):
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile("".join(cell["source"]), f"{path.name}, code cell {number}", "exec"), names)
            outputs.append(output.getvalue())
            if "parameters" in cell["metadata"].get("tags", []):
                assert parameters.keys() <= names.keys(), "a parameter has another name in the notebook"
                names.update(parameters)
    finally:
        os.chdir(before)
        torch.set_default_dtype(dtype_before)
    return outputs


def figures(outputs):
    """Return the numbers of all lines that tell a loss or an accuracy of the training."""
    lines = [line for output in outputs for line in output.splitlines() if line.startswith(("Epoch", "Accuracy"))]
    assert len(lines) == 3 * SMALL["EPOCHS"] + 1
    return [[float(number) for number in NUMBER.findall(line)] for line in lines]


@pytest.fixture(scope="module")
def one_replica(tmp_path_factory):
    return run_notebook(CUSTOM_TRAINING, SMALL, tmp_path_factory.mktemp("one"), torch.float64)


@pytest.fixture(scope="module")
def single_precision(tmp_path_factory):
    return run_notebook(CUSTOM_TRAINING, SMALL, tmp_path_factory.mktemp("single"))


def assert_same(outputs, expected):
    # In float64, because Adam divides by the size of the gradients, which makes much of their rounding.
    for line, other in zip(figures(outputs), figures(expected), strict=True):
        assert line == pytest.approx(other, rel=1e-10, abs=1e-10)


@pytest.mark.slow
def test_one_replica_learns(one_replica):
    losses = [line[1] for line in figures(one_replica) if len(line) > 1]
    assert losses[-1] < 0.7 * losses[0]
    assert one_replica[-1].splitlines() == [
        "The loss: 3.5",
        "Mean over the replicas' parts: 1.75",
        "Mean over the examples: 3.5",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_replicas_in_one_process(one_replica, num_replicas, tmp_path):
    devices = [f"cpu:{i}" for i in range(num_replicas)]
    outputs = run_notebook(CUSTOM_TRAINING, {**SMALL, "DEVICES": devices}, tmp_path, torch.float64)
    assert f"Number of devices: {num_replicas}\n" in outputs
    assert_same(outputs, one_replica)


@pytest.mark.end_to_end
def test_two_processes(one_replica, process_pool, tmp_path):
    results = process_pool(2).run(run_notebook, CUSTOM_TRAINING, SMALL, tmp_path, torch.float64)
    for outputs in results:
        assert "Number of devices: 2\n" in outputs
        assert_same(outputs, one_replica)
        # The last cell makes two replicas in each of the processes.
        assert "Mean over the replicas' parts: 0.875\n" in outputs[-1]


@pytest.mark.slow
def test_single_precision(single_precision, tmp_path):
    outputs = run_notebook(CUSTOM_TRAINING, {**SMALL, "DEVICES": ["cpu:0", "cpu:1"]}, tmp_path)
    losses, expected = ([line[1] for line in figures(run) if len(line) > 1] for run in (outputs, single_precision))
    assert losses == pytest.approx(expected, rel=1e-3)


def test_stored_outputs(single_precision):
    """What the notebook shows is what its cells print, but for the figures; `make notebooks` stores it anew."""
    for text, cell in zip(single_precision, code_cells(CUSTOM_TRAINING), strict=True):
        assert all(output["output_type"] == "stream" for output in cell["outputs"]), "no error, and no repr"
        assert kinds_of_lines(stored_text(cell)) == kinds_of_lines(text)


@pytest.mark.slow
@pytest.mark.timeout(300)  # processes start in it, beside other tests
@pytest.mark.parametrize("path", NOTEBOOKS_TO_RUN, ids=lambda path: path.stem)
def test_shows_what_it_prints(path, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the programs that it starts
    check_outputs(path, run_notebook(path, {"DATA_PATH": SMALL["DATA_PATH"]}, tmp_path))


def check_outputs(path, outputs):
    """Compare what the cells print with what is stored, numbers but for the rounding of other machines."""
    for text, cell in zip(outputs, code_cells(path), strict=True):
        assert {output["output_type"] for output in cell["outputs"]} <= {"stream", "display_data"}, "no error, no repr"
        stored = stored_text(cell)
        assert bool(stored) == bool(text)
        if path.stem not in NOT_COMPARED:
            assert NUMBER.sub("#", text) == NUMBER.sub("#", stored)
            numbers, expected = ([float(number) for number in NUMBER.findall(printed)] for printed in (text, stored))
            # Where sums are rounded otherwise, an optimizer makes more of it than the last digits.
            assert numbers == pytest.approx(expected, rel=0.05, abs=0.02)


def stored_text(cell):
    return "".join("".join(output["text"]) for output in cell["outputs"] if output.get("name") == "stdout")


def kinds_of_lines(text):
    """Return the lines without their numbers, each only once: there are as many epochs as one likes."""
    return list(dict.fromkeys(NUMBER.sub("#", line) for line in text.splitlines()))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_format(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", "".join("".join(cell["source"]) for cell in notebook["cells"]))
    assert [link for link in links if not (path.parent / link).exists()] == []
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    pictures = [output["data"]["image/png"] for output in outputs if "data" in output]
    assert all(len(base64.b64decode(picture)) < MAX_PICTURE for picture in pictures)
    assert f"tutorials/{path.stem}\n" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def test_unknown_parameter(tmp_path):
    with pytest.raises(AssertionError, match="another name"):
        run_notebook(CUSTOM_TRAINING, {"NO_SUCH_PARAMETER": 1}, tmp_path)
