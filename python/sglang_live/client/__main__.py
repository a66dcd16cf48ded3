"""`python -m sglang_live.client`: hold a conversation and report its measurements."""

import asyncio
import json
import sys

from sglang_live.client import clip
from sglang_live.client.config import ClientConfig, UserTurn, parse_args
from sglang_live.client.connecting import SessionError
from sglang_live.client.realtime_client import RealtimeClient
from sglang_live.client.report import Progress, show, summarise, write_responses
from sglang_live.client.turn_record import TurnRecord
from sglang_live.clock import MonotonicClock
from sglang_live.environment import start_in_utf8_mode


async def converse(
    config: ClientConfig, speech: dict[UserTurn, bytes], records: list[TurnRecord]
) -> None:
    """Take the turns one after another; stop at the first that fails.

    records: filled turn by turn, so that measurements are kept if a later turn raises.
    """
    clock = MonotonicClock()
    progress = Progress(clock)
    async with RealtimeClient(config.session, clock, progress.on_event) as client:
        show(f"connected to {config.session.url}, session {client.session.get('id')}")
        for number, turn in enumerate(config.turns, start=1):
            if turn.wav is not None:
                spoken_s = clip.duration_s(speech[turn])
                progress.turn_begins(number, len(config.turns), f"{turn.wav} ({spoken_s:.1f} s)")
                record = await client.speak(speech[turn])
            else:
                assert turn.text is not None, "UserTurn has a recording or a text"
                progress.turn_begins(number, len(config.turns), f"{turn.text!r}")
                record = await client.ask(turn.text)
            progress.turn_ended(record)
            records.append(record)
            if not record.ok:
                return
            if number < len(config.turns):
                # Speech before the end of the response would interrupt it.
                await client.wait_until_played()


def main(argv: list[str] | None = None) -> int:
    config = parse_args(argv)
    records: list[TurnRecord] = []
    error = None
    try:
        speech = {turn: clip.load_pcm(turn.wav) for turn in config.turns if turn.wav is not None}
    except ValueError as bad_file:
        show(f"error: {bad_file}")
        return 2
    try:
        asyncio.run(converse(config, speech, records))
    except SessionError as refused:
        error = str(refused)
        show(f"error: {error}")
    except KeyboardInterrupt:
        show("interrupted")
        return 130
    summary = summarise(records, len(config.turns), error)
    if config.out is not None and any(record.reply_pcm for record in records):
        write_responses(config.out, records)
        level = clip.measure_level(clip.load_pcm(config.out))
        show(
            f"wrote {config.out}: {level.duration_s:.2f} s, "
            f"peak {level.peak_dbfs:.1f} dBFS, rms {level.rms_dbfs:.1f} dBFS"
        )
    if config.json:
        print(json.dumps(summary), flush=True)
    return 0 if summary["status"] == "completed" else 1


if __name__ == "__main__":
    start_in_utf8_mode()
    sys.exit(main())
