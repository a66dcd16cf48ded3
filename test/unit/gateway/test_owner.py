"""Names and salts of key owners."""

import asyncio

from sglang_live.gateway.auth import owned_digest, owner_salt
from sglang_live.gateway.realtime.route import realtime_link

from .fakes import Client, FakeOrchestrator, MemoryWire, services


def test_a_salt_is_constant_and_differs_by_owner():
    assert owner_salt("alice") == owner_salt("alice")
    assert len({owner_salt(owner) for owner in ("alice", "bob", "")}) == 3
    assert "alice" not in owner_salt("alice")


def test_names_of_different_owners_or_kinds_differ_even_where_their_joined_text_is_equal():
    names = [("rid", "a", "bc"), ("rid", "ab", "c"), ("session", "a", "bc"), ("rid", "a", "b")]
    assert len({owned_digest(*name) for name in names}) == len(names)
    assert owned_digest("rid", "a", "bc") == owned_digest("rid", "a", "bc")


async def test_turns_of_one_key_have_one_salt_and_turns_of_two_keys_have_two():
    salts = []
    for owner in ("alice", "alice", "bob"):
        orchestrator, wire = FakeOrchestrator(), MemoryWire()
        serving = asyncio.create_task(
            realtime_link(wire, services(orchestrator), owner=owner).run()
        )
        client = Client(wire)
        await client.expect("session.created")
        client.send("response.create")
        await client.until("response.done")
        salts.append(orchestrator.turns[0].cache_salt)
        client.send_raw(None)
        await serving
    assert salts == [owner_salt("alice"), owner_salt("alice"), owner_salt("bob")]
