"""The thinker's requests of one turn, as stages/thinker/session.py sends them.

In: what the engine lacks of the turn's prompt. Out: requests in the engine's queue, each when the
result of the one before it has come back; the last one generates the response. Each waits for the
rounds in flight, and costs the device a prefill of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sglang_live.extensions.planner.simulation.engine.engine import Engine
from sglang_live.extensions.planner.simulation.engine.requests import Request
from sglang_live.extensions.planner.simulation.events import Events
from sglang_live.extensions.planner.simulation.server.session import Piece, Session
from sglang_live.extensions.planner.simulation.server.sessions import Prompt
from sglang_live.extensions.planner.simulation.spec import HostTimes


@dataclass(eq=False, slots=True, kw_only=True)
class Thinking:
    """
    Attributes:
        header: tokens of the instructions. All but one are in the radix tree.
        request: generates the response, behind the last piece of the prompt.
    """

    events: Events
    engine: Engine
    host: HostTimes
    header: int
    session: Session
    prompt: Prompt
    request: Request
    _n_sent: int = 0

    def begin(self) -> None:
        if self.prompt.is_new:
            self._ask(self._prefill_header)
        elif self.prompt.truncates:
            self._ask(self._send)
        else:
            self._send()

    def _ask(self, then: Callable[[], None]) -> None:
        """Send a message, which the engine answers between two rounds."""
        self.engine.post(lambda: self.events.after(self.host.answer_s, then))

    def _prefill_header(self) -> None:
        """In a request of its own, so that nothing else meets the radix tree."""

        def prefilled(req: Request) -> None:
            self.engine.pool.release(req.kv - req.cached_tokens)
            self._go_on()

        self._prefill("header", Piece(1), max(0, self.header - 1), prefilled)

    def _go_on(self) -> None:
        """The result of a request has come: send the next one."""
        self.events.after(self.host.result_s, self._send)

    def _send(self) -> None:
        if self._n_sent + 1 == len(self.prompt.pieces) or self.request.is_aborted:
            return self._add(self.request)
        piece = self.prompt.pieces[self._n_sent]
        self._n_sent += 1

        def prefilled(req: Request) -> None:
            self.session.n_device += piece.n_tokens
            self.engine.pool.release(req.kv - req.prompt_tokens)
            self._go_on()

        n_before = self.header + self.session.n_device
        self._prefill(str(self._n_sent), piece, n_before, prefilled)

    def _prefill(
        self, name: str, piece: Piece, n_before: int, prefilled: Callable[[Request], None]
    ) -> None:
        req = Request(
            rid=f"{self.request.rid}-{name}",
            prompt_tokens=n_before + piece.n_tokens,
            cached_tokens=n_before,
            max_new=0,
            reserve=0,
            audio_s=piece.audio_s,
            owner=self.request.owner,
            keeps_prefix=True,
        )
        req.prefilled = lambda: prefilled(req)
        self._add(req)

    def _add(self, req: Request) -> None:
        """Queue a request when the features of its clip are computed."""
        delay_s = self.host.features_per_s * req.audio_s
        self.events.after(delay_s, lambda: self.engine.post(lambda: self.engine.add(req)))
