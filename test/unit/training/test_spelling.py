"""The loss that trains the audio encoder to spell, over the words of its recordings only."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from training.demo.hearing import BLANK_ID, Spelling

VOCAB, HIDDEN = 12, 6
SAID = [torch.tensor([7, 3, 7]), torch.tensor([], dtype=torch.long), torch.tensor([5])]


@pytest.fixture
def embed_tokens() -> nn.Embedding:
    torch.manual_seed(1)
    return nn.Embedding(VOCAB, HIDDEN)


def test_only_words_of_the_recordings_are_distinguished(embed_tokens):
    spelling = Spelling.of(SAID, embed_tokens)
    assert spelling.token_ids.tolist() == [BLANK_ID, 3, 5, 7]
    assert torch.equal(spelling.directions, embed_tokens.weight[[BLANK_ID, 3, 5, 7]])


def test_the_loss_is_that_of_ctc_over_those_words(embed_tokens):
    rows = [torch.randn(n, HIDDEN) for n in (9, 4, 6)]
    spelling = Spelling.of(SAID, embed_tokens)
    logits = nn.utils.rnn.pad_sequence(rows) @ embed_tokens.weight.T
    others = [i for i in range(VOCAB) if i not in spelling.token_ids.tolist()]
    logits[..., others] = -torch.inf
    expected = functional.ctc_loss(
        logits.log_softmax(-1), torch.cat(SAID), torch.tensor([9, 4, 6]), torch.tensor([3, 0, 1])
    )
    torch.testing.assert_close(spelling.loss(rows, SAID), expected)


def test_it_spells_what_the_outputs_point_at(embed_tokens):
    spelling = Spelling.of(SAID, embed_tokens)
    words = functional.normalize(embed_tokens.weight, dim=1)
    with torch.no_grad():
        spelling.directions.copy_(words[spelling.token_ids])
    path = [BLANK_ID, 7, 7, BLANK_ID, 7, 3, BLANK_ID]
    assert spelling.spell(10 * words[path]) == [7, 7, 3]
