"""Untrusted archives are extracted into one folder, or raise a one-sentence error."""

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from cofima.core.errors import CofimaError
from cofima.data import archive
from cofima.data.archive import unpack

FILES = {"birds/a.txt": b"a", "./birds/b/c.txt": b"bc", "d.txt": b""}


def tar(path: Path, *members: tarfile.TarInfo, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as file:
        for member in members:
            content = FILES.get(member.name, b"x" * member.size)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, to: str = "", size: int = 1) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname, found.size = kind, to, size if kind == tarfile.REGTYPE else 0
    found.mode, found.uid = 0o4777, 12345
    return found


def below(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


WANTED = {"birds/a.txt": b"a", "birds/b/c.txt": b"bc", "d.txt": b""}


def test_files_of_a_tar_are_written_and_nothing_else_of_them(tmp_path: Path) -> None:
    made = tar(tmp_path / "a.tgz", member("birds", tarfile.DIRTYPE), *map(member, FILES))
    unpack(made, tmp_path / "out")
    assert below(tmp_path / "out") == WANTED
    found = (tmp_path / "out" / "birds" / "a.txt").stat()
    assert found.st_mode & 0o7111 == 0
    assert found.st_uid != 12345


def test_files_of_a_zip_are_written(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("birds/", b"")
        for name, content in FILES.items():
            file.writestr(name, content)
    unpack(tmp_path / "a.zip", tmp_path / "out")
    assert below(tmp_path / "out") == WANTED


@pytest.mark.parametrize("name", ["../a", "a/../../b", "/etc/a", "c:\\a", "a\\..\\b", ".", "a/../b"])
def test_a_name_that_leads_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CofimaError, match="leads out of the folder"):
        unpack(tar(tmp_path / "a.tgz", member(name)), tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        info = zipfile.ZipInfo("x")
        info.filename = name
        file.writestr(info, b"x")
    with pytest.raises(CofimaError, match="leads out of the folder"):
        unpack(tmp_path / "a.zip", tmp_path / "out")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != tmp_path]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_what_is_no_file_is_refused(kind: bytes, tmp_path: Path) -> None:
    with pytest.raises(CofimaError, match="x is a link or no file"):
        unpack(tar(tmp_path / "a.tar", member("x", kind, "/etc/passwd"), mode="w"), tmp_path / "out")


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    info = zipfile.ZipInfo("x")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr(info, "/etc/passwd")
    with pytest.raises(CofimaError, match="x is a link"):
        unpack(tmp_path / "a.zip", tmp_path / "out")


def test_one_name_twice_is_refused(tmp_path: Path) -> None:
    made = tar(tmp_path / "a.tgz", member("x"), member("./x"))
    with pytest.raises(CofimaError, match="exists"):
        unpack(made, tmp_path / "out")


def test_size_and_number_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tar(tmp_path / "a.tgz", member("x", size=500_000))
    monkeypatch.setattr(archive, "EXTRA", 1000)
    with pytest.raises(CofimaError, match="far more than a dataset of its size"):
        unpack(made, tmp_path / "out")
    monkeypatch.setattr(archive, "MOST_FILES", 2)
    with pytest.raises(CofimaError, match="far more"):
        unpack(tar(tmp_path / "b.tgz", *map(member, FILES)), tmp_path / "more")


@pytest.mark.parametrize("name", ["a.tgz", "a.tar", "a.zip"])
def test_what_is_damaged_or_no_archive_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"<html>not here</html>" * 100)
    with pytest.raises(CofimaError, match="cannot be unpacked"):
        unpack(tmp_path / name, tmp_path / "out")
    whole = tar(tmp_path / "b.tgz", member("x", size=100_000)).read_bytes()
    (tmp_path / "b.tgz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CofimaError, match="cannot be unpacked"):
        unpack(tmp_path / "b.tgz", tmp_path / "out2")
