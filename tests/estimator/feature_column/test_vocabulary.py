"""Columns with vocabularies."""

import logging

import numpy as np
import pytest
import torch

import torchstrategy as ts
from torchstrategy.estimator.feature_column.features import Features
from torchstrategy.estimator.feature_column.fingerprint import bucket_of

fc = ts.feature_column


def values_of(column, value):
    ids = column.ids(Features({column.key: value}))
    assert ids.values.dtype == torch.int64
    return torch.where(ids.present, ids.values, -9).tolist()


def with_list(*arguments, **options):
    return fc.categorical_column_with_vocabulary_list("a", *arguments, **options)


@pytest.fixture
def lines(tmp_path):
    """Return a function that writes a file of lines."""

    def write(*values, end="\n"):
        path = tmp_path / "vocabulary.txt"
        path.write_bytes("".join(value + end for value in values).encode())
        return path

    return write


def test_list_of_strings():
    column = with_list(["omar", "stringer", "marlo"])
    assert (column.name, column.num_buckets, column.dtype, column.default_value) == ("a", 3, str, -1)
    assert values_of(column, [["marlo", "skywalker"], ["omar"]]) == [[2, -1], [0, -9]]
    assert values_of(column, ["marlo", "", "other"]) == [[2], [-9], [-1]]
    assert values_of(with_list(["omar"], default_value=0), ["other", ""]) == [[0], [-9]]


@pytest.mark.parametrize("vocabulary", [("x", "y"), np.array(["x", "y"]), [b"x", b"y"]], ids=repr)
def test_kinds_of_lists(vocabulary):
    assert values_of(with_list(vocabulary), ["y", b"x"]) == [[1], [0]]


def test_list_of_integers():
    column = with_list([30, 35, 11, 23, 22])
    assert column.dtype == torch.int64
    assert values_of(column, torch.tensor([[11, 31], [30, -1], [99, 22]])) == [[2, -1], [0, -9], [-1, 4]]
    assert values_of(with_list((30, 35), dtype=torch.int32, default_value=1), [30, 4]) == [[0], [1]]


def test_values_out_of_the_vocabulary_are_hashed():
    column = with_list(["omar", "marlo"], num_oov_buckets=100)
    assert column.num_buckets == 102
    assert values_of(column, ["skywalker", "marlo"]) == [[2 + bucket_of("skywalker", 100)], [1]]
    numbers = with_list([30, 35], num_oov_buckets=100)
    assert values_of(numbers, torch.tensor([11, 35])) == [[2 + bucket_of("11", 100)], [1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "must be non-empty, column_name: a"),
        ((None,), "must be non-empty, column_name: a"),
        (("abc",), "must be a list of values, column_name: a"),
        ((["x", "y", "x"],), "Duplicate keys in vocabulary_list"),
        (([1, 1],), "Duplicate keys in vocabulary_list"),
        (([1.5],), "dtype must be string or integer"),
        ((["x"], torch.float32), "dtype must be string or integer"),
        ((["x"], torch.int64), "and vocabulary dtype str do not match, column_name: a"),
        (([1], str), "vocabulary dtype int64 do not match, column_name: a"),
        ((["x"], None, 0, 1), "Can't specify both num_oov_buckets and default_value in a"),
        ((["x"], None, -1, -1), "Invalid num_oov_buckets -1 in a"),
        ((["x"], None, 1), "default_value 1 of a is neither -1 nor one of 1 categories"),
    ],
)
def test_list_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        with_list(*arguments)


def test_file_of_strings(lines, caplog):
    with caplog.at_level(logging.INFO, "torchstrategy"):
        column = fc.categorical_column_with_vocabulary_file("a", lines("omar", "stringer", "marlo"))
    assert "vocabulary_size = 3 in a is inferred from the number of elements" in caplog.text
    assert (column.num_buckets, column.default_value) == (3, -1)
    assert values_of(column, ["marlo", "other", ""]) == [[2], [-1], [-9]]


def test_only_the_first_lines(lines):
    column = fc.categorical_column_with_vocabulary_file("a", lines("x", "y", "z"), vocabulary_size=2, num_oov_buckets=1)
    assert values_of(column, ["y", "z"]) == [[1], [2]]


def test_lines_of_windows_and_no_last_line_break(lines):
    column = fc.categorical_column_with_vocabulary_file("a", lines("x", "y", end="\r\n"))
    assert values_of(column, ["y", "x"]) == [[1], [0]]
    path = lines("x")
    path.write_bytes(b"x\ny")
    assert fc.categorical_column_with_vocabulary_file("a", path).num_buckets == 2


def test_file_of_integers(lines):
    column = fc.categorical_column_with_vocabulary_file("a", lines("5", "3"), dtype=torch.int64, default_value=0)
    assert values_of(column, [3, 5, 7]) == [[1], [0], [0]]


def test_file_is_read_once_and_late(lines):
    path = lines("x", "y")
    column = fc.categorical_column_with_vocabulary_file("a", path, vocabulary_size=2)
    path.write_text("y\nx\n")
    assert values_of(column, ["x"]) == [[1]]
    path.unlink()
    assert values_of(column, ["x"]) == [[1]]


def test_files_that_do_not_fit(lines):
    short = fc.categorical_column_with_vocabulary_file("a", lines("x"), vocabulary_size=2)
    with pytest.raises(ts.errors.InvalidArgumentError, match=r"vocabulary_size of a is 2, but .* has only 1 lines"):
        values_of(short, ["x"])
    twice = fc.categorical_column_with_vocabulary_file("a", lines("x", "y", "x"))
    with pytest.raises(ts.errors.InvalidArgumentError, match="holds 'x' twice"):
        values_of(twice, ["x"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary_file": None}, "Missing vocabulary_file in a"),
        ({"vocabulary_file": ""}, "Missing vocabulary_file in a"),
        ({"vocabulary_file": "no_such_file"}, "vocabulary_file in a does not exist. vocabulary_file: no_such_file"),
        ({"vocabulary_size": 0}, "Invalid vocabulary_size in a"),
        ({"num_oov_buckets": 1, "default_value": 0}, "Can't specify both num_oov_buckets and default_value in a"),
        ({"num_oov_buckets": -1}, "Invalid num_oov_buckets -1 in a"),
        ({"default_value": 1}, "default_value 1 of a is neither -1 nor one of 1 categories"),
        ({"dtype": torch.float64}, "dtype must be string or integer"),
    ],
)
def test_file_arguments(lines, options, message):
    with pytest.raises(ValueError, match=message):
        fc.categorical_column_with_vocabulary_file("a", **{"vocabulary_file": lines("x"), **options})
