"""Claims about the tokens of a batch."""

import sqlite3

import pytest

from sglang_live.extensions.batches.database import Database
from sglang_live.extensions.batches.records import NO_TOKENS, Tokens, tokens_of
from test.unit.extensions.batches.test_routes import Client, served

SPEAK, CHAT = "/v1/audio/speech", "/v1/chat/completions"


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"usage": {"prompt_tokens": 7, "completion_tokens": 3}}, Tokens(7, 0, 3)),
        (
            {
                "usage": {
                    "prompt_tokens": 7,
                    "completion_tokens": 3,
                    "prompt_tokens_details": {"cached_tokens": 4},
                }
            },
            Tokens(7, 4, 3),
        ),
        (
            {
                "usage": {
                    "prompt_tokens": 7,
                    "completion_tokens": None,
                    "prompt_tokens_details": None,
                }
            },
            Tokens(7, 0, 0),
        ),
        ({"audio": "", "usage": {"input_tokens": 2, "output_tokens": 9}}, Tokens(2, 0, 9)),
        ({"error": {"message": "x"}}, NO_TOKENS),
        ("a transcript", NO_TOKENS),
        (None, NO_TOKENS),
    ],
)
def test_both_forms_are_counted(body, tokens):
    assert tokens_of(body) == tokens


async def test_a_batch_has_the_sum_of_its_results(tmp_path):
    async with served(tmp_path) as address:
        client = Client(address)
        spoken = [{"input": "Hi."}, {"input": "Hi."}, {"input": ""}]
        batch = await client.ended(await client.create(SPEAK, spoken))
        lines = [line["response"]["body"] for line in await client.results(batch)]
        each = [line["usage"] for line in lines if "usage" in line]
        assert len(each) == 2 and batch.request_counts.failed == 1
        assert batch.usage.input_tokens == sum(usage["input_tokens"] for usage in each) > 0
        assert batch.usage.output_tokens == sum(usage["output_tokens"] for usage in each)
        chat = {
            "messages": [{"role": "user", "content": "Hi."}],
            "modalities": ["text", "audio"],
        }
        batch = await client.ended(await client.create(CHAT, [chat]))
        # As the fake's turns have it: 12 tokens in, 2 of them cached, 3 out.
        assert (batch.usage.input_tokens, batch.usage.output_tokens) == (12, 3)
        assert batch.usage.input_tokens_details.cached_tokens == 2
        assert batch.usage.total_tokens == 15


def test_a_database_of_the_version_before_is_kept(tmp_path):
    Database(tmp_path).close()
    with sqlite3.connect(tmp_path / "batches.sqlite") as before:
        for name in ("input_tokens", "cached_tokens", "output_tokens"):
            before.execute(f"ALTER TABLE batches DROP COLUMN {name}")
        before.execute("INSERT INTO batches (id, owner, n_lines) VALUES ('batch_x', 'o', 5)")
        before.execute("PRAGMA user_version = 1")
    before.close()
    database = Database(tmp_path)
    [row] = database.rows("SELECT n_lines, input_tokens, output_tokens FROM batches")
    assert tuple(row) == (5, 0, 0)
    database.close()
    Database(tmp_path).close()
