"""A strategy and its parameter client without servers: variables are tensors here, updated by plain optimizers."""

import copy
from collections import defaultdict

import cloudpickle
import torch

from torchstrategy.base.devices import Placement
from torchstrategy.cluster_resolver import ClusterSpec
from torchstrategy.ps.parameter_server_strategy import ParameterServerStrategy
from torchstrategy.strategies.strategy import Strategy


class MemoryClient:
    """What ``ParameterClient`` is to its users; ``log`` notes what was asked."""

    def __init__(self):
        self.values = {}
        self.versions = {}
        self.optimizers = {}
        self.log = []

    def create(self, spec, value):
        self.values[spec.id] = value.clone()
        self.versions[spec.id] = 0

    def pull(self, specs, known):
        self.log.append(("pull", [spec.id for spec in specs]))
        changed = [spec.id for spec in specs if known.get(spec.id) != (self.versions[spec.id],)]
        return {k: ((self.versions[k],), self.values[k].clone()) for k in changed}

    def pull_rows(self, spec, indices):
        self.log.append(("pull_rows", indices.tolist()))
        return self.values[spec.id][indices].clone()

    def update(self, spec, method, value):
        self.update_many([(spec, method, value)])

    def update_many(self, changes):
        for spec, method, value in changes:
            self.log.append((method, spec.id))
            own = self.values[spec.id]
            with torch.no_grad():
                {"assign": own.copy_, "assign_add": own.add_, "assign_sub": own.sub_}[method](value)
            self.versions[spec.id] += 1

    def read_into(self, spec, out):
        out.copy_(self.values[spec.id].detach())

    def write_from(self, spec, value):
        self.update(spec, "assign", value)

    def scatter(self, spec, method, indices, values):
        assert method == "scatter_add"
        self.values[spec.id].index_add_(0, indices, values)
        self.versions[spec.id] += 1

    def define_optimizer(self, optimizer_id, definition, specs):
        parts = cloudpickle.loads(definition)
        for spec in specs:
            self.values[spec.id] = torch.nn.Parameter(self.values[spec.id])
        groups = [{**group, "params": [self.values[k] for k in group["params"]]} for group in parts["groups"]]
        self.optimizers[optimizer_id] = parts["class"].__new__(parts["class"])
        state = {"defaults": parts["defaults"], "state": defaultdict(dict), "param_groups": groups}
        self.optimizers[optimizer_id].__setstate__(state)

    def set_hyper(self, optimizer_id, groups):
        for own, new in zip(self.optimizers[optimizer_id].param_groups, groups, strict=True):
            own.update(new)

    def push(self, optimizer_id, gradients, hyper=None):
        self.log.append(("push", sorted(gradients)))
        with torch.no_grad():
            if hyper is not None:
                self.set_hyper(optimizer_id, hyper)
            for k, gradient in gradients.items():
                self.values[k].grad = gradient
                self.versions[k] += 1
            self.optimizers[optimizer_id].step()
            for k in gradients:
                self.values[k].grad = None

    def optimizer_state(self, optimizer_id, spec):
        return dict(self.optimizers[optimizer_id].state.get(self.values[spec.id], {}))

    def load_optimizer_state(self, optimizer_id, spec, state):
        self.optimizers[optimizer_id].state[self.values[spec.id]] = copy.deepcopy(state)


class MemoryStrategy(ParameterServerStrategy):
    """A coordinator's strategy without a cluster."""

    def __init__(self, partitioner=None):
        Strategy.__init__(self, Placement(1, 0, (torch.device("cpu", 0),)))
        self.cluster_spec = ClusterSpec({"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2", "127.0.0.1:3"]})
        self._serve_with(MemoryClient(), partitioner, by_size=False)
