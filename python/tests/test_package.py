"""What ``import ferry`` gives, in a process that has imported nothing else of it."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys
import ferry

later = {"bench", "nn", "ops"}
assert not {f"ferry.{name}" for name in later} & set(sys.modules), "imported before it is used"
assert later | {"gating", "Group"} <= set(dir(ferry))
assert callable(ferry.nn.ExpertParallel) and callable(ferry.ops.route) and callable(ferry.gating.update_bias)
assert ferry.bench is sys.modules["ferry.bench"]
assert not hasattr(ferry, "absent")
from ferry import nn
assert nn is ferry.nn
"""


def test_submodules_are_imported_when_they_are_used() -> None:
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True, timeout=100)
