"""Ways to make a second module in the scope without its constructor; each returns it for a first one."""

import copy
import io
import pickle

import torch
from torch import nn

FEATURES = 3


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(FEATURES, 1, dtype=torch.float64)

    def forward(self, x):
        return self.inner(x)


class CopiesItself(Plain):
    """A class with ways of its own to be copied and pickled."""

    def __deepcopy__(self, memo):
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other


class SetsItsState(Plain):
    def __setstate__(self, state):
        super().__setstate__(state)
        self.was_set = True


def deep_copy(module):
    return copy.deepcopy(module)


def shallow_copy_of_a_copy(module):
    return copy.copy(copy.deepcopy(module))


def pickled(module):
    return pickle.loads(pickle.dumps(module))


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def in_a_list(module):
    return copy.deepcopy({"models": [module]})["models"][0]


def averaged(module):
    return torch.optim.swa_utils.AveragedModel(module).module


def traced_by_fx(module):
    return torch.fx.symbolic_trace(copy.deepcopy(module))


WAYS = (deep_copy, shallow_copy_of_a_copy, pickled, saved_and_loaded, in_a_list, averaged, traced_by_fx)
CLASSES = (Plain, CopiesItself, SetsItsState)
