"""`python -m sglang_live.client`: hold a conversation and report how it went."""

import asyncio
import json
import sys

from sglang_live.client import clip
from sglang_live.client.config import ClientConfig, UserTurn, parse_args
from sglang_live.client.realtime_client import RealtimeClient, SessionError
from sglang_live.client.report import Progress, say, summarise, write_replies
from sglang_live.client.turn_record import TurnRecord
from sglang_live.clock import MonotonicClock


async def converse(
    config: ClientConfig, speech: dict[UserTurn, bytes], records: list[TurnRecord]
) -> None:
    """Take the turns one after another; stop at the first that fails.

    Fills `records`, so that what was measured is not lost when a later turn breaks.
    """
    clock = MonotonicClock()
    progress = Progress(clock)
    async with RealtimeClient(config.session, clock, progress.on_event) as client:
        say(f"connected to {config.session.url}, session {client.session.get('id')}")
        for number, turn in enumerate(config.turns, start=1):
            if turn.wav is not None:
                spoken_s = clip.duration_s(speech[turn])
                progress.turn_begins(number, len(config.turns), f"{turn.wav} ({spoken_s:.1f} s)")
                record = await client.speak(speech[turn])
            else:
                progress.turn_begins(number, len(config.turns), f"{turn.text!r}")
                record = await client.ask(turn.text)
            progress.endpointing(record)
            records.append(record)
            if not record.ok:
                return
            if number < len(config.turns):
                # A user who speaks before the reply was heard would be interrupting.
                await client.wait_until_played()


def main(argv: list[str] | None = None) -> int:
    config = parse_args(argv)
    records: list[TurnRecord] = []
    error = None
    try:
        speech = {turn: clip.load_pcm(turn.wav) for turn in config.turns if turn.wav is not None}
    except ValueError as bad_file:
        say(f"error: {bad_file}")
        return 2
    try:
        asyncio.run(converse(config, speech, records))
    except SessionError as refused:
        error = str(refused)
        say(f"error: {error}")
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    summary = summarise(records, len(config.turns), error)
    if config.out is not None and any(record.reply_pcm for record in records):
        write_replies(config.out, records)
        level = clip.measure_level(clip.load_pcm(config.out))
        say(
            f"wrote {config.out}: {level.duration_s:.2f} s, "
            f"peak {level.peak_dbfs:.1f} dBFS, rms {level.rms_dbfs:.1f} dBFS"
        )
    if config.json:
        print(json.dumps(summary), flush=True)
    return 0 if summary["status"] == "completed" else 1


if __name__ == "__main__":
    sys.exit(main())
