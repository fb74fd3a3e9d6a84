"""Links whose queries are altered or made up, with a fixed seed: each is refused as a bad link, or
as no request at all where it holds characters that no address may."""

import http.client
import json
import os
import random
import string
from urllib.parse import urlsplit

DOCUMENT = json.loads(os.environ["DOCUMENT"])
SERVER = urlsplit(os.environ["SERVER"])
LINK = urlsplit(DOCUMENT["download"]["url"])
TRIES = 2000
# What must not stand in a query by RFC 3986, and is sent all the same. The server reads some of it.
FORBIDDEN = "[]{}|^`\"<>\\"
CHARACTERS = string.ascii_letters + string.digits + "%&=+-._~!$'()*,;:@/?" + FORBIDDEN
random.seed(20260105)


def altered(query):
    at = random.randrange(len(query))
    piece = "".join(random.choices(CHARACTERS, k=random.randrange(4)))
    return query[:at] + piece + query[at + random.randrange(3):]


def shuffled(query):
    pairs = query.split("&")
    random.shuffle(pairs)
    pairs.append(random.choice(pairs))
    return "&".join(pairs[: random.randrange(1, len(pairs) + 1)])


def made_up(_):
    return "".join(random.choices(CHARACTERS, k=random.randrange(200)))


def is_same(query):
    """Whether it says what the link says, in another spelling: order, percent-encoding."""
    def pairs(text):
        return sorted(tuple(pair.partition("=")) for pair in text.split("&"))
    return pairs(query) == pairs(LINK.query)


connection = http.client.HTTPConnection(SERVER.netloc, timeout=30)
counts, wrong = {}, []
for _ in range(TRIES):
    query = random.choice([altered, shuffled, made_up])(LINK.query)
    method = random.choice(["GET", "HEAD"])
    connection.putrequest(method, f"{LINK.path}?{query}")
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    counts[answer.status] = counts.get(answer.status, 0) + 1
    if answer.status == 400 and set(query) & set(FORBIDDEN):
        continue
    expected = 200 if is_same(query) else 403
    fine = answer.status == expected and answer.getheader("Cache-Control") == "private, no-store"
    if fine and expected == 403 and method == "GET":
        fine = json.loads(body)["type"] == "/problems/link-invalid"
    if not fine:
        wrong.append(f"{method} ?{query}\n  {answer.status} {answer.getheaders()}\n  {body[:300]!r}")
print(f"{TRIES} queries: {counts}, {len(wrong)} wrong")
for text in wrong[:10]:
    print(text)
raise SystemExit(1 if wrong or 403 not in counts else 0)
