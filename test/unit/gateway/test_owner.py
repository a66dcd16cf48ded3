"""Names and salts of key owners."""

from sglang_live.gateway.owner import owned_digest, owner_salt


def test_a_salt_belongs_to_one_owner_and_stays():
    assert owner_salt("alice") == owner_salt("alice")
    assert len({owner_salt(owner) for owner in ("alice", "bob", "")}) == 3
    assert "alice" not in owner_salt("alice")


def test_names_are_apart_by_owner_and_kind_and_not_by_how_they_are_joined():
    names = [("rid", "a", "bc"), ("rid", "ab", "c"), ("session", "a", "bc"), ("rid", "a", "b")]
    assert len({owned_digest(*name) for name in names}) == len(names)
    assert owned_digest("rid", "a", "bc") == owned_digest("rid", "a", "bc")
