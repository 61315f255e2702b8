"""The server of a worker or parameter server: ``ts.Server``."""

from torchstrategy.server.definition import ServerDef
from torchstrategy.server.server import Server
from torchstrategy.server.serving import serve_until_chief_ends

__all__ = ["Server", "ServerDef", "serve_until_chief_ends"]
