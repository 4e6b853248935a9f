"""The dashboard's files: vendored libraries are those that were named, with their licences, and nothing is fetched."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib

import pytest
from paths import ROOT

STATIC = ROOT / "trainer" / "dashboard" / "static"
VENDOR = STATIC / "vendor"
OWN = sorted(file for file in STATIC.rglob("*") if file.is_file() and VENDOR not in file.parents)


def test_vendored_files_are_what_is_written_down() -> None:
    listed = json.loads((VENDOR / "vendor.json").read_text())
    licences = {name for facts in listed.values() for name in facts["license_files"]}
    assert {file.name for file in VENDOR.iterdir()} == {"vendor.json", *listed, *licences}
    for name, facts in listed.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == facts["sha256"], name
        assert set(facts["licenses"].values()) <= {"MIT", "Apache-2.0"}
    for name in licences:
        assert (
            "Permission is hereby granted" in (VENDOR / name).read_text()
            or "Apache License" in (VENDOR / name).read_text()
        )


@pytest.mark.parametrize("file", OWN, ids=lambda file: file.name)
def test_no_text_becomes_markup_and_nothing_is_fetched_elsewhere(file) -> None:
    text = file.read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|dangerouslySet|\beval\(", text)
    assert not re.search(r"""https?://(?!www\.w3\.org/2000/svg)|["'(]//""", text)
    if file.suffix == ".html":
        # The policy forbids them, and the page would only fail in a browser.
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)
    for imported in re.findall(r"""from "(\.[^"]+)\"""", text):
        assert (file.parent / imported).is_file(), imported


def test_the_wheel_has_all_of_them() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folder = STATIC.parent
    matched = {file for pattern in patterns["agl.trainer.dashboard"] for file in folder.glob(pattern) if file.is_file()}
    assert matched == {file for file in STATIC.rglob("*") if file.is_file()}
