"""Hooks for Schemathesis: requests that are right by the description meet what is there."""

import itertools
import json
import os
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import schemathesis
from hypothesis import strategies as st

DOCUMENT = json.loads(os.environ["DOCUMENT"])
LINK = urlsplit(DOCUMENT["download"]["url"])
JOBS = {
    "withdrawExport": os.environ["WITHDRAWN"],
    "revokeExport": os.environ["REVOKED"],
    "restoreExport": os.environ["REVOKED"],
    "retryExport": os.environ["REVOKED"],
}
# Values of headers that hit something, as random text never does.
ETAG = f'"{DOCUMENT["sha256"]}"'
BYTES = DOCUMENT["bytes"]
HEADERS = {
    "Range": ["bytes=0-9", "bytes=5-", "bytes=-7", f"bytes={BYTES}-", "bytes=0-1, 4-5",
              "bytes=1-0", f"bytes=0-{2**64}", "chars=0-1", "bytes=" + "0-1," * 17 + "9-"],
    "If-Range": [ETAG, f"W/{ETAG}", "Fri, 15 Jan 2027 12:00:00 GMT", '"other"'],
    "If-Match": [ETAG, "*", '"other"', f'"other", {ETAG}'],
    "If-None-Match": [ETAG, "*", '"other"', f"W/{ETAG}"],
    "If-Modified-Since": ["Mon, 05 Jan 2026 09:30:00 GMT", "Fri, 15 Jan 2038 12:00:00 GMT", "x"],
    "If-Unmodified-Since": ["Mon, 05 Jan 2026 09:30:00 GMT", "Fri, 15 Jan 2038 12:00:00 GMT", "x"],
}

# Counted, so that a run can be had again.
TURNS = itertools.count()


def is_right(case):
    generation = case.meta and case.meta.generation
    return bool(generation) and generation.mode == schemathesis.GenerationMode.POSITIVE


@schemathesis.hook
def before_call(context, case, kwargs):
    name = case.operation.definition.raw.get("operationId")
    # An account that is disabled would close the door to all that comes after.
    if name == "setAccount" and (case.path_parameters or {}).get("user") in ("alice", "root", "app"):
        case.path_parameters["user"] = "zoe"
    # A list of exports names the one that all downloads are of.
    if name in JOBS and (case.path_parameters or {}).get("id") == DOCUMENT["job_id"]:
        case.path_parameters["id"] = JOBS[name]
    if not is_right(case):
        return
    if case.path_parameters and "id" in case.path_parameters:
        case.path_parameters["id"] = JOBS.get(name, DOCUMENT["job_id"])
    if name in ("download", "describeDownload"):
        case.query = dict(parse_qsl(LINK.query))
        meet(case.headers)
    if name == "listExports" and case.query and "cursor" in case.query:
        case.query["cursor"] = os.environ["CURSOR"]
    # The conversation of a scope that was made up is one that nobody was in, which is refused.
    if name == "createExport" and isinstance(case.body, dict):
        if str(case.body.get("scope", "")).startswith("conv:"):
            case.body["scope"] = "conv:c-team"


def meet(headers):
    """Gives headers of a download values that hit something: ranges in every second request, a
    condition in every third. All that may be drawn at once is hardly ever met."""
    turn = next(TURNS)
    for name in HEADERS:
        headers.pop(name, None)
    conditions = [name for name in HEADERS if name not in ("Range", "If-Range")]
    wanted = ["Range"] if turn % 2 else []
    if turn % 3 == 0:
        wanted.append(conditions[turn // 3 % len(conditions)])
    if turn % 7 == 0:
        wanted.append("If-Range")
    for name in wanted:
        headers[name] = HEADERS[name][turn // 2 % len(HEADERS[name])]


@schemathesis.hook
def before_load_schema(context, raw_schema):
    # An example is text, and bodies of a kind that is made here must be bytes.
    raw_schema["components"]["schemas"]["LogEvents"].pop("examples")


def lines(description):
    """Bodies of `POST /log`, by the schema of a line."""
    event = values(description["components"]["schemas"]["LogEvent"], description)
    texts = st.lists(event.map(lambda it: json.dumps(it, ensure_ascii=False)), max_size=4)
    return texts.map(lambda it: "\n".join(it).encode())


def values(schema, description):
    """Values by a schema, of which those keywords are read that events need."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return values(description["components"]["schemas"][name], description)
    if "oneOf" in schema:
        return st.one_of([values(it, description) for it in schema["oneOf"]])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema["type"]:
        case "object":
            members = {k: values(v, description) for k, v in schema["properties"].items()}
            must = {k: v for k, v in members.items() if k in schema["required"]}
            may = {k: v for k, v in members.items() if k not in schema["required"]}
            return st.fixed_dictionaries(must, optional=may)
        case "array":
            return st.lists(values(schema["items"], description), max_size=3)
        case "integer":
            return st.integers(schema["minimum"], schema["maximum"])
        case "boolean":
            return st.booleans()
    if schema.get("format") == "date-time":
        times = st.datetimes(allow_imaginary=False)
        return times.map(lambda it: it.isoformat() + "+01:00")
    # Encodable, that is, without lone surrogates; an id has no control characters either.
    without = ["Cs", "Cc"] if "pattern" in schema else ["Cs"]
    most = 40 if "pattern" in schema else 300
    characters = st.characters(exclude_categories=without)
    return st.text(characters, min_size=schema.get("minLength", 0), max_size=most)


FILE = Path(__file__).parents[2] / "docs" / "openapi.json"
with FILE.open(encoding="utf-8") as file:
    schemathesis.openapi.media_type("application/x-ndjson", lines(json.load(file)))


@schemathesis.serializer("application/x-ndjson")
def as_it_is(context, value):
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


@schemathesis.deserializer("application/gzip", "multipart/byteranges", "text/event-stream")
def as_bytes(context, response):
    return response.content.decode("latin-1")
