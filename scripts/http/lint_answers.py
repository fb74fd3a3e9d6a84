"""Asks for every kind of answer and shows each to httplint, with its request."""

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import time
from urllib.parse import urlsplit

from httplint.message import HttpRequestLinter, HttpResponseLinter
from httplint.note import levels

SERVER = urlsplit(os.environ["SERVER"])
DATA = os.environ["IBID_DATA"]
ALL = '{"scope":"all"}'
JSON = {"Content-Type": "application/json"}
NDJSON = {"Content-Type": "application/x-ndjson"}


def bearer(name):
    return {"Authorization": f"Bearer {os.environ[name]}"}


def argued_for(path):
    """The list of docs/http.md: `subject NAME_OF_NOTE`, perhaps `of` a media type, of each line."""
    with open(path, encoding="utf-8") as file:
        return set(re.findall(r"^\* `([a-z-]+ [A-Z_]{4,}[^`]*)`", file.read(), re.MULTILINE))


class Linter:
    def __init__(self, accepted):
        self.accepted, self.met, self.findings = accepted, set(), []
        self.answers, self.statuses = 0, {}

    def ask(self, method, path, expected, headers=None, body=None):
        """The answer, which must have this status, after a look at it."""
        headers = {"User-Agent": "ibid-test", **(headers or {})}
        connection = http.client.HTTPConnection(SERVER.netloc, timeout=30)
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != expected:
            raise SystemExit(f"{method} {path}: {answer.status}, not {expected}: {content!r}")
        self.lint(method, path, headers, body, answer, content)
        connection.close()
        self.answers += 1
        self.statuses[expected] = self.statuses.get(expected, 0) + 1
        try:
            return json.loads(content)
        except ValueError:
            return answer

    def lint(self, method, path, headers, body, answer, content):
        now = time.time()
        request = HttpRequestLinter(start_time=now)
        request.process_request_topline(method.encode(), path.encode(), b"1.1")
        request.process_headers([(b"Host", SERVER.netloc.encode())] + [
            (name.encode(), value.encode("latin-1")) for name, value in headers.items()])
        response = HttpResponseLinter(start_time=now, _related=request)
        response.base_uri = os.environ["SERVER"] + path
        response.is_head_response = method == "HEAD"
        reason = answer.reason.encode()
        response.process_response_topline(b"1.1", str(answer.status).encode(), reason)
        fields = answer.headers.raw_items()
        response.process_headers([(k.encode(), v.encode("latin-1")) for k, v in fields])
        response.feed_content(content)
        response.finish_content(True)
        for note in response.notes:
            # The id of the export is another in every run.
            where = re.sub(r"[a-z2-7]{26}", "ID", path.split("?")[0])
            kind = (answer.getheader("Content-Type") or "").split(";")[0]
            self.note(note, f"{method} {where} {answer.status}", kind)

    def note(self, note, where, kind):
        for inner in getattr(note, "subnotes", []):
            self.note(inner, where, kind)
        if note.level not in (levels.BAD, levels.WARN):
            return
        name = f"{note.subject or 'status'} {type(note).__name__}"
        if kind.startswith("multipart/"):
            name += f" of {kind}"
        if name in self.accepted:
            self.met.add(name)
        else:
            self.findings.append(f"{note.level.value}: {where}: {name}: {note.summary}")


def work():
    subprocess.run([os.environ["IBID"], "worker", "--until-idle"], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def service(ask):
    for path in ("/", "/healthz", "/readyz", "/metrics", "/openapi.json"):
        ask("GET", path, 200)
        ask("HEAD", path, 200)
        ask("DELETE", path, 405)
    ask("GET", "/problems/link-expired", 200)
    ask("GET", "/problems/link-expired", 200, {"Accept": "text/html"})
    ask("GET", "/problems/none", 404)
    ask("GET", "/nowhere", 404)


def exports(ask):
    """Gives the job that is done in the end, and its link."""
    alice = bearer("ALICE")
    post = {**alice, **JSON, "Idempotency-Key": "k"}
    ask("POST", "/exports", 401, JSON, ALL)
    ask("POST", "/exports", 403, {**post, **bearer("WRITER")}, ALL)
    ask("POST", "/exports", 415, {**post, "Content-Type": "text/plain"}, ALL)
    ask("POST", "/exports", 413, post, " " * 20_000)
    ask("POST", "/exports", 400, {**alice, **JSON}, ALL)
    ask("POST", "/exports", 400, {**post, "Idempotency-Key": "a,b"}, ALL)
    ask("POST", "/exports", 400, post, "{")
    ask("POST", "/exports", 400, post, '{"scope":"conv:none"}')
    job = ask("POST", "/exports", 202, post, ALL)["job_id"]
    ask("POST", "/exports", 200, post, ALL)
    ask("POST", "/exports", 422, post, '{"scope":"conv:c-team"}')
    ask("POST", "/exports", 429, {**post, "Idempotency-Key": "other"}, ALL)
    ask("PUT", "/exports", 405)
    path = f"/exports/{job}"
    ask("GET", path, 200, alice)
    ask("GET", path, 401)
    ask("GET", path, 404, bearer("CAROL"))
    work()
    document = ask("GET", path, 200, alice)
    ask("HEAD", path, 200, alice)
    ask("GET", "/exports?limit=1", 200, alice)
    ask("GET", "/exports?limit=x", 400, alice)
    events = ask("GET", f"{path}/events", 200, alice)
    assert events.getheader("Content-Type").startswith("text/event-stream")
    return job, document


def downloads(ask, document):
    link = document["download"]["url"]
    etag = f'"{document["sha256"]}"'
    ask("GET", link, 200)
    ask("HEAD", link, 200)
    ask("OPTIONS", link, 204)
    ask("POST", link, 405)
    ask("GET", link, 206, {"Range": "bytes=0-9"})
    ask("GET", link, 206, {"Range": "bytes=0-9", "If-Range": etag})
    ask("GET", link, 200, {"Range": "bytes=0-9", "If-Range": '"other"'})
    ask("GET", link, 206, {"Range": "bytes=0-1, 10-19"})
    ask("GET", link, 416, {"Range": f"bytes={document['bytes']}-"})
    ask("GET", link, 304, {"If-None-Match": etag})
    ask("HEAD", link, 304, {"If-None-Match": etag})
    ask("GET", link, 412, {"If-Match": '"other"'})
    ask("GET", link + "x", 403)
    ask("GET", link.split("?")[0], 403)


def log(ask):
    writer = {**bearer("WRITER"), **NDJSON}
    join = '{"kind":"join","conv":"c","user":"dave","ts":"2026-01-05T09:00:00Z"}\n'
    ask("POST", "/log", 200, writer, join)
    ask("POST", "/log?skip_invalid=1", 200, writer, "{\n")
    ask("POST", "/log", 400, writer, "{\n")
    ask("POST", "/log?x=1", 400, writer, join)
    ask("POST", "/log", 415, {**bearer("WRITER"), **JSON}, join)
    ask("GET", "/log", 405)


def admin(ask, job, document):
    root, link = {**bearer("ADMIN"), **JSON}, document["download"]["url"]
    path = f"/admin/exports/{job}"
    ask("POST", f"{path}/restore", 409, root)
    ask("POST", f"{path}/revoke", 400, root, "{}")
    ask("POST", f"{path}/revoke", 200, root, '{"reason":"a test"}')
    ask("GET", link, 410)
    ask("POST", f"{path}/retry", 409, root)
    ask("POST", f"{path}/restore", 200, root)
    shutil.rmtree(os.path.join(DATA, "artifacts", job))
    ask("GET", link, 503)
    # Made again, and not worked on yet.
    ask("POST", f"{path}/retry", 200, root)
    ask("GET", link, 409)
    work()
    ask("PUT", "/admin/accounts/alice", 200, root, '{"enabled":false}')
    ask("GET", link, 403)
    ask("GET", f"/exports/{job}", 403, bearer("ALICE"))
    ask("PUT", "/admin/accounts/alice", 200, root, '{"enabled":true}')
    ask("POST", "/admin/exports/none/retry", 404, root)
    ask("GET", link, 200)


def main():
    linter = Linter(argued_for(sys.argv[1]))
    ask = linter.ask
    service(ask)
    job, document = exports(ask)
    downloads(ask, document)
    log(ask)
    admin(ask, job, document)
    ask("DELETE", f"/exports/{job}", 204, bearer("ALICE"))
    for finding in sorted(set(linter.findings)):
        print(finding)
    for name in sorted(linter.accepted - linter.met):
        print(f"docs/http.md argues for {name}, which was not met: take it out")
    statuses = ", ".join(f"{status} ({n})" for status, n in sorted(linter.statuses.items()))
    print(f"{linter.answers} answers: {statuses}")
    print(f"{len(set(linter.findings))} findings, {len(linter.met)} kinds argued for")
    raise SystemExit(1 if linter.findings or linter.accepted - linter.met else 0)


main()
