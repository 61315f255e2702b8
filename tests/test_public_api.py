"""The public names and their signatures are those of public_api.txt, so that the surface can't change unnoticed.

After an intended change, write the new list with ``python tests/test_public_api.py`` and review its diff.
"""

import ast
import enum
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchstrategy

PUBLIC_API = Path(__file__).with_name("public_api.txt")
DOCS_API = Path(__file__).parents[1] / "docs" / "api"

MODULES = [
    "torchstrategy",
    "torchstrategy.callbacks",
    "torchstrategy.cluster_resolver",
    "torchstrategy.compat.v1.distribute",
    "torchstrategy.compat.v1.distribute.experimental",
    "torchstrategy.compat.v1.train",
    "torchstrategy.config",
    "torchstrategy.coordinator",
    "torchstrategy.data",
    "torchstrategy.data.experimental",
    "torchstrategy.data.readers",
    "torchstrategy.errors",
    "torchstrategy.estimator",
    "torchstrategy.estimator.experimental",
    "torchstrategy.estimator.export",
    "torchstrategy.experimental",
    "torchstrategy.experimental.partitioners",
    "torchstrategy.feature_column",
    "torchstrategy.losses",
    "torchstrategy.metrics",
    "torchstrategy.models",
    "torchstrategy.nn",
    "torchstrategy.optimizers",
    "torchstrategy.profiler",
    "torchstrategy.regularizers",
    "torchstrategy.summary",
    "torchstrategy.testing",
    "torchstrategy.tpu.experimental",
    "torchstrategy.train",
    "torchstrategy.utils",
]


def describe_api():
    """Return one line for each public name: its signature, or what else it is."""
    lines = []
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in sorted(module.__all__):
            lines += _describe(module_name, name, getattr(module, name))
    return lines


def _describe(module_name, name, value):
    full = f"{module_name}.{name}"
    if inspect.ismodule(value):
        return [f"{full}: module"]
    if inspect.isclass(value):
        return [f"{full}{_bases(value)}", *_members(full, value)]
    if callable(value):
        return [full + _signature(value)]
    return [f"{full}: {type(value).__name__}"]


def _bases(cls):
    if issubclass(cls, enum.Enum):
        return ": " + " | ".join(cls.__members__)
    if issubclass(cls, BaseException):
        return ": " + ", ".join(base.__name__ for base in cls.__mro__[1:] if base not in (object, BaseException))
    return _signature(cls)


def _members(full, cls):
    names = {name for base in cls.__mro__ if base is cls or _is_private(base) for name in vars(base)}
    for name in sorted(names):
        if name.startswith("_") or name in getattr(cls, "__members__", ()):
            continue
        member = inspect.getattr_static(cls, name)
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if inspect.isfunction(function):
            kind = f" [{type(member).__name__}]" if function is not member else ""
            yield f"{full}.{name}{_signature(function)}{kind}"
        else:
            yield f"{full}.{name}: {'property' if isinstance(member, property) else 'attribute'}"


def _is_private(cls):
    """Say whether a base class is ours and not public itself: its members are then listed with the subclass."""
    if cls.__module__.split(".")[0] != "torchstrategy":
        return False
    return all(getattr(importlib.import_module(module), cls.__name__, None) is not cls for module in MODULES)


def _signature(function):
    """Return the parameters without their types, which Python versions print differently."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    text = re.sub(r"<(\w+\.\w+): [^>]+>", r"\1", text)  # enum members
    return re.sub(r"<([^<>]+?)(?: of type object)? at 0x\w+>", r"<\1>", text)  # functions and sentinels


def test_public_names_and_signatures():
    expected = PUBLIC_API.read_text(encoding="utf-8").splitlines()
    actual = describe_api()
    gone, new = sorted(set(expected) - set(actual)), sorted(set(actual) - set(expected))
    assert (gone, new) == ([], []), "if intended: run `python tests/test_public_api.py` and review the diff"
    assert actual == expected


@pytest.mark.parametrize("name", MODULES)
def test_all_is_complete(name):
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    strangers = {n for n, value in vars(module).items() if not n.startswith("_") and not inspect.ismodule(value)}
    assert strangers - set(module.__all__) - {"annotations"} - _imported_for_use(module) == set()


def _imported_for_use(module):
    """Return the names that a module with code of its own imports; a module of re-exports has none."""
    source = inspect.getsource(module)
    if re.search(r"^(def|class) ", source, re.MULTILINE) is None:
        return set()
    return {n for n, value in vars(module).items() if getattr(value, "__module__", None) != module.__name__}


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_documented(name):
    module = importlib.import_module(name)
    undocumented = [
        n for n in module.__all__ if callable(value := getattr(module, n)) and not (value.__doc__ or "").strip()
    ]
    assert undocumented == []


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_on_an_api_page(name):
    pages = "\n".join(page.read_text(encoding="utf-8") for page in DOCS_API.glob("*.md"))
    assert re.search(rf"automodule:: {re.escape(name)}$", pages, re.MULTILINE)
    module = importlib.import_module(name)
    # Names that are imported when used: with `:members:` autodoc lists what `dir` tells, else the page has each.
    lists_members = re.search(rf"automodule:: {re.escape(name)}\n(?: +:.*\n)* +:members:", pages)
    is_lazy = "__dir__" in vars(module)
    names = [n for n in module.__all__ if not inspect.ismodule(getattr(module, n))]
    alone = [n for n in names if (is_lazy and not lists_members) or n not in dir(module)]
    assert [n for n in alone if not re.search(rf"auto\w+:: {re.escape(name)}\.{n}$", pages, re.MULTILINE)] == []


def test_what_a_property_is_has_no_colon():
    """The documentation takes what stands before a colon for the property's type."""
    for path in (Path(torchstrategy.__file__).parent).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        has_some = re.search(r"^ *@.*property", text, re.MULTILINE)
        for node in ast.walk(ast.parse(text)) if has_some else ():
            decorators = [ast.unparse(decorator) for decorator in getattr(node, "decorator_list", [])]
            if any("property" in decorator for decorator in decorators) and not node.name.startswith("_"):
                assert ": " not in (ast.get_docstring(node) or "").partition("\n")[0], f"{path}: {node.name}"


@pytest.mark.slow
def test_every_public_name_is_completed():
    program = f"""
import importlib
for name in {MODULES}:
    module = importlib.import_module(name)
    print(sorted(set(module.__all__) - set(dir(module))))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert set(done.stdout.splitlines()) == {"[]"}


@pytest.mark.end_to_end
def test_what_a_program_does_not_use_is_not_imported():
    program = """
import sys, torchstrategy as ts
print(sorted(set(vars(ts)) & set(ts.__all__)))  # a compiler can't find a name that is not there yet
strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
list(strategy.experimental_distribute_dataset([1.0, 2.0], batch_size=2))
print([name for name in ("torchdata", "encodings.idna", "torchstrategy.replicas.host_memory") if name in sys.modules])
print(sorted(name for name in sys.modules if name.startswith("torchstrategy.") and name.count(".") == 1))
print("Model" in dir(ts), ts.Model.__name__, "torchstrategy.fit" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    at_once, not_needed, imported, later = done.stdout.strip().splitlines()
    needed = {"compute_average_loss", "get_replica_context", "nn", "MirroredStrategy", "ReduceOp"}
    assert needed <= set(ast.literal_eval(at_once))
    assert not_needed == "[]"
    heavy = {
        "fit",
        "callbacks",
        "estimator",
        "ps",
        "tpu",
        "coordinator",
        "checkpoint",
        "testing",
        "xla",
    }
    assert not {f"torchstrategy.{name}" for name in heavy} & set(ast.literal_eval(imported))
    assert later == "True Model True"


@pytest.mark.parametrize("module", [torchstrategy, torchstrategy.data, torchstrategy.cluster_resolver])
def test_a_name_that_is_not_there(module):
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'Modell'"):
        module.Modell  # noqa: B018


if __name__ == "__main__":
    PUBLIC_API.write_text("\n".join(describe_api()) + "\n", encoding="utf-8")
