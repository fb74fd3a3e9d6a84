# Sourced by the tests of HTTP: builds `ibid`, starts it on a temporary folder with a sample log,
# and makes tokens and links. What is started ends with the script.

say() { printf '\n== %s\n' "$*"; }

# tools NAME==VERSION...: a Python with these packages; without them, says so and ends in order.
tools() {
    local folder
    folder=$target/http-tools
    if ! command -v python3 >/dev/null; then
        echo "skipped, because there is no python3: $*"
        exit 0
    fi
    python=$folder/bin/python
    if [ ! -x "$python" ]; then
        if ! python3 -m venv "$folder" >/dev/null 2>&1; then
            rm -rf "$folder"
            echo "skipped, because python3 cannot make a virtual environment (python3-venv): $*"
            exit 0
        fi
    fi
    if ! "$python" -m pip install --quiet --disable-pip-version-check "$@"; then
        echo "skipped, because PyPI does not give the packages: $*"
        exit 0
    fi
}

build() {
    say "build"
    cargo build --locked --package ibid-server
    ibid=$target/debug/ibid
}

# serve [FLAG...]: the address is in $server, the log of the process in $home/log.
serve() {
    "$ibid" serve --listen 127.0.0.1:0 --link-seconds 3600 "$@" >"$home/out" 2>"$home/log" &
    started=$!
    for _ in $(seq 200); do
        server=$(sed -n 's/.* listens on //p' "$home/out")
        if [ -n "$server" ]; then return; fi
        if ! kill -0 "$started" 2>/dev/null; then break; fi
        sleep 0.1
    done
    echo "the server did not start:" >&2
    cat "$home/log" >&2
    exit 1
}

stop() {
    if [ -n "$started" ]; then
        kill "$started" 2>/dev/null || true
        wait "$started" 2>/dev/null || true
        started=
    fi
}

token() { "$ibid" token create --user "$1" --role "$2" 2>/dev/null; }

# export_of TOKEN KEY: asks for an export, waits until it is done and gives its document.
export_of() {
    local job document
    job=$(curl -sSf "$server/exports" -H "Authorization: Bearer $1" -H "Idempotency-Key: $2" \
        -H 'Content-Type: application/json' -d '{"scope":"all"}' | member job_id)
    for _ in $(seq 200); do
        document=$(curl -sSf "$server/exports/$job" -H "Authorization: Bearer $1")
        if [ "$(member state <<<"$document")" = done ]; then
            echo "$document"
            return
        fi
        sleep 0.1
    done
    echo "the export $job is not done" >&2
    return 1
}

# member NAME...: a member of the JSON document on standard input.
member() {
    python3 -c 'import json, sys
value = json.load(sys.stdin)
for name in sys.argv[1:]:
    value = value[name]
print(value)' "$@"
}

target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
home=$(mktemp -d)
export IBID_DATA=$home/data
started=
export PYTHONDONTWRITEBYTECODE=1
trap 'stop; rm -rf "$home"' EXIT

cat >"$home/chat.jsonl" <<'END'
{"kind":"join","conv":"c-team","user":"alice","ts":"2026-01-05T09:00:00Z"}
{"kind":"join","conv":"c-team","user":"carol","ts":"2026-01-05T09:00:00Z"}
{"kind":"message","conv":"c-team","user":"bob","ts":"2026-01-05T09:30:00Z","body":"hi"}
{"kind":"message","conv":"c-team","user":"alice","ts":"2026-01-05T09:31:00Z","body":"hello, Bob"}
{"kind":"message","conv":"c-team","user":"bob","ts":"2026-01-05T09:32:00Z","body":"bye"}
END
