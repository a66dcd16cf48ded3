"""The limit on open files, raised when the server starts."""

import logging
import resource

log = logging.getLogger(__name__)

_WANTED = 65_536
# Sockets of stages, model files, shared memory.
_OWN_FILES = 512
# The connections of a session's client, with some reserve.
_PER_SESSION = 4


def raise_open_files(max_sessions: int, n_connections: int) -> int:
    """Raise the soft limit to the hard one, at most to 65,536; child processes inherit it.

    Logs a warning with the sufficient limit if the new one is too low.

    Args:
        max_sessions: sessions that may be open at once.
        n_connections: connections that may be open at once.
    Returns:
        The soft limit that now applies.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    top = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < top:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
            soft = top
        except (ValueError, OSError) as error:
            log.warning("open_files_not_raised limit=%d hard=%d error=%s", soft, hard, error)
    n_needed = _OWN_FILES + _PER_SESSION * max_sessions + n_connections
    if soft != resource.RLIM_INFINITY and soft < n_needed:
        log.warning(
            "open_files_short limit=%d needed=%d: raise it with `ulimit -n %d`, LimitNOFILE= of "
            "systemd or --ulimit nofile of a container",
            soft,
            n_needed,
            n_needed,
        )
    return soft
