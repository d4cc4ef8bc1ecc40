"""llama.cpp's own server, started here, over HTTP on this machine."""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import subprocess
import threading
import time

from protocol import Run, Work, serve_driver


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _follow(port: int, work: Work, marks: list[float]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3600)
    body = {
        "prompt": work.prompt,
        "n_predict": work.num_outputs,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_tokens": True,
        "cache_prompt": True,
    }
    connection.request(
        "POST", "/completion", json.dumps(body), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    for line in answer:
        if line.startswith(b"data: "):
            chunk = json.loads(line[6:])
            marks.extend([time.perf_counter()] * len(chunk.get("tokens") or ()))
    connection.close()


def main() -> None:
    """Drive one GGUF file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--slots", type=int, default=16)
    args = parser.parse_args()
    port = _free_port()

    def opened():
        command = [args.server, "-m", args.model, "-t", str(args.threads), "--port", str(port)]
        command += ["-np", str(args.slots), "-c", str(4096 * args.slots), "--no-webui", "-cb"]
        # the child lives as long as this driver: it is killed below
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            if server.poll() is not None:
                raise RuntimeError(f"llama-server ended with {server.returncode}")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    break
            except OSError:
                pass
            time.sleep(0.05)

        def run(works: list[Work]) -> Run:
            done = Run(time.perf_counter(), [[] for _ in works])
            threads = [
                threading.Thread(target=_follow, args=(port, work, marks))
                for work, marks in zip(works, done.marks, strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return done

        return run

    serve_driver(opened)


if __name__ == "__main__":
    main()
