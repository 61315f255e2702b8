"""A stand-in for a model and its loop, for tests of callbacks alone."""

import types

import torch

from torchstrategy.callbacks import CallbackList


class Model(torch.nn.Linear):
    """What callbacks use of ``ts.Model``."""

    def __init__(self, *, is_chief=True, metrics=(), lr=0.1):
        super().__init__(1, 1)
        self.distribute_strategy = types.SimpleNamespace(is_chief=is_chief)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=lr)
        self.metrics = list(metrics)
        self.stop_training = False
        self.iterations = 0


def fit(callbacks, epoch_logs, *, model=None, verbose=0, steps=2, initial_epoch=0, state=None, before_epoch=None):
    """Call the hooks of a training whose epochs have the given logs; return the list, and the epochs' logs."""
    model = Model() if model is None else model
    model.stop_training = False
    epochs = initial_epoch + len(epoch_logs)
    every = CallbackList(callbacks, model, {"verbose": verbose, "epochs": epochs, "steps": steps}, verbose=verbose)
    try:
        every.on_train_begin()
        if state is not None:
            every.load_state_dict(state)
        seen = []
        for epoch, logs in enumerate(epoch_logs, initial_epoch):
            if model.stop_training:
                break
            if before_epoch is not None:
                before_epoch(epoch, model)
            every.on_epoch_begin(epoch)
            for batch in range(steps or 2):
                every.on_train_batch_begin(batch)
                model.optimizer.step()
                model.iterations += 1
                every.on_train_batch_end(batch, dict(logs))
                if model.stop_training:
                    break
            logs = dict(logs)
            seen.append(logs)
            every.on_epoch_end(epoch, logs)
        every.on_train_end(seen[-1] if seen else None)
    finally:
        every.close()
    return every, seen
