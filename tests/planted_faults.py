"""Plant faults in a copy of the code, one after the other: the ordinary tests must catch each of them.

Run it by hand, after a change to the tests: ``python tests/planted_faults.py [WORD ...]`` takes the faults
whose names contain one of the words, or all. It ends with code 1 if a fault is not caught, if its text is no
longer in the code, or if a test fails with nothing planted.
"""

import functools
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, NoReturn

sys.path.remove(str(Path(__file__).parent))  # the tests of the copy have modules of the same names
sys.dont_write_bytecode = True  # two faults within a second look the same to the files that it would write
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

import pytest  # noqa: E402
import timm  # noqa: E402, F401 - and torch, which take seconds to import

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "pyproject.toml")


class Fault(NamedTuple):
    """A text of a file of ``src/cofima``, what stands there instead, and the tests that should tell."""

    name: str
    file: str
    old: str
    new: str
    tests: str


FAULTS = (
    Fault(
        "averaging: old and new weights are swapped",
        "weights/average.py",
        "lambda a, b, to, key, at: torch.lerp(a, b, lam, out=to)",
        "lambda a, b, to, key, at: torch.lerp(b, a, lam, out=to)",
        "tests/weights/test_average.py",
    ),
    Fault(
        "averaging: the ratio of the Fishers is upside down",
        "weights/average.py",
        "torch.div(f_old, f_new, out=out)",
        "torch.div(f_new, f_old, out=out)",
        "tests/weights/test_average.py",
    ),
    Fault(
        "averaging: CoFiMA keeps the Fisher of the trained weights instead of the merged ones",
        "methods/cofima.py",
        'elif task.index == 0 or self.variant == "authors":',
        "elif True:",
        "tests/methods/test_cofima.py",
    ),
    Fault(
        "Fisher: the mean counts a sample too many",
        "weights/fisher/diagonal.py",
        "total.div_(self.count)",
        "total.div_(self.count + 1)",
        "tests/weights/test_fisher.py",
    ),
    Fault(
        "Fisher: every small batch is computed one by one, not only the first",
        "weights/fisher/diagonal.py",
        "(FEW if self.count == 0 else 1)",
        "FEW",
        "tests/weights/test_fisher_few.py",
    ),
    Fault(
        "layers: features of a pass that failed stay",
        "models/layers.py",
        'may have left."""\n        self.pooled = []',
        'may have left."""',
        "tests/models/test_layers.py",
    ),
    Fault(
        "alignment: norms are summed over tasks, not averaged",
        "methods/components/alignment.py",
        "norms.mean(1, keepdim=True) + 1e-7",
        "norms.sum(1, keepdim=True) + 1e-7",
        "tests/methods/components/test_alignment.py",
    ),
    Fault(
        "store: a generation that failed stays",
        "store/model_folder.py",
        "            _withdraw(folder, folder / name)\n            raise",
        "            raise",
        "tests/store/test_model_folder.py",
    ),
    Fault(
        "store: a file is not compared with its hash",
        "store/generation.py",
        "!= self.record.files[name]:",
        '== "":',
        "tests/store/test_model.py tests/store/test_model_folder.py",
    ),
    Fault(
        "split: it does not depend on the seed",
        "data/splits.py",
        'f"{seed}/{key}"',
        'f"{key}"',
        "tests/data/test_stream.py tests/data/test_regression.py",
    ),
    Fault(
        "resume: augmentation begins anew in the middle of an epoch",
        "training/checkpoint.py",
        '            augment.set_state(self.resumed["augment"])\n',
        "",
        "tests/training/test_checkpoint.py",
    ),
    Fault(
        "resume: the state of a method is not restored",
        "store/model.py",
        "    model.method.restore(state)\n",
        "",
        "tests/methods/test_contract.py -k 'resume_equals and cofima'",
    ),
    Fault(
        "same seed, same bits: batches are drawn by the global generator",
        "training/loop.py",
        "torch.randperm(count, generator=generator)",
        "torch.randperm(count)",
        "tests/methods/test_contract.py -k 'resume_equals and seq_ft'",
    ),
    Fault(
        "several processes: shards of unequal size count the same",
        "core/distributed.py",
        "return (self.stop - self.start) * world_size() / self.whole if self.shared else 1.0",
        "return 1.0",
        "tests/experiment/test_several_processes.py",
    ),
    Fault(
        "state: the row of another class is removed",
        "methods/state.py",
        "value = drop_row(value, label, entry.dim)",
        "value = drop_row(value, 0, entry.dim)",
        "tests/methods/test_state.py tests/methods/test_plugin_state.py",
    ),
    Fault(
        "lock: two may hold it",
        "core/lock.py",
        "return lock_descriptor(handle, blocking=False)",
        "return lock_descriptor(handle, blocking=False) or True",
        "tests/core/test_lock.py",
    ),
    Fault(
        "CLI: a user's mistake ends with code 1",
        "cli/main.py",
        "complain(error)\n        sys.exit(2)",
        "complain(error)\n        sys.exit(1)",
        "tests/cli",
    ),
    Fault(
        "CLI: a path that cannot be read ends with a traceback",
        "cli/main.py",
        "except OSError as error:",
        "except ZeroDivisionError as error:",
        "tests/cli",
    ),
    Fault(
        "metrics: forgetting counts the last task among the best",
        "report/metrics.py",
        "for t in range(j, final))",
        "for t in range(j, final + 1))",
        "tests/report/test_metrics.py",
    ),
    Fault(
        "calibration: images count the same, not classes",
        "classifier/calibrate.py",
        "return (weights * each).sum()",
        "return each.sum()",
        "tests/classifier/test_predict.py tests/classifier/test_stages.py tests/classifier/test_pool.py",
    ),
    Fault(
        "forgetting check: a gain is a loss",
        "classifier/forgetting_check.py",
        "return self.before.mean_of_classes - self.after.mean_of_classes",
        "return self.after.mean_of_classes - self.before.mean_of_classes",
        "tests/classifier/test_forgetting_check.py tests/classifier/test_extend.py",
    ),
    Fault(
        "batch normalization: an average keeps the statistics of before",
        "methods/components/averaging.py",
        "    if stale:\n",
        "    if False:\n",
        "tests/methods/test_regression.py -k 'wise_ft and batch'",
    ),
    Fault(
        "batch normalization: a task vector keeps the statistics of training",
        "methods/opcm.py",
        "if task.index > 0 and statistics_moved(self.start, trained):",
        "if False:",
        "tests/methods/test_regression.py -k 'opcm and batch'",
    ),
    Fault(
        "training: a loss that is not a number goes on",
        "training/loop.py",
        "    if len(bad):\n        step",
        "    if False:\n        step",
        "tests/experiment/test_launch.py -k diverged",
    ),
    Fault(
        "start: settings cannot be read without torch",
        "data/options.py",
        "from pathlib import Path\nfrom typing import Annotated, Literal\n",
        "import torch\nfrom pathlib import Path\nfrom typing import Annotated, Literal\n",
        "tests/cli/test_startup.py",
    ),
    Fault(
        "ray: every cell gets one core",
        "experiment/grid/executors/ray.py",
        "cpus = needs.cpus or 1",
        "cpus = 1",
        "tests/experiment/grid/test_ray.py",
    ),
    Fault(
        "slurm: a job cannot be pickled",
        "experiment/grid/executors/slurm.py",
        "self.requeue = submitit.helpers.DelayedSubmission",
        "self.requeue = lambda *job: submitit.helpers.DelayedSubmission(*job)",
        "tests/experiment/grid/test_slurm.py",
    ),
)


@functools.cache
def first_failure_before(copy: Path, tests: str) -> str | None:
    """Return the first test that fails while nothing is planted, or None."""
    return first_failure(copy, tests)


def first_failure(copy: Path, tests: str) -> str | None:
    """Return the first test that fails with the code of a copy, or None; raise if they cannot be run."""
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if not child:
            run_tests(copy, tests, said.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        text = said.read()
    if code == 0:
        return None
    failed = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if code != 1 or not failed:
        raise RuntimeError(f"pytest {tests}: code {code}\n{text}")
    return failed[0].split(" - ")[0]


def run_tests(copy: Path, tests: str, said: int) -> NoReturn:
    """Be the process of some tests: it was forked from one that has imported torch, and nothing of ours."""
    code = 70
    try:
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.chdir(copy)
        os.environ |= {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
        sys.path[:0] = [str(copy / "src")]
        sys.modules["__main__"] = ModuleType("__main__")  # processes of the tests would run this file
        words = ["-q", "-x", "-rfE", "--tb=no", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist"]
        code = int(pytest.main([*words, *shlex.split(tests)]))
        sys.stdout.flush()
    finally:
        os._exit(code)


def judge(copy: Path, fault: Fault) -> tuple[bool, str]:
    """Plant a fault; return True if it is caught, and by which test, or what is wrong."""
    path = copy / "src/cofima" / fault.file
    text = path.read_text("utf-8")
    if text.count(fault.old) != 1:
        return False, f"its text is {text.count(fault.old)} times in {fault.file}"
    if before := first_failure_before(copy, fault.tests):
        return False, f"with nothing planted: {before}"
    path.write_text(text.replace(fault.old, fault.new), "utf-8")
    try:
        found = first_failure(copy, fault.tests)
    finally:
        path.write_text(text, "utf-8")
    return found is not None, found or f"NOT CAUGHT by {fault.tests}"


def main(words: list[str]) -> int:
    """Judge the faults whose names contain one of the words, or all; return the exit code."""
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            path = ROOT / name
            (shutil.copytree if path.is_dir() else shutil.copy)(path, Path(folder) / name)
        verdicts = []
        for fault in chosen:
            caught, said = judge(Path(folder), fault)
            verdicts.append(caught)
            print(f"{'caught' if caught else 'FAULT '}  {fault.name}\n        {said}", flush=True)
    print(f"{sum(verdicts)} of {len(verdicts)} caught")
    return 0 if verdicts and all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
