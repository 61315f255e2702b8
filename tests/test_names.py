"""Names that stand for something, and what is said of those that don't."""

import pytest

from torchstrategy.names import find

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
