"""How the scripts of this folder run programs, and how they end."""

import json
import subprocess
import sys
from pathlib import Path

from hosts import Failure, Missing


def run_for_json(name, arguments, environment, timeout_s):
    """The JSON that a program prints. `name` is what errors call it."""
    try:
        ended = subprocess.run(
            [str(argument) for argument in arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as expired:
        raise Failure(f"{name}: still running after {timeout_s} s") from expired
    if ended.returncode != 0:
        raise Failure(f"{name} failed: {ended.stderr.strip() or ended.returncode}")
    return json.loads(ended.stdout)


def run_script(main):
    """What `main` raises for the user is the script's last line, and its exit status 1."""
    script = Path(sys.argv[0]).name
    try:
        main()
    except Missing as missing:
        sys.exit(f"{script}: this machine lacks {missing}")
    except Failure as failure:
        sys.exit(f"{script}: {failure}")
