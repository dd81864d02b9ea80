"""Memory of a merge is small however large the models are: pages of mapped files do not count."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forked import Forked

STATUS = Path("/proc/self/status")
needs_proc = pytest.mark.skipif(not STATUS.exists(), reason="needs /proc to see anonymous memory")

# for each merge: how much the process's own memory grew while it ran, after one of tiny files
SCRIPT = """
import json, sys, threading, time
from pathlib import Path
import cofima

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

def merge(stem, method, how):
    pair = [f"{stem}a.safetensors", f"{stem}b.safetensors"]
    based = dict.fromkeys(("ties", "magmax", "breadcrumbs", "dare"), {"base": pair[1]})
    more = (based | {"fisher": {"fisher": pair}}).get(method, {})
    cofima.merge(pair[: 1 if more.get("base") else 2], "out.safetensors", method, force=True, **more, **how)

def grown(method, how):
    merge("small_", method, how)
    before, seen, done = anonymous(), [], threading.Event()

    def watch():
        while not done.wait(0.001):
            seen.append(anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    merge("", method, how)
    seen.append(anonymous())
    done.set()
    thread.join()
    return max(seen) - before

print(json.dumps([grown(*merge) for merge in json.loads(sys.argv[1])]))
"""


def pair(folder: Path, tensors: int, elements: int, stem: str = "") -> None:
    for seed, name in enumerate("ab"):
        draw = torch.Generator().manual_seed(seed)
        values = {f"block.{k}": torch.rand(elements, generator=draw) for k in range(tensors)}
        save_file(values, folder / f"{stem}{name}.safetensors")


def grown(folder: Path, merges: list[tuple[str, dict[str, object]]]) -> list[int]:
    """Return by how many bytes each merge made its process's own memory grow."""
    pair(folder, 2, 1000, "small_")  # the first merge pays for imports and kernels
    (folder / "script.py").write_text(SCRIPT)
    process = Forked(folder / "script.py", json.dumps(merges), cwd=folder)
    said, complained = process.communicate()
    assert process.returncode == 0, complained
    found: list[int] = json.loads(said)
    return found


@needs_proc
def test_memory_of_a_merge_does_not_grow_with_the_models(tmp_path: Path) -> None:
    """32 MB a model, in tensors of 4 MB; the limits are at least twice what was seen."""
    pair(tmp_path, 8, 1_000_000)
    merges = [("average", {}), ("fisher", {}), ("average", {"weights": [1, 2]})]
    merges += [(method, {}) for method in ("ties", "magmax", "breadcrumbs", "dare")]
    found = grown(tmp_path, merges)  # type: ignore[arg-type]
    most = [6_000_000, 14_000_000, 8_000_000, *[24_000_000] * 4]
    assert all(now < limit for now, limit in zip(found, most, strict=True)), found
    assert load_file(tmp_path / "out.safetensors").keys() == load_file(tmp_path / "a.safetensors").keys()


@pytest.mark.slow
@needs_proc
def test_a_gigabyte_is_merged_in_less_memory_than_one_tensor(tmp_path: Path) -> None:
    pair(tmp_path, 16, 16_000_000)
    (found,) = grown(tmp_path, [("average", {"lam": 0.4})])
    assert found < 64_000_000, found
    a, b, out = (load_file(tmp_path / f"{name}.safetensors") for name in ("a", "b", "out"))
    for key in ("block.0", "block.15"):
        torch.testing.assert_close(out[key], torch.lerp(a[key], b[key], 0.4))
