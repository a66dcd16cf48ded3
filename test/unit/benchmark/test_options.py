from dataclasses import dataclass

import pytest

from benchmark.load.options import check_names, parser_of, read_options


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    n_users: int = 4
    share: float = 0.5
    arms: str = "a,b"
    deflate: bool = True


def test_each_field_is_a_flag_of_its_type():
    assert read_options(Options(), "", []) == Options()
    argv = ["--n-users", "7", "--share", "1", "--arms=c", "--no-deflate"]
    found = read_options(Options(), "", argv)
    assert found == Options(n_users=7, share=1.0, arms="c", deflate=False)
    assert isinstance(found.share, float)


@pytest.mark.parametrize("argv", [["--n-users", "x"], ["--unknown", "1"], ["--arms", "d"]])
def test_what_is_not_permitted_ends_the_program(argv, capsys):
    with pytest.raises(SystemExit) as left:
        read_options(Options(), "", argv, arms=("a,b", "c"))
    assert left.value.code == 2 and argv[0] in capsys.readouterr().err


def test_names_are_known_ones(capsys):
    parser = parser_of(Options(), "")
    check_names(parser, "--arms", "a,b", ["a", "b", "c"])
    with pytest.raises(SystemExit):
        check_names(parser, "--arms", "a,z", ["a", "b", "c"])
    assert "--arms" in capsys.readouterr().err
