"""The direction of imports, read from the syntax trees: those inside functions and for type checkers only as well."""

import ast
import collections
import functools
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "torchstrategy"

# A unit is a module or a package directly under torchstrategy/. It may import lower layers and itself, nothing else.
CORE = [
    {"errors", "patches", "base"},
    {"data", "xla"},
    {"collectives", "cluster_resolver"},
    {"replicas"},
    {"gradients", "losses", "regularizers", "optimizers"},
    {"strategies", "checkpoint", "metrics"},
    {"nn", "profiler", "summary"},
]
# Wings look down at the core and not at each other, but for those that stand here.
WINGS = {"fit": set(), "ps": set(), "tpu": set(), "estimator": {"fit", "ps"}}
LAYERS = [
    *CORE,
    set(WINGS),
    {"testing"},
    # Public names in tf's places, the command, and the package's own names.
    {
        "callbacks",
        "compat",
        "conf",
        "config",
        "coordinator",
        "experimental",
        "feature_column",
        "models",
        "train",
        "utils",
    }
    | {"cli", "__init__", "__main__"},
]
LAYER_OF = {unit: layer for layer, units in enumerate(LAYERS) for unit in units}
# The package's names and its command, which gather what the others of their layer define.
ROOTS = {"__init__", "__main__"}

# What the files of strategies/ have in common; no other one of them may be imported there.
SHARED = {"strategy", "replica_context", "replica_values", "extended"}

# Packages that only some files may import; everything else must not know them.
CONFINED = {
    "hydra": (),
    "omegaconf": (),
    "torchdata": (),
    "torch_xla": ("xla/torch_xla_runtime.py", "xla/kernels.py"),
    "torch.utils._pytree": ("base/tree.py",),
}

FILES = sorted([*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / PACKAGE).rglob("*.pyi")])  # which list public names


@functools.cache
def imports_of(source):
    """Return the import statements of a file, which stand among others and in no expression."""
    found, holders = [], [ast.parse(source)]
    for holder in holders:  # which grows meanwhile
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            inner = getattr(holder, name, ())
            holders += inner if isinstance(inner, list) else ()
        if isinstance(holder, (ast.Import, ast.ImportFrom)):
            found.append(holder)
    return found


def imported_modules(source, modules):
    """Yield (line, dotted name) for every import; of our own names, the module that they stand in."""
    for node in imports_of(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{prefix}.{alias.name}"
                yield node.lineno, full if full in modules or not is_ours(full) else prefix


def violations(source, path, modules):
    """Return what is wrong with the imports of the file ``path`` (relative to the package), one line for each."""
    unit = Path(path).parts[0].partition(".")[0]
    found = []
    for line, name in imported_modules(source, modules):
        problem = _outside_problem(name, path) if not is_ours(name) else _inside_problem(name, path, unit)
        if problem:
            found.append(f"{PACKAGE}/{path}:{line}: {problem}")
    return found


def is_ours(name):
    return name.startswith(".") or name.split(".")[0] == PACKAGE


def _outside_problem(name, path):
    for package, files in CONFINED.items():
        if (name == package or name.startswith(package + ".")) and path not in files:
            return f"imports {name}, which only {list(files) or 'recipes'} may"
    return None


def _inside_problem(name, path, unit):
    if name.startswith("."):
        return f"imports {name}: imports are absolute"
    parts = name.split(".")
    if len(parts) == 1:
        return None if unit in ROOTS else "imports torchstrategy itself, not the module that defines the name"
    other = parts[1]
    if other not in LAYER_OF:
        return f"imports {name}, which stands in no layer of this test"
    if unit == other == "strategies" and len(parts) > 2 and parts[2] not in SHARED:
        return f"imports {name}: a strategy never imports another strategy"
    if unit in WINGS and other in WINGS[unit]:
        return None
    if unit != other and LAYER_OF[other] >= LAYER_OF[unit] and unit not in ROOTS:
        return f"imports {name} of layer {LAYER_OF[other]} from layer {LAYER_OF[unit]}"
    return None


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(sources, modules):
    """Return which of our modules each one imports, by dotted name; the package root is left out."""
    ours = modules - {PACKAGE}
    graph = {}
    for module, source in sources.items():
        if module != PACKAGE:
            graph[module] = {name for _, name in imported_modules(source, modules) if name in ours}
    return graph


def find_cycle(graph):
    """Return the modules of one import cycle in order, or ``None``."""
    done, trail = set(), []

    def visit(module):
        if module in trail:
            return trail[trail.index(module) :]
        if module in done:
            return None
        trail.append(module)
        cycle = next(filter(None, map(visit, sorted(graph.get(module, ())))), None)
        trail.pop()
        done.add(module)
        return cycle

    return next(filter(None, map(visit, sorted(graph))), None)


MODULES = {module_name(path) for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / PACKAGE)))
def test_imports_point_downwards(path):
    relative = path.relative_to(ROOT / PACKAGE).as_posix()
    assert relative.split("/")[0].partition(".")[0] in LAYER_OF, "give the new module a layer in this test"
    assert violations(path.read_text(encoding="utf-8"), relative, MODULES) == []


@pytest.mark.end_to_end
def test_no_import_cycles():
    graph = collections.defaultdict(set)
    for path in FILES:  # a package has its stub's imports as well
        for module, imported in import_graph({module_name(path): path.read_text(encoding="utf-8")}, MODULES).items():
            graph[module] |= imported
    assert graph
    assert find_cycle(graph) is None


@pytest.mark.parametrize(
    ("path", "source", "problem"),
    [
        ("base/values.py", "from torchstrategy.strategies.strategy import Strategy", "of layer 5 from layer 0"),
        (
            "base/values.py",
            "def f():\n    import torchstrategy.strategies.mirrored_strategy",
            "of layer 5 from layer 0",
        ),
        ("data/base.py", "from torchstrategy.xla import graph", "of layer 1 from layer 1"),
        (
            "strategies/strategy.py",
            "def f():\n    from torchstrategy.ps.parameter_server_strategy import x",
            "of layer 7 from layer 5",
        ),
        ("fit/model.py", "from torchstrategy.ps.parameter_server_strategy import x", "of layer 7 from layer 7"),
        ("ps/server/server.py", "from torchstrategy.estimator.session_loop import x", "of layer 7 from layer 7"),
        ("strategies/one_device.py", "from torchstrategy.strategies.default import get_strategy", "another strategy"),
        ("nn.py", "from torchstrategy import get_strategy", "imports torchstrategy itself"),
        ("nn.py", "from . import tree", "absolute"),
        ("strategies/strategy.py", "import hydra.utils", "only recipes may"),
        ("base/values.py", "import torch.utils._pytree as pytree", "only ['base/tree.py'] may"),
        ("base/values.py", "from torch.utils._pytree import tree_map", "only ['base/tree.py'] may"),
        ("base/values.py", "from torch.utils import _pytree", "only ['base/tree.py'] may"),
        ("base/values.py", "from torchstrategy.helpers import thing", "no layer"),
        (
            "base/values.py",
            "if TYPE_CHECKING:\n    x = 1\nelse:\n    import torchstrategy.nn",
            "of layer 6 from layer 0",
        ),
        (
            "gradients/plan.py",
            "if TYPE_CHECKING:\n    from torchstrategy.strategies.strategy import Strategy",
            "of layer 5 from layer 4",
        ),
    ],
)
def test_checker_finds(path, source, problem):
    (found,) = violations(textwrap.dedent(source), path, MODULES)
    assert problem in found


def test_checker_accepts_lower_layers_and_own_package():
    source = """
        import torch
        from torchstrategy.base import tree
        from torchstrategy.collectives.base import Collective

        if TYPE_CHECKING:
            from torchstrategy.base.context import Frame
        """
    assert (
        violations(textwrap.dedent(source), "collectives/in_process.py", MODULES | {"torchstrategy.collectives.base"})
        == []
    )


def test_checker_lets_the_estimator_use_two_wings():
    for module in ("fit.model", "ps.client"):
        assert violations(f"from torchstrategy.{module} import x", "estimator/session_loop.py", MODULES) == []
    assert violations("from torchstrategy.tpu.region import x", "estimator/session_loop.py", MODULES)


def test_cycle_is_found():
    modules = {"torchstrategy.data.a", "torchstrategy.data.b", "torchstrategy.data.c"}
    sources = {
        "torchstrategy.data.a": "from torchstrategy.data import b",
        "torchstrategy.data.b": "def f():\n    from torchstrategy.data.c import g",
        "torchstrategy.data.c": "if TYPE_CHECKING:\n    import torchstrategy.data.a",
    }
    assert find_cycle(import_graph(sources, modules)) == sorted(modules)
