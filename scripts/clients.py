"""Downloads from a real server with real clients; run by scripts/test-clients."""

import contextlib
import hashlib
import http.client
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

IBID = sys.argv[1]
CHECKS = []


def check(*needs):
    """A check, and the programs or modules without which it is skipped."""

    def register(function):
        CHECKS.append((function, needs))
        return function

    return register


def is_there(need):
    if need.startswith("python:"):
        modules = need.removeprefix("python:")
        return subprocess.run([sys.executable, "-c", f"import {modules}"], capture_output=True).returncode == 0
    return shutil.which(need) is not None


def run(*command, status=0, **more):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **more)
    statuses = status if isinstance(status, tuple) else (status,)
    if done.returncode not in statuses:
        raise AssertionError(f"{command[0]} ended with {done.returncode}: {done.stderr[-800:]}{done.stdout[-300:]}")
    return done


class Stage:
    """A server on a folder of its own, with an export of some 20 MB."""

    def __init__(self, folder):
        self.folder = folder
        self.environment = {"IBID_DATA": str(folder / "data"), "PATH": os.environ["PATH"], "HOME": str(folder)}
        with open(folder / "log.jsonl", "w") as log:
            stamp = "2026-01-05T09:00:00Z"
            for user in ("alice", "carol"):
                print(json.dumps({"kind": "join", "conv": user, "user": user, "ts": stamp}), file=log)
                for n in range(150):
                    seed = f"{user} {n}".encode()
                    body = "".join(hashlib.sha256(seed + bytes([m % 256, m // 256])).hexdigest() for m in range(4000))
                    event = {"kind": "message", "conv": user, "user": user, "ts": stamp, "body": body}
                    print(json.dumps(event), file=log)
        self.ibid("import", str(folder / "log.jsonl"))
        self.server = None
        self.port = 0
        self.start()
        self.file = self.made("alice")
        self.other = self.made("carol")

    def ibid(self, *arguments):
        return run(IBID, *arguments, env=self.environment).stdout.strip()

    def start(self):
        command = [IBID, "serve", "--listen", f"127.0.0.1:{self.port}"]
        self.server = subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        line = self.server.stdout.readline()
        self.port = int(line.rsplit(":", 1)[1])

    def kill(self):
        self.server.send_signal(signal.SIGKILL)
        self.server.wait()

    def base(self):
        return f"http://127.0.0.1:{self.port}"

    def made(self, user):
        """An export that is done."""
        file = File()
        file.token = self.ibid("token", "create", "--user", user)
        asked = self.ask(file.token, "/exports", b'{"scope":"all"}')
        file.job = asked["job_id"]
        while True:
            document = self.ask(file.token, f"/exports/{file.job}")
            if document["state"] == "done":
                break
            time.sleep(0.1)
        file.sha256, file.bytes = document["sha256"], document["bytes"]
        file.path = next((self.folder / "data" / "artifacts" / file.job).rglob("export.jsonl.gz"))
        file.content = file.path.read_bytes()
        return file

    def ask(self, token, path, body=None):
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", "Idempotency-Key": "k"}
        request = urllib.request.Request(self.base() + path, data=body, headers=headers)
        return json.load(urllib.request.urlopen(request))

    def link(self, file):
        """A fresh link."""
        document = self.ask(file.token, f"/exports/{file.job}")
        return self.base() + document["download"]["url"]

    def half(self, name, file=None):
        path = self.folder / name
        content = (file or self.file).content
        path.write_bytes(content[: len(content) // 2])
        return path

    def is_the_file(self, path):
        got = hashlib.sha256(path.read_bytes()).hexdigest()
        assert got == self.file.sha256, f"{path.name} is not the file: {path.stat().st_size} bytes"
        path.unlink()


class File:
    pass


@contextlib.contextmanager
def cutting(port, after):
    """A way to the server of which the first connection that sends so much breaks then."""
    listener = socket.create_server(("127.0.0.1", 0))
    state = {"cut": False, "asked": []}

    def pump(source, sink, limit):
        passed = 0
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                if limit is None:
                    state["asked"].append(chunk)
                elif not state["cut"] and passed + len(chunk) > limit:
                    sink.sendall(chunk[: limit - passed])
                    state["cut"] = True
                    break
                sink.sendall(chunk)
                passed += len(chunk)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", port))
                threading.Thread(target=pump, args=(client, server, None), daemon=True).start()
                threading.Thread(target=pump, args=(server, client, after), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1], state
    finally:
        listener.close()


@check("curl")
def curl_fetches_the_whole(stage):
    out = stage.folder / "whole.gz"
    run("curl", "-sSf", "-o", out, stage.link(stage.file))
    stage.is_the_file(out)


@check("curl")
def curl_goes_on_with_half_a_file(stage):
    out = stage.half("half.gz")
    run("curl", "-sSf", "-C", "-", "-o", out, stage.link(stage.file))
    stage.is_the_file(out)


@check("curl")
def curl_has_nothing_to_do_with_a_whole_file(stage):
    out = stage.folder / "done.gz"
    out.write_bytes(stage.file.content)
    # 22: the server says that there is no such range.
    run("curl", "-sSf", "-C", "-", "-o", out, stage.link(stage.file), status=(0, 22))
    stage.is_the_file(out)


@check("curl")
def curl_does_not_splice_two_files(stage):
    out = stage.half("changed.gz", stage.other)
    before = out.read_bytes()
    tag = f'If-Range: "{stage.other.sha256}"'
    # 33: it asked for a range and gets the whole, which it does not append.
    run("curl", "-sSf", "-C", "-", "-H", tag, "-o", out, stage.link(stage.file), status=33)
    assert out.read_bytes() == before
    run("curl", "-sSf", "-H", tag, "-r", "100-", "-o", out, stage.link(stage.file))
    stage.is_the_file(out)


@check("curl")
def curl_gets_two_ranges_in_one_answer(stage):
    answer = subprocess.run(
        ["curl", "-sSf", "-i", "-r", "0-0,-1", stage.link(stage.file)], capture_output=True, check=True
    ).stdout
    head, body = answer.split(b"\r\n\r\n", 1)
    assert b"206" in head.split(b"\r\n")[0], head
    assert b"content-range" not in head.lower(), head
    boundary = head.split(b"boundary=")[1].split(b"\r\n")[0]
    parts = body.split(b"\r\n--" + boundary)
    assert parts[0] == b"" and parts[3] == b"--\r\n", parts
    first, last = (part.split(b"\r\n\r\n", 1)[1] for part in parts[1:3])
    assert first == stage.file.content[:1] and last == stage.file.content[-1:]


@check("curl")
def curl_speaks_http_2(stage):
    out = stage.half("two.gz")
    command = ["curl", "-sSf", "--http2-prior-knowledge", "-w", "%{http_version}", "-C", "-", "-o", out]
    version = run(*command, stage.link(stage.file)).stdout
    assert version == "2", version
    stage.is_the_file(out)


@check("curl")
def curl_keeps_a_connection_for_several_ranges(stage):
    link = stage.link(stage.file)
    command = ["curl", "-sSf", "-w", "%{num_connects}\n"]
    for n in range(4):
        command += ["-r", f"{n * 1000}-{n * 1000 + 999}", "-o", str(stage.folder / f"r{n}"), link, "--next", "-sSf"]
        command += ["-w", "%{num_connects}\n"]
    connects = run(*command[:-4]).stdout.split()
    assert connects == ["1", "0", "0", "0"], connects
    got = b"".join((stage.folder / f"r{n}").read_bytes() for n in range(4))
    assert got == stage.file.content[:4000]


@check("curl")
def curl_goes_on_after_the_server_was_killed(stage):
    out = stage.folder / "killed.gz"
    command = ["curl", "-sSf", "--limit-rate", "4M", "-o", str(out), stage.link(stage.file)]
    fetching = subprocess.Popen(command, stderr=subprocess.PIPE)
    while not (out.exists() and out.stat().st_size > 1_000_000):
        time.sleep(0.01)
    stage.kill()
    # 18: less came than was announced; 56: the connection was reset.
    assert fetching.wait() in (18, 56), fetching.stderr.read()
    assert out.stat().st_size < stage.file.bytes
    stage.start()
    run("curl", "-sSf", "-C", "-", "-o", out, stage.link(stage.file))
    stage.is_the_file(out)


@check("wget")
def wget_goes_on_with_half_a_file(stage):
    out = stage.half("wget.gz")
    run("wget", "-q", "-c", "-O", out, stage.link(stage.file))
    stage.is_the_file(out)


@check("wget")
def wget_tries_again_when_the_line_breaks(stage):
    out = stage.folder / "broken.gz"
    with cutting(stage.port, 5_000_000) as (port, state):
        link = stage.link(stage.file).replace(str(stage.port), str(port), 1)
        run("wget", "-q", "--tries=3", "--waitretry=1", "-O", out, link)
        assert state["cut"]
    stage.is_the_file(out)


@check("wget")
def wget_has_nothing_to_do_with_a_whole_file(stage):
    out = stage.folder / "there.gz"
    out.write_bytes(stage.file.content)
    run("wget", "-q", "-c", "-O", out, stage.link(stage.file))
    stage.is_the_file(out)


@check("aria2c")
def aria2_uses_sixteen_connections(stage):
    out = stage.folder / "aria.gz"
    command = ["aria2c", "-q", "-x16", "-s16", "-k1M", "-d", str(stage.folder), "-o", out.name]
    run(*command, stage.link(stage.file))
    stage.is_the_file(out)


@check("aria2c")
def aria2_goes_on_with_a_fresh_link(stage):
    out = stage.folder / "fresh.gz"
    command = ["aria2c", "-q", "-x16", "-s16", "-k1M", "-c", "-d", str(stage.folder), "-o", out.name]
    fetching = subprocess.Popen([*command, "--max-download-limit=4M", stage.link(stage.file)])
    control = stage.folder / "fresh.gz.aria2"
    while not (out.exists() and out.stat().st_size > 1_000_000 and control.exists()):
        time.sleep(0.01)
    time.sleep(1.5)
    fetching.send_signal(signal.SIGINT)
    fetching.wait()
    assert control.exists(), "it was too fast"
    run(*command, stage.link(stage.file))
    stage.is_the_file(out)


@check("python:requests")
def requests_goes_on_with_if_range(stage):
    code = """
import requests, sys
link, path, tag = sys.argv[1:]
have = open(path, "rb").read()
headers = {"Range": f"bytes={len(have)}-", "If-Range": tag}
with requests.get(link, headers=headers, stream=True) as answer:
    assert answer.status_code == 206, answer.status_code
    with open(path, "ab") as file:
        for chunk in answer.iter_content(65536):
            file.write(chunk)
with requests.get(link, headers={"Range": "bytes=5-", "If-Range": '"other"'}, stream=True) as answer:
    assert answer.status_code == 200, answer.status_code
"""
    out = stage.half("requests.gz")
    run(sys.executable, "-c", code, stage.link(stage.file), out, f'"{stage.file.sha256}"')
    stage.is_the_file(out)


@check("python:httpx, h2")
def httpx_fetches_ranges_over_one_http_2_connection(stage):
    code = """
import asyncio, httpx, sys
link, path, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
async def main():
    async with httpx.AsyncClient(http1=False, http2=True, timeout=60) as client:
        piece = size // 8 + 1
        async def part(n):
            headers = {"Range": f"bytes={n * piece}-{min((n + 1) * piece, size) - 1}"}
            answer = await client.get(link, headers=headers)
            assert (answer.status_code, answer.http_version) == (206, "HTTP/2"), answer
            return answer.content
        parts = await asyncio.gather(*(part(n) for n in range(8)))
    open(path, "wb").write(b"".join(parts))
asyncio.run(main())
"""
    out = stage.folder / "httpx.gz"
    run(sys.executable, "-c", code, stage.link(stage.file), out, str(stage.file.bytes))
    stage.is_the_file(out)


@check("chromium", "chromedriver")
def chromium_downloads_and_goes_on_by_itself(stage):
    folder = stage.folder / "chromium"
    folder.mkdir()
    with cutting(stage.port, 6_000_000) as (port, state), browser(folder) as session:
        link = stage.link(stage.file).replace(str(stage.port), str(port), 1)
        session.open(link)
        out = folder / f"export-{stage.file.job}.jsonl.gz"
        for _ in range(600):
            if out.exists():
                break
            time.sleep(0.1)
        assert state["cut"], "the line did not break"
        assert out.exists(), f"there is only {sorted(path.name for path in folder.iterdir())}"
        asked = b"".join(state["asked"]).lower()
        assert b"range: bytes=" in asked, "it began again instead of going on"
    stage.is_the_file(out)


@contextlib.contextmanager
def browser(folder):
    """A headless Chromium that saves downloads in `folder`, by the WebDriver protocol."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        session = WebDriver(port, folder)
        yield session
        session.close()
    finally:
        driver.terminate()
        driver.wait()


class WebDriver:
    def __init__(self, port, folder):
        self.port = port
        options = {
            "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
            "prefs": {"download.default_directory": str(folder), "download.prompt_for_download": False},
        }
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        for _ in range(100):
            try:
                self.session = self.call("POST", "/session", wanted)["sessionId"]
                return
            except ConnectionRefusedError:
                time.sleep(0.1)
        raise AssertionError("chromedriver does not answer")

    def open(self, url):
        self.call("POST", f"/session/{self.session}/url", {"url": url})

    def close(self):
        self.call("DELETE", f"/session/{self.session}", None)

    def call(self, method, path, body):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        answer = json.load(connection.getresponse())["value"]
        if isinstance(answer, dict) and "error" in answer:
            raise AssertionError(answer["message"])
        return answer


@check("curl")
def an_artefact_that_is_cut_breaks_the_connection_and_nothing_else(stage):
    out = stage.folder / "cut.gz"
    command = ["curl", "-sSf", "--limit-rate", "4M", "-o", str(out), stage.link(stage.file)]
    fetching = subprocess.Popen(command, stderr=subprocess.PIPE)
    while not (out.exists() and out.stat().st_size > 1_000_000):
        time.sleep(0.01)
    os.truncate(stage.file.path, 1000)
    assert fetching.wait() in (18, 56), fetching.stderr.read()
    assert stage.server.poll() is None, "the server is gone"
    answer = run("curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", stage.link(stage.file)).stdout
    assert answer == "503", answer
    document = stage.ask(stage.file.token, f"/exports/{stage.file.job}")
    assert document["waiting"]["type"] == "artefact-unavailable", document
    # An admin has it made again, and what was fetched of the first is still good.
    stage.ibid("admin", "retry", stage.file.job)
    for _ in range(600):
        document = stage.ask(stage.file.token, f"/exports/{stage.file.job}")
        if document["state"] == "done":
            break
        time.sleep(0.1)
    assert "waiting" not in document, document
    run("curl", "-sSf", "-C", "-", "-o", out, stage.link(stage.file))
    stage.is_the_file(out)


def main():
    failed, skipped = [], []
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(pathlib.Path(folder))
        try:
            for function, needs in CHECKS:
                name = function.__name__.replace("_", " ")
                missing = [need for need in needs if not is_there(need)]
                if missing:
                    skipped.append(name)
                    print(f"skipped {name}: there is no {missing[0]}", flush=True)
                    continue
                begun = time.monotonic()
                try:
                    function(stage)
                    print(f"ok      {name} ({time.monotonic() - begun:.1f} s)", flush=True)
                except Exception as error:
                    failed.append(name)
                    print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)
        finally:
            stage.kill()
    passed = len(CHECKS) - len(failed) - len(skipped)
    print(f"{passed} passed, {len(failed)} failed, {len(skipped)} skipped")
    sys.exit(1 if failed else 0)


main()
