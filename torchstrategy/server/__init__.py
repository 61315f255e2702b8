"""The server of a worker or parameter server: ``ts.Server``."""

from torchstrategy.server.definition import ServerDef
from torchstrategy.server.server import Server

__all__ = ["Server", "ServerDef"]
