"""Mapped files: what is written is what the library reads."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cofima.core.errors import CofimaError
from cofima.weights.mmap import (
    DTYPE_NAMES,
    TensorSpec,
    create_mapped,
    read_mapped,
    spec_of,
    write_tensors,
)


def written(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    with create_mapped(path, {key: spec_of(value) for key, value in tensors.items()}, metadata) as out:
        for key, value in tensors.items():
            out[key].copy_(value)


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
def test_every_type_is_read_back_by_the_library(dtype: torch.dtype, tmp_path: Path, same_bits) -> None:
    raw = torch.randint(0, 2, (3, 5, dtype.itemsize), dtype=torch.uint8)
    values = {"x": raw.view(dtype)[..., 0], "odd": torch.ones(3, dtype=torch.uint8)}
    written(tmp_path / "f.safetensors", values, {})
    bits = {key: value.view(torch.uint8) for key, value in load_file(tmp_path / "f.safetensors").items()}
    same_bits(bits, {key: value.contiguous().view(torch.uint8) for key, value in values.items()})


def test_mixed_types_empty_tensors_and_names_that_are_not_ascii(tmp_path: Path, same_bits) -> None:
    values = {
        'ü/"quoted"\n': torch.randn(3),
        "byte": torch.tensor([1], dtype=torch.uint8),
        "big": torch.randn(2, 2, dtype=torch.float64),
        "none": torch.zeros(0, 4),
        "one": torch.tensor(2.5),
    }
    path = tmp_path / "f.safetensors"
    written(path, values, {"format": "pt", "é": "ö"})
    same_bits(load_file(path), values)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "é": "ö"}
    found, metadata = read_mapped(path)
    same_bits(found, values)
    assert metadata == {"format": "pt", "é": "ö"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool], ids=str)
def test_what_is_put_is_in_the_file_and_in_the_mapping(dtype: torch.dtype, tmp_path: Path) -> None:
    path, value = tmp_path / "f.safetensors", torch.randn(4, 5).to(dtype)
    with create_mapped(path, {"x": spec_of(value), "y": TensorSpec(torch.float64, (3,))}, {}) as out:
        out["y"][:] = 2
        for start in range(0, 20, 7):
            out.put("x", start, value.view(-1)[start : start + 7])
        assert torch.equal(out["x"], value)
    assert torch.equal(load_file(path)["x"], value)
    assert load_file(path)["y"].tolist() == [2, 2, 2]


def test_no_tensors_at_all(tmp_path: Path) -> None:
    written(tmp_path / "f.safetensors", {}, {})
    assert load_file(tmp_path / "f.safetensors") == {}


def test_the_bytes_are_those_that_the_library_writes(tmp_path: Path) -> None:
    """Same order, same offsets: only the library's own text of the header may differ in its order."""
    values = {
        "b": torch.randn(4),
        "a": torch.randn(2, dtype=torch.float64),
        "c": torch.ones(3, dtype=torch.int8),
    }
    written(tmp_path / "ours.safetensors", values, {"format": "pt"})
    save_file(values, tmp_path / "theirs.safetensors", {"format": "pt"})
    ours, theirs = ((tmp_path / f"{n}.safetensors").read_bytes() for n in ("ours", "theirs"))
    assert ours[-(16 + 16 + 3) :] == theirs[-(16 + 16 + 3) :]


def test_an_existing_file_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "f.safetensors").write_text("mine")
    with pytest.raises(FileExistsError):
        create_mapped(tmp_path / "f.safetensors", {"x": TensorSpec(torch.float32, (2,))}, {})
    assert (tmp_path / "f.safetensors").read_text() == "mine"


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 64, b"\x10" + b"\0" * 7 + b"{not json here!}"])
def test_what_is_no_safetensors_file_is_said(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(content)
    with pytest.raises(CofimaError, match=r"f\.safetensors: truncated, or not a safetensors file"):
        read_mapped(path)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    save_file({"x": torch.randn(8), "y": torch.randn(3)}, path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(CofimaError, match="truncated"):
            read_mapped(path)


def test_written_tensors_are_read_by_safetensors_and_nothing_is_beside_them(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 4).T,
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    write_tensors(tmp_path / "x.safetensors", tensors, {"format": "pt"})
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], value) for key, value in tensors.items())
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_an_error_of_the_disk_below_torch_is_one_of_the_disk(tmp_path: Path, monkeypatch) -> None:
    def fail(*_, **__):
        raise RuntimeError("unable to open file: No space left on device (28)")

    monkeypatch.setattr(torch, "from_file", fail)
    with pytest.raises(OSError, match="No space left"):
        write_tensors(tmp_path / "x.safetensors", {"a": torch.zeros(2)})
