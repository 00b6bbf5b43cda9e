"""The page of licences covers what the images install, and says what every licence means that is not permissive."""

import re
from typing import Any

import pytest

from tests.licences import PAGE, TABLES, images, is_permissive, licence_of, tables

BY_HAND, _, TABLE = PAGE.read_text(encoding="utf-8").partition(TABLES)
LINES = re.findall(r"^\| (\S+) \| (\d\S*) \| (.+) \| ([a-z ]+) \|$", TABLE.partition("## All packages")[2], re.MULTILINE)
LICENCES = {(name, version): licence for name, version, licence, _ in LINES}


def test_every_package_of_the_locks_is_there_in_its_version_and_no_other() -> None:
    assert {(name, version): where for name, version, _, where in LINES} == images(), "make licences"


def test_the_other_tables_follow_from_it() -> None:
    assert tables(LICENCES) == TABLES + TABLE


def test_every_licence_that_is_not_permissive_is_explained() -> None:
    assert not [one for one in set(LICENCES.values()) if not is_permissive(one) and f"`{one}`" not in BY_HAND]


@pytest.mark.parametrize(("metadata", "licence"), [
    ({"license_expression": "mit or apache-2.0", "license": "ignored"}, "MIT OR Apache-2.0"),
    ({"license": "Apache License, Version 2.0"}, "Apache-2.0"),
    ({"license": "MIT License", "classifier": ["License :: OSI Approved :: Apache Software License"]}, "MIT"),
    ({"license": "Apache License\n   Version 2.0, January 2004\n\n   TERMS"}, "Apache"),
    ({"license": "Copyright (c) 2025\n\nRedistribution", "classifier": ["License :: OSI Approved :: BSD License"]}, "BSD"),
    ({"classifier": ["License :: OSI Approved :: BSD License", "License :: OSI Approved :: MIT License"]}, "BSD, MIT"),
    ({"license": "Some EULA", "classifier": ["License :: Other/Proprietary License"]}, "Some EULA"),
    ({"classifier": ["License :: Other/Proprietary License", "Topic :: Security"]}, "Other/Proprietary License"),
    ({"license": "", "classifier": ["Topic :: Security"]}, "not stated"),
])  # fmt: skip
def test_a_licence_is_told_as_far_as_the_metadata_tell(metadata: dict[str, Any], licence: str) -> None:
    assert licence_of(metadata) == licence


@pytest.mark.parametrize(("licence", "permissive"), [
    ("Apache-2.0 WITH LLVM-exception AND MIT", True),
    ("GPL-2.0-only OR MIT", True),
    ("MPL-2.0 AND MIT", False),
    ("BSD, GPLv2", False),
    ("not stated", False),
])  # fmt: skip
def test_all_that_apply_count_and_of_alternatives_one(licence: str, permissive: bool) -> None:
    assert is_permissive(licence) == permissive
