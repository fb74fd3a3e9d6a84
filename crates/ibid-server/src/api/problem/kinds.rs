//! Every kind of problem there is, as its page tells it.

use http::StatusCode;

/// One kind: what `type`, `title` and `status` of its answers are, and what its page says.
#[derive(Debug, PartialEq, Eq)]
pub struct Kind {
    /// The stable name: the last part of `type`.
    pub name: &'static str,
    pub status: StatusCode,
    pub title: &'static str,
    /// When this is answered.
    pub when: &'static str,
    /// What a client should do.
    pub todo: &'static str,
}

macro_rules! kinds {
    ($($constant:ident = $status:ident $name:literal $title:literal, $when:literal, $todo:literal;)*) => {
        $(pub const $constant: Kind = Kind {
            name: $name,
            status: StatusCode::$status,
            title: $title,
            when: $when,
            todo: $todo,
        };)*
        /// All of them, by their status.
        pub const ALL: &[Kind] = &[$($constant),*];
    };
}

kinds! {
    IDEMPOTENCY_KEY_INVALID = BAD_REQUEST "idempotency-key-invalid"
        "The idempotency key is not valid",
        "The Idempotency-Key header stands twice, is empty, or is not one key of 1 to 255 visible ASCII characters.",
        "Send one key; a UUID is one.";
    IDEMPOTENCY_KEY_MISSING = BAD_REQUEST "idempotency-key-missing"
        "The request has no idempotency key",
        "A request for an export has no Idempotency-Key header.",
        "Make a value for each export that you want, such as a UUID, and send it with every repetition of the request.";
    LOG_INVALID = BAD_REQUEST "log-invalid"
        "Lines of the log are not valid",
        "Lines of the body are no events, or events that the log cannot take; nothing of the body was written.",
        "Correct the lines that the member errors names, or leave them out with ?skip_invalid=1.";
    MALFORMED = BAD_REQUEST "malformed"
        "The request is not HTTP",
        "What came is no request by RFC 9112, so nothing more can be said of it.",
        "Look at what stands between the client and the server, and at what the client writes.";
    REQUEST_INVALID = BAD_REQUEST "request-invalid"
        "The request is not valid",
        "The body is not JSON, has an unknown, missing or doubled member, or a value or a parameter cannot be what it is.",
        "Correct what the detail names; members that are not known are refused so that a slip never exports something else.";
    SCOPE_INVALID = BAD_REQUEST "scope-invalid"
        "The scope is not valid",
        "The scope is neither \"all\" nor \"conv:\" with the id of a conversation, or you were never in that conversation; whether it exists is not said.",
        "Use \"all\", or the id of a conversation that you were in.";
    UNAUTHORIZED = UNAUTHORIZED "unauthorized"
        "Who is asking is not known",
        "There is no Authorization header with a token, or the token is unknown, expired or revoked.",
        "Send Authorization: Bearer with a token that is good.";
    ACCOUNT_DISABLED = FORBIDDEN "account-disabled"
        "The account is disabled",
        "The user's account is disabled, so nothing is given out, by token or by link.",
        "Ask an administrator to enable it.";
    LINK_EXPIRED = FORBIDDEN "link-expired"
        "The link has expired",
        "The link was made by this service, and its time is over.",
        "Get a fresh one from the export's status; a download that has begun goes on with it.";
    LINK_INVALID = FORBIDDEN "link-invalid"
        "The link is not valid",
        "The link was not made by this service for this export and user: a parameter is missing, doubled, unknown or altered.",
        "Get a fresh one from the export's status, and copy it as a whole.";
    ROLE_INSUFFICIENT = FORBIDDEN "role-insufficient"
        "The token's role does not allow this",
        "The token is good, and its role is not the one that this route is for.",
        "Use a token with the role that the detail names.";
    NOT_FOUND = NOT_FOUND "not-found"
        "Not found",
        "There is nothing at this address, or no export of yours with this id; the two are not told apart for exports of others.",
        "Look at the address; GET /exports lists the exports that you have.";
    METHOD_NOT_ALLOWED = METHOD_NOT_ALLOWED "method-not-allowed"
        "The method is not allowed here",
        "The address is right and the method is not.",
        "Use one of the methods that the Allow header names.";
    REQUEST_TIMEOUT = REQUEST_TIMEOUT "request-timeout"
        "The request did not come in time",
        "The headers or the body of the request took longer than the server waits.",
        "Send the request again, on a new connection.";
    EXPORT_NOT_READY = CONFLICT "export-not-ready"
        "The export is not ready",
        "The link is good, and the file is not finished.",
        "Ask for the export's status until its state is \"done\".";
    NOT_RESTORABLE = CONFLICT "not-restorable"
        "The export cannot be restored",
        "Only a finished export that an admin revoked, and whose file is still there, can be restored.",
        "Let the user make a new export.";
    STATE_CONFLICT = CONFLICT "state-conflict"
        "The export's state does not allow this",
        "The export is in a state in which this cannot be done to it.",
        "Look at its state; some are final.";
    EXPORT_ERASED = GONE "export-erased"
        "The export's data was erased",
        "Data in this export was erased, and the export with it.",
        "Make a new export.";
    EXPORT_EXPIRED = GONE "export-expired"
        "The export has expired",
        "The time for which finished exports are kept has passed, and the file is deleted.",
        "Make a new export, with a new idempotency key.";
    EXPORT_REVOKED = GONE "export-revoked"
        "The export was revoked",
        "The export was taken back by its owner or an administrator.",
        "Its status says by whom and why; make a new export if that is allowed.";
    PRECONDITION_FAILED = PRECONDITION_FAILED "precondition-failed"
        "The file is not the one that was asked for",
        "If-Match or If-Unmodified-Since names another file than the one that is there.",
        "Fetch the file from its beginning.";
    BODY_TOO_LARGE = PAYLOAD_TOO_LARGE "body-too-large"
        "The body is too large",
        "The body of the request is longer than this route takes.",
        "Send less at a time; the detail says how much is taken.";
    URI_TOO_LONG = URI_TOO_LONG "uri-too-long"
        "The address is too long",
        "The address of the request is longer than the server reads.",
        "No address of this service is long; look at what made it.";
    UNSUPPORTED_MEDIA_TYPE = UNSUPPORTED_MEDIA_TYPE "unsupported-media-type"
        "The body is of a type that is not taken here",
        "The Content-Type of the request is not the one that this route takes.",
        "Send the body as the detail says.";
    RANGE_NOT_SATISFIABLE = RANGE_NOT_SATISFIABLE "range-not-satisfiable"
        "No part of the range is in the file",
        "Every range of the request begins behind the end of the file.",
        "Content-Range says how long the file is; if you have as much, it is whole.";
    IDEMPOTENCY_KEY_REUSED = UNPROCESSABLE_ENTITY "idempotency-key-reused"
        "The idempotency key was used for another request",
        "This key has made an export with another body, and a key stands for one request.",
        "Repeat that request unchanged, or send this one with a new key.";
    TOO_MANY_EXPORTS = TOO_MANY_REQUESTS "too-many-exports"
        "A limit on exports is reached",
        "The user has as many unfinished exports, or has made as many in 24 hours, as is allowed. A repetition of a request never counts.",
        "Wait as long as Retry-After says.";
    HEADERS_TOO_LARGE = REQUEST_HEADER_FIELDS_TOO_LARGE "headers-too-large"
        "The headers are too large",
        "The headers of the request are more than the server reads.",
        "Send fewer or shorter ones; cookies of other services are often the reason.";
    INTERNAL = INTERNAL_SERVER_ERROR "internal"
        "Something went wrong here",
        "This is a fault of the server.",
        "Give its operator the request_id of the answer, which stands in the log too.";
    ARTEFACT_UNAVAILABLE = SERVICE_UNAVAILABLE "artefact-unavailable"
        "The file cannot be read now",
        "The store of files does not answer, or the file is missing or not as long as it should be.",
        "Try again after Retry-After; tell the operator if it lasts, who can have the file made again.";
    SOURCE_LOADING = SERVICE_UNAVAILABLE "source-loading"
        "The log is still being loaded",
        "The first import of the log is not finished, so an export would not be whole.",
        "Try again after Retry-After.";
    UNAVAILABLE = SERVICE_UNAVAILABLE "unavailable"
        "The service cannot answer now",
        "The database does not answer, or must not be used until its operator has done something.",
        "Try again after Retry-After.";
}

impl Kind {
    /// The kind of this name.
    pub fn named(name: &str) -> Option<&'static Kind> {
        ALL.iter().find(|kind| kind.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kinds_stand_by_their_status_and_name() {
        let keys = ALL.iter().map(|kind| kind.status.as_u16());
        assert!(keys.clone().is_sorted(), "{:?}", keys.collect::<Vec<_>>());
        let mut names: Vec<_> = ALL.iter().map(|kind| kind.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ALL.len());
    }

    #[test]
    fn what_a_page_says_is_whole_sentences() {
        for kind in ALL {
            for text in [kind.when, kind.todo] {
                assert!(text.ends_with('.'), "{}: {text}", kind.name);
            }
            assert!(!kind.title.ends_with('.'), "{}", kind.name);
        }
    }
}
