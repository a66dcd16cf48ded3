"""When a KV pool will be full: occupancy grows with the number of sessions and with time.

    rho(t) = rho_0 + N r t        Metronome, equation 1

r, the growth per session and second, is the slope of occupancy over session-seconds: sessions that
begin meanwhile do not bend the line. It is 0, on average, where sessions are bounded. Requests of
SGLang's own API have no session: without sessions they count as one.
"""

import math
from collections import deque

import numpy as np

# Long enough to tell growth from turns that begin and end, short enough to follow its changes.
HISTORY_S = 60.0
_LEAST_SAMPLES = 8
# Least multiple of its standard error for which a slope counts as growth.
_CERTAIN = 3.0


class PoolForecast:
    """
    Attributes:
        share: share of the pool that is in use.
        rate: growth of the share per session and second; 0 while no growth is certain.
        n_sessions: at the latest sample.
    """

    def __init__(self, history_s: float = HISTORY_S):
        self._history_s = history_s
        self._samples: deque[tuple[float, float, float]] = deque()  # time, session-seconds, share
        self.n_sessions = 0
        self.share = self.rate = 0.0

    def observe(self, now_s: float, share: float, n_sessions: int) -> None:
        session_s = 0.0
        if self._samples:
            last_s, session_s, _ = self._samples[-1]
            session_s += max(1, self.n_sessions) * (now_s - last_s)
        self._samples.append((now_s, session_s, share))
        while now_s - self._samples[0][0] > self._history_s:
            self._samples.popleft()
        self.share = share
        self.n_sessions = n_sessions
        self.rate = self._slope()

    def saturates_in_s(self, n_sessions: int | None = None) -> float:
        """Returns the seconds until it is full, by default with all sessions; inf: never."""
        n_sessions = max(1, self.n_sessions if n_sessions is None else n_sessions)
        if self.share >= 1:
            return 0.0
        return (1 - self.share) / (n_sessions * self.rate) if self.rate > 0 else math.inf

    def most_sessions(self, saturates_s: float) -> float:
        """Returns the most sessions with which it is not full within saturates_s."""
        return (1 - self.share) / (saturates_s * self.rate) if self.rate > 0 else math.inf

    def _slope(self) -> float:
        if len(self._samples) < _LEAST_SAMPLES:
            return 0.0
        _, session_s, share = np.array(self._samples).T
        x, y = session_s - session_s.mean(), share - share.mean()
        spread = float(x @ x)
        if spread == 0:
            return 0.0
        slope = float(x @ y) / spread
        errors = y - slope * x
        deviation = math.sqrt(float(errors @ errors) / (len(x) - 2) / spread)
        return slope if slope > _CERTAIN * deviation else 0.0
