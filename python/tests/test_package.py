"""Contents of ``ferry`` after ``import ferry`` in a new process."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys
import ferry

later = {"nn", "ops"}
assert not {f"ferry.{name}" for name in later} & set(sys.modules), "imported before it is used"
assert later | {"gating", "Group"} <= set(dir(ferry))
assert callable(ferry.nn.ExpertParallel) and callable(ferry.ops.route) and callable(ferry.gating.update_bias)
assert ferry.ops is sys.modules["ferry.ops"]
assert not hasattr(ferry, "absent")
from ferry import nn
assert nn is ferry.nn
"""


def test_submodules_are_imported_when_they_are_used() -> None:
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True, timeout=100)
