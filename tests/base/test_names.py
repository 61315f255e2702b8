"""Names that stand for something, and what is said of those that don't."""

import pytest

from torchstrategy.base.names import alike, find, named_ranks, snake_case, tensors_of

KNOWN = {"mse": 1, "MeanSquaredError": 2, "mean_squared_error": 3}


@pytest.mark.parametrize(
    ("name", "expected"), [("mse", 1), ("MSE", 1), ("meansquarederror", 2), ("Mean_Squared_Error", 3)]
)
def test_letter_case_does_not_matter(name, expected):
    assert find(name, KNOWN, "loss=", "") == expected


def test_similar_names_are_listed():
    with pytest.raises(
        ValueError, match=r"^loss='mean_square_error' is not known\. Did you mean 'mean_squared_error' or "
    ):
        find("mean_square_error", KNOWN, "loss=", "Or give a function.")
    with pytest.raises(
        ValueError, match=r"Known names: MeanSquaredError, mean_squared_error, mse\. Or give a function\."
    ):
        find("zzz", KNOWN, "loss=", "Or give a function.")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("F1Score", "f1_score"),
        ("R2Score", "r2_score"),
        ("BLEU4Score", "bleu4_score"),
        ("MeanIoU", "mean_io_u"),
        ("AUC", "auc"),
        ("TopKAccuracy", "top_k_accuracy"),
        ("Conv2D", "conv2d"),
        ("MyF1", "my_f1"),
        ("HTTPError", "http_error"),
        ("Top5Accuracy", "top5_accuracy"),
        ("already_snake", "already_snake"),
    ],
)
def test_classes_are_named_as_by_keras(name, expected):
    assert snake_case(name) == expected


def test_of_many_ranks_those_that_are_alike_are_named_together():
    assert alike([[1], [1], [2]]) == [([0], [1]), ([1], [1]), ([2], [2])]
    many = alike([[1]] * 500 + [[2]] + [[1]] * 500)
    assert [(named_ranks(ranks), value) for ranks, value in many] == [
        ("ranks 0 to 499, 501 to 1000", [1]),
        ("rank 500", [2]),
    ]


@pytest.mark.parametrize(
    ("brought", "expected"), [(["float32[3]", "int64[]"], " (float32[3], int64[])"), (["x" * 6000], ""), ([], "")]
)
def test_what_a_rank_has_brought_is_said_if_it_is_short(brought, expected):
    assert tensors_of(brought) == expected
