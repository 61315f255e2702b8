"""Run the notebooks of the documentation, or those named, and store what they print; needs the package's extra "docs".

Without times and versions, so that a change of a notebook shows what it changed.
"""

import importlib.util
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

found = sorted(Path(__file__).parent.glob("tutorials/*.ipynb"))
if importlib.util.find_spec("torch_xla") is None:  # which has an environment of its own: make notebook-tpu
    found = [path for path in found if path.stem != "tpu"]

for path in map(Path, sys.argv[1:] or found):
    print(path)
    notebook = nbformat.read(path, as_version=4)
    folder = {"metadata": {"path": path.parent}}
    NotebookClient(notebook, record_timing=False, coalesce_streams=True, timeout=None, resources=folder).execute()
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, path)
