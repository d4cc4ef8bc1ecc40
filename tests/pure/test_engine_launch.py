"""A process that was launched ahead ends with its owner's connection, taken or not."""

from __future__ import annotations

import sys

import pytest

from quickstep.engine.process.launch import launch
from quickstep.errors import EngineError

# a worker: it has its end of the connection, and waits until the other one closes
_WORKER = (
    sys.executable,
    "-c",
    "import socket, sys; end = socket.socket(fileno=int(sys.argv[1])); "
    "end.sendall(b'up'); end.recv(1); sys.exit(3)",
)


def test_a_launched_process_speaks_over_its_connection_and_leaves_with_it():
    launched = launch(_WORKER)
    assert launched.connection.recv(2) == b"up"
    launched.connection.close()
    assert launched.process.wait(30) == 3


def test_ending_it_twice_is_ending_it():
    launched = launch(_WORKER)
    launched.end()
    launched.end()
    assert launched.process.returncode is not None


def test_a_command_that_does_not_exist_is_an_engine_error():
    with pytest.raises(EngineError, match="cannot be started"):
        launch(("/no/such/command",))
