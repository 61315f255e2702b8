"""Run the notebooks of the documentation, or those named, and store what they print; needs the package's extra "docs".

Without times and versions, so that a change of a notebook shows what it changed.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

for path in map(Path, sys.argv[1:] or sorted(Path(__file__).parent.glob("tutorials/*.ipynb"))):
    print(path)
    notebook = nbformat.read(path, as_version=4)
    folder = {"metadata": {"path": path.parent}}
    NotebookClient(notebook, record_timing=False, coalesce_streams=True, timeout=None, resources=folder).execute()
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, path)
