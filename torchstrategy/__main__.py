"""``python -m torchstrategy``: the ``torchstrategy`` command."""

import sys

from torchstrategy.cli import main

if __name__ == "__main__":
    sys.exit(main())
