"""A stage process dies and is started again, as stages/supervisor.py does.

Its turns fail, what it held is lost, its sessions stay with it. Turns that begin while it is down
fail at once; new sessions get another replica. When it is up again, a thinker prefills the
conversation of each session again with its next turn.
"""

from sglang_live.extensions.planner.simulation.server.replicas import (
    EngineReplica,
    Replica,
    ThinkerReplica,
    VocoderReplica,
)
from sglang_live.extensions.planner.simulation.server.server import Server
from sglang_live.extensions.planner.simulation.server.turn import Turn


def kill(server: Server, replica: Replica, restart_s: float) -> None:
    """End a replica's process now; the next one serves after restart_s."""
    replica.is_up = False
    if isinstance(replica, VocoderReplica):
        replica.vocoder.stop()
    elif isinstance(replica, EngineReplica):
        replica.engine.stop()
    for turn in [turn for turn in server.turns.values() if replica in turn.places.every]:
        _lose_requests(turn, replica)
        server.fail(turn)
    if isinstance(replica, ThinkerReplica):
        for session, places in server.sessions.values():
            if places.thinker is replica:
                replica.kv.lose(session)
    server.replicas.restart(replica)

    def serve() -> None:
        replica.is_up = True

    server.events.after(restart_s, serve)


def _lose_requests(turn: Turn, replica: Replica) -> None:
    if replica is turn.places.thinker:
        turn.thinker_ended = True
        if turn.thinker is not None:
            turn.thinker.is_finished = True
    if replica is turn.places.talker and turn.talker is not None:
        turn.talker.is_finished = True
