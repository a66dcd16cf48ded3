"""Word errors of a recognised text."""

import re


def words_of(text: str) -> list[str]:
    """Lower case, without punctuation; a hyphen separates words."""
    return re.sub(r"[^a-z0-9' ]", "", text.lower().replace("-", " ")).split()


def word_errors(said: str, heard: str) -> int:
    """Fewest words to replace, insert or delete."""
    reference, hypothesis = words_of(said), words_of(heard)
    costs = list(range(len(hypothesis) + 1))
    for number, word in enumerate(reference, 1):
        above, costs[0] = costs[0], number
        for at, other in enumerate(hypothesis, 1):
            best = min(costs[at] + 1, costs[at - 1] + 1, above + (word != other))
            above, costs[at] = costs[at], best
    return costs[-1]
