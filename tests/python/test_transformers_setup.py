# SPDX-License-Identifier: MIT
"""Checks that the oldest transformers version tested is the oldest version supported."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers_setup


def test_the_oldest_version_matches_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert transformers_setup.oldest().startswith("transformers==5.")
    monkeypatch.setattr(transformers_setup, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text('serve = ["torch>=2.6", "transformers>=6.1,<7"]\n')
    assert transformers_setup.oldest() == "transformers==6.1"


def test_no_version_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_setup, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text('serve = ["transformers"]\n')
    with pytest.raises(SystemExit, match="0 minimum versions of transformers; expected one"):
        transformers_setup.oldest()
