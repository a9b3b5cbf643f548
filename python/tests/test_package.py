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


def import_error(prelude: str) -> str:
    """Last line of what an import of ferry prints after ``prelude`` in a new process, where it fails."""
    end = subprocess.run(
        [sys.executable, "-c", f"{prelude}; import ferry"], capture_output=True, text=True, timeout=100
    )
    assert end.returncode == 1, end.stderr
    return end.stderr.splitlines()[-1]


def test_import_says_which_torch_is_needed() -> None:
    without = import_error("import sys; sys.modules['torch'] = None")
    assert without.startswith("ModuleNotFoundError: ferry needs torch 2.10 or newer, and there is none")
    too_old = import_error("import torch; del torch.Tensor.__dlpack_c_exchange_api__; torch.__version__ = '2.9.1'")
    assert too_old == "ImportError: ferry needs torch 2.10 or newer, and this is torch 2.9.1; install a newer one"
