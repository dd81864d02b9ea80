"""The process that trials are forked from: it has imported everything, and knows the tests' tiny networks.

It reads one JSON object a line (words, folder, fault) and answers with the exit code, the number of calls
that a fault could have hit, those by which a generation came into force, and what the command said.
"""

import ctypes
import gc
import hashlib
import importlib
import json
import multiprocessing
import os
import pkgutil
import signal
import sys
import tempfile
import traceback
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import typer

import cofima
import tiny  # noqa: F401 - registers the networks
from cofima.cli.main import app, main
from cofima.experiment.grid.executors import local
from cofima.training.checkpoint import Budget

SHIM = ctypes.CDLL(None)
SHIM.fault_count.restype = SHIM.fault_mark.restype = ctypes.c_long
SHIM.fault_mark.argtypes = [ctypes.c_long]
BECOME_PARENT_OF_ORPHANS, DIE_WITH_PARENT = 36, 1  # of prctl
SECONDS = 120  # of a trial, at most


def import_everything() -> None:
    """Import and make all that a trial would have to; what is not installed stays away."""
    for module in pkgutil.walk_packages(cofima.__path__, "cofima."):
        if not module.name.startswith(("cofima.integrations", "cofima.classifier.web", "cofima.__main__")):
            with suppress(ImportError):
                importlib.import_module(module.name)
    commands = typer.main.get_command(app)  # made of the functions' signatures, which takes longest of all
    typer.main.get_command = lambda _: commands
    gc.collect()
    gc.freeze()  # the memory stays shared with forked processes


def trial(order: dict[str, Any]) -> dict[str, Any]:
    """Fork a process that does what the command line says, with a fault; wait for all that it started."""
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as counted:
        child = os.fork()
        if not child:
            run(order, said.fileno(), counted.fileno())
        _, status = os.waitpid(child, 0)
        with suppress(ChildProcessError):
            while True:
                os.wait()
        said.seek(0)
        counted.seek(0)
        found = json.loads(counted.read() or '{"count": 0, "marks": [], "imported": []}')
        for name in found.pop("imported"):  # so that the next trial need not
            with suppress(Exception):
                importlib.import_module(name)
        return found | {"code": os.waitstatus_to_exitcode(status), "said": said.read()}


def publish(file: Path) -> str:
    """Serve a folder on the web, and let a file in it be the dataset's published one; return the address.

    The web server is a process of its own, which faults do not hit; it ends with the trial.
    """
    from cofima.data import download, sources

    download.PAUSE = 0.0
    module, digest = sources._module("cifar100"), hashlib.sha256(file.read_bytes()).hexdigest()
    plan = module.INFO.download
    known = replace(plan.files[0], digest=f"sha256:{digest}", size=file.stat().st_size)
    module.INFO = replace(module.INFO, download=replace(plan, files=(known,)))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(file.parent)))
    if not os.fork():
        SHIM.prctl(DIE_WITH_PARENT, signal.SIGKILL)
        server.serve_forever()
    server.socket.close()
    return f"http://127.0.0.1:{server.server_port}"


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def run(order: dict[str, Any], said: int, counted: int) -> None:
    """Be the process of a trial."""
    code = 0
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.chdir(order["folder"])
    os.environ.update(order["environment"])
    signal.alarm(SECONDS)
    local.worker_context = lambda: multiprocessing.get_context("fork")  # workers that import nothing anew
    if order["checkpoints"]:
        Budget.due = lambda self: True
    words, fault = order["words"], order["fault"]
    if order["published"]:
        words = [*words, "--from", publish(Path(order["published"]))]
    sys.argv = ["cofima", *words]
    root = os.fsencode(Path(order["folder"]) / fault["below"])
    before = set(sys.modules)
    SHIM.fault_arm(root, fault["how"], fault["at"], fault["error"], fault["reads"])
    try:
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    found: dict[str, Any] = {"count": SHIM.fault_count(), "imported": [*{*sys.modules} - before]}
    found["marks"] = [mark for number in range(64) if (mark := SHIM.fault_mark(number))]
    os.write(counted, json.dumps(found).encode())
    os._exit(code)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what is printed by accident is not an answer
    SHIM.prctl(BECOME_PARENT_OF_ORPHANS, 1)
    import_everything()
    print("ready", file=answers)
    for line in sys.stdin:
        print(json.dumps(trial(json.loads(line))), file=answers)
