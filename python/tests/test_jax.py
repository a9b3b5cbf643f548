"""The example in JAX, which uses libferry through its C interface and not this package."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# The build of scripts/test.sh, made before it tests Python.
LIBRARY = ROOT / "build" / "release" / "src" / "libferry.so"


@pytest.mark.skipif(not LIBRARY.exists(), reason=f"needs {LIBRARY} (scripts/test.sh release)")
def test_layer_in_jax() -> None:
    pytest.importorskip("jax", reason="needs JAX (python/requirements-jax.txt)")
    folder = LIBRARY.parent
    flags = f"-I{ROOT}/include -L{folder} -lferry -Wl,-rpath,{folder}"
    end = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "17_jax.py")],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "FERRY_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    assert end.returncode == 0, end.stderr
    assert end.stdout.count("largest difference") == 2
