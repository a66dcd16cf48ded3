"""Flags of the engines against SGLang's own declaration of them, before any engine starts."""

import random
import subprocess
import sys

import msgspec
import pytest

from sglang_live.errors import BadInputError
from sglang_live.stages.engine_args import RESERVED, engine_arguments, read_engine_argument
from sglang_live.stages.stage_flags import split_arguments


@pytest.fixture(scope="module")
def server_args():
    from sglang.srt import server_args

    return server_args


def test_every_argument_that_sglang_has_is_known_and_no_other(server_args):
    declared = {field.name for field in msgspec.structs.fields(server_args.ServerArgs)}
    untypable = {"custom_sigquit_handler", "stat_loggers"}
    hidden = {name for name in declared if name.startswith("_")}
    known = {argument.name for argument in engine_arguments().values()}
    assert known == declared - untypable - hidden


def test_what_sglangs_own_parser_makes_of_a_value_is_made_of_it_here(server_args):
    import argparse

    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    samples = {"int": "3", "float": "0.5", "human_readable_int": "2Ki", "str": "x"}
    compared = 0
    for action in parser._actions:
        argument = engine_arguments().get(action.dest)
        if argument is None or argument.kind not in samples or action.nargs == 0:
            continue
        assert argument.choices in (None, tuple(action.choices or ()))
        text = str(next(iter(action.choices))) if action.choices else samples[argument.kind]
        theirs = parser.parse_args(["--model-path", "m", action.option_strings[0], text])
        if argument.name not in RESERVED:
            name = action.option_strings[0][2:].replace("-", "_")
            assert read_engine_argument("--x", name, text) == (
                argument.name,
                getattr(theirs, argument.name),
            )
            compared += 1
    assert compared > 250


def test_names_are_checked_without_importing_sglang():
    code = (
        "import sys; from sglang_live.arguments import parse\n"
        "try: parse(['--model-path', 'demo', '--thinker.tp-sise', '2'])\n"
        "except Exception as error: print(error)\n"
        "print([name for name in ('torch', 'sglang', 'transformers') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said, imported = ran.stdout.splitlines()
    assert said.endswith("did you mean --thinker.tp-size?")
    assert imported == "[]"


def misspelt(name: str, rng: random.Random) -> str:
    """One letter lost, doubled, exchanged or swapped with the next one."""
    at = rng.randrange(1, len(name) - 1)
    letter = rng.choice("abcdefghijklmnopqrstuvwxyz")
    return rng.choice(
        [
            name[:at] + name[at + 1 :],
            name[:at] + name[at] + name[at:],
            name[:at] + letter + name[at + 1 :],
            name[:at] + name[at + 1] + name[at] + name[at + 2 :],
        ]
    )


def test_no_misspelt_flag_passes_and_the_one_meant_is_suggested():
    rng, known = random.Random(7), engine_arguments()
    drawn = suggested = 0
    while drawn < 500:
        meant = rng.choice([name for name in sorted(known) if len(name) > 3])
        typed = misspelt(meant, rng)
        if typed in known or typed.removeprefix("no_") in known:
            continue
        drawn += 1
        flag = f"--thinker.{typed.replace('_', '-')}"
        with pytest.raises(BadInputError) as refused:
            split_arguments([flag, "1"])
        assert str(refused.value).startswith(f"{flag}: SGLang has no such argument")
        suggested += str(refused.value).endswith(f"--thinker.{meant.replace('_', '-')}?")
    assert suggested > 0.9 * drawn


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("tp_size", "two", "takes a whole number, got 'two'"),
        ("tp_size", "1.5", "takes a whole number, got '1.5'"),
        ("tp_size", "", "takes a whole number, got ''"),
        ("tp_size", None, "needs a value"),
        ("mem_fraction_static", "much", "takes a number, got 'much'"),
        ("mem_fraction_static", "nan", "takes a number, got 'nan'"),
        ("sleep_on_idle", "2", "takes true or false, or no value, got '2'"),
        ("attention_backend", "tritn", "takes one of triton, .*, got 'tritn'"),
        ("max_total_tokens", "64 k", "takes a whole number, or one as 64k or 64Ki, got '64 k'"),
        ("max_total_tokens", "1.5Ki", "takes a whole number of Ki, got '1.5Ki'"),
        ("cuda_graph_bs_decode", "1,x", "takes a whole number, got '1,x'"),
        ("mm_process_config", "image", "takes JSON, got 'image'"),
        ("mm_process_config", '{"image":', "takes JSON"),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_flag(name, text, complaint):
    with pytest.raises(BadInputError, match=f"^--x {complaint}"):
        read_engine_argument("--x", name, text)


@pytest.mark.parametrize("name", RESERVED)
def test_arguments_that_the_server_sets_are_refused(name):
    with pytest.raises(BadInputError, match=RESERVED[name]):
        read_engine_argument("--x", name, "1")
