"""Files of models that change: which changes count where they are in use, and whether two computers have the same file."""

import os
import random
import shlex

import pytest

from cp_runtime.comfy.shared.files import ModelFiles
from cp_runtime.comfy.shared.recipe import describe, file_stamp, relocate
from cp_runtime.errors import ChangedFileError, MirrorError
from cp_runtime.pool import digests

CONTENT = random.Random(0).randbytes(1 << 20)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a model.safetensors"
    path.write_bytes(CONTENT)
    return path


def written(file):
    with open(file, "r+b") as opened:
        opened.write(b"other")


def written_with_its_time(file):
    before = file.stat()
    written(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_mtime_ns == before.st_mtime_ns


def renamed_over(file):
    new = file.with_suffix(".new")
    new.write_bytes(b"other")
    os.replace(new, file)


IN_PLACE = {
    "written": written,
    "its time put back": written_with_its_time,
    "longer": lambda file: file.write_bytes(CONTENT + b"x"),
    "shorter": lambda file: os.truncate(file, 5),
}
ELSEWHERE = {
    "renamed over": renamed_over,
    "removed": os.unlink,
    "renamed": lambda file: file.rename(file.with_name("b")),
    "linked": lambda file: os.link(file, file.with_name("b")),
    "read": lambda file: file.read_bytes(),
}


@pytest.mark.parametrize("change", IN_PLACE)
def test_a_file_that_is_written_to(file, change):
    files = ModelFiles([(str(file), file_stamp(str(file)))])
    files.check()
    os.link(file, file.with_name("c"))
    files.check()
    IN_PLACE[change](file)
    size = file.stat().st_size
    words = rf"{file} changed on disk after .* it has {size} bytes and is of \d+-\d+-\d+ .* it had {len(CONTENT)} bytes\. Queue the"
    for _ in range(2):
        with pytest.raises(ChangedFileError, match=words) as caught:
            files.check()
    assert shlex.split(str(caught.value).partition("over it: ")[2]) == ["mv", f"{file}.new", str(file)]


@pytest.mark.parametrize("change", ELSEWHERE)
def test_a_file_that_stays_for_those_who_have_it_open(file, change):
    files = ModelFiles([(str(file), file_stamp(str(file)))])
    ELSEWHERE[change](file)
    files.check()
    with open(files.path, "rb") as opened:
        assert opened.read() == CONTENT


def test_a_change_in_the_middle_is_told_before_what_it_led_to(file):
    files = ModelFiles([(str(file), file_stamp(str(file)))])
    with pytest.raises(ChangedFileError), files.unchanged():  # noqa: PT012
        written(file)
        raise ValueError
    with pytest.raises(ChangedFileError), files.unchanged():
        raise AssertionError


def test_files_that_are_others_already(file):
    stamp = file_stamp(str(file))
    renamed_over(file)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ChangedFileError, match=f"changed on disk .* it had {len(CONTENT)} bytes"):
        ModelFiles([(str(file), stamp)])
    file.unlink()
    with pytest.raises(MirrorError, match=f"the model file {file} cannot be read: No such file"):
        ModelFiles([(str(file), stamp)])
    assert len(os.listdir("/proc/self/fd")) == len(before)  # nothing is left open


SIZE, LARGE = 1 << 20, 64 << 20


def there(folders):
    return f"{folders[1]['diffusion_models'][0]}/flux/the model.sft"


def compare(folders):
    return relocate(folders[2], describe(folders[2], folders[0]), folders[1], "pc2")


@pytest.fixture
def read(monkeypatch):
    """Bytes that are read for digests."""
    pieces, stock = [], os.pread

    def pread(fd, count, offset):
        piece = stock(fd, count, offset)
        pieces.append(len(piece))
        return piece

    monkeypatch.setattr(digests.os, "pread", pread)
    return lambda: sum(pieces)


DAMAGES = {
    "4 kB of zeros": (lambda at: bytes(1 << 12), 1),
    "64 bytes": (lambda at: random.Random(at).randbytes(64), 8),
    "the last byte": (None, 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("content", [LARGE], indirect=True, ids=["64 MB"])
def test_a_copy_with_a_few_other_bytes_is_another_file(folders, content, damage):
    made, count = DAMAGES[damage]
    for number in range(count):
        at = LARGE - 1 if made is None else random.Random(number).randrange(LARGE - 4096)
        with open(there(folders), "r+b") as file:
            file.seek(at)
            file.write(bytes([content[at] ^ 1]) if made is None else made(at))
        with pytest.raises(MirrorError, match="pc2 has another model file") as caught:
            compare(folders)
        with open(there(folders), "r+b") as file:
            file.seek(at)
            file.write(content[at : at + 4096])
    assert compare(folders)["path"] == there(folders)
    said = str(caught.value)
    one, other = (digests.content_digest(path, file_stamp(path))[:12] for path in (folders[2]["path"], there(folders)))
    assert one == other
    assert f"{LARGE} bytes, written 20" in said
    assert f"digest {one}" in said
    copied, moved = said.partition("Copy it again: ")[2].split(" && ")
    assert shlex.split(copied) == ["scp", folders[2]["path"], f"pc2:{there(folders)}.new"]
    assert shlex.split(shlex.split(moved)[2]) == ["mv", f"{there(folders)}.new", there(folders)]


def test_a_file_is_read_once(folders, read):
    found = compare(folders)
    assert found["stamp"] == list(file_stamp(there(folders)))
    assert read() == 2 * SIZE
    compare(folders)
    assert read() == 2 * SIZE


@pytest.mark.parametrize("change", ["in place", "its time put back", "renamed over"])
def test_what_is_kept_of_a_file_that_changed_does_not_count(folders, change):
    compare(folders)
    path = there(folders)
    before = os.stat(path)
    if change == "renamed over":
        os.replace(path, f"{path}.old")
        with open(path, "wb") as file:
            file.write(bytes(SIZE))
    else:
        with open(path, "r+b") as file:
            file.write(b"other")
    if change != "in place":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(MirrorError, match="another model file"):
        compare(folders)


def test_a_file_that_is_another_one_than_comfyui_loaded_is_named(folders):
    path = folders[2]["path"]
    with open(path, "r+b") as file:
        file.write(b"other")
    with pytest.raises(ChangedFileError, match=f"{path} changed on disk after ComfyUI had loaded it"):
        describe(folders[2], folders[0])
    os.unlink(path)
    with pytest.raises(MirrorError, match=f"the model file {path} cannot be read: No such file"):
        describe(folders[2], folders[0])


def test_a_file_that_changes_while_it_is_read(folders, monkeypatch):
    def digest(path, stamp):
        with open(path, "r+b") as file:
            file.write(b"other")
        return ""

    monkeypatch.setattr("cp_runtime.comfy.shared.recipe.content_digest", digest)
    with pytest.raises(ChangedFileError, match="changed on disk while it was read"):
        describe(folders[2], folders[0])
