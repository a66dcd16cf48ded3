"""Progress of flex responses in the vocoder: behind all that is heard, and yet some always.

Flex gets a share that is small beside what is heard: in frames, where codes are decoded in batches,
and in time, where a voice reads one piece after the other.
"""

from dataclasses import dataclass

from sglang_live.settings import Count, Positive, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexConfig(Settings):
    """
    flex_share: flex frames for each heard frame that is decoded while flex waits.
    flex_overdue_chunks: chunks that flex may be owed behind listeners with little left to hear.
    flex_wait_s: a flex response has its first piece after what would end within this time.
    flex_slowdown: seconds for each second of its speech, from then on.
    """

    flex_share: Positive = 1 / 16
    flex_overdue_chunks: Count = 4
    flex_wait_s: Positive = 10.0
    flex_slowdown: Positive = 8.0


@dataclass(frozen=True, slots=True)
class FlexDebt:
    """frames: that flex is owed."""

    frames: float = 0.0

    def after(self, n_heard: int, n_flex: int, flex_waits: bool, config: FlexConfig) -> "FlexDebt":
        """The debt after a batch.

        Args:
            n_heard, n_flex: frames that it decoded.
            flex_waits: whether a flex chunk was ready.
        """
        earned = config.flex_share * n_heard if flex_waits else 0.0
        return FlexDebt(max(0.0, self.frames + earned - n_flex))

    def n_due(self, chunk_frames: int) -> int:
        """Flex chunks that go before those of listeners who have time; before others if overdue."""
        return int(self.frames / chunk_frames)

    def is_overdue(self, chunk_frames: int, config: FlexConfig) -> bool:
        return self.n_due(chunk_frames) >= config.flex_overdue_chunks


def flex_due_s(began_s: float, spoken_s: float, config: FlexConfig) -> float:
    """When the next piece of a flex response counts as due, among heard ones that are due when the
    audio before them ends.

    Args:
        began_s: when the response began. spoken_s: seconds of its speech so far.
    """
    return began_s + config.flex_wait_s + config.flex_slowdown * spoken_s
