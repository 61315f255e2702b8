"""Configuration of Sphinx: Markdown pages, notebooks with stored outputs, and API pages made from the docstrings."""

import importlib.metadata

project = "torchstrategy"
author = "The torchstrategy authors"
version = release = importlib.metadata.version("torchstrategy")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["_build"]

nb_execution_mode = "off"  # docs/execute_notebooks.py stores what the cells print

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "torchstrategy"
