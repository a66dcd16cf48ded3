"""How much of its KV pool an engine lends, and what it recalls.

In: a view of the lender's pool. Out: runs to offer, leases to recall. A lender keeps what it has
needed within the last minute and a reserve, because its own admission counts tokens that requests
may still decode: without them it refuses every request, although none ever fails to allocate.
Pure: no clock, no engine. Source: SwiftCache section 4.3 (the maximum over an interval).
"""

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseConfig:
    """
    roles: "lend" or "borrow", by stage.
    lent_bytes: that a process without an engine lends to each replica that borrows; 0: none does.
    lent_devices: that have it; one for all, or one for each.
    names_devices: a flag does.
    """

    roles: dict[str, str] = field(default_factory=dict)
    lent_bytes: int = 0
    lent_devices: tuple[str, ...] = ("cuda:0",)
    names_devices: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingConfig:
    """
    window_s: interval of the maximum need: SwiftCache's t, about a minute.
    future_tokens: tokens that admission expects a request to decode: SGLang's
        CLIP_MAX_NEW_TOKENS.
    cached_share: share of the pool that stays with the lender for prompts in its radix tree.
    n_runs: runs into which the whole pool would be divided, so that a recall moves a small part.
    max_run_bytes: largest run: PCIe 4 moves it to the host within 10 ms.
    calm_s: time without an offer after a recall: a burst of requests has more to come.
    """

    window_s: float = 60.0
    future_tokens: int = 4096
    cached_share: float = 0.125
    n_runs: int = 16
    max_run_bytes: int = 1 << 28
    calm_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.cached_share < 1:
            raise ValueError(f"cached_share is a share below 1, got {self.cached_share}")
        for name in ("window_s", "future_tokens", "n_runs", "max_run_bytes"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.calm_s < float("inf"):
            raise ValueError(f"calm_s must not be negative, got {self.calm_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LenderView:
    """
    Attributes:
        total: tokens of the pool.
        free: tokens that are free now; those of leases are not.
        evictable: tokens in unlocked leaves of the radix tree.
        leased: tokens of all leases.
        recalled: tokens of the leases among them that are recalled.
        needed: largest number of tokens that requests held within the window.
        longest_prompt: tokens of the longest prompt within the window.
        decoding: requests that take a slot per round.
        missing: tokens that a waiting request found too few in the latest round.
        since_recall_s: time since the latest recall.
    """

    total: int
    free: int
    evictable: int
    leased: int
    recalled: int
    needed: int
    longest_prompt: int
    decoding: int
    missing: int
    since_recall_s: float


def run_tokens(total: int, bytes_per_token: int, page_size: int, config: LendingConfig) -> int:
    """Tokens of one lease: whole pages; 0 if the pool is too small to lend any."""
    most = min(total // config.n_runs, config.max_run_bytes // bytes_per_token)
    return most - most % page_size


def reserve(view: LenderView, config: LendingConfig) -> int:
    """Tokens that stay free or evictable, for one more request than are running."""
    return config.future_tokens + view.longest_prompt + view.decoding


def offer(view: LenderView, run: int, config: LendingConfig) -> int:
    """Runs to offer now. Below the reserve and one run nothing is: what is offered stays offered.

    Args:
        run: tokens of a run.
    """
    if run <= 0 or view.recalled or view.missing or view.since_recall_s < config.calm_s:
        return 0
    kept = view.needed + reserve(view, config) + int(config.cached_share * view.total)
    spare = view.total - view.leased - kept - run
    return max(0, min(spare, view.free + view.evictable - reserve(view, config)) // run)


def lendable(total: int, run: int, config: LendingConfig) -> int:
    """Tokens that an idle engine lends at most.

    Args:
        total: tokens of the pool.
        run: tokens of a run.
    """
    idle = LenderView(
        total=total,
        free=total,
        evictable=0,
        leased=0,
        recalled=0,
        needed=0,
        longest_prompt=0,
        decoding=0,
        missing=0,
        since_recall_s=float("inf"),
    )
    return run * offer(idle, run, config)


def reclaim(view: LenderView, run: int, config: LendingConfig) -> int:
    """Runs to recall now, in addition to those that are recalled already."""
    active = view.leased - view.recalled
    if active <= 0 or run <= 0:
        return 0
    # The reserve is for one request; a second one may find it too small.
    missing = max(reserve(view, config) - view.free - view.evictable, view.missing)
    missing -= view.recalled
    return min(-(-missing // run), -(-active // run)) if missing > 0 else 0


class Need:
    """The lender's need over a window, which moves in steps: the maximum since one window ago."""

    _STEPS = 12

    def __init__(self, config: LendingConfig) -> None:
        self._step_s = config.window_s / self._STEPS
        self._steps: deque[tuple[float, int, int]] = deque(maxlen=self._STEPS + 1)

    def observe(self, now_s: float, held: int, prompt: int) -> None:
        """
        Args:
            held: tokens that requests hold.
            prompt: tokens of the longest prompt that has come since the last call.
        """
        if self._steps and now_s - self._steps[-1][0] < self._step_s:
            began_s, held_max, prompt_max = self._steps[-1]
            self._steps[-1] = (began_s, max(held_max, held), max(prompt_max, prompt))
        else:
            self._steps.append((now_s, held, prompt))
        while now_s - self._steps[0][0] > self._step_s * (self._STEPS + 1):
            self._steps.popleft()

    @property
    def held(self) -> int:
        return max((held for _, held, _ in self._steps), default=0)

    @property
    def prompt(self) -> int:
        return max((prompt for _, _, prompt in self._steps), default=0)
