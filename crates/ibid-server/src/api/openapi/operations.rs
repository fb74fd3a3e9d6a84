//! The operations: which there are, what they take and what they answer.

use ibid::ledger::Role;
use serde_json::{Value, json};

use super::Facts;
use super::answers::{Answer, PROTECTING, problems};
use crate::api::problem::Kind;
use crate::api::problem::kinds::*;
use crate::metrics;

/// One method at one address.
pub struct Operation {
    pub path: &'static str,
    /// In small letters, as the description has it.
    pub method: &'static str,
    pub described: Value,
    /// Headers that every answer of the address carries.
    everywhere: &'static [&'static str],
}

/// Who is asking is known by a token.
const TOKEN: [&Kind; 3] = [&UNAUTHORIZED, &ROLE_INSUFFICIENT, &ACCOUNT_DISABLED];
/// What may go wrong with a database.
const DATABASE: [&Kind; 2] = [&INTERNAL, &UNAVAILABLE];
/// What may be wrong with a body.
const BODY: [&Kind; 4] = [
    &REQUEST_INVALID,
    &BODY_TOO_LARGE,
    &UNSUPPORTED_MEDIA_TYPE,
    &REQUEST_TIMEOUT,
];

/// Why a download is refused, before its preconditions are looked at.
const REFUSED_DOWNLOAD: [&Kind; 8] = [
    &LINK_INVALID,
    &LINK_EXPIRED,
    &ACCOUNT_DISABLED,
    &EXPORT_REVOKED,
    &EXPORT_EXPIRED,
    &EXPORT_ERASED,
    &EXPORT_NOT_READY,
    &ARTEFACT_UNAVAILABLE,
];

/// What 200 and 206 say of the file.
const FILE: [&str; 6] = [
    "Accept-Ranges",
    "Content-Disposition",
    "Content-Length",
    "ETag",
    "Last-Modified",
    "Repr-Digest",
];

/// All operations of a server.
pub fn all(facts: &Facts) -> Vec<Operation> {
    let mut all = service();
    if facts.metrics {
        all.push(metrics());
    }
    all.extend([create(facts), list(), status(), withdraw(), events()]);
    all.extend([download("get", facts), download("head", facts)]);
    all.push(log());
    all.extend(admin());
    all.extend(options(facts));
    all
}

fn service() -> Vec<Operation> {
    let get = |path, id| Operation::new("get", path, id, "service");
    vec![
        get("/", "about")
            .says(
                "Tell what this is",
                "Tells the name and version of the service, what is promised of idempotency keys, \
                 and how long a link is good.",
            )
            .answer(
                Answer::new(200, "The service.")
                    .json("About")
                    .carries(&["Vary"]),
            ),
        get("/healthz", "isAlive")
            .says(
                "Tell whether the process answers",
                "Asks neither the database nor the store.",
            )
            .answer(Answer::new(200, "It does.").json("Health")),
        get("/readyz", "isReady")
            .says(
                "Tell whether the service can work",
                "Asks the database and the store of files.",
            )
            .answer(Answer::new(200, "It can.").json("Health"))
            .problems(&[&[&UNAVAILABLE]]),
        get(super::PATH, "description")
            .says(
                "Give this description",
                "It is OpenAPI 3.1, and as this server is set up.",
            )
            .answer(
                Answer::new(200, "The description.")
                    .content("application/json", json!({"type": "object"})),
            ),
        get("/problems/{name}", "problem")
            .says(
                "Describe a kind of problem",
                "The `type` of every problem leads here. It is a page where Accept names \
                 `text/html`, otherwise JSON.",
            )
            .takes(&["problem"])
            .answer(
                Answer::new(200, "When it is answered, and what to do.")
                    .json("ProblemKind")
                    .content("text/html", json!({"type": "string"}))
                    .carries(&["Vary", "Content-Security-Policy"]),
            )
            .problems(&[&[&NOT_FOUND]]),
    ]
}

fn metrics() -> Operation {
    Operation::new("get", "/metrics", "metrics", "service")
        .says(
            "Give the numbers of this process, and of the queue",
            "They are in the text format of OpenMetrics.",
        )
        .answer(
            Answer::new(200, "The numbers.")
                .content(media_type(metrics::MEDIA_TYPE), json!({"type": "string"})),
        )
        .problems(&[&DATABASE])
}

/// A media type without its parameters.
fn media_type(text: &str) -> &str {
    text.split(';').next().unwrap_or(text).trim()
}

fn create(facts: &Facts) -> Operation {
    let days = facts.record_days;
    let accepted = "A new export was made; ask for it at `Location` until its state is final.";
    let replayed = "This user has made this request with this key before, and here is the same \
                    export in the state it has now, whatever that is: also `failed`, `revoked` or \
                    `expired`. A new export needs a new key.";
    let mut operation = Operation::new("post", "/exports", "createExport", "exports")
        .says(
            "Ask for an export",
            &format!(
                "What the export holds is fixed at this moment. However often and however \
                 concurrently a request is sent with the same key, it makes one export. The \
                 request is compared as it was understood, so white space, the order of members \
                 and defaults make no difference. A key is remembered for {days} days from its \
                 first use; a request that is refused does not use it up. The checks are made in \
                 this order: who is asking, the media type, the size, the key, the body, the key's \
                 earlier use, the scope, the limits."
            ),
        )
        .role(Role::User)
        .takes(&["Idempotency-Key"])
        .body("application/json", "ExportRequest", "At most 16 KiB.")
        .answer(
            Answer::new(202, accepted)
                .json("Asked")
                .carries(&["Location"]),
        )
        .answer(
            Answer::new(200, replayed)
                .json("Asked")
                .carries(&["Location", "Idempotent-Replayed"]),
        )
        .problems(&[
            &TOKEN,
            &BODY,
            &[
                &IDEMPOTENCY_KEY_MISSING,
                &IDEMPOTENCY_KEY_INVALID,
                &SCOPE_INVALID,
                &IDEMPOTENCY_KEY_REUSED,
                &TOO_MANY_EXPORTS,
                &SOURCE_LOADING,
            ],
            &DATABASE,
        ]);
    operation.described["x-idempotency-key"] = json!({
        "specification": "draft-ietf-httpapi-idempotency-key-header-07",
        "required": true,
        "scope": "user",
        "kept_days": days,
        "max_characters": ibid::key::MAX_KEY_CHARS,
    });
    operation
}

fn list() -> Operation {
    Operation::new("get", "/exports", "listExports", "exports")
        .says(
            "List one's exports",
            "The exports of the token's user, newest first, in pages.",
        )
        .role(Role::User)
        .takes(&["limit", "cursor"])
        .answer(Answer::new(200, "A page.").json("Page"))
        .problems(&[&TOKEN, &[&REQUEST_INVALID], &DATABASE])
}

fn status() -> Operation {
    Operation::new("get", "/exports/{id}", "getExport", "exports")
        .says(
            "Tell how an export gets on",
            "Once it is done, every answer has a fresh link to its file. An export of somebody \
             else is answered as one that does not exist.",
        )
        .role(Role::User)
        .takes(&["job"])
        .answer(
            Answer::new(200, "The export as it is now.")
                .json("Export")
                .carries(&["Retry-After-Maybe"]),
        )
        .problems(&[&TOKEN, &[&NOT_FOUND], &DATABASE])
}

fn withdraw() -> Operation {
    Operation::new("delete", "/exports/{id}", "withdrawExport", "exports")
        .says(
            "Take an export back",
            "The owner withdraws the export, in any state and as often as it pleases. Work on it \
             stops, downloads end, and its file is deleted within a minute. Copies that were \
             downloaded before cannot be recalled.",
        )
        .role(Role::User)
        .takes(&["job"])
        .answer(Answer::new(
            204,
            "It is withdrawn, now or since an earlier request.",
        ))
        .problems(&[&TOKEN, &[&NOT_FOUND], &DATABASE])
}

fn events() -> Operation {
    let stream = "Events named `export`. The data of each is an `Export`, its id the version of \
                  it. The stream ends when the state is final, and after some minutes, when the \
                  client should come back with the id that it has.";
    let schema = json!({
        "type": "string",
        "description": "Server-sent events (WHATWG HTML, section 9.2).",
        "examples": ["event: export\nid: 5f3c9a1b2d4e6f70\nretry: 2000\ndata: {\"job_id\":\"...\"}\n\n"],
    });
    Operation::new("get", "/exports/{id}/events", "watchExport", "exports")
        .says(
            "Watch how an export gets on",
            "Sends the export whenever it has changed, as server-sent events, until its state is \
             final. The right to see it is asked for again all the time.",
        )
        .role(Role::User)
        .takes(&["job", "Last-Event-ID"])
        .answer(Answer::new(200, stream).content("text/event-stream", schema))
        .answer(Answer::new(
            204,
            "The state is final and the client has heard of it, so there is nothing to wait for.",
        ))
        .problems(&[&TOKEN, &[&NOT_FOUND], &DATABASE])
}

fn download(method: &'static str, facts: &Facts) -> Operation {
    let is_head = method == "head";
    let gzip = "application/gzip";
    let bytes = || json!({"description": "The bytes of the file.", "contentMediaType": gzip});
    let parts = json!({
        "description": "A part for each range, with its `Content-Type` and `Content-Range`.",
        "contentMediaType": "multipart/byteranges",
    });
    let whole = Answer::new(
        200,
        "The whole file: no range is asked for, or one that is passed over (`If-Range` is about \
         another file, the header is not understood, stands twice, or asks for too much).",
    );
    let elsewhere = "Where the object store sends the files: the address of the file there, for a \
                     minute. Preconditions and ranges are judged there.";
    let (id, summary, text) = match is_head {
        false => (
            "download",
            "Fetch the file of an export",
            "The link comes from the status of the export. All checks of the link, the user and \
             the export are made first, then the preconditions in the order of RFC 9110 section \
             13.2.2, then the ranges.",
        ),
        true => (
            "describeDownload",
            "Ask what a download would give",
            "Answers as GET without a Range would, without the file.",
        ),
    };
    let link = format!("A link is good for {} seconds.", facts.link_seconds);
    let mut operation = Operation::new(method, "/download/{id}", id, "download")
        .carrying(&PROTECTING)
        .says(summary, &format!("{text} {link}"));
    operation.described["security"] = json!([{"signature": []}]);
    operation.described["x-link-seconds"] = facts.link_seconds.into();
    operation = operation.takes(&["job", "u", "exp", "k", "sig"]).takes(&[
        "If-Match",
        "If-None-Match",
        "If-Modified-Since",
        "If-Unmodified-Since",
    ]);
    let not_modified = Answer::new(304, "The client has this file.").carries(&["ETag"]);
    operation = operation
        .answer(match is_head {
            false => whole.content(gzip, bytes()).carries(&FILE),
            true => Answer::new(200, "What would be sent.").carries(&FILE),
        })
        .answer(not_modified.carries(&["Last-Modified"]))
        .answer(Answer::new(307, elsewhere).carries(&["Location-Store", "Repr-Digest"]))
        .problems(&[&REFUSED_DOWNLOAD, &[&PRECONDITION_FAILED], &DATABASE]);
    if !is_head {
        let some = "The ranges that are asked for: one as it is, several as parts.";
        operation = operation
            .takes(&["Range", "If-Range"])
            .answer(
                Answer::new(206, some)
                    .content(gzip, bytes())
                    .content("multipart/byteranges", parts)
                    .carries(&FILE)
                    .carries(&["Content-Range-Maybe"]),
            )
            .problems(&[&[&RANGE_NOT_SATISFIABLE]]);
        operation.carries("416", &["ETag", "Last-Modified"]);
    }
    operation.carries("412", &["ETag", "Last-Modified"]);
    if is_head {
        operation.without_bodies();
    }
    operation
}

/// Every address tells its methods.
fn options(facts: &Facts) -> Vec<Operation> {
    const JOB: &[&str] = &["job"];
    let addresses: [(&str, &str, &[&str]); 15] = [
        ("/", "optionsOfService", &[]),
        ("/healthz", "optionsOfHealth", &[]),
        ("/readyz", "optionsOfReadiness", &[]),
        ("/metrics", "optionsOfMetrics", &[]),
        (super::PATH, "optionsOfDescription", &[]),
        ("/problems/{name}", "optionsOfProblem", &["problem"]),
        ("/exports", "optionsOfExports", &[]),
        ("/exports/{id}", "optionsOfExport", JOB),
        ("/exports/{id}/events", "optionsOfEvents", JOB),
        ("/download/{id}", "optionsOfDownload", JOB),
        ("/log", "optionsOfLog", &[]),
        ("/admin/exports/{id}/revoke", "optionsOfRevocation", JOB),
        ("/admin/exports/{id}/restore", "optionsOfRestoration", JOB),
        ("/admin/exports/{id}/retry", "optionsOfRetry", JOB),
        ("/admin/accounts/{user}", "optionsOfAccount", &["user"]),
    ];
    let there = addresses
        .into_iter()
        .filter(|(path, ..)| facts.metrics || *path != "/metrics");
    let described = there.map(|(path, id, parameters)| {
        let mut operation = Operation::new("options", path, id, "service");
        if path.starts_with("/download/") {
            operation = operation.carrying(&PROTECTING);
        }
        operation
            .takes(parameters)
            .says(
                "Tell which methods there are",
                "Nothing is looked at. To a page of an origin that the server's `cors_origins` \
                 lists it also says what the page may send and read.",
            )
            .answer(Answer::new(204, "`Allow` names them.").carries(&["Allow"]))
    });
    described.collect()
}

fn log() -> Operation {
    Operation::new("post", "/log", "appendLog", "log")
        .says(
            "Report events",
            "Events of the application, one a line (`LogEvent`), taken in one transaction and in \
             their order. If one line is not valid, nothing is written, and every line that is \
             not valid is named. An event with an `id` that is there already with the same content \
             counts as a duplicate, so that a request can be repeated.",
        )
        .role(Role::Writer)
        .takes(&["skip_invalid"])
        .body(
            "application/x-ndjson",
            "LogEvents",
            "At most 16 MiB, and 4 MiB a line.",
        )
        .answer(Answer::new(200, "What became of the lines.").json("Taking"))
        .problems(&[&TOKEN, &BODY, &[&LOG_INVALID], &DATABASE])
}

fn admin() -> Vec<Operation> {
    let post = |path, id| {
        Operation::new("post", path, id, "admin")
            .role(Role::Admin)
            .takes(&["job"])
    };
    let export = || Answer::new(200, "The export as it is then.").json("OwnedExport");
    vec![
        post("/admin/exports/{id}/revoke", "revokeExport")
            .says(
                "Revoke an export",
                "Downloads of it end, and no more begin. Copies that were downloaded before cannot \
                 be recalled. One that is revoked or expired already stays as it is.",
            )
            .body("application/json", "Revoke", "At most 16 KiB.")
            .answer(export())
            .problems(&[&TOKEN, &BODY, &[&NOT_FOUND, &STATE_CONFLICT], &DATABASE]),
        post("/admin/exports/{id}/restore", "restoreExport")
            .says(
                "Take a revocation back",
                "Only of an export that was done when an administrator revoked it, and whose file \
                 is still there.",
            )
            .answer(export())
            .problems(&[&TOKEN, &[&NOT_FOUND, &NOT_RESTORABLE], &DATABASE]),
        post("/admin/exports/{id}/retry", "retryExport")
            .says(
                "Try an export again",
                "One that failed is tried again. Of one that is done the file is made again if its \
                 bytes are lost or damaged, and only the recorded SHA-256 is accepted.",
            )
            .answer(export())
            .problems(&[&TOKEN, &[&NOT_FOUND, &STATE_CONFLICT], &DATABASE]),
        Operation::new("put", "/admin/accounts/{user}", "setAccount", "admin")
            .says(
                "Enable or disable an account",
                "Nothing is given out to a disabled account, by token or by link, and downloads \
                 that go on end. An account that nobody has mentioned is enabled.",
            )
            .role(Role::Admin)
            .takes(&["user"])
            .body("application/json", "AccountChange", "At most 16 KiB.")
            .answer(Answer::new(200, "The account as it is then.").json("Account"))
            .problems(&[&TOKEN, &BODY, &DATABASE]),
    ]
}

impl Operation {
    fn new(method: &'static str, path: &'static str, id: &str, tag: &str) -> Operation {
        Operation {
            path,
            method,
            described: json!({
                "operationId": id,
                "tags": [tag],
                "security": [],
                "parameters": [],
                "responses": {},
            }),
            everywhere: &[],
        }
    }

    fn says(mut self, summary: &str, description: &str) -> Operation {
        self.described["summary"] = summary.into();
        self.described["description"] = description.into();
        self
    }

    fn carrying(mut self, headers: &'static [&'static str]) -> Operation {
        self.everywhere = headers;
        self
    }

    fn role(mut self, role: Role) -> Operation {
        self.described["security"] = json!([{"token": [role.as_str()]}]);
        self
    }

    fn takes(mut self, parameters: &[&str]) -> Operation {
        if let Some(taken) = self.described["parameters"].as_array_mut() {
            let references = parameters
                .iter()
                .map(|name| json!({"$ref": format!("#/components/parameters/{name}")}));
            taken.extend(references);
        }
        self
    }

    fn body(mut self, media_type: &str, schema: &str, limit: &str) -> Operation {
        let schema = json!({"$ref": format!("#/components/schemas/{schema}")});
        self.described["requestBody"] = json!({
            "required": true,
            "description": limit,
            "content": {media_type: {"schema": schema}},
        });
        self
    }

    fn answer(mut self, answer: Answer) -> Operation {
        let answer = answer.carries(self.everywhere);
        let status = answer.status.to_string();
        self.described["responses"][status] = answer.described();
        self
    }

    fn problems(self, kinds: &[&[&'static Kind]]) -> Operation {
        let answers = problems(&kinds.concat());
        answers.into_iter().fold(self, Operation::answer)
    }

    /// Adds headers to an answer that is described.
    fn carries(&mut self, status: &str, headers: &[&str]) {
        for name in headers {
            let reference = format!("#/components/headers/{name}");
            self.described["responses"][status]["headers"][name] = json!({"$ref": reference});
        }
    }

    /// The answers to HEAD have none.
    fn without_bodies(&mut self) {
        let answers = self.described["responses"].as_object_mut();
        for answer in answers.into_iter().flatten().map(|(_, answer)| answer) {
            if let Some(members) = answer.as_object_mut() {
                members.remove("content");
            }
        }
    }
}
