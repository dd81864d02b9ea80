"""Tensors that are there as a whole, or as they were before."""

import json
from pathlib import Path

import pytest
import torch

from cofima.training import sealed
from cofima.weights.mapped import MappedFile

TENSORS = {
    "weight": torch.randn(3, 4).t(),  # not contiguous
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "half": torch.randn(5).bfloat16(),
    "empty": torch.zeros(0, 7),
    "flags": torch.tensor([True, False, True]),
    "chance": torch.Generator().manual_seed(3).get_state(),
}


def test_what_was_written_is_read(tmp_path: Path, same_bits) -> None:
    place = tmp_path / "deep" / "place"
    assert sealed.read_said(place) is None
    for number in range(3):
        sealed.write(place, TENSORS | {"weight": TENSORS["weight"] + number}, {"number": number})
        said = sealed.read_said(place)
        assert said["number"] == number
        same_bits(sealed.read_tensors(place, said), TENSORS | {"weight": TENSORS["weight"] + number})
        assert len(list(place.iterdir())) == 2, "what was there before is gone"
    sealed.remove(place)
    assert not place.exists()


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_writing_that_fails_leaves_what_was_there(
    fault: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_bits
) -> None:
    sealed.write(tmp_path, TENSORS, {"number": 1})
    whole, calls = MappedFile.put, []

    def put(self, key, first, values):
        calls.append(key)
        if len(calls) == 3:
            raise fault
        whole(self, key, first, values)

    monkeypatch.setattr(MappedFile, "put", put)
    with pytest.raises(type(fault)):
        sealed.write(tmp_path, {key: value * 0 for key, value in TENSORS.items()}, {"number": 2})
    said = sealed.read_said(tmp_path)
    assert said["number"] == 1
    same_bits(sealed.read_tensors(tmp_path, said), TENSORS)
    assert len(list(tmp_path.iterdir())) == 2


def test_half_a_file_of_a_killed_process_is_written_over(tmp_path: Path) -> None:
    sealed.write(tmp_path, TENSORS, {"number": 1})
    for name in sealed.TURNS:
        if not (tmp_path / name).exists():
            (tmp_path / name).write_bytes(b"half")
    sealed.write(tmp_path, TENSORS, {"number": 2})
    assert sealed.read_said(tmp_path)["number"] == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_damage_is_found(tmp_path: Path) -> None:
    sealed.write(tmp_path, TENSORS, {"number": 1})
    said = sealed.read_said(tmp_path)
    file = tmp_path / said["file"]
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="not what was written"):
        sealed.read_tensors(tmp_path, said)
    file.write_bytes(whole[:50])
    with pytest.raises(ValueError, match="cannot be read"):
        sealed.read_tensors(tmp_path, said)
    file.unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        sealed.read_tensors(tmp_path, said)
    text = (tmp_path / sealed.SAID).read_text()
    for broken in (json.dumps(json.loads(text) | {"number": 2}), text[:20], "[]", ""):
        (tmp_path / sealed.SAID).write_text(broken)
        with pytest.raises(ValueError, match="missing, or not what was written"):
            sealed.read_said(tmp_path)
