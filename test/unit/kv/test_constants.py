"""docs/kv.md states the constants that hold."""

from sglang_live.kv import preload, retention
from sglang_live.kv.elastic import ElasticConfig
from sglang_live.kv.link import LinkConfig
from sglang_live.kv.next_use import NextUseConfig
from sglang_live.kv.preload import PreloadConfig
from sglang_live.kv.retention import RetentionConfig
from test.unit.constants_in_docs import constants_of, written


def test_docs_state_every_constant():
    expected = written(
        RetentionConfig(),
        ("REBASE_RESERVE_TOKENS", retention.REBASE_RESERVE_TOKENS),
        NextUseConfig(),
        LinkConfig(),
        PreloadConfig(),
        ElasticConfig(),
        ("REMAINING_SPEECH_S", preload.REMAINING_SPEECH_S),
        ("PROTECTED_S", preload.PROTECTED_S),
    )
    assert constants_of("kv.md") == dict(expected)
