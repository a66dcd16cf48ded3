"""What a request becomes for the engine."""

import pytest
from msgspec.structs import replace

from sglang_live.engine_channel.inbox import CONTINUED
from sglang_live.messages import ThinkerRequest
from sglang_live.stages.thinker.request import MAX_RESPONSE_TOKENS, sampling_of

REQUEST = ThinkerRequest(
    "j",
    session_id="s",
    instructions="",
    keys=[],
    items=[],
    item_key="k",
    max_tokens=None,
    temperature=0.5,
    timeout_s=60.0,
)


@pytest.mark.parametrize("seed", [7, -7, 0])
def test_a_seed_is_the_engines(seed):
    assert sampling_of(replace(REQUEST, seed=seed), {}, [7])["sampling_seed"] == seed


@pytest.mark.parametrize(("most", "n_most"), [(None, MAX_RESPONSE_TOKENS), (10, 10), (3, 3)])
@pytest.mark.parametrize("n_before", [0, 1, 3])
def test_tokens_that_another_replica_has_generated_count(most, n_most, n_before):
    request = replace(REQUEST, max_tokens=most, continues=list(range(n_before)))
    sampling = sampling_of(request, {"top_p": 0.9, "min_new_tokens": 2}, [7])
    assert sampling == {
        "top_p": 0.9,
        "temperature": 0.5,
        "min_new_tokens": min(max(0, 2 - n_before), n_most - n_before),
        "max_new_tokens": n_most - n_before,
        "stop_token_ids": [7],
        **({"custom_params": {CONTINUED: n_before}} if n_before else {}),
    }
