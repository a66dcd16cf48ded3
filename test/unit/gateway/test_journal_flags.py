"""What the flags of the journal accept."""

import pytest

from sglang_live.arguments import parse
from sglang_live.errors import BadInputError

MODEL = ["--model-path", "demo"]


def journal_of(*flags: str):
    return parse([*MODEL, *flags]).journal


def test_without_flags_there_is_no_journal():
    assert journal_of().url == ""


def test_a_journal_has_a_key_and_an_expiry(tmp_path):
    key = str(tmp_path / "key")
    for url in ("sqlite:/var/lib/journal", "valkey://h:6379", "valkeys://me:secret@h"):
        journal = journal_of("--journal", url, "--journal-key-file", key)
        assert (journal.url, str(journal.key_file), journal.keep_s) == (url, key, 3600)
    assert journal_of("--journal-key-file", key, "--journal", url, "--journal-s", "60").keep_s == 60


def test_its_url_may_be_in_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_LIVE_JOURNAL", "valkey://h")
    assert journal_of("--journal-key-file", str(tmp_path)).url == "valkey://h"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--journal", "valkey://me:secret@h"], "need each other"),
        (["--journal-key-file", "key"], "need each other"),
        (["--journal", "redis://me:secret@h", "--journal-key-file", "key"], "is a URL of"),
        (["--journal", "/var/lib/journal", "--journal-key-file", "key"], "is a URL of"),
        (
            ["--journal", "sqlite:f", "--journal-key-file", "key", "--journal-s", "0"],
            "journal-s must be positive",
        ),
    ],
)
def test_what_cannot_be_is_refused_without_the_password(flags, why):
    with pytest.raises(BadInputError, match=why) as refused:
        journal_of(*flags)
    assert "secret" not in str(refused.value)
