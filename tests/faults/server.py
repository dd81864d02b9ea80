"""The process that trials are forked from: it has imported everything, and knows the tests' tiny networks.

It reads one JSON object a line (words, folder, fault) and answers with the exit code, the number of calls
that a fault could have hit, and what the command said.
"""

import ctypes
import json
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny  # noqa: F401 - registers the networks
from cofima.cli.main import main

SHIM = ctypes.CDLL(None)
SHIM.fault_count.restype = ctypes.c_long


def trial(order: dict[str, Any]) -> dict[str, Any]:
    """Fork a process that does what the command line says, with a fault."""
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as counted:
        child = os.fork()
        if not child:
            run(order, said.fileno(), counted.fileno())
        _, status = os.waitpid(child, 0)
        said.seek(0)
        counted.seek(0)
        code = os.waitstatus_to_exitcode(status)
        return {"code": code, "count": int(counted.read() or 0), "said": said.read()}


def run(order: dict[str, Any], said: int, counted: int) -> None:
    """Be the process of a trial."""
    code = 0
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.chdir(order["folder"])
    os.environ.update(order["environment"])
    signal.alarm(120)
    words, fault = order["words"], order["fault"]
    sys.argv = ["cofima", *words]
    SHIM.fault_arm(os.fsencode(order["folder"]), fault["how"], fault["at"], fault["error"], fault["reads"])
    try:
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(counted, str(SHIM.fault_count()).encode())
    os._exit(code)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what is printed by accident is not an answer
    print("ready", file=answers)
    for line in sys.stdin:
        print(json.dumps(trial(json.loads(line))), file=answers)
