"""Links from pages to files of the source tree: to the page that a file is part of, else to a page with its text.

Links are relative to the page that has them, as every viewer of the repository reads them. A page that includes a file
of another folder takes that file's links along, so they are looked up from there, too.
"""

from __future__ import annotations

import html
import pathlib
import string
from collections.abc import Callable
from typing import Any

import pygments
import pygments.formatters
import pygments.lexers
import pygments.util
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

DOCUMENTS = "docs"  # the sources of Sphinx, from the root
FOLDER = "files"  # of the site, for pages of files
PARTS = {".cuh": ".cpp", ".cu": ".cpp", ".pyi": ".py"}


def page_of_file(path: str) -> str:
    return f"{FOLDER}/{path}"


def is_link(node: nodes.Node) -> bool:
    return isinstance(node, (addnodes.pending_xref, addnodes.download_reference)) and node.get("reftype") == "myst"


class RepositoryLinks(SphinxTransform):
    default_priority = 400

    def apply(self, **_: Any) -> None:
        for node in list(self.document.findall(is_link)):
            self.resolve(node)

    def resolve(self, node: nodes.Element) -> None:
        target, _, anchor = node["reftarget"].partition("#")
        if node["refdomain"] == "doc":  # MyST has found a Markdown file, and has taken its suffix away
            target, anchor = f"/{target}.md".replace("//", "/"), node["reftargetid"] or ""
        path = self.find(target)
        if path is None:
            return
        page = self.config.repository_pages.get(path)
        if page is None and path.startswith(f"{DOCUMENTS}/") and path.endswith(".md"):
            page = path.removeprefix(f"{DOCUMENTS}/").removesuffix(".md")
        if page is not None:
            is_anchored = bool(anchor) and page != "index"
            link = addnodes.pending_xref(
                refdomain="doc",
                reftype="myst",
                refdoc=self.env.docname,
                reftarget=page,
                reftargetid=anchor if is_anchored else None,
                refexplicit=True,
            )
        else:
            if not hasattr(self.env, "repository_files"):
                self.env.repository_files = set()
            self.env.repository_files.add(path)
            uri = self.app.builder.get_relative_uri(self.env.docname, page_of_file(path))
            link = nodes.reference("", "", internal=True, refuri=uri)
        link += node.children
        node.replace_self(link)

    @property
    def root(self) -> pathlib.Path:
        return pathlib.Path(self.config.repository_root)

    def find(self, target: str) -> str | None:
        """Path of a file or folder of the source tree, from its root."""
        if not target or "://" in target:
            return None
        places = [pathlib.Path(self.env.doc2path(self.env.docname)).parent, self.root / DOCUMENTS]
        places += [
            self.root / pathlib.Path(file).parent
            for file, page in self.config.repository_pages.items()
            if page == self.env.docname
        ]
        for place in places:
            path = (place / target).resolve()
            if path.exists() and path.is_relative_to(self.root):
                return str(path.relative_to(self.root))
        return None


def text_of(path: pathlib.Path, link: Callable[[pathlib.Path, str], str]) -> str:
    """HTML of a file, or of the list of a folder's files."""
    if path.is_dir():
        names = sorted(entry.name + "/" * entry.is_dir() for entry in path.iterdir() if not entry.name.startswith("."))
        items = (f"<li>{link(path / name, html.escape(name))}</li>" for name in names)
        return f"<ul>{''.join(items)}</ul>"
    try:
        lexer = pygments.lexers.get_lexer_for_filename(path.with_suffix(PARTS.get(path.suffix, path.suffix)).name)
    except pygments.util.ClassNotFound:
        lexer = pygments.lexers.TextLexer()
    return pygments.highlight(path.read_text(encoding="utf-8"), lexer, pygments.formatters.HtmlFormatter())


def write_pages(app: Sphinx, error: Exception | None) -> None:
    """Writes pages without the theme: it would work out the navigation anew for each, for half of the build's time."""
    if error is not None or app.builder.format != "html":
        return
    root = pathlib.Path(app.config.repository_root)
    files: set[str] = getattr(app.env, "repository_files", set())
    template = (pathlib.Path(__file__).parent / "file.html").read_text(encoding="utf-8")
    for name in files:
        page = page_of_file(name)

        def link(path: pathlib.Path, text: str, page: str = page) -> str:
            target = str(path.relative_to(root))
            if target not in files:
                return text
            return f'<a href="{app.builder.get_relative_uri(page, page_of_file(target))}">{text}</a>'

        output = pathlib.Path(app.outdir) / f"{page}.html"
        output.parent.mkdir(parents=True, exist_ok=True)
        text = string.Template(template).substitute(
            name=html.escape(name),
            site=html.escape(app.config.html_title),
            home=app.builder.get_relative_uri(page, "index"),
            style=app.builder.get_relative_uri(page, "_static/pygments").replace(".html", ".css"),
            text=text_of(root / name, link),
        )
        output.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("repository_root", "", "env")
    app.add_config_value("repository_pages", {}, "env")
    app.add_transform(RepositoryLinks)
    app.connect("build-finished", write_pages)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
