"""Run the notebooks of the documentation and store what their cells print; needs the package's extra "docs".

Without times and versions, so that a change of a notebook shows what it changed.
"""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

for path in sorted(Path(__file__).parent.rglob("tutorials/*.ipynb")):
    print(path)
    notebook = nbformat.read(path, as_version=4)
    folder = {"metadata": {"path": path.parent}}
    NotebookClient(notebook, record_timing=False, coalesce_streams=True, timeout=None, resources=folder).execute()
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, path)
