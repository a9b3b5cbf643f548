"""Warns of public headers and names, of C++ and of the Python packages, that no page of the reference shows."""

from __future__ import annotations

import ast
import pathlib
import re
import xml.etree.ElementTree
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

log = logging.getLogger(__name__)

# Headers that only include others, or define only a macro for declarations.
COLLECTIONS = {"ferry.h", "ferry.hpp", "export.hpp"}
SHOWN_FILE = re.compile(r"^```\{doxygenfile\} (\S+)$", re.MULTILINE)


def shown_headers(root: pathlib.Path) -> set[str]:
    shown: set[str] = set()
    for page in (root / "docs" / "reference").rglob("*.md"):
        for name in SHOWN_FILE.findall(page.read_text(encoding="utf-8")):
            if name in shown:
                log.warning("%s: another page shows %s already", page.relative_to(root), name)
            shown.add(name)
    return shown


def check_headers(app: Sphinx, env: BuildEnvironment) -> None:
    root = pathlib.Path(app.config.repository_root)
    shown = shown_headers(root)
    headers = {path.name for path in (root / "include" / "ferry").glob("*.h*") if path.suffix in (".h", ".hpp")}
    for name in sorted(headers - COLLECTIONS - shown):
        log.warning("include/ferry/%s: no page of docs/reference shows it", name)
    declared = {name for name, *_ in env.domains["cpp"].get_objects()}
    for path in pathlib.Path(app.config.breathe_projects["ferry"]).glob("namespaceferry*.xml"):
        for member in xml.etree.ElementTree.parse(path).iter("memberdef"):
            header = pathlib.PurePath(member.find("location").get("file")).name
            name = member.findtext("qualifiedname") or ""
            if header in shown and name not in declared:
                log.warning("%s of %s: its page does not show it", name, header)


def public_names(module: pathlib.Path) -> list[str]:
    """Value of ``__all__``."""
    for statement in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == ["__all__"]:
            return ast.literal_eval(statement.value)
    return []


def check_modules(app: Sphinx, env: BuildEnvironment) -> None:
    root = pathlib.Path(app.config.repository_root)
    shown = env.domains["py"].objects
    for module, file in app.config.public_modules.items():
        for name in public_names(root / file):
            # Packages offer names of their modules, too; one place is enough.
            is_shown = any(re.fullmatch(rf"{module.split('.')[0]}\.(\w+\.)?{name}", key) for key in shown)
            if not is_shown and not name.startswith("__"):
                log.warning("%s.%s: no page of docs/reference shows it", module, name)


def check(app: Sphinx, env: BuildEnvironment) -> None:
    check_headers(app, env)
    check_modules(app, env)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("public_modules", {}, "env")
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
