"""The benchmarks are scripts beside the library: their folder is where Python finds what they share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "recipes" / "benchmarks"))
