"""Flags of the client; this file alone reads argv and the environment."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from sglang_live.client.session_options import SessionOptions

BUNDLED_CLIP = Path(__file__).parent.parent / "assets" / "question.flac"
API_KEY_VARIABLE = "SGLANG_LIVE_API_KEY"


@dataclass(frozen=True, slots=True)
class UserTurn:
    """The user's part of one turn: a recording or a written question."""

    wav: Path | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        if (self.wav is None) == (self.text is None):
            raise ValueError("a turn is either a recording or a text")
        if self.text is not None and not self.text.strip():
            raise ValueError("a written question must not be empty")
        if self.wav is not None and not self.wav.is_file():
            raise ValueError(f"no such file: {self.wav}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Settings of one run of the command.

    out: file for the audio of all responses; None: no file.
    json: print a summary as JSON.
    """

    session: SessionOptions
    turns: tuple[UserTurn, ...]
    out: Path | None
    json: bool

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError("there is no turn")
        if self.out is not None and not self.out.parent.is_dir():
            raise ValueError(f"no such folder: {self.out.parent}")


def parse_args(argv: list[str] | None = None) -> ClientConfig:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return ClientConfig(
            session=SessionOptions(
                url=args.url,
                model=args.model,
                voice=args.voice,
                instructions=args.instructions,
                push_to_talk=args.push_to_talk,
                api_key=args.api_key or os.environ.get(API_KEY_VARIABLE),
                turn_timeout_s=args.turn_timeout_s,
            ),
            turns=tuple(args.turns or [UserTurn(wav=BUNDLED_CLIP)]),
            out=args.out,
            json=args.json,
        )
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_live.client",
        description="Speak into a /v1/realtime server at real-time pace and measure the responses. "
        "Exit code 0: every turn has a response; 1: one has none; 2: wrong arguments.",
    )
    add = parser.add_argument
    add("--url", default="ws://127.0.0.1:30000/v1/realtime", help="default: %(default)s")
    add(
        "--wav",
        dest="turns",
        action="append",
        type=_wav_turn,
        metavar="FILE",
        help="recording to speak (wav or flac); repeat for several turns in one session "
        "(default: the bundled recording)",
    )
    add(
        "--text",
        dest="turns",
        action="append",
        type=_text_turn,
        metavar="TEXT",
        help="ask in writing instead; may be mixed with --wav in any order",
    )
    add("--out", type=Path, metavar="FILE", help="write the audio of all responses as one wav file")
    add("--json", action="store_true", help="print one JSON object as the last line of stdout")
    add("--model", help="default: the one that the server has")
    add("--voice", help="default: the model's first voice")
    add("--instructions", help="system prompt of the session")
    add("--push-to-talk", action="store_true", help="commit each recording, without server VAD")
    add("--api-key", help=f"default: environment variable {API_KEY_VARIABLE}")
    add(
        "--turn-timeout-s",
        type=float,
        default=60.0,
        metavar="S",
        help="longest wait for a response after the end of the recording (default: %(default)s)",
    )
    return parser


def _wav_turn(value: str) -> UserTurn:
    return _user_turn(wav=Path(value))


def _text_turn(value: str) -> UserTurn:
    return _user_turn(text=value)


def _user_turn(*, wav: Path | None = None, text: str | None = None) -> UserTurn:
    try:
        return UserTurn(wav, text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
