"""The server of a worker or parameter server: ``ts.Server``."""

from torchstrategy.ps.server.definition import ServerDef
from torchstrategy.ps.server.server import Server, serve_until_chief_ends

__all__ = ["Server", "ServerDef", "serve_until_chief_ends"]
