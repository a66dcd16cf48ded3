"""Any grammar of a client is checked in little time."""

import time

import pytest

from sglang_live.gateway.errors import ParameterError
from sglang_live.gateway.native.grammars import ebnf

_ALL = 16_384


@pytest.mark.parametrize("filler", [" ", "1", "{", ",", "{ ", "{1 , "])
def test_a_grammar_of_braces_and_blanks_is_checked_in_linear_time(filler):
    grammar = ("{" + filler * _ALL)[:_ALL]
    began_s = time.process_time()
    try:
        ebnf(grammar, "ebnf")
    except ParameterError as error:
        assert "nested too deep" in str(error)
    # CPU time. Backtracking took 24 s at 400 blanks, growing with the fourth power.
    assert time.process_time() - began_s < 2


def test_a_count_of_thousands_of_digits_is_refused_as_too_large():
    with pytest.raises(ParameterError, match="too large"):
        ebnf('root ::= "a"{' + "9" * 5_000 + "}", "ebnf")


def test_a_count_is_bounded_with_blanks_around_it():
    for repeat in ("{1000001}", "{ 1 , 1000001 }", "{1000001,}", "{, 1000001}"):
        with pytest.raises(ParameterError, match="too large"):
            ebnf('root ::= "a"' + repeat, "ebnf")
    assert ebnf('root ::= "a"{ 2 , 3 }', "ebnf")
