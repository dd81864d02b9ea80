"""What Windows has of the modules that differ, and a process without the rest: Windows as seen from Linux."""

import ast
import os
import shutil
import signal
import sys
from pathlib import Path

UNIX_MODULES = (
    "curses",
    "fcntl",
    "grp",
    "nis",
    "posix",
    "pty",
    "pwd",
    "readline",
    "resource",
    "spwd",
    "syslog",
)
UNIX_MODULES += ("termios", "tty")
UNIX_PATHS = ("/proc/", "/dev/", "/tmp/")
UNIX_FIELDS = {"st_blocks", "st_blksize", "st_rdev", "st_flags", "AF_UNIX", "clock_gettime", "tzset"}
# https://docs.python.org/3/library/os.html and signal.html: what is not marked "Availability: Unix"
OS = """
abort access add_dll_directory altsep chdir chmod close closerange cpu_count curdir defpath device_encoding
devnull DirEntry dup dup2 environ error execl execle execlp execlpe execv execve execvp execvpe extsep
fdopen fsdecode fsencode fspath fstat fsync ftruncate get_blocking get_exec_path get_handle_inheritable
get_inheritable get_terminal_size getcwd getcwdb getenv getlogin getpid getppid isatty linesep link listdir
lseek lstat makedirs mkdir name open pardir path PathLike pathsep pipe popen process_cpu_count putenv read
readlink remove removedirs rename renames replace rmdir scandir sep set_blocking set_handle_inheritable
set_inheritable spawnl spawnle spawnv spawnve startfile stat stat_result strerror supports_bytes_environ
supports_dir_fd supports_effective_ids supports_fd supports_follow_symlinks symlink system terminal_size
times times_result truncate umask uname_result unlink unsetenv urandom utime waitpid waitstatus_to_exitcode
walk write _exit F_OK R_OK W_OK X_OK EX_OK SEEK_CUR SEEK_END SEEK_SET TMP_MAX O_APPEND O_BINARY O_CREAT O_EXCL
O_NOINHERIT O_RANDOM O_RDONLY O_RDWR O_SEQUENTIAL O_SHORT_LIVED O_TEMPORARY O_TEXT O_TRUNC O_WRONLY P_DETACH
P_NOWAIT P_NOWAITO P_OVERLAY P_WAIT
"""  # without kill, which there ends the process that it should only ask for
SIGNAL = """
CTRL_BREAK_EVENT CTRL_C_EVENT Handlers NSIG SIGABRT SIGBREAK SIGFPE SIGILL SIGINT SIGSEGV SIGTERM SIG_DFL
SIG_IGN Signals default_int_handler getsignal raise_signal set_wakeup_fd signal strsignal valid_signals
"""
WINDOWS = {"os": set(OS.split()), "signal": set(SIGNAL.split())}


def unix_only(source: str) -> list[str]:
    """Return a line for each name that Windows does not have: a module, a function, a field, a path."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name in UNIX_MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module in UNIX_MODULES:
            names = [node.module]
        elif isinstance(node, ast.ImportFrom) and node.module in WINDOWS:
            names = [alias.name for alias in node.names if alias.name not in WINDOWS[node.module]]
        elif isinstance(node, ast.Attribute):
            module = node.value.id if isinstance(node.value, ast.Name) else ""
            foreign = module in WINDOWS and node.attr not in WINDOWS[module]
            names = [node.attr] if foreign or node.attr in UNIX_FIELDS else []
        elif isinstance(node, ast.Constant) and str(node.value).startswith(UNIX_PATHS):
            names = [str(node.value)]
        found += [f"line {node.lineno}: {name}" for name in names]  # type: ignore[attr-defined]
    return found


def hide_unix() -> None:
    """Take from this process what only Unix has; what is imported of this project is imported anew.

    Other packages and the standard library have their own ways on Windows, and what they have loaded stays.
    """
    import filelock  # noqa: F401 - its lock is the system's own on Windows, too

    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    for module in (os, signal):
        for name in set(vars(module)) - WINDOWS[module.__name__]:
            if not name.startswith("_") and not isinstance(vars(module)[name], type(os)):
                delattr(module, name)
    signal.SIGBREAK = 21  # type: ignore[attr-defined, assignment]
    for name in UNIX_MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for name in [name for name in sys.modules if name.partition(".")[0] == "cofima"]:
        del sys.modules[name]
    sys.path.insert(0, str(Path(__file__).parent))


def need_unix(folder: Path) -> list[str]:
    """Return the files of tests that use what only Unix has, or processes that are forked."""
    texts = {str(path): path.read_text("utf-8") for path in folder.rglob("test_*.py")}
    return [path for path, text in texts.items() if unix_only(text) or "\nfrom forked import" in text]
