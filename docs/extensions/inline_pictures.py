"""SVG pictures become part of the page, so that their colours follow the theme, light or dark."""

from __future__ import annotations

import pathlib
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

FOLDER = "pictures/"


class InlinePictures(SphinxPostTransform):
    default_priority = 400
    formats = ("html",)

    def run(self, **_: Any) -> None:
        for image in list(self.document.findall(nodes.image)):
            uri = image["uri"]
            if uri.startswith(FOLDER) and uri.endswith(".svg"):
                svg = (pathlib.Path(self.env.srcdir) / uri).read_text(encoding="utf-8")
                image.replace_self(nodes.raw("", f'<div class="ferry-picture">{svg}</div>', format="html"))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_post_transform(InlinePictures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
