"""Settings of Sphinx. scripts/docs.sh runs it, after Doxygen has read the public headers (docs/Doxyfile)."""

import fnmatch
import pathlib
import sys
import typing

from sphinx.application import Sphinx
from sphinx.ext.autodoc.mock import _MockObject

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "docs" / "extensions"), str(ROOT / "python"), str(ROOT / "python" / "deep_ep")]

project = "Ferry"
author = "the authors of Ferry"
project_copyright = author
release = version = (ROOT / "VERSION").read_text(encoding="utf-8").strip()

extensions = [
    "myst_parser",
    "breathe",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "declarations",
    "docstrings",
    "inline_pictures",
    "public_names",
    "repository_files",
]
exclude_patterns = ["extensions"]
smartquotes = False  # values such as "auto" and options such as --ranks are to be copied

# Markdown
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]

# C and C++
breathe_projects = {"ferry": str(ROOT / "build" / "docs" / "doxygen" / "xml")}
breathe_default_project = "ferry"
breathe_domain_by_extension = {"h": "c", "hpp": "cpp", "cuh": "cpp"}
breathe_default_members = ("members", "undoc-members")
breathe_show_include = False
breathe_show_define_initializer = True
breathe_show_enumvalue_initializer = True
# The page of each header declares its namespaces anew, and the extension declarations takes them off the pages again.
suppress_warnings = ["duplicate_declaration.cpp"]
cpp_id_attributes = ["FERRY_API", "FERRY_HOST_DEVICE", "FERRY_DEVICE", "__device__"]
c_id_attributes = ["FERRY_C_API"]

# Python: the packages are read without their extension modules and without torch and JAX, so nothing is compiled.
autodoc_mock_imports = ["torch", "numpy", "jax", "ferry._native", "ferry._deep_ep"]
# Annotations are evaluated, where `torch.Tensor | None` has to work for stand-ins too.
_MockObject.__or__ = lambda self, other: typing.Union[self, other]  # noqa: UP007
_MockObject.__ror__ = lambda self, other: typing.Union[other, self]  # noqa: UP007
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": True}
python_use_unqualified_type_names = True
public_modules = {
    "ferry": "python/ferry/__init__.py",
    "ferry.gating": "python/ferry/gating.py",
    "ferry.nn": "python/ferry/nn.py",
    "ferry.ops": "python/ferry/ops.py",
    "ferry.jax": "python/ferry/jax.py",
    "deep_ep": "python/deep_ep/deep_ep/__init__.py",
}

# Files of the source tree that are pages of the site, and links from pages to all other files.
repository_root = str(ROOT)
repository_pages = {
    "README.md": "index",
    "CONTRIBUTING.md": "developers/contributing",
    "CHANGELOG.md": "reference/changes",
    "tests/emulated_gpus/README.md": "developers/emulated-gpus",
    "tests/fuzz/README.md": "developers/fuzz",
    "tests/ucx_card/README.md": "developers/ucx-card",
}

# HTML
html_theme = "furo"
html_title = f"Ferry {release}"
html_static_path = ["static"]
html_css_files = ["ferry.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
maximum_signature_line_length = 100
pygments_style = "friendly"
pygments_dark_style = "monokai"


def leave_out_absent_pages(app: Sphinx, name: str, text: list[str]) -> None:
    """Entries of the navigation that end with * are for pages that need not exist."""
    if name == "index":
        pages = app.project.docnames
        text[0] = "\n".join(
            line for line in text[0].splitlines() if not line.endswith("*") or fnmatch.filter(pages, line)
        )


def setup(app: Sphinx) -> None:
    app.connect("source-read", leave_out_absent_pages)
