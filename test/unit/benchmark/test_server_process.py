"""ServerProcess against a stand-in that serves /health and has a child process."""

import sys
from pathlib import Path

import psutil
import pytest

from benchmark.load import server as server_module
from benchmark.load.process_usage import UsageMeter
from benchmark.load.server import ServerError, ServerProcess, command
from sglang_live.policy.policies import POLICIES

STAND_IN = """
import http.server, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
BROKEN = "import sys; print('stage talker: no such model'); sys.exit(3)"


def stand_in(monkeypatch, source: str):
    def launch(_model_path, _policies, port, _server_args, _module):
        return [sys.executable, "-c", source, str(port)]

    monkeypatch.setattr(server_module, "command", launch)
    monkeypatch.setattr(server_module, "HEALTH_POLL_S", 0.01)


def test_the_whole_process_tree_is_gone_afterwards(monkeypatch):
    stand_in(monkeypatch, STAND_IN)
    with ServerProcess("demo", "off", (), 10.0) as server:
        meter = UsageMeter(server.pid)
        meter.sample()
        tree = [psutil.Process(server.pid), *psutil.Process(server.pid).children()]
        assert len(tree) == 2
        assert sum(usage.n_processes for usage in meter.usage().values()) == 2
    _, alive = psutil.wait_procs(tree, timeout=2.0)
    assert not alive


def test_a_server_that_dies_at_start_shows_its_log(monkeypatch):
    stand_in(monkeypatch, BROKEN)
    with pytest.raises(ServerError, match=r"exited with 3(.|\n)*no such model"):
        ServerProcess("demo", "off", (), 10.0).__enter__()


def test_a_server_that_never_becomes_healthy_is_stopped_and_reported(monkeypatch):
    stand_in(monkeypatch, "import time; time.sleep(60)")
    server = ServerProcess("demo", "off", (), 0.1)
    with pytest.raises(ServerError, match=r"not healthy within"):
        server.__enter__()


def test_the_launch_command_names_the_arm():
    line = command("demo", "urgency+pacing", 31000, ("--x=1",))
    assert Path(line[0]).name.startswith("python")
    assert " ".join(line[1:]) == (
        "-m sglang_live.launch_server --model-path demo --host 127.0.0.1 --port 31000 "
        "--live-policies urgency,pacing --x=1"
    )
    everything = command("demo", "all", 1, ())[-1].split(",")
    assert set(everything) <= set(POLICIES) - {"admission"}
