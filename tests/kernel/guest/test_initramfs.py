# SPDX-License-Identifier: MIT
"""Tests the archive that a guest boots from."""

from __future__ import annotations

from pathlib import Path

from guest.initramfs import Initramfs


def entries(archive: Path) -> list[tuple[str, int, bytes]]:
    """Parses an archive as the format specifies; returns names, modes and contents."""
    data, found, offset = archive.read_bytes(), [], 0
    while True:
        assert data[offset : offset + 6] == b"070701"
        fields = [int(data[offset + 6 + 8 * i : offset + 14 + 8 * i], 16) for i in range(13)]
        mode, size, name_size = fields[1], fields[6], fields[11]
        name = data[offset + 110 : offset + 110 + name_size - 1].decode()
        offset = (offset + 110 + name_size + 3) // 4 * 4
        if name == "TRAILER!!!":
            assert offset == len(data)
            return found
        found.append((name, mode, data[offset : offset + size]))
        offset = (offset + size + 3) // 4 * 4


def test_folders_come_before_what_is_in_them(tmp_path: Path) -> None:
    root = Initramfs()
    root.text("/a/b/c/file", "12345", 0o600)
    root.link("/a/link", "b/c")
    root.write(tmp_path / "archive")
    assert entries(tmp_path / "archive") == [
        ("a", 0o040755, b""),
        ("a/b", 0o040755, b""),
        ("a/b/c", 0o040755, b""),
        ("a/b/c/file", 0o100600, b"12345"),
        ("a/link", 0o120777, b"b/c"),
    ]


def test_a_tree_is_copied_with_its_links_and_modes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    (source / "inner" / "run").write_bytes(b"#!")
    (source / "inner" / "run").chmod(0o755)
    (source / "link").symlink_to("inner/run")
    root = Initramfs()
    root.tree("/top", source)
    root.write(tmp_path / "archive")
    found = {name: (mode, data) for name, mode, data in entries(tmp_path / "archive")}
    assert found["top/inner/run"] == (0o100755, b"#!")
    assert found["top/link"] == (0o120777, b"inner/run")
