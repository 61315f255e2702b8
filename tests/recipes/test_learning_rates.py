import learning_rates
import pytest
import torch


def test_constant():
    assert [learning_rates.constant(size, base=0.1).rate for size in (5, 500)] == [0.1, 0.1]


def test_table():
    table = {5: 0.1, 10: 0.15, 20: 0.175}
    assert learning_rates.from_table(10, table).rate == 0.15
    with pytest.raises(ValueError, match=r"global batch of 40, only for 5, 10, 20\. Add one by .*\{40: RATE\}"):
        learning_rates.from_table(40, table)


@pytest.mark.parametrize(("exponent", "expected"), [(1.0, 0.04), (0.5, 0.02)])
def test_scaled(exponent, expected):
    scaled = learning_rates.scaled(256, base=0.01, base_batch_size=64, exponent=exponent)
    assert scaled.rate == pytest.approx(expected)


def test_warm_up_rises_to_the_rate():
    learning_rate = learning_rates.scaled(64, base=0.4, base_batch_size=64, exponent=1.0, warmup_steps=3)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=learning_rate.rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate.factor)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
