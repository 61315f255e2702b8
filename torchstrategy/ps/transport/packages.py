"""The packages of the extra ``ps``, for all that needs them: the library is importable without."""

from __future__ import annotations

from typing import Any

__all__ = ["cloudpickle", "require", "z85", "zmq"]

zmq: Any
z85: Any
cloudpickle: Any
try:
    import zmq
    from zmq.utils import z85
except ImportError:  # pragma: no cover - depends on what is installed
    zmq = z85 = None
try:
    import cloudpickle  # type: ignore[no-redef]
except ImportError:  # pragma: no cover - depends on what is installed
    cloudpickle = None


def require() -> None:
    """Check that the optional packages are there.

    Raises:
        ImportError: one is missing, or this pyzmq can't encrypt.
    """
    missing = [name for name, module in (("pyzmq", zmq), ("cloudpickle", cloudpickle)) if module is None]
    if missing:
        raise ImportError(
            f"Parameter servers need {' and '.join(missing)}, which can't be imported here: "
            "pip install 'torchstrategy[ps]'"
        )
    if not zmq.has("curve"):
        raise ImportError(
            "This build of pyzmq has no CURVE encryption, without which no connection is made. Install one that has "
            "it: pip install --force-reinstall 'pyzmq>=26'"
        )
