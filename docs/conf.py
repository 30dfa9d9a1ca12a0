"""How Sphinx builds these pages, and the reference that it takes out of the code: `make docs`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parent))

from reference import for_sphinx, signature_of, write_reference

from stream2llm_sdk import __version__

project = "stream2llm-sdk"
release = version = __version__
copyright = "the authors of stream2llm-sdk, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["*.py"]

myst_heading_anchors = 3


default_role = "code"  # docstrings write `names` as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
autodoc_inherit_docstrings = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]  # a list, and not the members once more
python_display_short_literal_types = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 100

html_theme = "furo"  # with the system's fonts: nothing is fetched when a page is read
html_title = f"stream2llm-sdk {__version__}"
html_copy_source = False
html_show_sphinx = False


def setup(app: Any) -> None:
    """What Sphinx calls first."""
    write_reference(Path(app.srcdir))
    app.connect("autodoc-process-docstring", for_sphinx, priority=100)  # before Napoleon reads the sections
    app.connect("autodoc-process-signature", signature_of)
