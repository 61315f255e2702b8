"""Trains one of the programs with a planted mistake, or a right one: ``planted_script.py KIND MISTAKE``."""

import sys

import torchstrategy as ts
from tests.testing.verification import planted, right


def main():
    kind, mistake = sys.argv[1:]
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        if kind == "right":
            program, batches = right.build(strategy, mistake), right.batches()
        else:
            program, batches = planted.build(strategy, kind, mistake), planted.make_batches(kind)
    for batch in strategy.experimental_distribute_dataset(batches):
        program["step"](batch)
    if "metric" in program:
        metric = program["metric"]
        print(f"metric: {float(metric() if mistake == 'metric' else metric.result()):.6f}")


if __name__ == "__main__":
    main()
