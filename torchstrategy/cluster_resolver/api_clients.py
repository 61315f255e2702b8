"""Clients of clusters' interfaces, which only some resolvers need."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["import_optional", "make_service"]


def import_optional(module: str, extra: str, what: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: the module.
        extra: the extra of this package that installs it.
        what: what the caller needs it for, or instead of what.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"This resolver needs {what}: pip install 'torchstrategy[{extra}]'") from error


def make_service(api: str, credentials: Any, discovery_url: str | None = None) -> Any:
    """Return a client of one of Google's interfaces, version ``v1``.

    Args:
        api: its name, such as ``"compute"``.
        credentials: Google's credentials; ``"default"`` asks ``google.auth`` for them.
        discovery_url: where the client finds what the interface offers; ``None`` means Google's place.

    Raises:
        ImportError: the client's package is not installed.
    """
    discovery = import_optional("googleapiclient.discovery", "gce", "Google's API client, or the argument service")
    if credentials == "default":
        credentials, _ = import_optional("google.auth", "gce", "Google's API client").default()
    where = {} if discovery_url is None else {"discoveryServiceUrl": discovery_url}
    return discovery.build(api, "v1", credentials=credentials, **where)
