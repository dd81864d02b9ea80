"""The shape of the code: imports point one way, methods stay small, nothing is unpickled."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import cofima
from cofima import methods
from cofima.data.options import Preset
from windows import unix_only

ROOT = Path(cofima.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
PLAIN_PICKLES = ROOT / "data" / "sources" / "unpickle.py"  # refuses all that could run code

# A module imports from its own room and from tiers above its own in this list; rooms of one tier do not
# import each other.
TIERS = [
    ("core",),
    ("data", "models", "weights"),
    ("training",),
    ("methods",),
    ("store",),
    ("report",),
    ("experiment",),
    ("classifier",),
    ("analysis", "integrations"),
    ("cli",),
    ("__main__",),
]
TIER = {room: tier for tier, rooms in enumerate(TIERS) for room in rooms}


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a source, which several rules look at."""
    return tuple(ast.walk(ast.parse(source)))


def modules() -> dict[str, Path]:
    """Return every module by its dotted name."""
    found = {}
    for path in FILES:
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(source: str, module: str, is_package: bool) -> Iterator[tuple[str, int]]:
    """Yield every module of ours that the source imports, wherever in it, with the line."""
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")
            if node.level:
                base = base[: len(base) - node.level + is_package]
                start = ".".join([*base, node.module] if node.module else base)
            else:
                start = node.module or ""
            # "from cofima import x" may name a module x or something inside cofima/__init__.py
            names = [
                f"{start}.{alias.name}" if f"{start}.{alias.name}" in MODULES else start
                for alias in node.names
            ]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            names = texts
        else:
            continue
        yield from ((name, node.lineno) for name in names if name.split(".")[0] == "cofima")


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "cofima"


def wrong_way(source: str, module: str, is_package: bool = False) -> list[str]:
    """Return a line for each import from a tier to the right, or from another room of the same tier."""
    mine, found = room(module), []
    for name, line in imports(source, module, is_package):
        if name == "cofima":  # the top alone may ask the package itself, for its version
            wrong = mine not in ("cli", "__main__")
        else:
            wrong = room(name) != mine and TIER[room(name)] >= TIER[mine]
        found += [f"{module}:{line} imports {name}"] if wrong else []
    return found


def test_imports_point_from_tier_to_tier() -> None:
    found = [
        line
        for module, path in MODULES.items()
        if module != "cofima"
        for line in wrong_way(path.read_text(), module, path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


def test_the_check_itself_tells_right_from_wrong() -> None:
    wrong = [
        "from cofima.methods import build",
        "import cofima.store.model",
        "from ..methods import build",
        "from .. import store",
        "from cofima import average",
        "from ..data import stream",  # a room of the same tier
        "def late():\n    from cofima.experiment.launch import launch",
        "def late():\n    from importlib import import_module\n    import_module('cofima.cli')",
    ]
    assert [source for source in wrong if not wrong_way(source, "cofima.weights.average")] == []
    right = "from cofima.core.errors import CofimaError\nfrom .ops import Weights"
    assert wrong_way(right, "cofima.weights.average") == []


def test_a_type_name_names_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_docstring_begins_as_an_indirect_question() -> None:
    found = []
    for module, path in MODULES.items():
        for node in nodes_of(path.read_text()):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                first = (ast.get_docstring(node) or "").partition(" ")[0]
                if first in ("What", "How", "Who", "Where", "Whether", "Which", "When"):
                    found.append(f"{module}: {getattr(node, 'name', 'module')}")
    assert not found, "\n".join(found)


def test_no_module_is_called_utils() -> None:
    names = {part for module in MODULES for part in module.split(".")}
    assert not {name for name in names if "util" in name or name in ("helpers", "common", "misc")}


def test_a_method_is_one_file_that_cites_its_paper() -> None:
    found = []
    for name in methods.names():
        kind = methods.find(name)
        wanted = ("label", "paper", "equation", "__doc__")
        found += [f"{name} does not set {key} itself" for key in wanted if not vars(kind).get(key)]
        if kind.__module__ != f"cofima.methods.{name}":
            found.append(f"{name} is defined in {kind.__module__}")
    assert found == []


def test_method_labels_differ() -> None:
    labels = [methods.find(name).label for name in methods.names()]
    assert len(set(labels)) == len(labels)


def identifiers(node: ast.AST) -> set[str]:
    """Return the names that a node defines or uses."""
    fields = (getattr(node, field, None) for field in ("id", "attr", "arg", "asname", "name"))
    return {name for name in fields if isinstance(name, str)}


def knowledge_of_methods(source: str, room: str = "serve") -> list[str]:
    """Return a line for each place in a module that knows a single method: its name, label, class or state.

    A name counts as a string, alone or in a list with commas, and as an identifier. The package has the name
    of a method: as a plain word it is allowed, but nothing may be compared with it.
    """
    kinds = {name: methods.find(name) for name in methods.names()}
    known = {*kinds, *(kind.label for kind in kinds.values())}
    known -= set(get_args(Preset)) if room == "data" else set()  # images as SLCA's authors prepare them
    kept = {entry.name for kind in kinds.values() for entry in kind.state_schema}
    groups, names = tuple(name for name in kept if name.endswith(".")), known | kept
    nodes = nodes_of(source)
    prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    compared = {id(part) for node in nodes if isinstance(node, ast.Compare) for part in ast.walk(node)}
    found = []
    for node in nodes:
        words, module = [], ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            words = [node.value, *([] if " " in node.value else node.value.split(","))]
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").partition("cofima.methods.")[2]
        said = {word for word in words if word in names or word.startswith(groups)}
        said |= identifiers(node) & known
        said -= set() if id(node) in compared else {"cofima"}
        if said or module in kinds:
            found.append(f"line {node.lineno}: {', '.join(sorted(said)) or module}")  # type: ignore[attr-defined]
    return found


# tables of the paper, recipes, and rules of merging, one of which has the name of a method
MAY_KNOW_METHODS = ("methods", "report/paper", "experiment/recipes", "classifier/merge/request.py")


def test_no_single_method_is_known_outside_methods() -> None:
    others = [path for path in FILES if not str(path.relative_to(ROOT)).startswith(MAY_KNOW_METHODS)]
    found = {str(path): knowledge_of_methods(path.read_text(), path.parent.name) for path in others}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_the_check_itself_sees_knowledge_of_a_method() -> None:
    knowing = [
        "known = name == 'slca'",
        "known = name == 'cofima'",
        "known = method.label in ('RanPAC', 'other')",
        "table = {'wise_ft': 1}",
        "from cofima.methods.slca import SLCA",
        "kept = state['gaussians.means']",
        "key = f'raw_head.{name}'",
        "kept = state['readout.packed']",
        "default = 'coma,cofima,wise_ft'",
        "bound = run.joint",
        "def intransigence(joint): pass",
        "measure(slca=True)",
        "class SLCA: pass",
    ]
    assert [source for source in knowing if not knowledge_of_methods(source)] == []


def test_the_check_itself_lets_ordinary_words_pass() -> None:
    fine = "'fisher'\nimport cofima\nname = version('cofima')\nstart = at.start\nkeys = table.keys()"
    assert not knowledge_of_methods(f'"""SLCA."""\n{fine}\nx = "memory", "gaussians of slca"')


UNSAFE = {"pickle", "dill", "joblib", "shelve"}
SAFE_LOAD = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}


def unpickling(source: str, may_import: bool = False) -> list[str]:
    """Return a line for each import of a pickle module and each load that does not rule pickles out."""
    found = []
    for node in nodes_of(source):
        names: list[str] = []
        if isinstance(node, ast.Import) and not may_import:
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and (call := ast.unparse(node.func)) in SAFE_LOAD:
            given = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            key, value = SAFE_LOAD[call]
            found += [f"line {node.lineno}: {call}"] if given.get(key) is not value else []
        found += [f"line {node.lineno}: {name}" for name in names if name.split(".")[0] in UNSAFE]
    return found


def test_nothing_is_unpickled() -> None:
    found = {str(path): unpickling(path.read_text(), path == PLAIN_PICKLES) for path in FILES}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_the_check_itself_sees_what_is_unpickled() -> None:
    unsafe = [
        "import pickle",
        "def late():\n    import os, joblib.numpy_pickle",
        "from shelve import open",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
    ]
    assert [source for source in unsafe if not unpickling(source)] == []
    safe = "import json\ntorch.load(path, weights_only=True)\nnp.load(path, allow_pickle=False)"
    assert unpickling(safe) == []


def test_the_one_reader_of_pickles_chooses_what_may_be_made() -> None:
    tree = ast.parse(PLAIN_PICKLES.read_text())
    used = {
        n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "pickle"
    }
    assert used == {"Unpickler", "UnpicklingError"}
    (reader,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.bases)
    assert [n.name for n in reader.body if isinstance(n, ast.FunctionDef)] == ["find_class"]


def test_what_only_unix_has_is_in_one_module() -> None:
    found = {str(path.relative_to(ROOT)): unix_only(path.read_text("utf-8")) for path in FILES}
    assert found.pop("core/system.py"), "it has no reason to be there"
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_the_check_itself_sees_what_only_unix_has() -> None:
    unix = [
        "import fcntl",
        "def late():\n    import os, resource",
        "from pwd import getpwnam",
        "from os import pwrite",
        "handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)",
        "if hasattr(os, 'getuid'):\n    os.getuid()",
        "child = os.fork()",
        "os.kill(process, 0)",
        "signal.signal(signal.SIGHUP, handler)",
        "taken = path.stat().st_blocks",
        "socket.socket(socket.AF_UNIX)",
        "text = open('/proc/self/status').read()",
    ]
    assert [source for source in unix if not unix_only(source)] == []
    both = "import os, signal\nos.open(path, os.O_RDONLY)\nos.fsync(handle)\nsignal.SIGTERM\nworker.kill()"
    assert unix_only(both) == []


def python(code: str, **environment: str) -> str:
    own = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=own | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_importing_asks_openmp_to_sleep_before_torch_is_there() -> None:
    code = (
        "import sys, os\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': print(os.environ.get('OMP_WAIT_POLICY'), flush=True); os._exit(0)\n"
        "sys.meta_path.insert(0, Watch())\n"
        "import cofima; cofima.Model; sys.exit('torch was not imported')"
    )
    assert python(code) == "PASSIVE"


def test_a_user_s_own_choice_of_waiting_stands() -> None:
    code = "import cofima, os; print(os.environ['OMP_WAIT_POLICY'])"
    assert python(code, OMP_WAIT_POLICY="ACTIVE") == "ACTIVE"


def test_what_is_promised_at_top_level_is_there() -> None:
    assert all(hasattr(cofima, name) for name in cofima.__all__)
    assert {"average", "fisher_average", "average_all", "fisher_average_all", "load"} <= set(cofima.__all__)
