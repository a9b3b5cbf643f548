"""Declarations as breathe makes them, in the form in which pages show them.

Namespaces around the declarations of a header are left out, since each page would repeat them. Enums of C without a
name are shown and listed as "enum", not by the number that Doxygen gives them.
"""

from __future__ import annotations

from typing import Any

from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform


def is_namespace(description: addnodes.desc) -> bool:
    signature = description[0]
    return signature.astext().startswith("namespace ")


def leave_out(description: addnodes.desc) -> None:
    place = description.parent.index(description)
    description.parent[place : place + 1] = description[-1].children


def leave_out_number(signature: addnodes.desc_signature) -> None:
    signature["_toc_name"] = "enum"
    for name in list(signature.findall(addnodes.desc_name)):
        name.parent.remove(name)


class Declarations(SphinxTransform):
    default_priority = 400

    def apply(self, **_: Any) -> None:
        for signature in list(self.document.findall(addnodes.desc_signature)):
            if signature.get("_toc_name", "").startswith("@"):
                leave_out_number(signature)
        namespace = self.namespace()
        while namespace is not None:
            leave_out(namespace)
            namespace = self.namespace()

    def namespace(self) -> addnodes.desc | None:
        return next((node for node in self.document.findall(addnodes.desc) if is_namespace(node)), None)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_transform(Declarations)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
