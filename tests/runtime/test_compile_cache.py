"""The compile cache is private, keyed by all it depends on, and trusts no file that a run did not leave so."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from moegraph.errors import RunError
from moegraph.runtime import compile_cache as module
from moegraph.runtime.cache_contents import keep_contents, remove_unknown, users_of
from moegraph.runtime.compile_cache import cache_folder, compile_cache


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_the_folder_and_the_one_above_are_this_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = cache_folder("CPU")
    finally:
        os.umask(before)
    assert folder.parent == tmp_path / "cache" / "moegraph" / "compiled"
    assert mode(folder) == mode(folder.parent) == 0o700


def test_a_folder_that_others_can_read_is_closed(tmp_path: Path) -> None:
    folder = cache_folder("CPU")
    for part in (folder, folder.parent):
        part.chmod(0o755)
    assert cache_folder("CPU") == folder
    assert mode(folder) == mode(folder.parent) == 0o700


@pytest.mark.parametrize("which", ["folder", "above"])
def test_a_folder_that_others_could_write_into_is_refused(which: str) -> None:
    folder = cache_folder("CPU")
    part = folder if which == "folder" else folder.parent
    part.chmod(0o770)
    with pytest.raises(RunError, match=r"others can write into the compile cache .* is run: remove it"):
        cache_folder("CPU")


@pytest.mark.parametrize("which", ["folder", "above"])
def test_a_link_in_its_place_is_refused(which: str, tmp_path: Path) -> None:
    folder = cache_folder("CPU")
    part = folder if which == "folder" else folder.parent
    part.rename(tmp_path / "elsewhere")
    part.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="is not a folder of this user: remove it"):
        cache_folder("CPU")


def test_a_file_in_its_place_and_another_users_folder_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache_folder("CPU")
    mine = os.getuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: mine + 1)
        with pytest.raises(RunError, match="is not a folder of this user"):
            cache_folder("CPU")
    folder.rmdir()
    folder.write_text("", encoding="utf-8")
    with pytest.raises(RunError, match="cannot be made: File exists"):
        cache_folder("CPU")


def test_a_relative_xdg_cache_home_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the XDG base directory specification wants it: never inside the folder that someone works in."""
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder("CPU").is_relative_to(tmp_path / "home" / ".cache")


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The key for a package of two files whose contents a test may change."""
    sources = tmp_path / "sources"
    (sources / "sub").mkdir(parents=True)
    monkeypatch.setattr(module.resources, "files", lambda package: sources)

    def call(files: dict[str, str], device: str = "CPU") -> str:
        for path in sources.rglob("*.py"):
            path.unlink()
        for name, text in files.items():
            (sources / name).write_text(text, encoding="utf-8")
        return module._key(device)

    return call


def test_the_key_changes_with_sources_versions_and_device(
    key: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"a.py": "x = 1\n", "sub/b.py": "y = 2\n"}
    first = key(files)
    assert key(files) == first
    others = [
        key({**files, "a.py": "x = 2\n"}),
        key({**files, "c.py": ""}),
        key({"a.py": "x = 1\n", "b.py": "y = 2\n"}),  # moved
        key({"a.py": "x = 1\ny = 2\n", "sub/b.py": ""}),
        key(files, device="NVIDIA H200"),
    ]
    monkeypatch.setattr(module, "versions", lambda: {"torch": "0"})
    others.append(key(files))
    assert len({first, *others}) == 1 + len(others)


def test_compilers_inside_use_the_folder_and_afterwards_the_environment_is_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with compile_cache("CPU"):
        folder = cache_folder("CPU")
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "inductor")
        assert os.environ["TRITON_CACHE_DIR"] == str(folder / "triton")
    assert os.environ["TRITON_CACHE_DIR"] == "/mine"
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_the_headers_that_go_into_every_kernel_are_not_in_the_folder_for_temporary_files() -> None:
    from torch._inductor import codecache

    before = codecache._HEADER_DIR
    with compile_cache("CPU"):
        headers = cache_folder("CPU").parent / "headers"
        assert Path(codecache._HEADER_DIR) == headers
        assert Path(codecache._HEADER_LOCK_DIR).parent == headers
        assert mode(headers) == 0o700
        (headers / "planted.h.gch").write_bytes(b"")
    assert before == codecache._HEADER_DIR
    (headers / "planted.h.gch").write_bytes(b"code")
    with compile_cache("CPU"):
        assert not (headers / "planted.h.gch").exists()


def fill(folder: Path) -> dict[str, Path]:
    files = {name: folder / "inductor" / "ab" / name for name in ("kernel.so", "kernel.cpp", "graph")}
    files["kernel.so"].parent.mkdir(parents=True, exist_ok=True)
    for name, path in files.items():
        path.write_bytes(name.encode() * 100)
    return files


def test_what_a_run_left_is_there_for_the_next_one() -> None:
    with compile_cache("CPU"):
        files = fill(cache_folder("CPU"))
    with compile_cache("CPU"):
        assert all(path.is_file() for path in files.values())


@pytest.mark.parametrize("damage", ["torn", "emptied", "flipped", "added", "link"])
def test_a_file_that_is_not_as_a_run_left_it_is_removed_and_the_others_stay(damage: str, tmp_path: Path) -> None:
    with compile_cache("CPU"):
        files = fill(cache_folder("CPU"))
    victim = files["kernel.so"]
    data = victim.read_bytes()
    if damage == "torn":
        victim.write_bytes(data[:50])
    elif damage == "emptied":
        victim.write_bytes(b"")
    elif damage == "flipped":
        victim.write_bytes(data[:-1] + b"!")
    elif damage == "added":
        victim = victim.with_name("planted.so")
        victim.write_bytes(b"")
    else:
        (tmp_path / "same").write_bytes(data)
        victim.unlink()
        victim.symlink_to(tmp_path / "same")
    notes: list[str] = []
    with compile_cache("CPU", note=notes.append):
        assert not os.path.lexists(victim)
        left = {path.name for path in files["graph"].parent.iterdir()}
    assert left == {"kernel.so", "kernel.cpp", "graph"} - {victim.name}
    assert len(notes) == 1
    assert victim.name in notes[0]
    assert "removed, and compiled again" in notes[0]
    with compile_cache("CPU", note=notes.append):
        assert len(notes) == 1  # said once, and nothing of what is whole


@pytest.mark.parametrize(
    ("what", "files"),
    [
        ("a run", ("metrics.jsonl", "manifest.json")),
        ("a compiled directory", ("report.json", "spec.yaml")),
        ("a checkpoint", ("manifest.json",)),
    ],
)
def test_a_cache_inside_what_people_copy_and_share_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, files: tuple[str, ...]
) -> None:
    folder = tmp_path / ("step-000120" if what == "a checkpoint" else "data")
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    with pytest.raises(RunError, match=rf"lies inside {what}, .*{folder.name}: set XDG_CACHE_HOME"):
        cache_folder("CPU")
    assert not (folder / "cache").exists()


def interrupted(compiled_all: bool) -> dict[str, Path]:
    """The files of a run that Ctrl-C stopped, while it compiled or later."""
    with suppress(KeyboardInterrupt), compile_cache("CPU") as keep:
        files = fill(cache_folder("CPU"))
        if compiled_all:
            keep()
        raise KeyboardInterrupt
    assert all(path.exists() for path in files.values())
    return files


def test_what_a_run_left_that_was_stopped_while_it_compiled_is_not_used() -> None:
    files = interrupted(compiled_all=False)
    with compile_cache("CPU"):
        assert not any(path.exists() for path in files.values())


def test_what_was_compiled_is_kept_when_the_run_is_stopped_later() -> None:
    files = interrupted(compiled_all=True)
    with compile_cache("CPU"):
        assert all(path.exists() for path in files.values())


def test_a_broken_listing_lists_nothing() -> None:
    for text in ("", "{", "[]", "null", '{"inductor/ab/graph": 3}'):
        with compile_cache("CPU"):
            files = fill(cache_folder("CPU"))
        (cache_folder("CPU") / "contents.json").write_text(text, encoding="utf-8")
        with compile_cache("CPU"):
            assert not any(path.exists() for path in files.values())


def test_nothing_is_removed_or_listed_while_another_process_uses_the_folder(tmp_path: Path) -> None:
    files = fill(tmp_path)
    with users_of(tmp_path) as first, users_of(tmp_path) as second:
        for alone in (first, second):
            with alone() as mine:
                assert not mine
    with users_of(tmp_path) as only:
        with only() as mine:
            assert mine
        assert remove_unknown(tmp_path) == sorted(f"inductor/ab/{name}" for name in files)
    keep_contents(tmp_path)
    assert remove_unknown(tmp_path) == []
