"""The package as users get it: a small wheel that holds everything, and one version everywhere."""

import importlib.metadata
import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import cofima

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
MEGABYTE = 1024**2


def run(*words: str | Path, **more: object) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of this tree, with what is installed."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    build = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    run(sys.executable, "-c", build, folder, cwd=ROOT)
    (found,) = folder.iterdir()
    return found


def test_the_wheel_is_small_and_holds_every_file_of_the_package(wheel: Path) -> None:
    assert wheel.name == f"cofima-{cofima.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < 6 * MEGABYTE
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if not name.startswith("cofima-")}
        metadata = archive.read(f"cofima-{cofima.__version__}.dist-info/METADATA").decode()
    files = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=False)
    tracked = {name.removeprefix("src/") for name in files.stdout.splitlines()}
    assert tracked <= packed or not tracked  # outside of a repository there is no list
    assert {"cofima/py.typed", "cofima/models/vit_micro.safetensors"} <= packed
    assert "cofima/experiment/recipes/table1.yaml" in packed
    assert "cofima/report/paper/published.json" in packed
    assert f"\nVersion: {cofima.__version__}\n" in metadata


def test_the_installed_wheel_runs_without_the_tree(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:  # what pip install --no-deps --target does with a pure wheel
        archive.extractall(place)
    env = {**os.environ, "PYTHONPATH": str(place)}
    code = "import cofima; print(cofima.__file__); from cofima.cli.main import main; main()"
    said = run(sys.executable, "-c", code, "--help", cwd=tmp_path, env=env)
    assert Path(said.splitlines()[0]).is_relative_to(place)
    assert "cofima demo" in said


@pytest.mark.slow
def test_the_wheel_alone_runs_the_demo_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Install it with its dependencies, as a user does, and learn."""
    venv.create(tmp_path / "env", with_pip=True)
    home = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    run(home / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel, env=env)
    assert run(home / "cofima", "--version", env=env).strip() == f"cofima {cofima.__version__}"
    said = run(home / "cofima", "demo", "--quick", "--out", tmp_path / "demo", cwd=tmp_path, env=env)
    assert "CoFiMA" in said
    assert (tmp_path / "demo" / "report.html").is_file()


def test_there_is_one_version() -> None:
    assert PROJECT["dynamic"] == ["version"]
    assert importlib.metadata.version("cofima") == cofima.__version__
    told = [
        path for path in ("CITATION.cff", "mkdocs.yml") if cofima.__version__ in (ROOT / path).read_text()
    ]
    assert not told  # a release would forget them


def test_only_what_is_tested_is_claimed() -> None:
    oldest = PROJECT["requires-python"].removeprefix(">=")
    versions = [c.rpartition(" :: ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    assert versions[0] == oldest
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in versions
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text("utf-8"))
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    assert (matrix["os"], matrix["python"]) == (
        ["ubuntu-latest", "macos-latest", "windows-latest"],
        [oldest, "3.x"],
    )


def test_the_placeholder_stands_in_the_checklist() -> None:
    (address,) = PROJECT["urls"].values()
    assert address == "https://example.org/cofima"  # reserved for examples: no address is invented
    assert address in (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def test_the_citation_names_the_paper() -> None:
    known = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert known["authors"] == [{"name": "The cofima authors"}]
    assert known["preferred-citation"]["url"] == "https://arxiv.org/abs/2312.08977"
