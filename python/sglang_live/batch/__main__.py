"""`python -m sglang_live.batch FILE.jsonl`: run a batch and write its results."""

import asyncio
import sys

from sglang_live.batch.api import Api, BatchError
from sglang_live.batch.config import BatchRun, parse_args
from sglang_live.batch.progress import Progress
from sglang_live.environment import start_in_utf8_mode

_ENDED = ("completed", "failed", "expired", "cancelled")


async def run(config: BatchRun, progress: Progress) -> bool:
    """Returns True if every request succeeded. Raises BatchError."""
    async with Api(config.url, config.api_key, progress.offline) as api:
        if config.file is not None:
            _say(f"uploading {config.file} ({config.file.stat().st_size:,} bytes)")
            batch = await api.create(config.file, config.endpoint)
            _say(f"batch {batch['id']}; to go on later: --id {batch['id']} --out {config.out}")
        else:
            assert config.batch_id is not None, "BatchRun has a file or an id"
            batch = await api.batch(config.batch_id)
        try:
            progress.show(batch)
            while batch["status"] not in _ENDED:
                await asyncio.sleep(config.poll_s)
                batch = await api.batch(batch["id"])
                progress.show(batch)
        finally:
            progress.end()
        for fault in (batch["errors"] or {}).get("data", ()):
            _say(f"line {fault['line']}: {fault['message']}")
        for name, path in (("output_file_id", config.out), ("error_file_id", config.errors)):
            if batch[name]:
                await api.save(batch[name], path)
                _say(f"wrote {path}")
        return batch["status"] == "completed" and not batch["request_counts"]["failed"]


def main(argv: list[str] | None = None) -> int:
    config = parse_args(argv)
    try:
        return 0 if asyncio.run(run(config, Progress())) else 1
    except (BatchError, OSError) as error:
        _say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        _say("interrupted; the batch goes on in the server")
        return 130


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    start_in_utf8_mode()
    sys.exit(main())
